"""Loaders inside a worker, of a dataset or a collate function, give the same as torch's there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parity.compare import assert_same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset

import shmloader
from shmloader import DataLoader

X, Y = torch.arange(24).reshape(12, 2), torch.arange(12.0)
INNER = {
    "tensors": TensorDataset(X, Y),
    "array": X.numpy(),
    "tensor": Y,
    "subset": Subset(TensorDataset(X), list(range(9, 1, -1))),
    "stack": StackDataset(x=TensorDataset(X), y=Y),
    "samples": [{"n": n, "x": np.full(3, n)} for n in range(12)],
}


class UsesLoader(Dataset[Any]):
    """Its samples, or the batches of `join`, are all batches of a loader over another dataset."""

    def __init__(self, loader: Any, inner: Any, **options: Any) -> None:
        self.loader, self.inner, self.options = loader, inner, options

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return [index, list(self.loader(self.inner, batch_size=4, **self.options))]

    def join(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


@pytest.mark.each_value
@pytest.mark.parametrize("worker_type", ["process", "thread"])
@pytest.mark.parametrize("inner_threads", [0, 1])
@pytest.mark.parametrize("name", INNER)
def test_batches_are_torchs(name: str, inner_threads: int, worker_type: Any) -> None:
    options = {"num_workers": 1, "worker_type": "thread"} if inner_threads else {}
    ours, torchs = UsesLoader(DataLoader, INNER[name], **options), UsesLoader(TorchLoader, INNER[name])
    outer = {"batch_size": 2, "num_workers": 1, "worker_type": worker_type}
    assert_same(list(DataLoader(ours, **outer)), list(TorchLoader(torchs, batch_size=2)))
    joined = list(DataLoader(range(6), collate_fn=ours.join, **outer))
    assert_same(joined, list(TorchLoader(range(6), batch_size=2, collate_fn=torchs.join)))


def test_batches_are_torchs_under_install() -> None:
    expected = list(TorchLoader(UsesLoader(TorchLoader, INNER["tensors"]), batch_size=2))
    with shmloader.install():
        loaded = list(TorchLoader(UsesLoader(TorchLoader, INNER["tensors"]), batch_size=2, num_workers=1))
    assert_same(loaded, expected)
