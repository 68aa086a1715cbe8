"""Records and lists with numbers, of chunks that differ in their widths: in memory, in Arrow and in files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from store_samples import Person, Point, same

import shmloader
from shmloader import share
from shmloader.store.columns.kind import types_in

ROWS = 300
"""As a stream these rows are several chunks, whose integers have different widths."""

RECORDS: dict[str, list[Any]] = {
    "dicts": [{"a": n, "b": -n * n * n, "c": n / 7, "d": n % 3 == 0, "e": str(n)} for n in range(ROWS)],
    "tuples": [(n, n * 500, n * 0.5, f"{n}") for n in range(ROWS)],
    "records in records": [{"a": {"x": n, "y": n + 1, "z": True}, "b": [n]} for n in range(ROWS)],
    "records that are None": [{"a": {"x": n, "y": n + 1, "z": 2} if n % 3 else None} for n in range(ROWS)],
    "optional keys": [
        {"a": n, "b": 1.5, **({"c": n} if n % 2 else {}), **({"d": True} if n % 5 else {})}
        for n in range(ROWS)
    ],
    "optional keys that may be None": [
        {"a": n, "b": n, "c": n, **({"d": None if n % 3 else n} if n % 2 else {})} for n in range(ROWS)
    ],
    "optional keys of rows that may be None": [
        {"a": n, "b": n, "c": n, **({"d": n} if n % 2 else {})} if n % 3 else None for n in range(ROWS)
    ],
    "one optional key of rows that may be None": [
        ({"a": n} if n % 2 else {}) if n % 3 else None for n in range(ROWS)
    ],
    "optional records": [
        {"s": n, **({"r": {"x": n, "y": n, "z": n}} if n % 2 else {}), "t": "x"} for n in range(ROWS)
    ],
    "namedtuples": [Point(n, n * 2.0) for n in range(ROWS)],
    "dataclasses": [Person(str(n), n, [n]) for n in range(ROWS)],
    "many patterns of keys": [
        {"z": 1, **{f"k{place}": n for place in range(9) if n >> place & 1}} for n in range(ROWS)
    ],
}


@pytest.mark.parametrize("stream", [False, True], ids=["list", "stream"])
@pytest.mark.parametrize("case", RECORDS)
def test_records_come_back_from_memory_arrow_and_files(case: str, stream: bool, tmp_path: Path) -> None:
    rows = RECORDS[case]
    store = shmloader.share(iter(rows) if stream else rows)
    assert same(list(store), rows)
    assert same([store[n] for n in range(len(rows))], rows)
    store.save(tmp_path / "x.arrow")
    found = shmloader.open(tmp_path / "x.arrow")
    assert same(list(found), rows)


def test_a_field_is_a_column() -> None:
    rows = RECORDS["optional keys"]
    store = shmloader.share(iter(rows))
    assert len(store.chunks.starts) > 2
    assert list(store["a"]) == [row["a"] for row in rows]
    assert list(store["c"]) == [row.get("c") for row in rows]
    assert store["b"].to_arrow().to_pylist() == [1.5] * ROWS
    assert store["c"].to_arrow().to_pylist() == [row.get("c") for row in rows]
    assert np.asarray(store["a"]).tolist() == [row["a"] for row in rows]
    with pytest.raises(KeyError):
        store.column("shmloader.keys")
    fields = {field.name: field for field in store.describe().fields}
    assert list(fields) == ["a", "b", "c", "d"]
    assert (fields["b"].type, fields["b"].nbytes) == ("double", 8 * ROWS)


def test_a_column_of_numbers_is_memory_of_the_store() -> None:
    store = shmloader.share(RECORDS["dicts"])
    column = store["c"]
    (buffer,) = [one for one in column.field(0).buffers() if one is not None]
    assert store.buffer.address <= buffer.address < store.buffer.address + store.buffer.nbytes


@pytest.mark.parametrize("stream", [False, True], ids=["one chunk", "chunks of other widths"])
def test_numbers_are_gathered(stream: bool) -> None:
    rows = RECORDS["dicts"]
    store = shmloader.share(iter(rows) if stream else rows)
    chosen = np.random.default_rng(0).integers(0, ROWS, 200)
    taken = store.take(chosen)
    for name, dtype in {"a": np.int64, "b": np.int64, "c": np.float64, "d": np.bool_}.items():
        assert taken[name].dtype == dtype
        assert taken[name].tolist() == [rows[n][name] for n in chosen]


def test_tuples_have_a_column_for_each_item() -> None:
    store = shmloader.share(RECORDS["tuples"])
    assert list(store.column(3)) == [f"{n}" for n in range(ROWS)]
    with pytest.raises(KeyError):
        store.column(4)


def test_a_key_with_the_name_of_the_keys_is_a_key() -> None:
    rows = [{"shmloader.keys": n, "a": n, "b": n, "c": n} for n in range(20)]
    assert list(shmloader.share(rows)) == rows


LISTS: dict[str, list[Any]] = {
    "of one length": [[n, n + 1.5, None] for n in range(ROWS)],
    "of another length in a later chunk": [[n] * (2 + (n > 100)) for n in range(ROWS)],
    "of any length in a later chunk": [[n] * (2 if n < 100 else n % 4) for n in range(ROWS)],
    "and None": [None if n % 5 == 0 else [n, n] for n in range(ROWS)],
    "of lists": [[[n, 1]] for n in range(ROWS)],
    "of texts": [{"words": [str(n), "x"]} for n in range(ROWS)],
    "of records": [[{"a": n, "b": str(n)}] for n in range(ROWS)],
}


@pytest.mark.parametrize("case", LISTS)
def test_lists_of_one_length_come_back_from_memory_arrow_and_files(case: str, tmp_path: Path) -> None:
    rows = LISTS[case]
    store = shmloader.share(iter(rows))
    assert same(list(store), rows)
    assert store.to_arrow().slice(3, 4).to_pylist() == rows[3:7] or "words" in str(rows[0])
    store.save(tmp_path / "x.arrow")
    assert same(list(shmloader.open(tmp_path / "x.arrow")), rows)


def test_arrows_own_lists_of_one_length_are_read() -> None:
    boxes = pa.array([[n, n + 1.5] for n in range(20)], pa.list_(pa.float32(), 2))
    assert list(shmloader.share(boxes[5:])) == boxes[5:].to_pylist()


def test_types_are_parsed_once_and_not_for_each_field(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    loads = json.loads

    def loads_counted(text: bytes) -> Any:
        parsed.append(text)
        return loads(text)

    monkeypatch.setattr(json, "loads", loads_counted)
    rows = [{f"a number of many {k}": k + n for k in range(300)} for n in range(20)]
    store = share(rows)
    assert list(store) == rows
    assert len(store.describe().fields) == 300
    assert store["a number of many 7"][3] == 10
    assert len(parsed) < 10


def test_rows_that_hold_several_rows_each_are_kept_in_few_columns() -> None:
    rows: list[Any] = [{"n": 0, "one": None, "other": None}]
    for number in range(1, 18):
        rows.append({"n": number, "one": rows[-1], "other": rows[number // 2]})
    store = share(rows)
    assert len(types_in(store.field(0).type)) < 200  # else 8,000
    assert list(store) == rows
