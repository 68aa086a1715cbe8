"""Two ranks of accelerate on CPU, started by torchrun: each writes its samples as JSON.

    torchrun --nproc-per-node 2 accelerate_ranks.py FOLDER (slots|torch)

With "slots", torch's own iterators are forbidden, and the options of the prepared loader are checked.
"""

import json
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.utils.data import Dataset, dataloader

import shmloader

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"dispatch_batches": True},
    {"split_batches": True},
    {"even_batches": False},
    {"dispatch_batches": True, "split_batches": True},
]


class Rows(Dataset):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def forbid(*_: Any, **__: Any) -> None:
    raise AssertionError("torch's own iterator was made")


def main() -> None:
    if sys.argv[2] == "slots":
        shmloader.install()
        dataloader._MultiProcessingDataLoaderIter.__init__ = forbid
    seen = []
    for configuration in CONFIGURATIONS:
        given = accelerate.DataLoaderConfiguration(**configuration)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=given)
        if sys.argv[2] == "slots":
            loader = shmloader.DataLoader(Rows(), batch_size=4, num_workers=1, worker_restarts=2)
        else:
            loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1)
        loader = accelerator.prepare(loader)
        if sys.argv[2] == "slots":
            assert loader.worker_restarts == 2, "options were lost"
        seen.append([batch.flatten().tolist() for batch in loader])
        rest = accelerate.skip_first_batches(loader, 1)
        seen.append([batch.flatten().tolist() for batch in rest])
    path = Path(sys.argv[1]) / f"rank{accelerator.process_index}"
    path.write_text(json.dumps(seen), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
