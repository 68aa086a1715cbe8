"""``unshare`` finds what is shared wherever it is, and costs little in data where nothing is."""

from __future__ import annotations

import datetime as dt
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmloader import share, unshare
from shmloader.store.handles import is_shared


class Sample:
    def __init__(self, value: Any) -> None:
        self.value, self.parts = value, [value]


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Named(NamedTuple):
    value: Any


class OwnList(list[Any]):
    """A list of a program's own."""


def objects_array(value: Any) -> Any:
    array = np.empty(2, object)
    array[1] = value
    return array


def cycle(value: Any) -> Any:
    """A tuple and a list in each other: the list is seen before what it leads to."""
    inner: list[Any] = []
    outer = (inner, [value])
    inner.append(outer)
    return outer


WAYS: dict[str, Callable[[Any], Any]] = {
    "object": Sample,
    "slots": Slots,
    "namedtuple": Named,
    "list of its own": lambda value: OwnList([value]),
    "deque": lambda value: deque([value]),
    "array of objects": objects_array,
    "cycle": cycle,
    "row": lambda value: {"path": Path("x"), "at": dt.date(2024, 1, 1), "number": np.int64(1), "last": value},
    "long row": lambda value: [*range(100), value],
    "deep row": lambda value: [[[[[[value]]]]]],
    "object in a row": lambda value: {"sample": Sample(Slots([value]))},
}


def parts_of(value: Any, seen: set[int]) -> list[np.ndarray[Any, Any]]:
    """All arrays of numbers in a value."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [value]
    held: Any = [getattr(value, name, None) for name in ("value", "parts")]
    if isinstance(value, list | tuple | deque | dict | np.ndarray):
        held = value.values() if isinstance(value, dict) else value
    return [array for one in held if one is not None for array in parts_of(one, seen)]


@pytest.mark.parametrize("way", WAYS)
def test_shared_arrays_are_found_behind_many_plain_rows(way: str) -> None:
    numbers = share(np.arange(1 << 18))
    root: dict[str, Any] = {"rows": [*({"a": i, "b": [i, 1.5]} for i in range(100)), WAYS[way](numbers)]}
    assert any(is_shared(one, None) for one in parts_of(root, set()))
    assert unshare(root) is root
    found = parts_of(root, set())
    assert found
    assert not any(is_shared(one, None) for one in found)
    assert all(np.array_equal(one, numbers) for one in found)
    assert all(one is found[0] for one in found)


ROWS: dict[str, Callable[[int], Any]] = {
    "objects": Sample,
    "rows of NumPy's numbers": lambda number: {"a": np.int64(number)},
    "rows of other values": lambda number: (Path("x"), dt.timedelta(number), b"x"),
}


@pytest.mark.parametrize("row", ROWS)
def test_data_in_which_nothing_is_shared_costs_no_memory(row: str) -> None:
    root = {"rows": [ROWS[row](number) for number in range(20_000)]}
    unshare({"rows": [ROWS[row](0)]})  # imports what it needs
    tracemalloc.start()
    try:
        assert unshare(root) is root
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100 * 20_000
