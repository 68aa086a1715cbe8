"""Shares a dataset of a hundred large attributes, and loads it: for a process that may open few files.

Run by test_store_walk.py, with the start method as its argument. Prints the descriptors that it took, and
whether the data was read.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader, share

ATTRIBUTES = 100
LARGE = 1 << 17


class Wide(Dataset[Any]):
    """A hundred attributes of every kind that is replaced, all large."""

    def __init__(self) -> None:
        for number in range(ATTRIBUTES):
            setattr(self, f"a{number}", self.make(number))

    @staticmethod
    def make(number: int) -> Any:
        if number % 4 == 0:
            return np.full(LARGE, number, np.int64)
        if number % 4 == 1:
            return torch.full((LARGE,), number)
        if number % 4 == 2:
            return [f"text {number} {row}" for row in range(16_000)]
        return {f"key {number} {row}": row for row in range(8_000)}

    def __len__(self) -> int:
        return ATTRIBUTES

    def __getitem__(self, number: int) -> str:
        value = getattr(self, f"a{number}")
        if number % 4 == 3:
            return str(value[f"key {number} 77"])
        return str(value[77].item() if number % 4 < 2 else value[77])


def expected(number: int) -> str:
    return [str(number), str(number), f"text {number} 77", "77"][number % 4]


def main(start_method: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    print("limit", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    before = len(os.listdir("/proc/self/fd"))
    shared = share(Wide())
    print("descriptors", len(os.listdir("/proc/self/fd")) - before)
    loader = DataLoader(shared, batch_size=10, num_workers=1, multiprocessing_context=start_method)
    values = [value for batch in loader for value in batch]
    loader.close()
    print("read", values == list(map(expected, range(ATTRIBUTES))))


if __name__ == "__main__":
    main(sys.argv[1])
