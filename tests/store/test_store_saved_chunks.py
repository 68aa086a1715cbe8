"""Stores of several chunks become one column in a file: rows that repeat, chunks that differ."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from store_samples import Person, same
from warm_python import warm_python

from shmloader import open as open_store
from shmloader import share
from shmloader.store import MappingStore
from shmloader.store.columns.values import Pickles


def saved(rows: list[Any], path: Path) -> Any:
    """Rows in several chunks, saved and opened."""
    store = share(iter(rows))
    assert len(store.chunks.batches) > 1
    assert same(list(store), rows)
    store.save(path)
    return list(open_store(path, allow_pickle=True))


NOTHING: dict[str, Any] = {}


@pytest.mark.parametrize(
    "rows", [[NOTHING] * 300, [{"a": NOTHING, "n": n} for n in range(300)]], ids=["rows", "fields"]
)
def test_an_empty_dict_that_repeats_is_saved(rows: list[Any], tmp_path: Path) -> None:
    assert same(saved(rows, tmp_path / "rows.arrow"), rows)


ARROW = int(pa.__version__.split(".")[0])
AGAIN: dict[str, Any] = {
    "pickled values": 1j,
    "tuples": (1, "a"),
    "lists": [1, 2],
    "dicts of tuples": {"at": (1, 2)},
    "arrays": np.arange(3),
    "tensors": torch.arange(3.0),
}


@pytest.mark.parametrize("name", AGAIN)
def test_objects_that_repeat_are_saved_as_parquet(name: str, tmp_path: Path) -> None:
    value, path = AGAIN[name], tmp_path / "rows.parquet"
    plain = [value] * 100
    for rows in (plain, [{"v": value, "n": n} for n in range(100)], [*plain, None], [[value] * 2] * 100):
        if rows[-1] is None and name in ("lists", "arrays", "tensors") and ARROW < 23:
            continue  # such a release cannot read None among lists of one length (docs/stores.md)
        share(rows).save(path)
        assert same(list(open_store(path, allow_pickle=True)), rows)


@pytest.mark.parametrize(
    "row_of", [lambda text, n: (text, n), lambda text, n: {text}, lambda text, n: {n: text}]
)
def test_rows_that_repeat_have_texts_that_repeat(row_of: Callable[[str, int], Any], tmp_path: Path) -> None:
    once = [row_of(f"label {n % 3}", n) for n in range(100)]
    for rows in (once * 3, once * 300 + [None, *once]):  # of one chunk, and of several
        assert same(list(share(rows)), rows)
        for name in ("rows.arrow", "rows.parquet"):
            assert same(saved(rows, tmp_path / name), rows)


def test_python_types_over_dictionaries_are_read_from_parquet(tmp_path: Path) -> None:
    words = Pickles.write([1j, 2j])
    storage = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 50, pa.int32()), words.storage)
    column = words.type.rewrap(storage)
    table = pa.table({"a": column, "b": pa.FixedSizeListArray.from_arrays(column, 1)})
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    read = f"import shmloader; print(list(shmloader.open({str(path)!r}, allow_pickle=True)))"
    printed = subprocess.check_output([*warm_python(), "-c", read], text=True)  # Arrow might end the process
    assert printed.strip() == str([{"a": 1j, "b": [1j]}, {"a": 2j, "b": [2j]}] * 50)


def test_dicts_keep_the_order_of_their_keys_where_chunks_have_several(tmp_path: Path) -> None:
    # Chunks of 16, 64, 256 and so on: in each of them the keys have one order.
    rows = [{"a": 1, "b": n} for n in range(16 + 64)] + [{"b": "x", "a": n} for n in range(300)]
    assert same(saved(rows, tmp_path / "rows.arrow"), rows)
    rows += [None] * 5
    assert same(saved(rows, tmp_path / "rows.arrow"), rows)
    rows = [{"in": [row], "n": 1} for row in rows]
    assert same(saved(rows, tmp_path / "rows.arrow"), rows)
    persons = [Person("a", 1) for _ in range(380)]
    for person in persons[16 + 64 :]:
        del person.name
        person.name = "b"  # now the last of its attributes
    store = share(iter(persons))
    store.save(tmp_path / "persons.arrow")
    assert list(open_store(tmp_path / "persons.arrow")) == persons


class WithoutArrow(MappingStore):
    def to_arrow(self) -> Any:
        raise TypeError("these values are no columns")


def test_a_mapping_that_has_no_columns_is_not_saved_as_its_keys(tmp_path: Path) -> None:
    store = WithoutArrow(*share({n: str(n) for n in range(100)}).__reduce__()[1])
    with pytest.raises(TypeError, match="no columns"):
        store.save(tmp_path / "rows.arrow")
    assert not list(tmp_path.iterdir())
