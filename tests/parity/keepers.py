"""Datasets and collate functions that keep earlier batches in the worker.

Each returns, with its batch, whether everything that it kept is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from .datasets import row

WIDTH = 3000


class _Memory:
    """Objects that are kept, and a copy of each."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, torch.Tensor]] = []

    def keep(self, thing: torch.Tensor) -> torch.Tensor:
        self.kept.append((thing, thing.clone()))
        return thing

    def intact(self) -> bool:
        return all(torch.equal(thing, copy) for thing, copy in self.kept)


class KeepsAll(_Memory):
    """Keeps every batch that it collates."""

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        intact = self.intact()
        return {"x": self.keep(default_collate(samples)), "intact": intact}


class KeepsViews(_Memory):
    """Keeps a slice, a detached alias and an array of each batch, not the batch."""

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        intact, batch = self.intact(), default_collate(samples)
        self.keep(batch[:, 10:20])
        self.keep(batch.detach().t())
        self.keep(torch.from_numpy(batch.numpy()[-1:]))
        return {"x": batch, "intact": intact}


class ReturnsCached(_Memory):
    """Every second batch is one that was returned before, the object itself."""

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        intact = self.intact()
        count = len(self.kept)
        if count % 2 == 0 or count < 3:
            return {"x": self.keep(default_collate(samples)), "intact": intact}
        self.kept.append(self.kept[count // 2])
        return {"x": self.kept[count // 2][0], "intact": intact}


class ReturnsPrevious(_Memory):
    """Returns the batch of the last task together with the new one, as mixing augmentations do."""

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        intact, batch = self.intact(), default_collate(samples)
        previous = self.kept[-1][0] if self.kept else batch
        self.keep(batch)
        return {"x": batch, "previous": previous, "views": [previous[0], batch[:, ::2]]} | {"intact": intact}


class Accumulates(_Memory):
    """Returns the running sum of all batches, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.total: torch.Tensor | None = None

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        batch = default_collate(samples)
        if self.total is None:
            self.total = batch
            self.expected = batch.clone()
        else:
            intact = torch.equal(self.total, self.expected)
            self.total = self.total + batch
            self.expected = self.total.clone()
            return {"x": self.total, "intact": intact}
        return {"x": self.total, "intact": True}


class Scratch(_Memory):
    """Collates twice, returns only a part of one result, and keeps a buffer for in-place work."""

    def __call__(self, samples: list[torch.Tensor]) -> Any:
        intact = self.intact()
        first, second = default_collate(samples), default_collate(samples[::-1])
        second.mul_(2)
        if not self.kept:
            self.keep(torch.zeros(5))
        buffer = default_collate(samples[:1])
        buffer.zero_()
        self.keep(buffer)
        return {"x": (first + second)[:, 5:], "half": second[:1], "intact": intact}


KEEPERS = [KeepsAll, KeepsViews, ReturnsCached, ReturnsPrevious, Accumulates, Scratch]


class CollatingDataset(Dataset):
    """Collates in __getitem__, and hands out a cached batch for each index seen before."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        intact = all(torch.equal(kept, copy) for kept, copy in self.cache.values())
        if index not in self.cache:
            made = default_collate([row(index, WIDTH), row(index + 1, WIDTH)])
            self.cache[index] = (made, made.clone())
        return {"x": self.cache[index][0], "intact": intact}


class WritesAfterwards(Dataset):
    """Overwrites the sample of the last index while it makes the next: one buffer for all."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.buffer: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.buffer is None:
            self.buffer = default_collate([row(index, WIDTH)])
        self.buffer.copy_(row(index, WIDTH)[None])
        return self.buffer
