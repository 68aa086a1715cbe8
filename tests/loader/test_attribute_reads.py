"""Workers read the attributes of a dataset as fast as without the loader.

Before Python 3.13 an object keeps its attributes in a quicker place than a dict until something asks for its
``__dict__``, and a forked worker has its dataset as the main process had it. An object shows the dict to the
garbage collector once it has one.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import shmloader

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="this Python reads attributes as fast after __dict__ was asked for"
)


def has_dict(dataset: Any) -> bool:
    return any(type(held) is dict and "rows" in held for held in gc.get_referents(dataset))


class Rows(Dataset[bool]):
    def __init__(self) -> None:
        self.rows = torch.arange(16)
        self.epoch = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> bool:
        return has_dict(self)


class Stream(IterableDataset[bool]):
    def __init__(self) -> None:
        self.rows = torch.arange(16)

    def __iter__(self) -> Any:
        for _ in self.rows:
            yield has_dict(self)


class Records(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.records = [f"{number:060}" for number in range(20_000)]


class WithEpochs(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_an_object_whose_dict_was_asked_for_is_seen() -> None:
    dataset = Rows()
    assert not has_dict(dataset)
    vars(dataset)
    assert has_dict(dataset)


@pytest.mark.parametrize("kind", [Rows, Stream])
@pytest.mark.parametrize("persistent", [False, True])
def test_no_epoch_makes_workers_read_slower(kind: Any, persistent: bool) -> None:
    with shmloader.DataLoader(kind(), num_workers=1, persistent_workers=persistent) as loader:
        for _ in range(3):
            assert not any(bool(batch) for batch in loader)


def test_datasets_with_set_epoch_are_read_as_fast_until_it_has_changed_something() -> None:
    dataset = WithEpochs()
    with shmloader.DataLoader(dataset, num_workers=1, persistent_workers=True) as loader:
        for _ in range(2):
            assert not any(bool(batch) for batch in loader)


def test_the_copy_with_shared_containers_is_read_as_fast() -> None:
    with shmloader.DataLoader(Records(), num_workers=1, share_dataset=True) as loader:
        assert type(loader.dataset.records) is not list
        assert not any(bool(batch) for batch in loader)
