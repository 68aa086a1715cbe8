"""Objects that behave oddly, and numbers, keys and graphs at the limits of stores."""

from __future__ import annotations

import datetime as dt
import errno
import gc
import logging
import os
import pickle
import resource
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest
import torch
from store_samples import Point

from shmloader import NotSharedWarning, SharedMemoryExhausted, share
from shmloader.store import Store, open_store
from shmloader.store.columns.encode import ColumnEncoder
from shmloader.store.job import fingerprint_of
from shmloader.store.testing import identical
from shmloader.store.views import ListView


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class NoRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no text for this")


class Closed(dict[str, int]):
    """A handle to something that has been closed."""

    @property
    def nbytes(self) -> int:
        raise RuntimeError("closed")


class Unpicklable(str):
    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError("not this one")


def large() -> list[str]:
    return [f"text {number}" for number in range(30_000)]


@pytest.mark.parametrize("other", [{NoRepr(): Holder()}, Closed(a=1)])
def test_objects_that_raise_when_asked_are_left_alone(other: Any) -> None:
    shared = share(Holder(texts=large(), other=other))
    assert isinstance(shared.texts, Store)
    assert shared.other is other


def test_a_list_whose_elements_raise_anything_when_pickled_stays() -> None:
    holder = Holder(texts=large(), others=[Unpicklable("x" * 50) for _ in range(60_000)])
    with pytest.warns(
        NotSharedWarning, match=r"Holder.others, .* element \[0\] is a Unpicklable.*not this one"
    ):
        shared = share(holder)
    assert isinstance(shared.texts, Store)
    assert shared.others is holder.others


def test_the_row_and_the_field_that_cannot_be_kept_are_named() -> None:
    rows: list[Any] = [{"a": n, "inner": {"b": [0, 1]}} for n in range(100)]
    rows[7]["inner"]["b"][1] = lambda: 1
    with pytest.raises(AttributeError, match="pickle") as caught:
        share(rows)
    assert "its element [7]['inner']['b'][1] is a function, which cannot" in caught.value.__notes__[-1]


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "uint4", "bits8", "quint8"])
def test_tensors_that_torch_cannot_read_from_a_pickle_are_refused_by_row_and_field(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this release of torch has no such dtype")
    rows: list[Any] = [{"number": n} for n in range(3)]
    rows[2]["packed"] = torch.arange(8, dtype=torch.uint8).view(dtype)
    with pytest.raises(
        pickle.PicklingError, match=rf"cannot read a tensor of {dtype} .*Share its bytes"
    ) as caught:
        share(rows)
    assert "its element [2]['packed'] is a Tensor" in caught.value.__notes__[-1]
    rows[2]["packed"] = rows[2]["packed"].view(torch.uint8)
    assert share(rows)[2]["packed"].view(dtype).dtype is dtype


@pytest.mark.parametrize("missing", ["c", "0"])
def test_a_missing_field_is_told_which_there_are(missing: str) -> None:
    with pytest.raises(KeyError, match=f"'{missing}': not all rows have such a field. The fields: 'a', 'b'"):
        share([{"a": 1, "b": 2}])[missing]
    with pytest.raises(KeyError, match=r"of kind 'int8' and have no fields: store\[number\] is a row"):
        share([1, 2])[missing]


@pytest.mark.parametrize("number", [0, 63_217, 69_999])
def test_the_one_element_that_cannot_be_kept_is_named_without_a_try_of_each(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tried: list[int] = []
    encode = ColumnEncoder.encode

    def encode_counted(self: ColumnEncoder, values: list[Any], depth: int = 0) -> Any:
        tried.append(len(values))
        return encode(self, values, depth)

    monkeypatch.setattr(ColumnEncoder, "encode", encode_counted)
    rows: list[Any] = [(n, "text") for n in range(70_000)]
    rows[number] = (1, threading.Lock())
    with pytest.raises(TypeError, match="pickle") as caught:
        share(rows)
    assert f"its element [{number}][1] is a lock, which cannot be kept" in str(caught.value.__notes__)
    assert len(tried) < 100
    assert sum(tried) < 8 * len(rows)  # with the items of the rows


def test_want_of_descriptors_is_an_error_with_the_limit_and_what_to_do() -> None:
    gc.collect()  # otherwise descriptors of earlier tests might be closed meanwhile
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.dup(0)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limits[1]))
    try:
        for data in (Holder(array=np.zeros(1 << 17)), [1, 2, 3]):
            with pytest.raises(OSError, match=rf"as it may: {highest}.*ulimit -n") as raised:
                share(data)
            assert raised.value.errno == errno.EMFILE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


class Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(6)


def test_an_iterator_may_not_know_its_length() -> None:
    batches = iter(torch.utils.data.DataLoader(Numbers(), batch_size=3))
    with pytest.raises(TypeError):
        len(batches)
    assert share(batches) == [torch.arange(3), torch.arange(3, 6)]


def test_what_an_iterator_raises_is_blamed_on_no_element() -> None:
    batches = iter(torch.utils.data.DataLoader([0, 1, "x"], batch_size=3))  # type: ignore[arg-type]
    assert len(batches) == 1
    with pytest.raises(TypeError) as raised:
        share(batches)
    assert not hasattr(raised.value, "__notes__")


def test_a_long_chain_of_objects_is_walked_in_little_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = link = Holder()
    for _ in range(20_000):  # the paths of all of them would be 1 GB of text
        link.then = Holder()
        link = link.then
    link.texts = large()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shared: Any = share(first)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < 200 << 10
    for _ in range(20_000):
        shared = shared.then
    assert isinstance(shared.texts, Store)
    (record,) = [text for text in caplog.messages if "is now in shared memory" in text]
    assert len(record) < 1000
    assert "Holder.then.then" in record
    assert ".then.texts, a list, is" in record


@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_unsigned_row_numbers_do_not_wrap_round(number: int) -> None:
    store = share([1, 2, 3])
    with pytest.raises(IndexError, match=rf"row {number} of a store with 3 rows"):
        store.take(np.array([0, number], np.uint64))
    assert store.take(np.array([2, 0], np.uint64)).tolist() == [3, 1]


@pytest.mark.parametrize(
    ("key", "equal"), [(np.str_("é"), "é"), (np.bytes_(b"a"), b"a"), (np.bool_(True), 1), (np.str_("a"), "a")]
)
def test_numpys_keys_are_found_by_pythons_and_the_other_way(key: Any, equal: Any) -> None:
    assert share({key: 1})[equal] == 1
    assert share({equal: 1})[key] == 1
    assert share({(key, 2): 1})[equal, 2] == 1


@pytest.mark.parametrize("kind", [np.str_, np.bytes_])
def test_numpys_texts_of_very_many_lengths_are_kept(kind: Any) -> None:
    captions = [kind(b"x" * n) if kind is np.bytes_ else kind("x" * n) for n in range(300)]
    assert all(map(identical, share(captions), captions))


@pytest.mark.parametrize("text", [np.str_("a\0"), np.bytes_(b"a\0\0")])
def test_numpys_texts_keep_zeros_at_their_end(text: Any) -> None:
    """NumPy compares them as equal to texts without these, and its pickles and arrays drop them."""
    store = share([text, text[:1], type(text)(text[:1])] * 20)
    assert [len(row) for row in store[:3]] == [len(text), 1, 1]
    assert type(store[0]) is type(text)
    assert share({text: 1}).get(text[:]) == 1


class Metres(np.float64):
    def __new__(cls, number: float, note: str = "") -> Self:
        metres = super().__new__(cls, number)
        metres.note = note
        return metres

    note: str


class Label(np.str_):
    __slots__ = ()


class Serial(np.longlong):
    __slots__ = ()


@pytest.mark.parametrize("made", [Metres(2.5, "of the door"), Label("a\0"), Serial(1 << 40)], ids=repr)
def test_subclasses_of_numpys_scalars_come_back_as_themselves(made: Any) -> None:
    """NumPy's own pickles give the scalar of the dtype, without attributes."""
    places = (
        share([made] * 3),
        share([made, 1, "a"] * 20),
        share([{object: made}] * 3)[0].values(),
        share({made}),
    )
    for one in (next(iter(place)) for place in places):
        assert type(one) is type(made)
        assert repr(one) == repr(made)
        assert getattr(one, "__dict__", None) == getattr(made, "__dict__", None)


def test_a_longlong_in_a_file_is_no_int64_and_no_pickle(tmp_path: Path) -> None:
    rows = [np.longlong(1), np.int64(2), np.ulonglong(3), None] * 10
    share(rows).save(tmp_path / "numbers.arrow")
    for store in (share(rows), open_store(tmp_path / "numbers.arrow")):
        assert [type(row) for row in store] == [type(row) for row in rows]
        assert list(store) == rows


def test_numbers_of_dtypes_that_other_libraries_add_are_kept() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    for name in ("float8_e5m2", "float8_e4m3fn", "bfloat16", "int4"):  # of kinds "f" and "V"
        number = getattr(ml_dtypes, name)(1)
        for value in (number, np.full(3, number), np.array(number)):
            for row in share([value] * 40):
                assert type(row) is type(value)
                assert row.dtype == value.dtype
                assert (row == value).all()


def test_uuids_keep_how_safe_they_are() -> None:
    safe = [uuid.UUID(int=n, is_safe=kind) for n, kind in enumerate(uuid.SafeUUID)]
    assert [row.is_safe for row in share(safe)] == list(uuid.SafeUUID)


@pytest.mark.parametrize("safe", uuid.SafeUUID)
def test_uuids_that_are_as_safe_as_each_other_are_no_pickles(safe: uuid.SafeUUID, tmp_path: Path) -> None:
    """Those that ``uuid.uuid1()`` makes, say: their files open without ``allow_pickle``."""
    rows = [uuid.UUID(int=n, is_safe=safe) for n in range(3)]
    share(rows).save(tmp_path / "ids.arrow")
    opened = open_store(tmp_path / "ids.arrow")
    assert opened == rows
    assert {row.is_safe for row in opened} == {safe}


@pytest.mark.parametrize("suffix", ["arrow", "parquet"])
def test_files_of_repeated_named_tuples_open(suffix: str, tmp_path: Path) -> None:
    """There they are in dictionaries."""
    point = Point(1, 0.5)
    for number, rows in enumerate(([point] * 64, [{"at": point, "n": n} for n in range(64)])):
        path = tmp_path / f"{number}.{suffix}"
        share(rows).save(path)
        opened = open_store(path)
        assert opened == rows
        assert type(opened[1] if number == 0 else opened[1]["at"]) is Point


def test_lists_of_no_items_in_fixed_lists_are_read() -> None:
    items = pa.FixedSizeListArray.from_arrays(pa.array([], pa.int64()), 300)
    column = pa.Array.from_buffers(pa.list_(items.type, 0), 3, [None], children=[items])
    assert share(pa.table({"x": column, "n": [1, 2, 3]}))[0] == {"x": [], "n": 1}


def test_a_list_of_very_many_small_lists_is_heavy() -> None:
    """Its weight is beyond 32 bits: as a light one it would be built as objects at each read."""
    boxes = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(80_000_000, np.int8)), 4)
    column = pa.ListArray.from_arrays(pa.array([0, 20_000_000], pa.int32()), boxes)
    assert isinstance(share(pa.table({"x": column}))[0]["x"], ListView)


def test_an_error_of_a_row_is_not_its_own_cause() -> None:
    """Tools that follow causes would never end."""
    store = share([Refuses(n) for n in range(20)])
    for read in (lambda: store[3], lambda: list(store), lambda: store.take([3]), lambda: store[:5][3]):
        with pytest.raises(ValueError, match="not again") as caught:
            read()
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


def test_an_error_of_a_pickled_row_is_its_own_where_only_another_file_has_pickles(tmp_path: Path) -> None:
    share([1, 2]).save(tmp_path / "a.arrow")
    share([Refuses(n) for n in range(2)]).save(tmp_path / "b.arrow")
    store = open_store([tmp_path / "a.arrow", tmp_path / "b.arrow"], allow_pickle=True)
    with pytest.raises(ValueError, match=r"^not again$"):
        store[2]


class Refuses:
    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: Any) -> None:
        raise ValueError("not again")


class Eastern(dt.tzinfo):
    """As in the documentation of datetime: the offset depends on the time."""

    def utcoffset(self, time: dt.datetime | None) -> dt.timedelta:
        return dt.timedelta(hours=-5) + self.dst(time)

    def dst(self, time: dt.datetime | None) -> dt.timedelta:
        assert time is not None
        return dt.timedelta(hours=4 <= time.month < 11)

    def tzname(self, time: dt.datetime | None) -> str:
        return "EDT" if self.dst(time) else "EST"


def test_times_of_a_zone_that_asks_for_the_time_are_kept() -> None:
    times = [dt.datetime(2024, month, 1, tzinfo=Eastern()) for month in range(1, 13)]
    for time, read in zip(times, share(times), strict=True):
        assert (read, read.utcoffset(), type(read.tzinfo)) == (time, time.utcoffset(), Eastern)


def test_a_function_that_calls_itself_has_a_fingerprint() -> None:
    def make(step: int) -> Any:
        loop: list[Any] = [step]
        loop.append(loop)

        def count(number: int = 3) -> Any:
            return [step, *count(number - 1), loop] if number else other(number)

        def other(number: int) -> Any:
            return count(number - step)

        return count

    assert fingerprint_of(make(1)) == fingerprint_of(make(1)) != fingerprint_of(make(2))


def test_defaults_by_keyword_alone_are_part_of_a_fingerprint() -> None:
    def make(split: str) -> Any:
        def build(*, of: str = split) -> str:
            return of

        return build

    assert fingerprint_of(make("train")) == fingerprint_of(make("train")) != fingerprint_of(make("valid"))


def test_columns_of_one_name_are_an_error_that_names_them() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1, 2, 3]] * 5, columns=["a", "b", "a"])
    with pytest.raises(ValueError, match=r"columns of this DataFrame have one name: \['a'\]. Rename"):
        share(frame)


def test_a_limit_on_the_size_of_files_is_not_want_of_memory() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SharedMemoryExhausted, match="ulimit -f unlimited") as caught:
            share(np.zeros(1 << 22, np.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "available" not in str(caught.value)
