"""Rows read from a store equal those that were given, with the same types."""

import datetime as dt
import itertools
import math
import multiprocessing
import os
import pickle
import zoneinfo
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from robustness.processes import LONG
from store_samples import Colour, Custom, Frozen, Person, Point, Slotted, same
from store_strategies import ARRAYS, SCALARS, containers

import shmloader
from shmloader import share_on_host
from shmloader.store import share
from shmloader.store.handles import pack, unpack

VALUES = st.recursive(SCALARS | ARRAYS, containers, max_leaves=8)
ROWS = st.lists(VALUES, max_size=12) | st.lists(containers(SCALARS), max_size=12)

THOROUGH = settings(
    max_examples=100 if LONG else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@THOROUGH
@given(ROWS)
def test_nested_records_come_back_as_they_were(rows: list[Any]) -> None:
    store = share(rows)
    assert len(store) == len(rows)
    for row, number in zip(rows, itertools.count()):
        assert same(store[number], row), (store[number], row)


def differences(stores: list[Any], pickled: bytes, found: Any) -> None:
    """Put what differs; the rows come pickled, since torch's transport loses that a tensor is conjugated."""
    pairs = zip(stores, pickle.loads(pickled), strict=True)
    found.put([f"{list(store)} for {rows}" for store, rows in pairs if not same(list(store), rows)])


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
def test_nested_records_come_back_everywhere(number: int, tmp_path: Path) -> None:
    """A thousand each: here, over handles, from a file, in forked and spawned processes, on the host."""
    made: list[tuple[Any, list[Any]]] = []

    @seed(number)
    @settings(THOROUGH, max_examples=1000, database=None, phases=[Phase.generate])
    @given(ROWS)
    def look(rows: list[Any]) -> None:
        store = share(rows)
        assert same(list(store), rows)
        assert same(list(unpack(*pack(store))), rows)
        store.save(tmp_path / "rows.arrow")
        assert same(list(shmloader.open(tmp_path / "rows.arrow", allow_pickle=True)), rows)
        made.append((store, rows))
        if len(made) == 200:
            look_elsewhere()

    def look_elsewhere() -> None:
        stores, parts = [store for store, _ in made], [rows for _, rows in made]
        on_host: list[Any] = []
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            found = context.SimpleQueue()
            process = context.Process(target=differences, args=(stores, pickle.dumps(parts), found))
            process.start()
            assert found.get() == []
            process.join()
            process.close()
            found.close()
        for _ in ("built", "attached"):
            on_host.append(share_on_host(lambda: share(parts), name=f"{os.getpid()} {id(on_host)}"))
            assert same([list(row) for row in on_host[-1]], parts)
        made.clear()

    look()


WEST = dt.timezone(-dt.timedelta(hours=5))
HOMOGENEOUS = {
    "ints": [3, -1, 2**40],
    "small ints": [1, 2, -128],
    "huge ints": [1, 2**63, -(2**63), -(2**63) - 1],
    "ints and None": [1, None, 2**40, None],
    "floats": [1.5, -0.0, math.inf, math.nan],
    "floats and None": [None, 2.5],
    "bools": [True, False, True] * 5,
    "bools and None": [True, None, False],
    "numbers of all types": [1, 1.0, True, None, np.int8(1), 2**80],
    "strings": ["", "a", "žluťoučký", "😀" * 50, "with\0null"],
    "strings and None": ["a", None, ""],
    "lone surrogates": ["a", "\ud800", "b\udcff"],
    "bytes": [b"", b"a", b"\0" * 5000],
    "records": [{"path": f"{n}.jpg", "label": n} for n in range(100)],
    "keys in another order": [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    "missing keys": [{"a": 1, "b": 2}, {"a": 1}, {}, {"b": None}],
    "every dict with keys of its own": [{f"k{n}": n} for n in range(50)],
    "keys that equal but differ": [{1: "a"}, {True: "a"}, {1.0: "a"}],
    "tuples": [(1, "a"), (2, "b")],
    "tuples of other lengths": [(1,), (), (1, 2.0, "x")],
    "namedtuples": [Point(1, 2.0), Point(3)],
    "dataclasses": [Person("a", 1), Person("b", 2, ["x"])],
    "frozen dataclasses": [Frozen("a", 1), Frozen("b", 2)],
    "dataclasses with slots": [Slotted("a", 1), Slotted("b", 2)],
    "nested lists": [[1, 2], [], [3]],
    "lists of lists": [[[1.5], []], [], [[2.5, 3.5]]],
    "records in records": [{"a": {"b": [1, {"c": "x"}]}, "d": (1, None)}] * 3,
    "enums": [Colour.RED, Colour.BLUE],
    "dict subclasses": [OrderedDict(b=1, a=2), defaultdict(list, x=[1])],
    "times beyond UTC's": [dt.datetime(2020, 1, 1, tzinfo=WEST), dt.datetime.max.replace(tzinfo=WEST)],
    "times before UTC's": [dt.datetime.min.replace(tzinfo=zoneinfo.ZoneInfo("Asia/Tokyo"))] * 2,
    "times of UTC": [dt.datetime.max.replace(tzinfo=dt.UTC), dt.datetime.min.replace(tzinfo=dt.UTC)],
    "times without zone": [dt.datetime(9999, 12, 31), dt.datetime(1, 1, 1)],  # noqa: DTZ001
    "longest times": [dt.timedelta(1), dt.timedelta.max, dt.timedelta.min],
    "custom objects": [Custom(np.arange(3), torch.arange(3.0), "x"), Custom(np.zeros(0), torch.ones(()), "")],
    "nothing but None": [None, None],
    "nothing": [],
}


@pytest.mark.parametrize("case", HOMOGENEOUS)
def test_rows_of_each_kind_come_back(case: str) -> None:
    rows = HOMOGENEOUS[case]
    assert same(list(share(rows)), rows)
    assert same(list(share(iter(rows))), rows)


def test_extra_attributes_of_a_dataclass_come_back() -> None:
    """An instance may have attributes that are no fields."""
    persons = [Person("a", 1), Person("b", 2)]
    persons[1].nickname = "c"
    assert same(share(persons)[1], persons[1])


def test_types_may_change_long_after_the_start() -> None:
    """Each chunk is encoded by itself: later values are not converted to earlier types."""
    rows = [{"a": n} for n in range(50_000)] + [{"a": "x", "b": 2.5}, [1], None] + [{"a": 2**70}] * 3
    store = share(iter(rows))
    assert all(map(same, store, rows))
    assert len(store) == len(rows)


def test_a_list_that_contains_itself_is_cut_off_by_pickle() -> None:
    cycle: list[Any] = [1]
    cycle.append(cycle)
    row = share([cycle])[0]
    for _ in range(40):
        assert row[0] == 1
        row = row[1]


def test_what_cannot_be_pickled_is_the_error_of_pickling_it() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        share([{"f": lambda: None}])


ARRAY_LISTS = {
    "one shape": [np.arange(6).reshape(2, 3) + n for n in range(5)],
    "ragged": [np.arange(n, dtype=np.int32) for n in range(7)],
    "ragged images": [np.ones((n, 4, 3), np.uint8) * n for n in range(5)],
    "Fortran order": [np.asfortranarray(np.random.rand(3, 4)) for _ in range(3)],
    "Fortran order, ragged": [np.asfortranarray(np.random.rand(3, n)) for n in (2, 5, 4)],
    "no dimensions": [np.array(1.5), np.array(2.5)],
    "structured": [np.array([(1, 2.5)], [("a", "i4"), ("b", ">f8")])] * 2,
    "datetime64": [np.array(["2024-01-01", "NaT"], "M8[D]"), np.array([1], "M8[us]")],
    "strings": [np.array(["abc", "d"]), np.array(["efghi"])],
    "dtypes mixed": [np.zeros(3, "f4"), np.zeros(3, "f8"), np.zeros(3, ">f8"), np.zeros((3, 1), "f4")],
    "not contiguous": [np.arange(10)[::3], np.arange(12).reshape(3, 4)[:, 1:3]],
    "of another byte order, pickled": [{"x": OrderedDict(y=np.arange(6, dtype=">i8")[::-2])}] * 2,
    "large": [np.random.rand(3000) for _ in range(3)],
    "Python objects": [np.array([1, "a", None], object)],
    "tensors of one shape": [torch.rand(3, 4) for _ in range(4)],
    "ragged tensors": [torch.arange(n) for n in range(5)],
    "tensors of dtypes that NumPy lacks": [torch.rand(3).bfloat16(), torch.rand(2).to(torch.float8_e5m2)],
    "an item of such a dtype with a stride": [torch.ones(4).bfloat16().as_strided((1,), (2,))] * 2,
    "tensors, not contiguous": [torch.rand(4, 3).T, torch.rand(5)[::2]],
    "complex tensors": [torch.rand(3, dtype=torch.complex64), torch.rand(2, dtype=torch.complex64).conj()],
    "tensors with gradients": [torch.ones(2, requires_grad=True)],
    "tensors in records": [{"x": torch.rand(2, 2), "y": n} for n in range(3)],
}


@pytest.mark.parametrize("case", ARRAY_LISTS)
def test_arrays_and_tensors_come_back(case: str) -> None:
    rows = ARRAY_LISTS[case]
    store = share(rows)
    assert all(map(same, store, rows))
    assert same(store[-1], rows[-1])


def test_a_sparse_tensor_comes_back() -> None:
    sparse = torch.eye(3).to_sparse()
    back = share([sparse])[0]
    assert back.layout == torch.sparse_coo
    assert torch.equal(back.to_dense(), sparse.to_dense())
