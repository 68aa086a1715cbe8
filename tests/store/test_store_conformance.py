"""Every kind of store passes the published checks."""

import datetime as dt
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from lazy_files import write
from store_samples import Colour, Custom, Frozen, Person, Point

import shmloader
from shmloader import share
from shmloader.store import Store
from shmloader.store import testing as conformance
from shmloader.store.rows import RowStore

N = 40
TABLE = pa.table(
    {
        "n": [*range(N - 1), None],
        "s": ["x" * n for n in range(N)],
        "l": [[n, None] for n in range(N)],
        "d": [dt.date(2024, 1, 1)] * N,
    }
)
WORDS = [f"word {n}" for n in range(50)]
ARRAYS = [np.arange(100), np.ones(100, np.int64)]
TENSORS = [torch.arange(100), torch.ones(100, dtype=torch.int64)]
RECORDS = [{"text": str(n) * 50, "words": WORDS, "n": n} for n in range(3)]


def both(rows: list[Any]) -> tuple[Store, list[Any]]:
    return share(rows), rows


def of_chunks(make_row: Callable[[int], Any]) -> tuple[Store, list[Any]]:
    """Made from a stream, which begins with small chunks, so that there are several."""
    store = share(make_row(n) for n in range(3 * N))
    assert len(store.chunks.starts) > 3
    return store, [make_row(n) for n in range(3 * N)]


def part_of(rows: list[Any], part: slice) -> tuple[Store, list[Any]]:
    return share(rows)[part], rows[part]


KINDS: dict[str, Callable[[], tuple[Store, list[Any]]]] = {
    "ints": lambda: both(list(range(-N, N))),
    "floats": lambda: of_chunks(lambda n: n / 3),
    "bools": lambda: of_chunks(lambda n: n % 3 == 0),
    "numbers and None": lambda: of_chunks(lambda n: None if n % 7 == 0 else n),
    "numbers that grow": lambda: of_chunks(lambda n: n**12),
    "strings": lambda: of_chunks(lambda n: "é" * (n % 11)),
    "bytes": lambda: of_chunks(lambda n: bytes([n % 7]) * n),
    "records": lambda: of_chunks(
        lambda n: {"path": f"{n}.jpg", "label": n, "weight": n / 2, "ok": n % 2 == 0}
    ),
    "records with gaps": lambda: of_chunks(lambda n: {"a": n} if n % 5 else {"a": None, "b": str(n)}),
    "tuples": lambda: of_chunks(lambda n: (n, str(n))),
    "namedtuples": lambda: of_chunks(lambda n: Point(n, n / 2)),
    "dataclasses": lambda: both([Person(str(n), n, ["x"] * n) for n in range(N)]),
    "frozen dataclasses": lambda: both([Frozen(str(n), n) for n in range(N)]),
    "lists": lambda: of_chunks(lambda n: list(range(n % 5))),
    "lists of strings": lambda: of_chunks(lambda n: ["a" * n] * (n % 3)),
    "arrays": lambda: of_chunks(lambda n: np.full((2, 3), n, np.float32)),
    "arrays in Fortran order": lambda: of_chunks(lambda n: np.asfortranarray(np.full((2, 3), n))),
    "ragged arrays": lambda: of_chunks(lambda n: np.arange(n % 7, dtype=np.int16)),
    "structured arrays": lambda: of_chunks(lambda n: np.array([(n, "a")], [("n", ">i4"), ("s", "U2")])),
    "tensors": lambda: of_chunks(lambda n: torch.full((2, 3), n)),
    "tensors of bfloat16": lambda: of_chunks(lambda n: torch.full((3,), n, dtype=torch.bfloat16)),
    "ragged tensors": lambda: of_chunks(lambda n: torch.arange(n % 7)),
    "arrays and tensors in records": lambda: of_chunks(
        lambda n: {"x": np.full(3, n), "y": torch.full((2,), n), "z": n, "path": str(n)}
    ),
    "custom objects": lambda: both([Custom(np.arange(n), torch.arange(n), str(n)) for n in range(N)]),
    "enums": lambda: both([random.choice(list(Colour)) for _ in range(N)]),
    "records that share": lambda: of_chunks(lambda n: {"n": n, "words": WORDS, "array": ARRAYS[n % 2]}),
    "arrays that are the same": lambda: of_chunks(lambda n: ARRAYS[n % 2]),
    "tensors that are the same": lambda: of_chunks(lambda n: TENSORS[n % 2]),
    "rows that are the same": lambda: of_chunks(lambda n: RECORDS[n % 3]),
    "objects that share": lambda: of_chunks(lambda n: Custom(ARRAYS[0], TENSORS[n % 2], str(n))),
    "everything at once": lambda: both(
        [1, "a", None, 2.5, b"x", [1, "b"], {"k": (1,)}, True, 2**70, Point(1)]
    ),
    "nothing": lambda: both([]),
    "one row": lambda: both(["x"]),
    "a slice": lambda: part_of([{"n": n} for n in range(N)], slice(5, None, 3)),
    "a slice backwards": lambda: part_of([str(n) for n in range(N)], slice(None, 4, -2)),
    "a field": lambda: (
        share([{"a": n, "b": str(n)} for n in range(N)]).column("b"),
        [str(n) for n in range(N)],
    ),
    "an array of objects": lambda: (share(a := np.array(["a", 1, None], object)), a.tolist()),
    "an Arrow table": lambda: (share(TABLE), TABLE.to_pylist()),
    "an Arrow table of many chunks": lambda: (
        share(t := pa.concat_tables([TABLE.slice(n, 3) for n in range(9)])),
        t.to_pylist(),
    ),
    "an Arrow batch": lambda: (share(TABLE.to_batches()[0]), TABLE.to_pylist()),
    "an Arrow array": lambda: (share(a := pa.array([[1], None, []])), a.to_pylist()),
    "a dictionary array": lambda: (share(a := pa.array(["a", "b", "a"]).dictionary_encode()), a.to_pylist()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_store_conforms(kind: str) -> None:
    store, rows = KINDS[kind]()
    for check in conformance.CHECKS:
        check(store, rows)


def sample(n: int) -> dict[str, Any]:
    return {"n": n, "text": str(n), "array": np.arange(n % 5), "tensor": torch.full((2,), n)}


@pytest.mark.parametrize("how", [{}, {"lazy": True}, {"lazy": True, "cache_nbytes": 1}], ids=str)
def test_stores_of_files_conform(how: dict[str, Any], tmp_path: Path) -> None:
    rows = [sample(n) for n in range(39)]
    write(tmp_path / "parquet", rows)  # three files, of several row groups each
    share(rows).save(tmp_path / "x.arrow")
    for check in conformance.CHECKS:
        check(shmloader.open(tmp_path / ("parquet" if how else "x.arrow"), **how), rows)


class Wrong(RowStore):
    """A store that breaks one promise at a time, to see the checks fail."""


def broken_row(store: RowStore, index: int) -> Any:
    return {} if index == 3 else RowStore.row(store, index)


BROKEN: dict[str, dict[str, Any]] = {
    "rows_are_identical": {"__getitem__": lambda self, index: float(RowStore.__getitem__(self, index))},
    "iteration_gives_the_rows": {"__iter__": lambda self: iter([])},
    "wrong_indices_are_errors": {"__getitem__": lambda self, index: self.row(0)},
    "slices_are_views": {"__getitem__": lambda self, index: list(self)[index]},
    "it_is_a_read_only_sequence": {"__setitem__": lambda self, index, value: None},
    "it_equals_its_rows": {"__eq__": lambda self, other: True, "__hash__": None},
    "values_are_found": {"__contains__": lambda self, value: False},
    "many_rows_come_at_once": {"__getitems__": lambda self, indices: [self.row(0) for _ in indices]},
    "take_gathers_the_rows": {"take": lambda self, indices, out=None: np.zeros(len(indices))},
    "copies_are_the_store": {"__deepcopy__": lambda self, memo: list(self)},
    "plain_pickles_are_refused_or_whole": {"__reduce__": lambda self: (list, ())},
    "it_travels_without_its_data": {"__reduce__": lambda self: (list, (list(self),))},
    "it_says_what_it_is": {"describe": lambda self: None},
    "arrow_has_the_same_rows": {"to_arrow": lambda self: pa.array([1])},
}


@pytest.mark.parametrize("check", BROKEN)
def test_the_checks_find_what_is_broken(check: str) -> None:
    rows = list(range(1, 9))
    broken = type("Broken", (RowStore,), BROKEN[check])(share(rows).chunks)
    with pytest.raises((AssertionError, TypeError, AttributeError)):
        getattr(conformance, check)(broken, rows)


def test_the_checks_find_arrays_that_can_be_written() -> None:
    kept = np.zeros(3)

    class Writable(Store):
        def __len__(self) -> int:
            return 1

        def row(self, index: int) -> Any:
            return kept

        take = describe = to_arrow = None

    with pytest.raises(AssertionError):
        conformance.arrays_are_read_only(Writable(), [np.zeros(3)])
