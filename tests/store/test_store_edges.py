"""Types that NumPy hardly tells apart, byte orders, attributes of unusual objects, and texts of errors."""

from __future__ import annotations

import collections
import datetime as dt
import errno
import functools
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from store_samples import Slotted, same

from shmloader import open as open_store
from shmloader import share
from shmloader.store import Store
from shmloader.store.columns.buffers import offsets_of_lengths
from shmloader.store.handles import MappedFiles, is_shared, pack, unpack

NINE = dt.timedelta(hours=9)

# Times.


@pytest.mark.parametrize(
    "zone", [*map(dt.timezone, (-NINE, NINE)), *map(ZoneInfo, ("Asia/Tokyo", "America/New_York"))]
)
def test_the_first_and_last_times_of_a_zone_are_kept(zone: dt.tzinfo) -> None:
    for time in (dt.datetime.min, dt.datetime.max):  # noqa: DTZ901
        rows = [time.replace(tzinfo=zone)] * 3
        assert list(share(rows)) == rows
        assert share({rows[0]: 1})[rows[0]] == 1


# Types of NumPy.

AMBIGUOUS = [np.longlong, np.ulonglong, np.intc, np.int64, np.longdouble, np.clongdouble]


def again(store: Any, folder: Path) -> list[Any]:
    """A store, and its copies through other processes and files."""
    store.save(folder / "again.arrow")
    return [store, unpack(*pack(store)), open_store(folder / "again.arrow", allow_pickle=True)]


@pytest.mark.parametrize("code", [">i2", ">i4", ">u8", ">f4", ">f8", ">c16", ">M8[s]", ">U3", "<i8"])
def test_byte_orders_come_back(code: str, tmp_path: Path) -> None:
    array = np.arange(12).astype(code).reshape(4, 3)
    rows = [array, array[1:], array.T, {"x": array[0]}, array[2:3, 1]]
    if "M" not in code:  # NumPy pickles these in the machine's byte order
        rows.append(Slotted("x", array))  # type: ignore[arg-type]
    for store in again(share(rows), tmp_path):
        assert all(map(same, store, rows))
        assert store[0].dtype.byteorder == array.dtype.byteorder
    assert same(share(array), array)
    for store in again(share(list(array)), tmp_path):
        assert same(store.take([2, 0]), array[[2, 0]])
        out = np.empty((2, 3), code)
        assert same(store.take([2, 0], out), array[[2, 0]])


# Descriptions of stores.


def test_nothing_but_none_is_of_the_kind_that_none_is() -> None:
    store = share([{"a": None, "b": n} for n in range(100)])
    assert store.column("a").describe().kind == "null"
    assert share([None] * 5).describe().kind == "null"
    assert (
        share([{"a": None if n % 2 else "x"} for n in range(100)])
        .column("a")
        .describe()
        .kind.startswith("string")
    )
    assert share([]).describe().kind == "objects"


MANY_KINDS = {f"Kind{n}": type(f"Kind{n}", (str,), {}) for n in range(130)}
globals().update(MANY_KINDS)  # where pickle finds them


def test_none_is_arrows_null_among_more_kinds_than_a_union_has() -> None:
    rows = [None, *(kind("x") for kind in MANY_KINDS.values())]
    store = share(rows)
    assert same(list(store), rows)
    assert store.to_arrow().null_count == 1


@pytest.mark.parametrize(("last", "dtype"), [(2**31 - 3, np.int32), (2**31 - 2, np.int64)])
def test_offsets_are_as_wide_as_the_last_one_needs(last: int, dtype: Any) -> None:
    offsets = offsets_of_lengths(np.array([2, last]))
    assert offsets.dtype == dtype
    assert offsets.tolist() == [0, 2, last + 2]


def test_a_slice_has_columns_where_its_store_has() -> None:
    rows = [{"a": n, "b": str(n)} for n in range(100)]
    column = share(rows)[10:90:3].column("b")
    assert list(column) == [str(n) for n in range(10, 90, 3)]
    assert column.take([1, -1]) == ["13", "88"]
    assert column[2:4].to_arrow().to_pylist() == ["16", "19"]
    assert share([(1, "x")] * 3)[1:].column(1)[0] == "x"
    assert list(unpack(*pack(column))) == list(column)
    with pytest.raises(KeyError):
        share(rows)[1:].column("c")
    with pytest.raises(KeyError):
        share([1, 2, 3])[1:].column("a")


# Attributes of objects that are more than their parts.


def large() -> list[str]:
    return [f"text {number}" for number in range(30_000)]


def read(number: int, texts: Any = None) -> Any:
    return texts[number]


def test_attributes_of_a_partial_are_kept_and_shared() -> None:
    original = functools.partial(read, texts=large())
    original.name = "texts"  # type: ignore[attr-defined]
    original.more = large()  # type: ignore[attr-defined]
    original.again = (original,)  # type: ignore[attr-defined]
    shared = share(original)
    assert type(shared) is functools.partial
    assert shared(7) == "text 7"
    assert shared.name == "texts"
    assert isinstance(shared.keywords["texts"], Store)
    assert isinstance(shared.more, Store)
    assert shared.again[0] is shared
    inner = functools.partial(original, 3)
    inner.list = large()  # type: ignore[attr-defined]
    copied = share(inner)
    assert copied() == "text 3"
    assert isinstance(copied.list, Store)
    assert type(original.more) is list  # type: ignore[attr-defined]


class Pair(NamedTuple):
    left: Any
    right: Any


class Named(Pair):
    """A namedtuple with attributes of its own."""


def test_attributes_of_a_namedtuple_are_kept_and_shared() -> None:
    original = Named(large(), 1)
    original.name, original.more = "texts", large()
    shared = share(original)
    assert type(shared) is Named
    assert isinstance(shared.left, Store)
    assert shared.name == "texts"
    assert isinstance(shared.more, Store)
    only = Named(1, 2)
    only.more = large()
    assert isinstance(share(only).more, Store)


def test_namespaces_are_objects_with_attributes() -> None:
    original = SimpleNamespace(texts=large(), name="texts", inner=SimpleNamespace(more=large()))
    shared = share(original)
    assert type(shared) is SimpleNamespace
    assert shared.name == "texts"
    assert isinstance(shared.texts, Store)
    assert isinstance(shared.inner.more, Store)
    assert type(original.texts) is list


# Arrow data.


def test_arrays_of_varying_shape_have_no_fields() -> None:
    """Their items and shapes are internal."""
    store = share([np.zeros((rows, 3)) for rows in range(1, 9)])
    assert [field.name for field in store.describe().fields] == [""]
    assert store.describe().kind == "ndarray <f8"
    with pytest.raises(KeyError):
        store.column("items")


def test_empty_tables_are_described() -> None:
    for table in (pa.table({"a": pa.array([], pa.int64())}), pa.table({})):
        store = share(table)
        assert list(store) == []
        assert store.describe().rows == 0
        assert "0 rows" in repr(store)


@pytest.mark.parametrize("kind", ["string_view", "run_end_encoded"])
def test_types_that_arrow_cannot_gather_are_taken_row_by_row(kind: str) -> None:
    if kind == "run_end_encoded":
        column = pc.run_end_encode(pa.array(["x", "x", "y"]))
    else:
        column = pa.array(["x" * 30, "y", None], pa.string_view())
        try:
            _ = column.nbytes
        except pa.ArrowTypeError:
            pytest.skip("this release of pyarrow cannot tell the size of a string_view")
    values = column.to_pylist()
    numbers = [2, 0, 0, 1, -1]
    wanted = [values[number] for number in numbers]
    assert share(column).take(numbers) == wanted
    table = share(pa.table({"a": column, "n": [1, 2, 3]}))
    taken = table.take(numbers)
    assert (taken["a"], taken["n"].tolist()) == (wanted, [3, 1, 1, 2, 3])
    assert len(share(column).take([])) == 0


# Sparse tensors.


def test_sparse_tensors_in_rows_are_compared_and_measured() -> None:
    sparse = [torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()]
    store = share(sparse * 20)
    assert store == sparse * 20
    assert store != [torch.eye(3)] * 40
    shared = share(SimpleNamespace(few=[*sparse, torch.zeros(1 << 19)]))
    assert shared.few[0] is sparse[0]
    assert is_shared(shared.few[2], MappedFiles())


# Messages of errors.


def test_what_cannot_be_pickled_is_an_error_that_says_what_and_why() -> None:
    class Local:
        pass

    for value in (lambda: 1, Local()):
        with pytest.raises((AttributeError, pickle.PicklingError)) as raised:
            share([value])
        *_, why, which = raised.value.__notes__  # Python 3.14's pickle adds some of its own
        assert f"pickling a {type(value).__qualname__}, as values are kept" in why
        assert f"element [0] is a {type(value).__qualname__}" in which


REFUSED: dict[str, tuple[Any, str]] = {
    "a text": ("text", r"not str\. A text is one value: share a list of texts, such as text.splitlines"),
    "bytes": (b"text", r"not bytes\. bytes are one value: .* numpy.frombuffer\(data, numpy.uint8\)"),
    "a bytearray": (bytearray(b"text"), "bytearray are one value"),
    "a range": (range(10), r"not range\. A range takes no memory, .* share list\(range\(...\)\)"),
    "a function": (large, "not function. Share what calling it returns"),
    "a class": (Pair, "not type. Share what calling it returns"),
    "a view of a dict": ({1: 2}.values(), r"not dict_values\. .* share iter\(data\)"),
    "a number": (5, "not int$"),
    "None": (None, "not NoneType$"),
    "an array without dimensions": (np.array(5), r"one value .*array\(5\).* Share array.reshape\(1\)"),
    "an object without dimensions": (np.array(None, object), r"one value .* Share array.reshape\(1\)"),
    "a tensor without dimensions": (torch.tensor(5), r"has 0 dimensions.* Tensor.reshape\(1\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_container_is_refused_with_what_to_do(name: str) -> None:
    value, text = REFUSED[name]
    with pytest.raises(TypeError, match=text):
        share(value)


def test_what_the_errors_advise_works() -> None:
    assert list(share("a\nb".splitlines())) == ["a", "b"]
    assert list(share(np.frombuffer(b"ab", np.uint8))) == [97, 98]
    assert list(share(list(range(3)))) == [0, 1, 2]
    assert sorted(share([*{1, 2}])) == [1, 2]
    assert 1 in share(dict.fromkeys({1, 2}))
    assert list(share(iter({1: 2}.values()))) == [2]
    assert list(share(collections.deque([1, 2]))) == [1, 2]
    assert share(np.array(5).reshape(1))[0] == 5
    assert share(torch.tensor(5).reshape(1))[0] == 5


SAVED: dict[str, Callable[[], Any]] = {
    "as Arrow": lambda: share([1, 2, 3]),
    "as an image": lambda: share([1, "2"]),
}


@pytest.mark.parametrize("name", SAVED)
def test_errors_of_save_name_the_file_that_was_asked_for(name: str, tmp_path: Path) -> None:
    store = SAVED[name]()
    missing = tmp_path / "no folder" / "store.arrow"
    with pytest.raises(FileNotFoundError) as raised:
        store.save(missing)
    assert raised.value.filename == str(missing)
    assert str(missing) in str(raised.value)
    folder = tmp_path / "folder.arrow"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"folder\.arrow'$") as raised_too:
        store.save(folder)
    assert raised_too.value.filename == str(folder)
    assert os.listdir(tmp_path) == ["folder.arrow"]
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").write_text("")
        store.save(tmp_path / "file" / "store.arrow")
    long = tmp_path / f"{'é' * 120}.arrow"
    store.save(long)
    assert list(open_store(long)) == list(store)


def test_errors_while_a_file_is_written_name_it_too(tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk."""
    store = share(list(np.zeros((64, 1 << 14))))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match=r"store\.arrow'$") as raised:
            store.save(tmp_path / "store.arrow")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.errno == errno.EFBIG
    assert raised.value.filename == str(tmp_path / "store.arrow")
    assert not os.listdir(tmp_path)


def test_rows_that_hold_all_rows_before_are_an_error_that_says_so() -> None:
    row: dict[str, Any] = {"prev": None}
    rows = [row := {"prev": row} for _ in range(100_000)][-9:]  # Python 3.13 pickles thousands
    with pytest.raises(RecursionError) as caught:
        share(rows)
    assert any("nested too deeply" in note for note in caught.value.__notes__)


def test_errors_of_open_tell_odd_values_and_arguments_from_damage(tmp_path: Path) -> None:
    path = tmp_path / "times.arrow"
    table = pa.table({"at": pa.array([0, 1 << 60], pa.timestamp("us"))})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(ValueError, match=r"row 1 of .*, or has values that Python lacks"):
        open_store(path)[1]
    with pytest.raises(ValueError, match="more than once"):
        open_store(path, columns=["at", "at"])
