"""Mappings and sets as stores: their items as rows, and an index of the keys' hashes in shared memory.

The index takes five to eight bytes per key, once on the host. A process that looks keys up makes a list of at
most 4,097 numbers; a dict only of keys whose types are not known here. Python's hash of a str differs from
process to process, so keys are hashed in a way that does not.
"""

from __future__ import annotations

import datetime as dt
import enum
import numbers
import pickle
import uuid
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from dataclasses import replace
from operator import attrgetter
from pathlib import PurePath
from typing import Any, ClassVar, cast
from zlib import crc32

import numpy as np
import pyarrow as pa

from shmloader.store.base import SharedObject, Store, equal
from shmloader.store.description import StoreDescription, describe_rows
from shmloader.store.memory import MemoryWriter
from shmloader.store.rows import RowStore
from shmloader.store.sealed_buffer import SharedBuffer
from shmloader.store.tables import form_of_mapping

_HASH_BITS = 32
_MOST_BUCKET_BITS = 12  # 0.15 MB in each process that looks keys up
_Numbers = np.ndarray[Any, np.dtype[Any]]
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive numbers over all 64 bits


def _instant(key: dt.datetime) -> int:
    """A number that is the same for equal times in any time zone."""
    seconds = ((key.toordinal() * 24 + key.hour) * 60 + key.minute) * 60 + key.second
    offset = key.replace(fold=0).utcoffset() or dt.timedelta()
    return seconds * 1_000_000 + key.microsecond - offset // dt.timedelta(microseconds=1)


_STAND_INS: dict[Any, Callable[[Any], int | str]] = {
    uuid.UUID: attrgetter("int"),
    dt.datetime: _instant,
    dt.date: dt.date.toordinal,
    PurePath: lambda key: str(key).lower(),  # case means nothing in Windows
    enum.Enum: attrgetter("_name_"),
}
"""Functions that give the value to hash for keys of these types, equal for equal keys."""


def hash_of(key: Any) -> int | None:
    """A hash of 32 bits that is the same in all processes, and for keys that are equal.

    Returns:
        None for types whose hash or equality is not known to be Python's own.
    """
    if key.__class__ is str and key.isascii():
        return crc32(key.encode())
    kind_hash: Any = type(key).__hash__
    if kind_hash is int.__hash__:
        return (hash(key) * _GOLDEN >> 32) & 0xFFFFFFFF
    if kind_hash is str.__hash__ or isinstance(key, np.str_):
        return crc32(str.encode(key, "utf-8", "surrogatepass"))
    if kind_hash is bytes.__hash__ or isinstance(key, np.bytes_):
        return crc32(key)
    if key is None:
        return 0x2545F491
    # hash(1) == hash(1.0) == hash(True) == hash(Decimal(1)), and those of timedeltas are NumPy's
    if isinstance(key, numbers.Number | np.bool_ | dt.timedelta):
        return (hash(key) * _GOLDEN >> 32) & 0xFFFFFFFF
    if kind_hash is tuple.__hash__ or kind_hash is frozenset.__hash__:
        hashes: Any = [hash_of(item) for item in key]
        if None in hashes:
            return None
        hashes = hashes if kind_hash is tuple.__hash__ else sorted(hashes)
        return crc32(np.array(hashes, np.uint32).tobytes(), len(hashes))
    if isinstance(key, np.datetime64):  # it is equal to the datetime
        rounded = key.astype("M8[us]")
        key = rounded.item() if rounded == key else key
    for kind, stand_in in _STAND_INS.items():  # also of subclasses, such as pandas.Timestamp
        if isinstance(key, kind) and kind.__hash__(key) == hash(key):
            return hash_of(stand_in(key))
    return None


def hashes_of(keys: Iterable[Any]) -> _Numbers:
    """The hashes of keys; -1 for those that have none."""
    return np.array([-1 if (hashed := hash_of(key)) is None else hashed for key in keys], np.int64)


def write_index(hashes: _Numbers, writer: MemoryWriter) -> Callable[[Store, SharedBuffer], KeyIndex]:
    """Write the index of the keys of all rows, by their hashes; returns the function that makes it."""
    odd = np.flatnonzero(hashes < 0)
    rows = np.argsort(hashes, kind="stable")[len(odd) :]  # the odd ones, -1, come first
    number = np.min_scalar_type(len(hashes))
    arrays = hashes[rows].astype(np.uint32), rows.astype(number), odd.astype(number)
    makes = list(map(writer.array, arrays))
    return lambda keys, buffer: KeyIndex(keys, *(make(buffer) for make in makes))


class KeyIndex:
    """Finds the rows of keys by arrays in shared memory.

    Args:
        keys: The key of each row.
        hashes: Of the keys, ascending, 32 bits.
        rows: The row of each of these.
        odd: Rows whose keys have no hash.
    """

    def __init__(self, keys: Store, hashes: _Numbers, rows: _Numbers, odd: _Numbers) -> None:
        self.keys = keys
        self._arrays = hashes, rows, odd
        # Items of these are ints of Python.
        self._hashes = memoryview(cast("Any", hashes))
        self._rows = memoryview(cast("Any", rows))
        bits = min(max(0, len(hashes).bit_length() - 3), _MOST_BUCKET_BITS)
        self._shift = _HASH_BITS - bits
        limits = np.arange((1 << bits) + 1, dtype=np.int64) << self._shift
        self._buckets: list[int] = np.searchsorted(hashes, limits).tolist()
        self._rows_of_odd: dict[Any, int] | None = None

    def row_of(self, key: Any) -> int:
        """The row of a key, or -1."""
        hashed = hash_of(key)
        if hashed is None:
            return self._odd_row_of(key)
        bucket = hashed >> self._shift
        end = self._buckets[bucket + 1]
        place = bisect_left(self._hashes, hashed, self._buckets[bucket], end)
        while place < end and self._hashes[place] == hashed:
            row: int = self._rows[place]
            found = self.keys[row]
            if found is key or found == key:
                return row
            place += 1
        return -1

    def _odd_row_of(self, key: Any) -> int:
        if self._rows_of_odd is None:
            self._rows_of_odd = {self.keys[row]: row for row in self._arrays[2].tolist()}
        return self._rows_of_odd.get(key, -1)

    def __reduce__(self) -> Any:
        return KeyIndex, (self.keys, *self._arrays)


def index_of(keys: Store) -> KeyIndex:
    """Make the index of keys that are in memory, or in a file, already."""
    with MemoryWriter() as writer:
        make = write_index(hashes_of(keys), writer)
        return make(keys, writer.seal())


def factory_of(data: Mapping[Any, Any]) -> Callable[[], Any] | None:
    """A copy of the function that a mapping calls for keys that it lacks; None if those are a KeyError.

    Raises:
        TypeError: If a store could not do the same.
    """
    method = getattr(type(data), "__missing__", None)
    if method is None:
        return None
    name = type(data).__qualname__
    if method is Counter.__missing__:
        return int
    if method is not defaultdict.__missing__:
        raise TypeError(
            f"{name} defines __missing__, which a shared mapping would not call: share a plain dict of its "
            "items, shmloader.share(dict(data)), for which a missing key is a KeyError"
        )
    factory: Callable[[], Any] | None = data.default_factory  # type: ignore[attr-defined]
    try:
        copied: Callable[[], Any] | None = pickle.loads(pickle.dumps(factory))
    except Exception as error:
        raise TypeError(
            f"the default_factory {factory!r} of this {name} cannot be pickled, as other processes need it "
            f"({type(error).__name__}: {error}): make it a function of a module, or share a plain dict, "
            "shmloader.share(dict(data)), for which a missing key is a KeyError"
        ) from error
    return copied


class KeyedStore(SharedObject):
    """Base of mappings and sets: rows, and the index of their keys.

    The rows are the members of a set; of a mapping they are records with the fields ``key`` and ``value``.
    """

    KIND: ClassVar[str]

    def __init__(self, rows: RowStore, index: KeyIndex) -> None:
        self.rows = rows
        self._index = index

    def __contains__(self, key: object) -> bool:
        return self._index.row_of(key) >= 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self._index.keys)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def buffer(self) -> SharedBuffer:
        """The memory of the rows."""
        return self.rows.buffer

    @property
    def form(self) -> dict[str, Any]:
        """The kind of the mapping, as its file has it."""
        return {"rows": self.KIND}

    def describe(self) -> StoreDescription:
        """The description of the rows, under the kind of the mapping."""
        return replace(self.rows.describe(), kind=self.KIND)

    def to_arrow(self) -> Any:
        """The members, or a ``pyarrow.Table`` with ``key`` and ``value``."""
        return self.rows.to_arrow()

    def __repr__(self) -> str:
        return describe_rows(self, self.rows, self.describe())

    def __reduce__(self) -> Any:
        return type(self), (self.rows, self._index)


class MappingStore(KeyedStore, Mapping[Any, Any]):
    """A read-only mapping in shared memory, in the order of the dict that it was made from.

    Keys of types that are not known here, such as custom classes, are found through a dict, which each
    process makes of those keys when it first looks for such a one.

    Made from a ``Counter`` or ``defaultdict``, it answers as that does for a key that it does not have;
    nothing is inserted.
    """

    KIND = "mapping"

    def __init__(self, rows: RowStore, index: KeyIndex, factory: Callable[[], Any] | None = None) -> None:
        """Read a mapping; the ``factory`` makes the values of keys that it lacks."""
        super().__init__(rows, index)
        self._values = rows.column("value") if len(rows) else rows
        self._factory = factory

    def __getitem__(self, key: Any) -> Any:
        row = self._index.row_of(key)
        if row >= 0:
            return self._values[row]
        if self._factory is None:
            raise KeyError(key)
        return self._factory()

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or ``default`` as for a dict, also if ``[key]`` would make up a value."""
        row = self._index.row_of(key)
        return default if row < 0 else self._values[row]

    def items(self) -> ItemsView[Any, Any]:
        """The items, in order."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """The values, in order."""
        return _Values(self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mapping):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(key in other and equal(value, other[key]) for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]  # as of a dict

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with ``key`` and ``value``, also without any."""
        return super().to_arrow() if len(self) else pa.table({"key": pa.nulls(0), "value": pa.nulls(0)})

    @property
    def form(self) -> dict[str, Any]:
        """The kind of the mapping and its default factory, as its file has them."""
        return form_of_mapping(self._factory)

    def __reduce__(self) -> Any:
        return MappingStore, (self.rows, self._index, self._factory)


class _Items(ItemsView[Any, Any]):
    _mapping: MappingStore

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((record["key"], record["value"]) for record in self._mapping.rows)


class _Values(ValuesView[Any]):
    _mapping: MappingStore

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping._values)  # noqa: SLF001 - a part of the mapping


class SetStore(KeyedStore, AbstractSet[Any]):
    """A read-only set in shared memory."""

    KIND = "set"

    @classmethod
    def _from_iterable(cls, values: Iterable[Any]) -> Any:
        """The result type of ``&``, ``|`` and ``-``: sets of the calling process."""
        return set(values)
