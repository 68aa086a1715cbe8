"""Stores in files: an opened store equals the saved one, and a file that is gone or changed is an error."""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import errno
import json
import os
import pickle
import stat
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from robustness.processes import LONG
from torch.utils.data import ConcatDataset

from shmloader import DataLoader, LoaderError
from shmloader.store import Store, StoreDescription, chunks, share
from shmloader.store.chunks import rows_of
from shmloader.store.files import FileBuffer, open_store
from shmloader.store.handles import pack, unpack
from shmloader.store.memory import Table


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Sample:
    path: str
    label: int


RECORDS = [{"path": f"image {n}", "label": n, "weight": n / 2, "ok": n % 2 == 0} for n in range(3000)]
PLAIN: dict[str, Any] = {
    "records": RECORDS,
    "nested": [{"words": ["a", "b" * (n % 5)], "at": {"x": n, "y": [[n]]}} for n in range(100)],
    "strings": [f"text {n}" for n in range(5000)],
    "bytes": [b"\0\xff" * n for n in range(100)],
    "ints": [*range(-5, 2000), 1 << 40],
    "floats": [n / 7 for n in range(100)],
    "some None": [None if n % 3 else n for n in range(3000)],
    "None at first": [*[{"a": n, "b": None} for n in range(2000)], {"a": 1, "b": "text"}],
}
OTHERS: dict[str, Any] = {
    "tuples": [(n, str(n)) for n in range(100)],
    "namedtuples": [Point(n, n / 2) for n in range(100)],
    "dataclasses": [Sample(str(n), n) for n in range(100)],
    "tuples of any length": [tuple(range(n % 20)) for n in range(100)],
    "keys that vary": [{str(n): n} for n in range(10)],
    "ints then floats": [*range(3000), 1.5],
    "mixed": [1, "two", 3.0, None, b"five", [6], {"seven": 7}],
    "large ints": [1 << 100, -(1 << 90)],
    "objects": [decimal.Decimal(n) for n in range(100)] + [dt.date(2020, 1, 1)],
    "numpy scalars": [np.float32(n) for n in range(10)],
    "arrays": [np.arange(n % 7, dtype=np.float32) for n in range(100)],
    "images": [np.full((3, 4), n, np.uint8) for n in range(50)],
    "empty": [],
    "nothing but None": [None] * 5,
    "lists of None": [[None, None], []],
    "empty dicts": [{}, {}],
    "a dict": {f"key {n}": {"value": n} for n in range(1000)},
}


def both(one: Any, other: Any) -> bool:
    """Whether two rows are equal and of the same types."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other and repr(one) == repr(other)


def same(store: Any, data: Any) -> bool:
    if isinstance(data, dict):
        return dict(store) == data and all(map(both, store.values(), data.values()))
    return len(store) == len(data) and all(map(both, store, data))


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_what_is_opened_equals_what_was_saved(tmp_path: Path, name: str) -> None:
    data = (PLAIN | OTHERS)[name]
    store, path = share(data), tmp_path / "data.arrow"
    store.save(path)
    opened = open_store(path, allow_pickle=True)
    assert same(opened, data)
    assert opened == store
    again = unpack(*pack(opened))  # by the path; the index of a dict's keys is in memory
    assert same(again, data)


@pytest.mark.parametrize("spaced", [True, False])
def test_the_metadata_may_be_any_json(tmp_path: Path, spaced: bool) -> None:
    """Other programs write it without spaces, in another order, with keys of their own."""
    said = json.dumps(
        {"more": [1], "rows": "column", "version": 1}, separators=None if spaced else (",", ":")
    )
    schema = pa.schema([pa.field("", pa.int64())], {b"shmloader": said.encode()})
    with pa.ipc.new_file(tmp_path / "data.arrow", schema) as writer:
        writer.write_table(pa.table([pa.array([1, 2])], schema=schema))
    assert list(open_store(tmp_path / "data.arrow")) == [1, 2]


def test_a_file_replaced_while_it_is_opened_is_not_mapped_with_the_old_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, open_file = tmp_path / "data.arrow", tmp_path / "other.arrow", os.open
    share(RECORDS).save(path)
    share(RECORDS).save(other)

    def open_once_replaced(name: Any, *arguments: Any, **others: Any) -> int:
        if name == str(path) and other.exists():
            other.replace(path)
        return open_file(name, *arguments, **others)

    monkeypatch.setattr(os, "open", open_once_replaced)
    with pytest.raises(LoaderError, match="was changed since it was opened"):
        open_store(path)
    assert open_store(path) == RECORDS


@pytest.mark.parametrize("name", PLAIN)
def test_plain_rows_are_arrow_data_for_any_program(tmp_path: Path, name: str) -> None:
    share(PLAIN[name]).save(tmp_path / "data.arrow")
    table = pa.ipc.open_file(tmp_path / "data.arrow").read_all()
    rows = table.column(0).to_pylist() if table.column_names == [""] else table.to_pylist()
    assert rows == PLAIN[name]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(
    max_examples=60 if LONG else 20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rows=st.lists(JSON, max_size=8), repeat=st.sampled_from([1, 700]))
def test_any_rows_are_the_same_after_a_file(tmp_path: Path, rows: list[Any], repeat: int) -> None:
    """Repeated, so that there are several chunks."""
    share(rows * repeat).save(tmp_path / "data.arrow")
    assert same(open_store(tmp_path / "data.arrow", allow_pickle=True), rows * repeat)


@pytest.mark.parametrize("data", [np.arange(1000).reshape(-1, 5), torch.arange(1000.0).reshape(-1, 5)])
def test_arrays_and_tensors_are_the_same_after_a_file(tmp_path: Path, data: Any) -> None:
    share(list(data)).save(tmp_path / "data.arrow")
    opened = open_store(tmp_path / "data.arrow", allow_pickle=True)
    assert opened[0].dtype == data.dtype
    assert len(opened) == len(data)
    assert all((row == other).all() for row, other in zip(opened, data, strict=True))
    if isinstance(data, np.ndarray):
        with pytest.raises(ValueError, match="read-only"):
            opened[0][0] = 1
    else:
        opened[0][0] = 77  # a tensor cannot refuse; the file must not change
        assert open_store(tmp_path / "data.arrow", allow_pickle=True)[0][0] == 0


TABLE = pa.table(
    {
        "path": [f"image {n}" for n in range(5000)],
        "label": pa.array(range(5000), pa.int32()),
        "when": pa.array([dt.datetime(2020, 1, 1, tzinfo=dt.UTC)] * 5000),
    }
)


def write_stream(table: Any, path: Path) -> None:
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=999)


def write_file(table: Any, path: Path, compression: str | None = None) -> None:
    with pa.ipc.new_file(
        path, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_table(table, max_chunksize=999)


WRITERS: dict[str, Any] = {
    "file": write_file,
    "stream": write_stream,
    "compressed": lambda table, path: write_file(table, path, "lz4"),
    "parquet": lambda table, path: pq.write_table(table, path, row_group_size=999),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_files_of_other_programs_are_stores_of_dicts(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data"  # the contents decide
    WRITERS[kind](TABLE, path)
    store = open_store(path, allow_pickle=True)
    assert list(store) == TABLE.to_pylist()
    assert store[-1] == TABLE.slice(4999).to_pylist()[0]
    assert store.to_arrow().equals(TABLE)
    assert store.take([3, 4000])["label"].tolist() == [3, 4000]
    assert store.describe().rows == 5000
    is_mapped = kind in ("file", "stream")
    assert isinstance(store.buffer, FileBuffer) is is_mapped


def test_a_mapped_file_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    before = pa.total_allocated_bytes()
    write_file(pa.table({"x": np.zeros(1 << 20)}), tmp_path / "data.arrow")
    store = open_store(tmp_path / "data.arrow", allow_pickle=True)
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert store[5] == {"x": 0.0}


@pytest.mark.parametrize("make_writer", [pa.ipc.new_file, pa.ipc.new_stream], ids=["file", "stream"])
def test_compressed_batches_are_unpacked_one_by_one(
    make_writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"x": np.arange(20 << 17)})
    compressed = pa.ipc.IpcWriteOptions(compression="lz4")
    with make_writer(str(tmp_path / "data.arrow"), table.schema, options=compressed) as writer:
        writer.write_table(table, max_chunksize=1 << 17)
    taken, before, append_batch = [], pa.total_allocated_bytes(), Table.append_batch

    def append_noting_memory(self: Table, batch: Any) -> None:
        taken.append(pa.total_allocated_bytes() - before)
        append_batch(self, batch)

    monkeypatch.setattr(Table, "append_batch", append_noting_memory)
    usual, counted = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(counted)
    try:
        assert open_store(tmp_path / "data.arrow")[-1] == {"x": (20 << 17) - 1}
    finally:
        pa.set_memory_pool(usual)
    assert len(taken) == 20
    assert max(taken) < 4 << 20  # of 20
    assert counted.max_memory() < 4 << 20  # even before the first one is appended


def test_only_batches_that_are_read_are_made_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This matters for files with very many batches."""
    table, made = pa.table({"x": np.arange(100)}), list[Any]()
    with pa.ipc.new_file(str(tmp_path / "data.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)

    def note(batch: Any) -> Any:
        made.append(batch)
        return rows_of(batch)

    monkeypatch.setattr(chunks, "rows_of", note)
    store = open_store(tmp_path / "data.arrow")
    pack(store)
    assert not made
    assert [store[7], store[7]] == [{"x": 7}, {"x": 7}]
    assert len(made) == 1


@pytest.mark.parametrize("make_writer", [pa.ipc.new_file, pa.ipc.new_stream], ids=["file", "stream"])
def test_a_compressed_file_is_unpacked_also_if_its_first_batch_has_no_rows(
    make_writer: Any, tmp_path: Path
) -> None:
    """Otherwise each process that maps the file would unpack it for itself."""
    table = pa.table({"x": np.zeros(1 << 16)})
    compressed = pa.ipc.IpcWriteOptions(compression="lz4")
    with make_writer(str(tmp_path / "data.arrow"), table.schema, options=compressed) as writer:
        writer.write_batch(pa.RecordBatch.from_pydict({"x": np.zeros(0)}))
        writer.write_table(table)
    store = open_store(tmp_path / "data.arrow")
    assert len(store) == 1 << 16
    assert not isinstance(store.buffer, FileBuffer)


@pytest.mark.long
def test_a_file_may_be_larger_than_what_memory_may_be_had(tmp_path: Path) -> None:
    """The process may use less private memory than the file's length."""
    path = tmp_path / "data.arrow"
    write_file(pa.table({"x": np.arange(16 << 20)}), path)
    program = (
        "import resource, sys; from pathlib import Path; from shmloader.store.files import open_store\n"
        "line = next(x for x in Path('/proc/self/status').read_text().splitlines() if 'VmData' in x)\n"
        "limit = int(line.split()[1]) * 1024 + (96 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "store = open_store(sys.argv[1])\n"
        "print(sum(store[n]['x'] for n in range(0, len(store), 1 << 16)))\n"
        "try: bytearray(128 << 20)\n"
        "except MemoryError: print('limited')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(sum(range(0, 16 << 20, 1 << 16))), "limited"], done.stderr


def test_a_deep_copy_is_the_store_itself(tmp_path: Path) -> None:
    share(RECORDS).save(tmp_path / "data.arrow")
    store = open_store(tmp_path / "data.arrow", allow_pickle=True)
    assert copy.deepcopy(store) is store


def test_workers_open_the_file_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_method: str
) -> None:
    parts = [RECORDS, OTHERS["namedtuples"]]
    monkeypatch.chdir(tmp_path)
    for number, part in enumerate(parts):
        share(part).save(f"{number}.arrow")
    dataset = ConcatDataset(
        [open_store(f"{number}.arrow", allow_pickle=True) for number in range(len(parts))]
    )
    monkeypatch.chdir("/")
    data = parts[0] + parts[1]
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=range(0, len(data), 50),
        num_workers=1,
        multiprocessing_context=start_method,
    )
    assert list(loader) == data[::50]
    loader.close()


@pytest.mark.parametrize("name", ["records", "namedtuples"])
def test_a_file_that_is_gone_is_an_error_that_says_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / "data.arrow"
    data = (PLAIN | OTHERS)[name]
    share(data).save(path)
    store = open_store(path, allow_pickle=True)
    pickled = pickle.dumps(store)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{path}, which is not there"):
        pickle.loads(pickled)
    assert store[3] == data[3]  # the mapping stays


@pytest.mark.parametrize("name", ["records", "namedtuples"])
@pytest.mark.parametrize("how", ["replaced", "touched"])
def test_a_file_that_has_changed_is_an_error_with_before_and_after(
    tmp_path: Path, name: str, how: str
) -> None:
    path = tmp_path / "data.arrow"
    data = (PLAIN | OTHERS)[name]
    share(data).save(path)
    store = open_store(path, allow_pickle=True)
    pickled, inode = pickle.dumps(store), path.stat().st_ino
    if how == "replaced":
        share(data).save(path)
    else:
        os.utime(path, (1, 1))
    with pytest.raises(
        LoaderError, match=rf"was changed .* inode {inode}, .* now .* inode {path.stat().st_ino}"
    ):
        pickle.loads(pickled)
    assert store[3] == data[3]


def test_saving_over_the_file_of_an_open_store_leaves_that_store_as_it_was(tmp_path: Path) -> None:
    """A file that is shortened under a mapping is a bus error."""
    path = tmp_path / "data.arrow"
    share(RECORDS).save(path)
    store = open_store(path, allow_pickle=True)
    share(["short"]).save(path)
    assert list(store) == RECORDS
    assert list(open_store(path, allow_pickle=True)) == ["short"]


@pytest.mark.parametrize("how", ["replaced", "unlinked"])
def test_tensors_are_read_from_a_file_that_has_no_path_any_more(tmp_path: Path, how: str) -> None:
    """Only tensors need writable memory, which is mapped when the first one is read."""
    path = tmp_path / "tensors.arrow"
    share([{"t": torch.full((3,), n), "ragged": torch.ones(n % 4)} for n in range(9)]).save(path)
    store = open_store(path)
    if how == "replaced":
        share([{"t": torch.zeros(3), "ragged": torch.zeros(1)}] * 11).save(path)
    else:
        path.unlink()
    descriptors = len(os.listdir("/proc/self/fd"))
    assert store[7]["t"].tolist() == [7, 7, 7]
    assert store[7]["ragged"].tolist() == [1, 1, 1]
    assert store["t"].take([2, 5]).tolist() == [[2] * 3, [5] * 3]
    store[7]["t"].fill_(5)  # stays in this process
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises((LoaderError, FileNotFoundError), match=str(path)):
        pickle.loads(pickle.dumps(store))


def test_a_failed_save_leaves_no_file_and_the_old_one_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.arrow"
    share(RECORDS).save(path)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", full)
    with pytest.raises(OSError, match="No space left"):
        share(["other"]).save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["data.arrow"]
    assert list(open_store(path, allow_pickle=True)) == RECORDS


def test_a_file_system_that_syncs_no_folders_takes_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def of_files(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(fd)

    monkeypatch.setattr(os, "fsync", of_files)
    share(RECORDS).save(tmp_path / "data.arrow")
    assert list(open_store(tmp_path / "data.arrow", allow_pickle=True)) == RECORDS


@pytest.mark.parametrize("exists", [True, False])
def test_saving_to_a_symbolic_link_writes_the_file_that_it_names(exists: bool, tmp_path: Path) -> None:
    other = tmp_path / "disk"
    other.mkdir()
    real, link = other / "data.arrow", tmp_path / "data.arrow"
    link.symlink_to(Path("disk") / "data.arrow")
    if exists:
        share([1]).save(real)
    share([1, 2]).save(link)
    assert link.is_symlink()
    assert [path.name for path in other.iterdir()] == ["data.arrow"]
    assert list(open_store(real)) == list(open_store(link)) == [1, 2]


def test_a_saved_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    share(["a"]).save(tmp_path / "data.arrow")
    (tmp_path / "other").touch()
    assert (tmp_path / "data.arrow").stat().st_mode == (tmp_path / "other").stat().st_mode


VIEWS: dict[str, Any] = {
    "rows with an Arrow type": (lambda: share(RECORDS)[1:], RECORDS[1:]),
    "rows at a distance": (lambda: share(RECORDS)[-2:5:-7], RECORDS[-2:5:-7]),
    "rows without an Arrow type": (lambda: share(OTHERS["namedtuples"])[10:20], OTHERS["namedtuples"][10:20]),
    "rows without an Arrow type, backwards": (lambda: share(OTHERS["tuples"])[::-3], OTHERS["tuples"][::-3]),
    "a slice of a slice": (lambda: share(OTHERS["objects"])[10:][::2], OTHERS["objects"][10::2]),
    "no rows": (lambda: share(OTHERS["mixed"])[:0], []),
    "a field with an Arrow type": (lambda: share(RECORDS).column("path"), [row["path"] for row in RECORDS]),
    "a field without one": (
        lambda: share([{"a": 1j * n} for n in range(9)]).column("a"),
        [1j * n for n in range(9)],
    ),
    "a part of a field": (lambda: share([{"a": (n,)} for n in range(9)]).column("a")[2:4], [(2,), (3,)]),
    "rows of a table": (lambda: share(TABLE)[7:9], TABLE.to_pylist()[7:9]),
    "chosen rows": (lambda: share(RECORDS).select([5, 3, -1]), [RECORDS[5], RECORDS[3], RECORDS[-1]]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_part_of_a_store_is_saved_as_just_that_part(tmp_path: Path, name: str) -> None:
    view, rows = VIEWS[name]
    view().save(tmp_path / "part.arrow")
    assert same(open_store(tmp_path / "part.arrow", allow_pickle=True), rows)


def test_what_is_saved_of_a_part_is_no_larger_than_it(tmp_path: Path) -> None:
    shared = [str(number) * 10 for number in range(1000)]  # a list in each row, and the same one
    store = share([(number, shared, "x" * 2000) for number in range(2000)])
    store[1000:1100].save(tmp_path / "part.arrow")
    assert list(open_store(tmp_path / "part.arrow", allow_pickle=True)) == [
        (n, shared, "x" * 2000) for n in range(1000, 1100)
    ]
    assert (tmp_path / "part.arrow").stat().st_size < 60_000


def test_a_kind_of_store_of_ones_own_is_saved_by_its_rows(tmp_path: Path) -> None:
    class Squares(Store):
        def __len__(self) -> int:
            return 9

        def row(self, index: int) -> Any:
            return index**2

        def take(self, indices: Any, out: Any = None) -> Any:
            return [self.row(index) for index in indices]

        def describe(self) -> StoreDescription:
            return StoreDescription("squares", 9, 0, 0)

        def to_arrow(self) -> Any:
            raise TypeError("squares are made when they are read")

    Squares()[1:].save(tmp_path / "part.arrow")
    assert list(open_store(tmp_path / "part.arrow")) == [n**2 for n in range(1, 9)]


def test_a_store_from_a_file_is_saved_to_another_one(tmp_path: Path) -> None:
    for data in (RECORDS, OTHERS["namedtuples"]):
        share(data).save(tmp_path / "one.arrow")
        open_store(tmp_path / "one.arrow", allow_pickle=True).save(tmp_path / "two.arrow")
        assert same(open_store(tmp_path / "two.arrow", allow_pickle=True), data)


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_another_suffix_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match=r"named \*\.arrow, \*\.ipc, \*\.feather"):
        share(["a"]).save(tmp_path / f"data{suffix}")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "contents", [b"", b"PA", b"hello, world", b"ARROW1\0\0cut off", b"\xff\xff\xff\xff\x10"]
)
def test_what_is_no_table_is_refused(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "data").write_bytes(contents)
    with pytest.raises(ValueError, match=str(tmp_path / "data")):
        open_store(tmp_path / "data", allow_pickle=True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.arrow"):
        open_store(tmp_path / "nothing.arrow", allow_pickle=True)


def test_a_list_of_files_and_patterns_is_read_in_its_order(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        share([{"label": name}]).save(tmp_path / f"{name}.arrow")
    store = open_store([tmp_path / "c.arrow", str(tmp_path / "[ab].arrow")])
    assert store["label"] == ["c", "a", "b"]
    assert pickle.loads(pickle.dumps(store)) == list(store)


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ({"a": 1, "b": 2}, {"b": 20, "c": 3}, "'b'"),
        ({n: n for n in range(3000)}, {n + 0.0: n for n in range(2999, 6000)}, r"2999"),
        ({1, 2}, {2, 3}, "2"),
        (
            {dt.date(2024, 1, n): n for n in (1, 2, 3)},
            {dt.date(2024, 1, 3): 5},
            r"datetime\.date\(2024, 1, 3\)",
        ),
    ],
    ids=["texts", "numbers", "sets", "others"],
)
def test_a_key_in_two_files_is_named(tmp_path: Path, one: Any, other: Any, key: str, suffix: str) -> None:
    paths = [tmp_path / f"{name}.{suffix}" for name in ("one", "other")]
    for data, path in zip((one, other), paths, strict=True):
        share(data).save(path)
    with pytest.raises(
        ValueError, match=rf"other\.{suffix} has the key {key}.*, which .*one\.{suffix} has too"
    ):
        open_store(paths)
    with pytest.raises(ValueError, match=r"which .* has too"):
        open_store([paths[0], paths[0]])


def test_mappings_and_sets_of_several_files_are_one(tmp_path: Path) -> None:
    nan = float("nan")
    parts: list[Any] = [{1: "a", nan: "b"}, {}, {2: "c", nan: "d", "x" * 50: "e"}], [{1, 2}, set(), {3, "a"}]
    for some in parts:
        for number, data in enumerate(some):
            share(data).save(tmp_path / f"{number}.arrow")
        found = open_store([tmp_path / f"{number}.arrow" for number in range(3)])
        assert len(found) == sum(map(len, some))
        assert all(key in found for data in some for key in data if key is not nan)


@pytest.mark.parametrize("nothing", ["", [], [""]])
def test_an_empty_path_is_refused(nothing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share([{"label": 1}]).save(tmp_path / "a.arrow")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="names no file"):
        open_store(nothing)


def test_a_name_instead_of_a_list_of_columns_is_refused(tmp_path: Path) -> None:
    share([{"a": 1, "b": 2, "ab": 3}]).save(tmp_path / "a.arrow")
    with pytest.raises(TypeError, match=r"such as \['ab'\]"):
        open_store(tmp_path / "a.arrow", columns="ab")


def test_a_column_that_a_wide_file_lacks_is_named_in_a_short_message(tmp_path: Path) -> None:
    share([{f"column {n}": n for n in range(3000)}]).save(tmp_path / "a.arrow")
    with pytest.raises(KeyError, match="has no column 'b'; it has 'column 0', 'column 1'") as raised:
        open_store(tmp_path / "a.arrow", columns=["b"])
    assert len(str(raised.value)) < 1500


GONE = """
import collections, dataclasses, enum
Colour = enum.Enum("Colour", "RED BLUE", module=__name__)
Pair = collections.namedtuple("Pair", "a b", module=__name__)
@dataclasses.dataclass
class Person:
    name: str
"""


@pytest.mark.parametrize("name", ["Colour", "Pair", "Person"])
def test_a_class_whose_module_is_not_loaded_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("gone_by_now")
    monkeypatch.setitem(sys.modules, "gone_by_now", module)
    exec(GONE, vars(module))
    value = {"Colour": module.Colour.BLUE, "Pair": module.Pair(1, "x"), "Person": module.Person("a")}[name]
    share([{"n": n, "of": [value]} for n in range(9)]).save(tmp_path / "x.arrow")
    assert open_store(tmp_path / "x.arrow")[7]["of"] == [value]
    monkeypatch.delitem(sys.modules, "gone_by_now")
    with pytest.raises(ValueError, match=rf"x\.arrow.*'{name}' of the module 'gone_by_now'.*Import it first"):
        open_store(tmp_path / "x.arrow")
    assert open_store(tmp_path / "x.arrow", columns=["n"])[7] == {"n": 7}
