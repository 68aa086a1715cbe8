"""Datasets for ``dispatch="dynamic"``, whose samples draw or wait for others, and plays of their epochs."""

from __future__ import annotations

import multiprocessing
import random
import time
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase
from torch.utils.data import Dataset, get_worker_info

from shmloader import DataLoader

# A failing example is not made smaller: each try starts processes.
SMALL: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),
}


class Draws(Dataset):
    """Sample ``i`` is its draws from each global generator; ``slow`` ones take 20 ms."""

    def __init__(self, length: int, slow: frozenset[int] = frozenset()) -> None:
        self.length, self.slow = length, slow

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.slow:
            time.sleep(0.02)
        return {
            "index": index,
            "torch": torch.rand(2),
            "normal": torch.randn(1),
            "numpy": np.random.standard_normal(3),
            "random": random.gauss(0, 1),
        }


class Gate(Dataset):
    """Sample ``i`` of ``closed`` waits until ``i + others`` samples were made in all, or for ``patience_s``.

    So it waits until ``others`` later samples were made. A sample is its index, its worker, and whether the
    wait ended without them.
    """

    def __init__(
        self, length: int, closed: set[int], others: int, patience_s: float = 90.0, items: int = 3
    ) -> None:
        self.length, self.closed, self.others, self.patience_s = length, closed, others, patience_s
        self.made = multiprocessing.get_context("fork").Value("q", 0)
        self.items = items

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        gave_up = 0
        if index in self.closed:
            until_s = time.monotonic() + self.patience_s
            while self.made.value < index + self.others and not gave_up:
                time.sleep(0.001)
                gave_up = int(time.monotonic() > until_s)
        with self.made.get_lock():
            self.made.value += 1
        return torch.tensor([index, get_worker_info().id, gave_up] + [0] * (self.items - 3))


def play(dataset: Any, epochs: int = 1, seed: int = 5, **given: Any) -> list[Any]:
    """All batches of some epochs, from a fixed state of the generators."""
    torch.manual_seed(seed)
    given.setdefault("dispatch", "dynamic")
    with DataLoader(dataset, persistent_workers=True, **given) as loader:
        return [[plain(batch) for batch in loader] for _ in range(epochs)]


def plain(batch: Any) -> Any:
    """A batch as lists, which ``==`` compares."""
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, (torch.Tensor, np.ndarray)) else batch
