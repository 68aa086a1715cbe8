"""Workers read the attributes of a dataset as fast as without the loader (docs/decisions/0033)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import shmloader

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="this Python reads attributes as fast after __dict__ was asked for"
)

EPOCHS = 3


def has_dict(dataset: Any) -> bool:
    """Whether an object's attributes lie in a dict: the garbage collector knows of it then."""
    return any(type(held) is dict and "rows" in held for held in gc.get_referents(dataset))


class Rows(Dataset[bool]):
    def __init__(self, **more: Any) -> None:
        self.rows = torch.arange(16)
        for name, value in more.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> bool:
        return has_dict(self)


class Plain:
    """A dataset that is no subclass of torch's."""

    def __init__(self) -> None:
        self.rows = torch.arange(16)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> bool:
        return has_dict(self)


class Stream(IterableDataset[bool]):
    def __init__(self) -> None:
        self.rows = torch.arange(16)

    def __iter__(self) -> Iterator[bool]:
        for _ in self.rows:
            yield has_dict(self)


class Scaled(Rows):
    scale = 1.0


def test_an_object_whose_dict_was_asked_for_is_seen() -> None:
    dataset = Rows()
    assert not has_dict(dataset)
    vars(dataset)
    assert has_dict(dataset)


@pytest.mark.each_value
@pytest.mark.parametrize("calls_set_epoch", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        Rows,
        Plain,
        Stream,
        lambda: Rows(names=["a", "b"], transform=len, size=(3, 4)),
        lambda: Scaled(scale=2.0),
    ],
    ids=["dataset", "plain class", "stream", "with lists", "with defaults"],
)
def test_no_epoch_has_workers_read_slower(make: Any, persistent: bool, calls_set_epoch: bool) -> None:
    with shmloader.DataLoader(make(), num_workers=1, persistent_workers=persistent) as loader:
        for epoch in range(EPOCHS):
            if calls_set_epoch:
                loader.set_epoch(epoch)
            assert not any(map(bool, loader))


def test_nor_do_those_of_a_second_loader() -> None:
    dataset = Rows()
    for _ in range(2):
        with shmloader.DataLoader(dataset, num_workers=1, persistent_workers=True) as loader:
            for _ in range(EPOCHS):
                assert not any(map(bool, loader))


@pytest.mark.parametrize("kind", [Rows, Scaled])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_copy_with_shared_containers_is_read_as_fast(kind: Any, persistent: bool) -> None:
    dataset = kind(records=[f"{number:060}" for number in range(20_000)], scale=2.0)
    shared = shmloader.share(dataset)
    assert type(shared.records) is not list
    with shmloader.DataLoader(shared, num_workers=1, persistent_workers=persistent) as loader:
        for _ in range(EPOCHS):
            assert not any(map(bool, loader))
