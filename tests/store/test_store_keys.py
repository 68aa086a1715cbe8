"""Optional keys, and objects that repeat, in memory and in files."""

from __future__ import annotations

import decimal
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shmloader import open as open_store
from shmloader import share
from shmloader.store import Store
from shmloader.store.columns.arrays import Arrays
from shmloader.store.testing import identical


def rows_with_some_of(names: int, count: int = 3000) -> list[dict[str, Any]]:
    """Dicts with a random choice of keys, whose values are sometimes None, of every kind."""
    random = np.random.default_rng(0)
    values: list[Any] = ["text", 5, None, 1.5, (1, 2), np.arange(3), [1, "mixed"], Path("x"), {"a": 1}, b"x"]
    there = random.random((count, names)) < 0.6
    return [
        {f"k{name}": values[name % 10] if row % 7 else None for name in range(names) if there[row, name]}
        for row in range(count)
    ]


@pytest.mark.parametrize("names", [1, 9, 20, 70])  # 70: more bits than an integer has
def test_any_choice_of_keys_comes_back_in_order(names: int, tmp_path: Path) -> None:
    """More combinations than have functions of their own; absent is not None."""
    rows = rows_with_some_of(names)
    store = share(rows)
    store.save(tmp_path / "rows.arrow")
    for found in (store, open_store(tmp_path / "rows.arrow")):
        assert all(map(identical, found, rows))
        assert not [field.name for field in found.describe().fields if field.pickled]


def test_chunks_with_other_keys_are_one_table_in_a_file(tmp_path: Path) -> None:
    """Fields stay plain columns, which any Arrow program reads."""
    rows: list[dict[str, Any]] = [{"a": n} for n in range(40_000)]
    rows += [{"a": n, "b": str(n)} if n % 2 else {"a": n} for n in range(40_000)]
    rows += [{"a": n, "b": str(n), "c": None} for n in range(40_000)]
    store = share(rows)
    assert len(store.chunks.starts) > 4
    store.save(tmp_path / "rows.arrow")
    table = pa.ipc.open_file(tmp_path / "rows.arrow").read_all()
    assert table.column_names == ["a", "b", "c", "shmloader.keys"]
    assert table.column("b").to_pylist() == [row.get("b") for row in rows]
    assert list(open_store(tmp_path / "rows.arrow")) == rows
    store.save(tmp_path / "rows.parquet")
    for name in ("rows.arrow", "rows.parquet"):
        chosen = open_store(tmp_path / name, columns=["c", "b"])
        assert [chosen[n] for n in (0, 40_001, 80_000)] == [{}, {"b": "1"}, {"c": None, "b": "0"}]


def test_keys_in_another_order_stay_in_it() -> None:
    rows = [{"a": 1, "b": 2}, {"b": 3, "a": 4}, {"b": 5}, {"c": 6, "a": 7}] * 50
    assert all(list(one.items()) == list(other.items()) for one, other in zip(share(rows), rows, strict=True))


def test_rows_that_repeat_have_fields(tmp_path: Path) -> None:
    """A list may contain samples that were drawn more than once."""
    rows = [{"label": n % 5, "path": f"{n}.jpg", "box": np.full(4, n)} for n in range(500)]
    store = share(rows * 20)
    assert store.nbytes < 2 * share(rows).nbytes + 4 * 20 * 500 + 5000
    assert store["label"] == [row["label"] for row in rows] * 20
    assert store.take([501, 3])["label"].tolist() == [1, 3]
    assert np.array_equal(store.take(list(range(20)))["box"], np.stack([row["box"] for row in rows[:20]]))
    store.save(tmp_path / "rows.arrow")
    assert open_store(tmp_path / "rows.arrow")["path"][-1] == "499.jpg"


def test_rows_of_another_container_have_fields() -> None:
    rows = [{"label": n % 5, "path": f"{n}.jpg" + "x" * 500} for n in range(4000)]
    shared = share({"all": rows, "shuffled": rows[::-1]})
    assert isinstance(shared["shuffled"], Store)
    assert shared["shuffled"]["label"] == [row["label"] for row in rows[::-1]]
    assert shared["shuffled"].take([0, 1])["label"].tolist() == [4, 3]


def test_values_that_may_be_none_are_columns() -> None:
    rows: list[Any] = [None, (1, 2), None, (3, 4)] * 20
    for values in (rows, [None, np.arange(3), np.arange(3)] * 20, [None, np.arange(2), np.arange(5)] * 20):
        store = share([{"value": value} for value in values])
        assert all(identical(row["value"], value) for row, value in zip(store, values, strict=True))
        assert "or" not in store.describe().fields[0].type
        taken = store.take(range(len(values)))["value"]
        assert all(map(identical, taken, values))


def test_a_chunk_of_none_beside_chunks_of_arrays_stays_none(tmp_path: Path) -> None:
    rows = [{"value": None}] * 20_000 + [{"value": np.zeros(0)}, {"value": np.zeros((0, 4))}] * 10_000
    rows += [{"value": np.arange(3)}] * 20_000
    store = share([dict(row) for row in rows])
    store.save(tmp_path / "rows.arrow")
    opened = open_store(tmp_path / "rows.arrow")
    for number in (0, 19_999, 20_000, 20_001, 40_000, -1):
        assert identical(opened[number], rows[number])
        assert identical(store[number], rows[number])


@pytest.mark.parametrize("beside", [[], 1, None, {"a": 1, "b": 2, "c": 3}])
@pytest.mark.parametrize("empty", [torch.tensor([]), np.zeros((0, 3), "u1"), np.zeros((2, 0), ">f4")])
def test_arrays_without_items_stand_beside_anything(empty: Any, beside: Any, tmp_path: Path) -> None:
    """Each is a column, and the columns after it are read right."""
    rows = [{"x": empty, "n": 1}, {"x": beside, "n": 2}, {"x": [empty, beside], "n": 3}]
    store = share(rows)
    store.save(tmp_path / "rows.arrow")
    assert all(map(identical, store, rows))
    assert all(map(identical, open_store(tmp_path / "rows.arrow"), rows))


@pytest.mark.parametrize("empty", [torch.tensor([]), np.zeros((0, 3), "u1")])
def test_arrays_without_items_alone(empty: Any, tmp_path: Path) -> None:
    store = share([{"x": empty}, {"x": empty[:0]}] * 20)
    store.save(tmp_path / "rows.parquet")
    assert all(map(identical, open_store(tmp_path / "rows.parquet"), store))
    assert share([empty] * 20).take(range(20)).shape == (20, *empty.shape)


def test_arrays_without_items_are_read_from_files_that_have_no_column_for_them(tmp_path: Path) -> None:
    """Such files were saved when the storage was Arrow's null."""
    kind = Arrays(pa.null(), dtype="<f8", shape=[0, 3])
    column = pa.chunked_array([kind.wrap_array(pa.nulls(3))])
    share(pa.table({"n": [1, 2, 3], "x": column})).save(tmp_path / "rows.arrow")
    opened = open_store(tmp_path / "rows.arrow")
    assert identical(opened[2], {"n": 3, "x": np.zeros((0, 3))})
    assert opened["x"].take(range(3)).shape == (3, 0, 3)


def test_such_files_are_joined_with_others(tmp_path: Path) -> None:
    kind = Arrays(pa.null(), dtype="<f8", shape=[0, 3])
    column = pa.chunked_array([kind.wrap_array(pa.nulls(2))])
    (tmp_path / "parts").mkdir()
    share(pa.table({"n": [1, 2], "x": column})).save(tmp_path / "parts" / "1.arrow")
    share([{"n": 3, "x": np.ones((2, 3))}]).save(tmp_path / "parts" / "2.arrow")
    open_store(tmp_path / "parts").save(tmp_path / "rows.arrow")
    expected = [{"n": n, "x": np.zeros((0, 3))} for n in (1, 2)] + [{"n": 3, "x": np.ones((2, 3))}]
    assert all(map(identical, open_store(tmp_path / "rows.arrow"), expected))


def test_columns_of_one_name_stay_in_arrows_table() -> None:
    table = pa.table([pa.array([1, 2]), pa.array([3, 4])], names=["a", "a"])
    assert share(table).to_arrow().equals(table)


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["arrays", "tensors"])
def test_chunks_of_arrays_of_other_shapes_are_one_column_in_a_file(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their items are not read as Python objects for that."""
    monkeypatch.delattr("shmloader.store.columns.encode._encoded_anew")
    shapes = [(2, 3)] * 40 + [(3, 3)] * 100 + [(n % 4, 2) for n in range(400)]
    dtype = ">u2" if make is np.asarray else "u1"
    arrays = [make(np.full(shape, n % 200, dtype)) for n, shape in enumerate(shapes)]
    rows: list[Any] = [{"x": one if n % 5 else None, "y": n} for n, one in enumerate(arrays)]
    flat = [{"x": make(np.arange(2.0 + (n > 40))), "y": n} for n in range(100)]
    for number, some in enumerate((rows, flat)):
        store = share(iter(some))
        assert len({store["x"].field(chunk).type for chunk in range(len(store.chunks.starts) - 1)}) > 1
        (kind,) = {chunk.type for chunk in store["x"].to_arrow().chunks}
        assert isinstance(kind, Arrays)
        store.save(tmp_path / f"{number}.arrow")
        assert all(map(identical, open_store(tmp_path / f"{number}.arrow"), some))
        part = store[3:90]
        part.save(tmp_path / "part.arrow")
        assert all(map(identical, open_store(tmp_path / "part.arrow"), some[3:90]))


def test_keys_that_refuse_to_be_compared_come_back() -> None:
    """A Decimal and a NumPy integer of one hash cannot be compared, and no row does so."""
    rows: list[dict[Any, int]] = [{decimal.Decimal(1): 1, "x": 2}, {np.int64(1): 1}, {"x": 3}]
    assert [repr(row) for row in share(rows)] == [repr(row) for row in rows]


def test_numbers_of_other_widths_are_one_type_in_a_table(tmp_path: Path) -> None:
    for number, kind in enumerate((pa.float32(), pa.float64(), pa.list_(pa.float32()), pa.int64())):
        values = pa.array([[0.1], None] if pa.types.is_list(kind) else [7, None], kind)
        pq.write_table(pa.table({"x": values}), tmp_path / f"{number}.parquet")
    few = open_store(tmp_path / "[01].parquet")
    assert few.to_arrow().schema.field("x").type == pa.float64()
    everything = open_store(tmp_path / "*.parquet")
    everything.save(tmp_path / "all.arrow")
    assert open_store(tmp_path / "all.arrow") == list(everything)
    assert few["x"].to_arrow().to_pylist() == [7.0, None, 7.0, None]


def test_files_of_one_pattern_may_differ_in_the_types_of_columns(tmp_path: Path) -> None:
    """Parts of one list that were saved one by one may differ like this."""
    parts = [
        [{"id": n, "tag": None} for n in range(100)],
        [{"id": n, "tag": "x"} for n in range(90_000, 90_100)],
    ]
    for number, part in enumerate(parts):
        share(part).save(tmp_path / f"part {number}.arrow")
    rows = parts[0] + parts[1]
    store = open_store(str(tmp_path / "part *.arrow"))
    assert list(store) == rows
    assert store["id"] == [row["id"] for row in rows]
    assert store.take([0, 150] * 20)["id"].tolist() == [0, 90_050] * 20
    assert store.to_arrow().to_pylist() == rows
    share([{"other": 1}]).save(tmp_path / "part 2.arrow")
    with pytest.raises(
        ValueError, match=r"part 2\.arrow has other rows than .*part 0\.arrow: table of 'other' instead"
    ):
        open_store(str(tmp_path / "part *.arrow"))


@dataclass(slots=True)
class Box:
    x: int
    label: str


@dataclass(frozen=True, slots=True)
class FrozenBox:
    x: int
    label: str | None = None


def test_dataclasses_with_slots_are_columns(tmp_path: Path) -> None:
    for rows in ([Box(n, f"label {n}") for n in range(100)], [FrozenBox(n) for n in range(100)]):
        store = share(rows)
        assert all(map(identical, store, rows))
        assert [(field.name, field.pickled) for field in store.describe().fields] == [
            ("x", None),
            ("label", None),
        ]
        store.save(tmp_path / "rows.arrow")
        assert list(open_store(tmp_path / "rows.arrow")) == rows
    empty = object.__new__(Box)
    empty.x = 5
    assert share([empty] * 3)[1].x == 5  # pickled


def test_the_row_that_cannot_be_kept_is_named() -> None:
    rows: list[Any] = [Box(n, "x") for n in range(1000)]
    rows[77].label = lambda: None
    with pytest.raises((pickle.PicklingError, AttributeError)) as caught:
        share(rows)
    assert any("element [77] is a Box" in note for note in caught.value.__notes__)
