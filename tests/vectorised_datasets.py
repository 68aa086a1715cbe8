"""Datasets for the tests of vectorised sources, which workers under every start method can import."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import shmloader

ROWS = 40


class Samples(Dataset[Any]):
    """Sample ``i`` is ``{"x": …, "y": i}``; notes the calls made."""

    def __init__(self) -> None:
        self.x = torch.arange(ROWS * 6, dtype=torch.float32).reshape(ROWS, 2, 3)
        self.asked: list[str] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append("sample")
        return {"x": self.x[index], "y": index % ROWS}


class Batches(Samples):
    """Makes the same batches itself, in the slot."""

    def __getbatch__(self, indices: Any) -> dict[str, Any]:
        self.asked.append("batch")
        assert type(indices) is np.ndarray
        assert indices.dtype == np.int64
        x = shmloader.empty(len(indices), 2, 3)
        torch.index_select(self.x, 0, torch.from_numpy(indices), out=x)
        return {"x": x, "y": torch.from_numpy(indices % ROWS)}


class OtherSamples(Batches):
    """A subclass with samples of its own, unknown to its base's ``__getbatch__``."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": -self.x[index], "y": index % ROWS}


class OtherSamplesInBulk(Batches):
    """The same, by ``__getitems__``."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"x": -self.x[index]} for index in indices]


class FailingBatches(Batches):
    """Cannot make a batch that has row 5, nor sample 5."""

    def __getbatch__(self, indices: Any) -> dict[str, Any]:
        if 5 in indices:
            raise KeyError("a batch with row 5")
        return super().__getbatch__(indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise KeyError("row 5")
        return super().__getitem__(index)


class Columns(Samples):
    """Gives a batch as columns."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": self.x[indices]}


class DoubledSubset(Subset[Any]):
    """Samples of its own, by both of its methods."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * field for field in super().__getitem__(index))

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class DoubledTensors(TensorDataset):
    """Samples of its own."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(2 * field for field in super().__getitem__(index))


class NamedTensors(TensorDataset):
    """The samples of its base."""

    classes = ("a", "b")


class TensorsInBulk(TensorDataset):
    """Samples of its own, by the method that torch asks first."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [tuple(3 * field for field in self[index]) for index in indices]


class TensorsThatMakeUpMethods(TensorDataset):
    """Finds a ``__getitems__`` that its class does not have."""

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__":
            return lambda indices: [tuple(5 * field for field in self[index]) for index in indices]
        raise AttributeError(name)
