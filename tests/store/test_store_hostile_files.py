"""Damaged and hostile files: an error that names the file, or other values; no code runs, and nothing
crashes.

A process of its own reads mutated files and reports the outcomes. All 45,000 mutations run with
``SHMLOADER_LONG=1``.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from store_samples import Colour, Person, Point

import shmloader
from shmloader import share
from shmloader.store.columns.types import (
    ArrayType,
    DataclassType,
    EnumType,
    LinkType,
    NamedTupleType,
    PickleType,
)

ROWS: list[Any] = [
    {
        "path": f"image {n}",
        "label": n,
        "at": Point(n, n / 2),
        "who": Person("x" * n, n),
        "colour": Colour.RED,
        "array": np.arange(n % 5),
        "tensor": torch.ones(2, 2),
        "mixed": (n, "a", None)[n % 3],
        "boxes": [[n, 2.5]] * (n % 3),
        "tags": {n},
        **({"extra": None} if n % 2 else {}),
    }
    for n in range(40)
]

READS = """
import random, sys, traceback, warnings
import shmloader
from pathlib import Path
warnings.simplefilter("ignore")
seed, most, folder, *sources = sys.argv[1:]
sys.path.insert(0, folder)
import store_samples
dice = random.Random(int(seed))
ends = {4: [-1, 1 << 16, (1 << 31) - 1, -(1 << 31)], 8: [-1, 1 << 31, 1 << 36, (1 << 63) - 1]}

def place(data):
    edge = dice.randrange(min(len(data), 4096))  # where most of a large file's metadata is
    return dice.choice([dice.randrange(len(data)), edge, len(data) - 1 - edge])

def mutate(data):
    how = dice.randrange(6)
    if how == 0:
        del data[dice.randrange(len(data)):]
    for _ in range(dice.choice([1, 1, 2, 8])):
        if how in (1, 2) and len(data) > 8:  # an offset, a length
            width = dice.choice([4, 8])
            at = min(place(data), len(data) - width) // width * width
            data[at:at + width] = dice.choice(ends[width]).to_bytes(width, "little", signed=True)
        elif data:
            data[place(data)] = dice.choice([0, 1, 127, 128, 255, dice.randrange(256)])

def read(store, is_small):
    some = range(len(store))
    if len(some) > 1000:
        some = [*range(20), *dice.sample(some, 50), len(store) - 1]
    for number in some:
        store[number]
    if len(store):
        store.take([0, len(store) - 1] * 20)
        for name in store[0]:
            try:
                column = store[name]
            except KeyError:  # not all rows have it
                continue
            list(map(column.__getitem__, some))
    if is_small:
        list(store)
        store.to_arrow()

for source in map(Path, sources):
    good = source.read_bytes()
    is_small = len(good) < 1 << 16
    path = source.with_stem("mutated")
    errors, count = 0, int(most) // (1 if is_small else 4)
    for number in range(count):
        data = bytearray(good)
        mutate(data)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        print("reading mutation", number, "of", source, file=sys.stderr, flush=True)
        try:
            read(shmloader.open(path), is_small)
        except Exception as error:
            if str(path) not in str(error):
                raise
            errors += 1
    print(errors / count)
"""


def mutate(sources: Iterable[Path], count: int, seed: int) -> list[float]:
    """Read mutations of files in another process, ``count`` of each; returns the shares of errors."""
    arguments = [seed, count, Path(__file__).parents[1], *sources]
    command = [sys.executable, "-c", READS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])  # the mutated file is there still
    return list(map(float, done.stdout.split()))


def write_large(path: Path, rows_at_once: int, **options: Any) -> None:
    """Some MiB of plain columns: from 2 MiB on, files are mapped in another way."""
    numbers = np.arange(12_000)
    table = pa.table(
        {
            "path": [f"images/{n:09d} and more text, so that the file is large enough" * 2 for n in numbers],
            "octets": [bytes([n % 256]) * (n % 100) for n in numbers],
            "label": numbers,
            "words": [["a word", None, str(n)][: n % 4] for n in numbers],
            "box": [[n / 2] * 4 for n in numbers],
            "at": [{"x": n, "y": None if n % 2 else str(n)} for n in numbers],
            "kind": pa.array([f"kind {n % 7}" for n in numbers]).dictionary_encode(),
        }
    )
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows_at_once, **options)
        return
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, rows_at_once)


def write_small(path: Path, **options: Any) -> None:
    plain = [{name: row[name] for name in ("path", "label", "at", "array")} for row in ROWS]
    if path.suffix == ".parquet":
        share(plain).save(path)
        return
    table = pa.table({"text": [str(n) for n in range(40)], "list": [[n, None] for n in range(40)]})
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, 7)


FILES: dict[str, Callable[[Path], None]] = {
    "every kind.arrow": lambda path: share(ROWS).save(path),
    "stream.arrow": write_small,
    "compressed stream.arrow": lambda path: write_small(path, compression="zstd"),
    "one batch.arrow": lambda path: write_large(path, 1 << 20),
    "batches.arrow": lambda path: write_large(path, 500),
    "compressed batches.arrow": lambda path: write_large(path, 2000, compression="lz4"),
    "small.parquet": write_small,
    "row groups.parquet": lambda path: write_large(path, 2000),
    "plain.parquet": lambda path: write_large(path, 1 << 20, use_dictionary=False, compression="none"),
}


def test_mutated_files_are_errors_that_name_the_file(tmp_path: Path) -> None:
    for name, write_file in FILES.items():
        write_file(tmp_path / name)
    shares = mutate([tmp_path / name for name in FILES], 100, seed=0)
    assert min(shares) > 0.05


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", FILES)
def test_many_mutations_are_errors_that_name_the_file(tmp_path: Path, name: str, seed: int) -> None:
    FILES[name](tmp_path / name)
    assert min(mutate([tmp_path / name], 2000, seed)) > 0.05


READS_ALL = """
import sys
import pyarrow as pa
import shmloader
for path in sys.argv[1:]:
    table = pa.ipc.open_file(pa.memory_map(path)).read_all()
    for read in (lambda: list(shmloader.open(path)), lambda: shmloader.share(table)[0]):
        try:
            read()
        except ValueError as error:
            print(error)
"""


def test_offsets_that_lead_out_of_the_file_are_errors(tmp_path: Path) -> None:
    paths = []
    for rows, rows_at_once in ((40, 40), (12_000, 12_000), (12_000, 500)):
        texts = pa.array(
            [f"images/{n:09d} and more, so that the file is large enough" * 3 for n in range(rows)]
        )
        lists = pa.array([["a", str(n)] for n in range(rows)])
        for offset, column in itertools.product((-(1 << 31), -1, (1 << 31) - 1), (texts, lists)):
            table = pa.table({"column": column})
            paths.append(tmp_path / f"{len(paths)}.arrow")
            with pa.ipc.new_file(paths[-1], table.schema) as writer:
                writer.write_table(table, rows_at_once)
            data = bytearray(paths[-1].read_bytes())
            begin = data.index(column.buffers()[1].to_pybytes()[:64])
            data[begin + 12 : begin + 16] = offset.to_bytes(4, "little", signed=True)
            paths[-1].write_bytes(data)
    command = [sys.executable, "-c", READS_ALL, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    said = done.stdout.splitlines()
    assert len(said) == 2 * len(paths)
    for path, opened, shared in zip(paths, said[::2], said[1::2], strict=True):
        assert f"row 0 of {path}" in opened
        assert "do not ascend" in opened
        assert "Offset invariant failure" in shared


READS_EACH = """
import sys
from pathlib import Path
import shmloader
good, path = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
for place in range(len(good)):
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1:])
    try:
        list(shmloader.open(path))
    except Exception as error:
        assert str(path) in str(error)
"""


def test_damaged_metadata_of_a_parquet_file_ends_no_process(tmp_path: Path) -> None:
    """For some of the bytes Arrow raises an exception of C++ that pyarrow does not catch."""
    good, path = tmp_path / "good.parquet", tmp_path / "mutated.parquet"
    pq.write_table(
        pa.table({"a": [["x"] * (n % 3) for n in range(9)]}), good, store_schema=False, write_statistics=False
    )
    command = [sys.executable, "-c", READS_EACH, str(good), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_an_unreadable_row_is_named_with_its_own_file(tmp_path: Path, suffix: str) -> None:
    """Also if the file was unpacked to memory, and among others."""
    names = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path, times in zip(names, ([1, 2], [3, 1 << 62]), strict=True):
        table = pa.table({"at": pa.array(times, pa.timestamp("us"))})
        if suffix == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    store = shmloader.open(names)
    named = rf"row 3 of .*b\.{suffix} cannot be read"
    reads: list[Callable[[], Any]] = [
        lambda: store[3],
        lambda: list(store),
        lambda: store.__getitems__([0, 3]),
        lambda: store["at"][3],
        lambda: store[1:][2],
    ]
    for read in reads:
        with pytest.raises(ValueError, match=named) as caught:
            read()
        assert isinstance(caught.value.__cause__, OverflowError)
    with pytest.raises(ValueError, match=rf"a\.{suffix}, or another file that was opened with it, cannot"):
        store.take([0, 3])
    assert list(store[:3]["at"])[2].microsecond == 3


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def write(path: Path, column: Any, said: dict[str, Any] | None = None) -> None:
    said = {"version": 1, "rows": "column", **(said or {})}
    schema = pa.schema([pa.field("", column.type)], {b"shmloader": json.dumps(said).encode()})
    with pa.ipc.new_file(path, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([column], schema=schema))


def test_pickled_values_are_read_only_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bomb.arrow"
    write(path, PickleType(pa.binary(), types=["x"]).wrap(pa.array([pickle.dumps(Bomb())])))
    with pytest.raises(ValueError, match=r"bomb\.arrow has pickled values \(rows\).*allow_pickle=True"):
        shmloader.open(path)
    share([{"a": 1, "b": 1j}] * 3).save(path)
    with pytest.raises(ValueError, match=r"pickled values \(b\)"):
        shmloader.open(path)
    assert shmloader.open(path, columns=["a"])[2] == {"a": 1}
    assert shmloader.open(path, allow_pickle=True)[1] == {"a": 1, "b": 1j}
    assert not (tmp_path / "exploded").exists()


def test_classes_are_not_imported_and_none_of_their_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may name any class: one that is not loaded is replaced, and one that is loaded must fit."""
    (tmp_path / "explosive.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    fields = pa.StructArray.from_arrays([pa.array([1])], ["x"])
    for name in ("explosive:Point", "subprocess:Popen", "builtins:type", "os:path", "nowhere", ":"):
        write(tmp_path / "file.arrow", NamedTupleType(fields.type, python=name).wrap(fields))
        (row,) = shmloader.open(tmp_path / "file.arrow")
        assert tuple(row) == (1,)
        assert row._fields == ("x",)
        assert type(row).__module__.startswith("shmloader")
    numbers = pa.array([0], pa.int8())
    write(
        tmp_path / "file.arrow", EnumType(numbers.type, python="signal:Signals", members=["A"]).wrap(numbers)
    )
    (member,) = shmloader.open(tmp_path / "file.arrow")
    assert (member.name, type(member).__name__) == ("A", "Signals")
    assert "explosive" not in sys.modules


class Runs:
    """Notes that it was called, as a descriptor or a method of the classes below."""

    called: ClassVar[list[str]] = []

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else self.called.append("get")

    def __set__(self, instance: Any, value: Any) -> None:
        self.called.append("set")


@dataclass
class WithProperty:
    x: int

    @property
    def y(self) -> int:
        return 0

    @y.setter
    def y(self, value: int) -> None:
        Runs.called.append("y")


@dataclass(slots=True)
class WithPropertyAndSlots:
    x: int

    y = WithProperty.y


@dataclass
class WithDescriptor:
    x: Runs = Runs()


@dataclass
class WithDel:
    x: int

    def __del__(self) -> None:
        Runs.called.append("del")


class TupleWithDel(namedtuple("TupleWithDel", "x")):  # noqa: PYI024
    __slots__ = ()

    def __del__(self) -> None:
        Runs.called.append("del")


@dataclass
class WithSetattr:
    x: int

    def __setattr__(self, name: str, value: Any) -> None:
        Runs.called.append("setattr")
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (WithProperty, "y"),
        (WithPropertyAndSlots, "y"),
        (Person, "__class__"),
        (WithDescriptor, "x"),
        (WithDel, "x"),
        (WithSetattr, "x"),
    ],
)
def test_dataclasses_that_could_run_code_are_refused_by_name(tmp_path: Path, kind: type, field: str) -> None:
    fields = pa.StructArray.from_arrays([pa.array([1])], [field])
    name = f"{kind.__module__}:{kind.__qualname__}"
    write(tmp_path / "file.arrow", DataclassType(fields.type, python=name).wrap(fields))
    Runs.called.clear()
    store = shmloader.open(tmp_path / "file.arrow")
    with pytest.raises(
        ValueError, match=rf"file\.arrow cannot be read.*values with {field} become no.*\.{kind.__name__}:"
    ):
        store[0]
    assert not Runs.called


def test_a_class_that_fits_one_column_is_not_taken_for_others(tmp_path: Path) -> None:
    """Nor is one with a ``__del__`` taken for namedtuples."""
    good = pa.StructArray.from_arrays([pa.array(["a"]), pa.array([1])], ["name", "age"])
    bad = pa.StructArray.from_arrays([pa.array([1])], ["x"])
    of_del = f"{__name__}:TupleWithDel"
    columns = [
        DataclassType(good.type, python="store_samples:Person").wrap(good),
        DataclassType(bad.type, python="store_samples:Person").wrap(bad),
        NamedTupleType(bad.type, python="store_samples:Point").wrap(bad),
        NamedTupleType(bad.type, python=of_del).wrap(bad),
    ]
    table = pa.table(columns, names=["good", "bad", "point", "del"])
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    store = shmloader.open(tmp_path / "file.arrow", columns=["good", "point", "del"])
    row = store[0]
    assert vars(row["good"]) == {"name": "a", "age": 1}
    assert row["point"]._fields == ("x",)
    assert type(row["del"]).__module__.startswith("shmloader")
    with pytest.raises(ValueError, match=r"values with x become no instances of store_samples\.Person"):
        shmloader.open(tmp_path / "file.arrow")[0]


def test_a_module_that_loads_itself_when_used_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy.py").write_text("raise SystemExit('loaded')")
    spec = importlib.util.spec_from_file_location("lazy", tmp_path / "lazy.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy", module)
    spec.loader.exec_module(module)
    fields = pa.StructArray.from_arrays([pa.array([1])], ["x"])
    write(tmp_path / "file.arrow", NamedTupleType(fields.type, python="lazy:Point").wrap(fields))
    assert tuple(shmloader.open(tmp_path / "file.arrow")[0]) == (1,)


def test_instances_with_more_than_their_fields_come_back_with_all_of_it(tmp_path: Path) -> None:
    """They are pickled, so a file says that it has pickled values."""
    people = [Person("a", 1), Person("b", 2)]
    people[1].nick = "c"  # type: ignore[attr-defined]
    store = share(people)
    assert [vars(row) for row in store] == list(map(vars, people))
    store.save(tmp_path / "people.arrow")
    assert [vars(row) for row in shmloader.open(tmp_path / "people.arrow", allow_pickle=True)] == list(
        map(vars, people)
    )
    with pytest.raises(ValueError, match="pickled values"):
        shmloader.open(tmp_path / "people.arrow")


HOSTILE: dict[str, Any] = {
    "pointers": lambda: ArrayType(pa.list_(pa.uint8(), 8), dtype="|O", shape=[1]).wrap(
        pa.FixedSizeListArray.from_arrays(pa.array(bytes(8)[:8] and [0] * 8, pa.uint8()), 8)
    ),
    "a shape that is too large": lambda: ArrayType(
        pa.list_(pa.uint8(), 8), dtype="|u1", shape=[1 << 40]
    ).wrap(pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8)),
    "a shape over nothing": lambda: ArrayType(pa.null(), dtype="<i8", shape=[4]).wrap(pa.nulls(3)),
    "a huge shape over nothing": lambda: ArrayType(pa.null(), dtype="<i8", shape=[1 << 36]).wrap(pa.nulls(3)),
    "a negative shape": lambda: ArrayType(pa.list_(pa.uint8(), 8), dtype="|u1", shape=[-8]).wrap(
        pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8)
    ),
    "links": lambda: LinkType(pa.int8(), link=0).wrap(pa.array([0], pa.int8())),
    "a tensor of no dtype": lambda: ArrayType(
        pa.list_(pa.uint8(), 8), dtype="|u1", shape=[8], tensor="os"
    ).wrap(pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_types_that_contradict_themselves_are_errors_that_name_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.arrow"
    write(path, HOSTILE[name]())
    for read in (list, lambda store: store.take([0] * 20)):
        with pytest.raises(ValueError, match=r"hostile\.arrow"):
            read(shmloader.open(path))


@pytest.mark.parametrize("said", [{"version": 2}, {"rows": "mapping"}, {"rows": "anything"}])
def test_metadata_of_another_format_is_an_error_that_names_the_file(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    write(tmp_path / "other.arrow", pa.array([1]), said)
    with pytest.raises(ValueError, match=r"other\.arrow"):
        shmloader.open(tmp_path / "other.arrow")
