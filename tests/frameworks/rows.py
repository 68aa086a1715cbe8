"""A dataset and options for the tests of frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import shmloader

OPTIONS: dict[str, Any] = {
    "memory_budget_nbytes": 1 << 26,
    "worker_restarts": 2,
    "on_error": "skip",
    "dispatch": "dynamic",
    "prefetch_epochs": True,
    "worker_type": "process",
    "share_dataset": True,
    "shard": None,
    "seed_per_sample": True,
}
ARGUMENTS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


class Rows(Dataset[torch.Tensor]):
    def __init__(self, count: int = 24) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def options_of(loader: Any) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in OPTIONS}


def forbid_torchs_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch's own workers were to be started")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__init__", refuse)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__del__", lambda self: None)


@pytest.fixture
def installed() -> Iterator[None]:
    with shmloader.install():
        yield
