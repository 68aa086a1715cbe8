"""A program's own package ``datasets``, with classes named as Hugging Face's: it is not taken for that."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pytest
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader


class _OwnStream(IterableDataset):
    """Keeps its place itself; to load no state is to begin anew."""

    def __init__(self, length: int = 12) -> None:
        self.length, self.next = length, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state.get("next", 0)


class _OwnRows(Dataset):
    """Gives for a list of indices something else than their rows."""

    format: ClassVar = {"type": None}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: Any) -> Any:
        return {"x": np.asarray(index) * 2 if isinstance(index, list) else np.int64(index)}


@pytest.fixture
def own_package(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Its classes, under the names and in the modules where Hugging Face has its own."""
    made = {}
    for module, name, kind in (
        ("datasets", "Dataset", _OwnRows),
        ("datasets.arrow_dataset", "Dataset", _OwnRows),
        ("datasets.iterable_dataset", "IterableDataset", _OwnStream),
    ):
        made[name] = made.get(name) or type(name, (kind,), {"__module__": module})
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        setattr(sys.modules[module], name, made[name])
    return types.SimpleNamespace(**made)


@pytest.mark.parametrize("workers", [0, 1])
def test_its_stream_resumes_where_it_was(workers: int, own_package: types.SimpleNamespace) -> None:
    how: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    loader = DataLoader(own_package.IterableDataset(), 2, **how)
    assert [batch.tolist() for batch in islice(loader, 2)] == [[0, 1], [2, 3]]
    state = loader.state_dict()
    loader.close()
    resumed = DataLoader(own_package.IterableDataset(), 2, **how)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize("workers", [0, 1])
def test_its_rows_are_torchs(workers: int, own_package: types.SimpleNamespace) -> None:
    how: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    batches = [
        [batch["x"].tolist() for batch in kind(own_package.Dataset(), 4, **how)]
        for kind in (DataLoader, torch.utils.data.DataLoader)
    ]
    assert batches[0] == batches[1]
