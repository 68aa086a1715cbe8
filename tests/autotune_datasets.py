"""Datasets for ``num_workers="auto"``: samples that draw after a delay, and workers that start late."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from shmloader import DataLoader


class Draws(Dataset):
    """Sample ``i`` is its draws from each global generator, after ``delay_s``."""

    def __init__(self, length: int, delay_s: float = 0.0) -> None:
        self.length, self.delay_s = length, delay_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if self.delay_s:
            time.sleep(self.delay_s)
        return index, float(torch.rand(1)), float(np.random.random()), random.random()


class WaitForFile:
    """A ``worker_init_fn`` that makes all workers but the first wait until a file exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, worker_id: int) -> None:
        while worker_id > 0 and not self.path.exists():
            time.sleep(0.01)


def plain(batch: Any) -> Any:
    return [value.tolist() if isinstance(value, torch.Tensor) else plain(value) for value in batch]


def epochs(loader: DataLoader, number: int = 1, seed: int = 7) -> list[Any]:
    torch.manual_seed(seed)
    return [[plain(batch) for batch in loader] for _ in range(number)]


def processes(loader: DataLoader) -> int:
    return len(loader._iterator._workers)
