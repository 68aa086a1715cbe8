"""Datasets with samples that raise, importable by workers under every start method, and a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

MODES = ["skip", "replace"]
quiet = pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning")


class Flawed(Dataset):
    """Sample i is three times i; those in `bad` raise, each index its own kind of error."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if int(index) in self.bad:
            raise [ValueError, KeyError, OSError, StopIteration][int(index) % 4](f"no {index}")
        return torch.full((3,), int(index))


class Raising(Dataset):
    """Sample 5 raises what `make` makes; samples 1 and 4 a ValueError."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.make()
        if index in {1, 4}:
            raise ValueError(index)
        return index


class FlawedStream(IterableDataset):
    """Worker k's samples are 100 k, 100 k + 1 and so on; its iterator continues after it has raised."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.length, self.bad = length, bad

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return self.Steps(self, 0 if info is None else 100 * info.id)

    class Steps:
        def __init__(self, stream: FlawedStream, base: int) -> None:
            self.stream, self.base, self.step = stream, base, -1

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.step += 1
            if self.step >= self.stream.length:
                raise StopIteration
            if self.step in self.stream.bad:
                raise ValueError(f"no {self.step}")
            return self.base + self.step


def rows(loader: Any) -> list[list[int]]:
    """The first items of the samples of all batches; nothing is held, so slots are used again."""
    return [batch.reshape(len(batch), -1)[:, 0].tolist() for batch in loader]


def cut(indices: list[int], size: int) -> list[list[int]]:
    return [indices[begin : begin + size] for begin in range(0, len(indices), size)]
