"""Classes derived from torch's datasets that make samples in their own way are asked for each sample."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from parity.compare import assert_same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

from shmloader import DataLoader, why_per_sample

ROWS = 8
X = torch.arange(ROWS)


class Counting(Dataset[Any]):
    """Counts how often its property was read."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> int:
        self.reads += 100
        return self.reads

    def __len__(self) -> int:
        return ROWS


class Tensors(Counting, TensorDataset):
    tensors = property(lambda self: (X + self.read(),))


class Indices(Counting, Subset[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.dataset = X

    indices = property(lambda self: [self.read() // 100 % ROWS] * ROWS)


class Inner(Counting, Subset[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.indices = range(ROWS)

    dataset = property(lambda self: X + self.read())


class Stacked(Counting, StackDataset[Any]):
    datasets = property(lambda self: {"a": X + self.read()})


class MadeUp(TensorDataset):
    """Has its tensors by ``__getattr__``."""

    def __init__(self) -> None:
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        if name != "tensors":
            raise AttributeError(name)
        self.reads += 100
        return (X + self.reads,)

    def __len__(self) -> int:
        return ROWS


@pytest.mark.parametrize("kind", [Tensors, Indices, Inner, Stacked, MadeUp])
def test_a_property_is_read_for_each_sample(kind: Any) -> None:
    assert "no __getbatch__" in str(why_per_sample(kind()))
    assert "no __getbatch__" in str(why_per_sample(Subset(kind(), [1])))
    expected = list(TorchLoader(kind(), 4))
    assert_same(list(DataLoader(kind(), 4, num_workers=1)), expected)
    assert_same(list(DataLoader(kind(), 4, num_workers=1, worker_type="thread")), expected)


CHANGED = {
    "__getitem__": (TensorDataset, lambda: TensorDataset(X), lambda self, index: (X[index] * 100,)),
    "__getitems__": (Subset, lambda: Subset(X, [3, 2]), lambda self, indices: [X[i] * 100 for i in indices]),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_what_is_put_into_torchs_class_is_asked(
    name: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, make, change = CHANGED[name]
    assert why_per_sample(make()) is None
    method = functools.wraps(getattr(kind, name))(change) if wrapped else change
    monkeypatch.setattr(kind, name, method)
    assert "overrides" in str(why_per_sample(make()))
    loader = DataLoader(make(), batch_sampler=[[0, -1]], num_workers=1, worker_type="thread")
    assert_same(list(loader), list(TorchLoader(make(), batch_sampler=[[0, -1]])))
