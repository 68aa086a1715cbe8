"""Hostile files: an error that names the file; no code runs."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from store_samples import Person

import shmloader
from shmloader import share
from shmloader.store.columns.arrays import Arrays, Scalars
from shmloader.store.columns.mixed import Links
from shmloader.store.columns.records import Dataclasses, Namedtuples
from shmloader.store.columns.values import Decimals, Enums, Pickles
from shmloader.store.handles import pack, unpack


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
    write(path, Pickles(pa.binary(), types=["x"]).wrap_array(pa.array([pickle.dumps(Bomb())])))
    with pytest.raises(ValueError, match=r"bomb\.arrow has pickled values \(rows\).*allow_pickle=True"):
        shmloader.open(path)
    share([{"a": 1, "b": 1j}] * 3).save(path)
    with pytest.raises(ValueError, match=r"pickled values \(b\)"):
        shmloader.open(path)
    assert shmloader.open(path, columns=["a"])[2] == {"a": 1}
    assert shmloader.open(path, allow_pickle=True)[1] == {"a": 1, "b": 1j}
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_pickled_values_of_a_file_that_was_exchanged_after_the_check_are_read_by_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    column = Pickles(pa.binary(), types=["x"]).wrap_array(pa.array([pickle.dumps(Bomb())]))
    table = pa.table({"a": column})
    if suffix == "arrow":
        pa.feather.write_feather(table, "bomb.arrow", compression="uncompressed")
    else:
        pq.write_table(table, "bomb.parquet")
    monkeypatch.setattr("shmloader.store.files._check_columns", lambda *_, **__: None)
    store = shmloader.open(f"bomb.{suffix}")
    for one in (store, unpack(*pack(store))):
        with pytest.raises(pickle.UnpicklingError):
            one[0]
    assert not (tmp_path / "exploded").exists()


def test_classes_are_not_imported_and_none_of_their_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may name any class: it must be loaded, and fit."""
    (tmp_path / "explosive.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    fields = pa.StructArray.from_arrays([pa.array([1])], ["x"])
    for name in ("explosive:Point", "subprocess:Popen", "builtins:type", "os:path", "nowhere", ":"):
        write(tmp_path / "file.arrow", Namedtuples(fields.type, python=name).wrap_array(fields))
        with pytest.raises(ValueError, match=r"file\.arrow: .*Import it first"):
            shmloader.open(tmp_path / "file.arrow")
    numbers = pa.array([0], pa.int8())
    signals = Enums(numbers.type, python="signal:Signals", members=["A"])
    write(tmp_path / "file.arrow", signals.wrap_array(numbers))
    with pytest.raises(ValueError, match="'Signals' of the module 'signal'"):
        shmloader.open(tmp_path / "file.arrow")
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
    write(tmp_path / "file.arrow", Dataclasses(fields.type, python=name).wrap_array(fields))
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
        Dataclasses(good.type, python="store_samples:Person").wrap_array(good),
        Dataclasses(bad.type, python="store_samples:Person").wrap_array(bad),
        Namedtuples(bad.type, python="store_samples:Point").wrap_array(bad),
        Namedtuples(bad.type, python=of_del).wrap_array(bad),
    ]
    table = pa.table(columns, names=["good", "bad", "point", "del"])
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    assert vars(shmloader.open(tmp_path / "file.arrow", columns=["good"])[0]["good"]) == {
        "name": "a",
        "age": 1,
    }
    for column, name in (("point", "Point"), ("del", "TupleWithDel")):
        with pytest.raises(ValueError, match=f"of the class .{name}. of the module .* another"):
            shmloader.open(tmp_path / "file.arrow", columns=[column])
    with pytest.raises(ValueError, match=r"values with x become no instances of store_samples\.Person"):
        shmloader.open(tmp_path / "file.arrow", columns=["good", "bad"])[0]


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
    write(tmp_path / "file.arrow", Namedtuples(fields.type, python="lazy:Point").wrap_array(fields))
    with pytest.raises(ValueError, match=r"file\.arrow: .*of the module .lazy"):
        shmloader.open(tmp_path / "file.arrow")


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
    "pointers": lambda: Arrays(pa.list_(pa.uint8(), 8), dtype="|O", shape=[1]).wrap_array(
        pa.FixedSizeListArray.from_arrays(pa.array(bytes(8)[:8] and [0] * 8, pa.uint8()), 8)
    ),
    "a shape that is too large": lambda: Arrays.around(
        pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8), dtype="|u1", shape=[1 << 40]
    ),
    "a shape over nothing": lambda: Arrays(pa.null(), dtype="<i8", shape=[4]).wrap_array(pa.nulls(3)),
    "a huge shape over nothing": lambda: Arrays.around(pa.nulls(3), dtype="<i8", shape=[1 << 36]),
    "a negative shape": lambda: Arrays.around(
        pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8), dtype="|u1", shape=[-8]
    ),
    "links": lambda: Links(pa.int8(), link=0).wrap_array(pa.array([0], pa.int8())),
    "a tensor of no dtype": lambda: Arrays.around(
        pa.FixedSizeListArray.from_arrays(pa.array([0] * 8, pa.uint8()), 8),
        dtype="|u1",
        shape=[8],
        tensor="os",
    ),
    "a text that is not Unicode": lambda: Scalars(pa.binary(4), dtype="<U1").wrap_array(
        pa.array([b"\xff" * 4], pa.binary(4))
    ),
    "a decimal that is no number": lambda: Decimals(pa.string()).wrap_array(pa.array(["1.5.2"])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_types_that_contradict_themselves_are_errors_that_name_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.arrow"
    write(path, HOSTILE[name]())
    for read in (list, np.asarray, lambda store: store.take([0] * 20)):
        with pytest.raises(ValueError, match=r"hostile\.arrow"):
            read(shmloader.open(path))


@pytest.mark.parametrize("said", [{"version": 2}, {"rows": "mapping"}, {"rows": "anything"}])
def test_metadata_of_another_format_is_an_error_that_names_the_file(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    write(tmp_path / "other.arrow", pa.array([1]), said)
    with pytest.raises(ValueError, match=r"other\.arrow"):
        shmloader.open(tmp_path / "other.arrow")
