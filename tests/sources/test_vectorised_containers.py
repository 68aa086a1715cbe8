"""Rows of stores are joined to the containers that torch's default_collate makes of them, or refused."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from batch_outcomes import assert_same_outcomes, outcomes
from parity.run import descriptors_for_torch
from torch.utils.data import ConcatDataset, StackDataset, Subset
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader

ROWS = 40
BATCHES = [list(range(20)), [1, 3, 2], [0], [39, 2]]


class Two(NamedTuple):
    x: Any
    y: Any


class Three(NamedTuple):
    x: Any
    y: Any
    z: Any


class Tenfold(Two):
    """Iterates over other values than it has."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((10 * self.x, 10 * self.y))


class Named(OrderedDict[str, Any]):
    """A mapping with an attribute beside its items."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = "a name"


class Listed(list[Any]):
    """A list of a class of its own."""


def described(batch: Any) -> Any:
    """A batch, described with the classes of all its parts."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, batch.tolist()
    if isinstance(batch, dict | UserDict):
        beside = getattr(batch, "name", None), getattr(batch, "default_factory", None)
        return type(batch), beside, [(key, described(value)) for key, value in batch.items()]
    if isinstance(batch, list | tuple):
        return type(batch), [
            described(tuple.__getitem__(batch, n) if isinstance(batch, tuple) else batch[n])
            for n in range(len(batch))
        ]
    return batch if not isinstance(batch, Exception) else (type(batch), batch.args)


ROWS_OF: dict[str, Callable[[int], Any]] = {
    "ordered": lambda i: OrderedDict(z=i, y=2.0),
    "ordered, of tensors": lambda i: OrderedDict(z=torch.full((3,), i), y="text"),
    "default": lambda i: defaultdict(list, z=i),
    "counter": lambda i: Counter(z=i),
    "with an attribute": lambda i: Named(z=i),
    "user's": lambda i: UserDict(z=i),
    "list": lambda i: Listed([i, 2.0]),
    "in a dict": lambda i: {"a": OrderedDict(z=i), "b": i},
    "in a tuple": lambda i: (defaultdict(list, z=i), i),
    "in a namedtuple": lambda i: Two(OrderedDict(z=i), [i, i]),
    "in another": lambda i: OrderedDict(z=defaultdict(int, a=i, b="text")),
    "a dict in one": lambda i: OrderedDict(z={"a": (i, "text")}),
    "now and then": lambda i: OrderedDict(z=i) if i % 3 else {"z": i},
    "now and then inside": lambda i: {"a": OrderedDict(z=i) if i % 3 else {"z": i}},
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda store: store,
    "slice": lambda store: store[::-1],
    "subset": lambda store: Subset(store, range(ROWS)[::-1]),
    "stack": lambda store: StackDataset(a=store, b=store[::-1]),
    "concat": lambda store: ConcatDataset([store[:2], store[2:]]),
}


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", ROWS_OF)
def test_batches_are_of_the_classes_of_their_rows(rows: str, way: str) -> None:
    dataset = WAYS[way](shmloader.share([ROWS_OF[rows](i) for i in range(ROWS)]))
    expected = list(map(described, outcomes(TorchLoader(dataset, batch_sampler=BATCHES))))
    loader = DataLoader(dataset, batch_sampler=BATCHES, num_workers=1, worker_type="thread")
    assert list(map(described, outcomes(loader))) == expected


@pytest.mark.parametrize("make", [OrderedDict, lambda **items: defaultdict(list, items)])
def test_a_column_is_of_the_class_of_its_values(make: Callable[..., Any]) -> None:
    column = shmloader.share([{"a": make(z=i)} for i in range(ROWS)]).column("a")
    expected = list(map(described, TorchLoader(column, 8)))
    assert list(map(described, DataLoader(column, 8, num_workers=1))) == expected
    assert expected[0][0] is type(make())


@pytest.mark.parametrize("make", [Tenfold, lambda *row: {"a": Tenfold(*row)}], ids=["rows", "inside"])
def test_namedtuples_that_iterate_over_other_values_are_joined_by_these(make: Callable[..., Any]) -> None:
    store = shmloader.share([make(i, 1) for i in range(ROWS)])
    with descriptors_for_torch():  # each process that passes the batch on iterates over it, too
        expected = list(map(described, TorchLoader(store, 20, num_workers=1)))
    assert list(map(described, DataLoader(store, 20, num_workers=1))) == expected


def test_taking_rows_of_a_subclass_of_dict_gives_the_rows() -> None:
    rows = [OrderedDict(z=i) for i in range(ROWS)]
    taken = shmloader.share(rows).take([3, 1])
    assert (type(taken), list(map(type, taken)), taken) == (list, [OrderedDict] * 2, [rows[3], rows[1]])


MIXED: dict[str, list[Any]] = {
    "a longer namedtuple": [(i, i) if i % 2 else Three(i, i, i) for i in range(ROWS)],
    "a namedtuple as long": [(i, i) if i % 2 else Two(i, i) for i in range(ROWS)],
    "longer ones in another chunk": [(i, i) for i in range(1 << 14)] + [(i, i, i) for i in range(1 << 14)],
}


@pytest.mark.parametrize("rows", MIXED)
def test_tuples_that_differ_are_joined_or_refused_as_by_torch(rows: str) -> None:
    store = shmloader.share(MIXED[rows])
    last = len(store) - 1
    batches = [[0, last], [last, 0], [1, 3], [last]]
    expected = outcomes(TorchLoader(store, batch_sampler=batches))
    loader = DataLoader(store, batch_sampler=batches, num_workers=1, worker_type="thread")
    assert_same_outcomes(outcomes(loader), expected)
    assert len({type(one) for one in expected}) > 1 or "as long" in rows
