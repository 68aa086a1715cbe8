"""The picture of a profile in docs/profile.md: ``python -m benchmarks.profile_picture docs/profile.png``.

One sample in eighty takes 60 ms, so with turns each worker comes to wait for the one that has it.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import Dataset

from shmloader import DataLoader


class OneSlow(Dataset[torch.Tensor]):
    """320 samples of a millisecond, some of them slow."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.06 if index % 80 == 41 else 0.001)
        return torch.full((3, 64, 64), index)


def main() -> None:
    with DataLoader(OneSlow(), 8, num_workers=2) as loader, loader.profile() as profile:
        for _ in loader:
            time.sleep(0.003)
    profile.save_picture(sys.argv[1])
    print(profile)


if __name__ == "__main__":
    main()
