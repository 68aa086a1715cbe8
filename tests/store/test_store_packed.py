"""Numbers of records lie side by side in memory; everywhere else they are ordinary columns."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from store_samples import Person, Point, same

import shmloader
from shmloader import share
from shmloader.store.columns.compiled import Scope, compile_reader
from shmloader.store.columns.types import PackedType, RecordsType, find_types

ROWS = 300
"""As a stream these rows are several chunks, whose integers have different widths."""

PACKED: dict[str, list[Any]] = {
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
FEW_NUMBERS = {"namedtuples", "dataclasses", "one optional key of rows that may be None"}


@pytest.mark.parametrize("stream", [False, True], ids=["list", "stream"])
@pytest.mark.parametrize("case", PACKED)
def test_records_come_back_from_memory_arrow_and_files(case: str, stream: bool, tmp_path: Path) -> None:
    rows = PACKED[case]
    store = shmloader.share(iter(rows) if stream else rows)
    assert same(list(store), rows)
    assert same([store[n] for n in range(len(rows))], rows)
    is_packed = bool(find_types(store.field(0).type, RecordsType))
    assert is_packed == (case not in FEW_NUMBERS)

    table = store.to_arrow()
    assert "shmloader.records" not in str(table.type if isinstance(table, pa.ChunkedArray) else table.schema)
    store.save(tmp_path / "x.arrow")
    found = shmloader.open(tmp_path / "x.arrow")
    assert not find_types(found.field(0).type, PackedType)
    assert same(list(found), rows)


def test_a_packed_field_is_a_column() -> None:
    rows = PACKED["optional keys"]
    store = shmloader.share(iter(rows))
    assert len(store.chunks.starts) > 2
    assert list(store["a"]) == [row["a"] for row in rows]
    assert list(store["c"]) == [row.get("c") for row in rows]
    assert store["b"].to_arrow().to_pylist() == [1.5] * ROWS
    assert store["c"].to_arrow().to_pylist() == [row.get("c") for row in rows]
    assert np.asarray(store["a"]).tolist() == [row["a"] for row in rows]
    with pytest.raises(KeyError):
        store.column("shmloader.records")
    fields = {field.name: field for field in store.describe().fields}
    assert list(fields) == ["a", "b", "c", "d"]
    assert (fields["b"].type, fields["b"].nbytes) == ("double", 8 * ROWS)


def test_a_column_of_packed_numbers_is_memory_of_the_store() -> None:
    store = shmloader.share(PACKED["dicts"])
    column = store["c"]
    (buffer,) = [one for one in column.field(0).storage.buffers() if one is not None]
    assert store.buffer.address <= buffer.address < store.buffer.address + store.buffer.nbytes


@pytest.mark.parametrize("stream", [False, True], ids=["one chunk", "chunks of other widths"])
def test_packed_numbers_are_gathered(stream: bool) -> None:
    rows = PACKED["dicts"]
    store = shmloader.share(iter(rows) if stream else rows)
    chosen = np.random.default_rng(0).integers(0, ROWS, 200)
    taken = store.take(chosen)
    for name, dtype in {"a": np.int64, "b": np.int64, "c": np.float64, "d": np.bool_}.items():
        assert taken[name].dtype == dtype
        assert taken[name].tolist() == [rows[n][name] for n in chosen]


def test_tuples_do_not_have_the_records_as_an_item() -> None:
    store = shmloader.share(PACKED["tuples"])
    assert store.tuple_length() == 4
    assert list(store.column(3)) == [f"{n}" for n in range(ROWS)]
    with pytest.raises(KeyError):
        store.column(4)


def test_a_key_with_the_name_of_the_records_is_a_key() -> None:
    rows = [{"shmloader.records": n, "a": n, "b": n, "c": n} for n in range(20)]
    assert list(shmloader.share(rows)) == rows


def test_a_file_with_packed_numbers_is_refused(tmp_path: Path) -> None:
    """Their places and types could be anything."""
    batch = shmloader.share(PACKED["dicts"]).chunks.batches[0]
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(ValueError, match=r"x\.arrow.*refer to others"):
        shmloader.open(tmp_path / "x.arrow")


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


def test_the_time_to_make_a_reader_grows_with_its_names_and_not_with_their_square() -> None:
    def seconds(count: int) -> float:
        scope = Scope()
        begin = time.process_time()
        compile_reader([f"return [{', '.join(scope.bind(n) for n in range(count))}]"], scope)
        return time.process_time() - begin

    least = [min(seconds(count + turn) for turn in range(3)) for count in (500, 4000)]
    assert least[1] < 8 * 4 * least[0]
