"""Mappings and sets as stores: their items as rows, and an index of the keys' hashes in shared memory.

The index takes eight bytes per key, once on the host; no process builds a dict of its own. Python's hash of a
str differs from process to process, so keys are hashed in a way that does not.
"""

from __future__ import annotations

import numbers
import pickle
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.base import SharedObject, Store, equal
from shmloader.store.description import StoreDescription, describe_rows
from shmloader.store.memory import new_builder
from shmloader.store.rows import RowStore
from shmloader.store.tables import form_of_mapping

_HASH_BITS = 32
_MOST_BUCKET_BITS = 12  # 32 KB in each process that looks keys up
_Hashes = np.ndarray[Any, np.dtype[np.int64]]
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive numbers over all 64 bits


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
    if isinstance(key, numbers.Number | np.bool_):  # hash(1) == hash(1.0) == hash(True) == hash(Decimal(1))
        return (hash(key) * _GOLDEN >> 32) & 0xFFFFFFFF
    if kind_hash is tuple.__hash__:
        hashes = [hash_of(item) for item in key]
        return None if None in hashes else crc32(np.array(hashes, np.uint32).tobytes(), len(hashes))
    return None


class IndexLayout(NamedTuple):
    """The place of an index in memory, by offsets."""

    keys: int  # how many are in the index
    hashes: int  # of the keys, ascending, 32 bits
    rows: int  # the row of each of these
    code: str  # the type of rows, ``I`` or ``Q``
    odd: int  # rows whose keys are not in the index, 64 bits
    odd_count: int


def hashes_of(keys: Iterable[Any]) -> _Hashes:
    """The hashes of keys; -1 for those that have none."""
    return np.array([-1 if (hashed := hash_of(key)) is None else hashed for key in keys], np.int64)


def write_index(hashes: _Hashes, out: BufferBuilder) -> IndexLayout:
    """Append the index of the keys of all rows, by their hashes."""
    odd = np.flatnonzero(hashes < 0)
    rows = np.argsort(hashes, kind="stable")[len(odd) :]  # the odd ones, -1, come first
    code = "I" if len(hashes) < 1 << 32 else "Q"
    return IndexLayout(
        len(rows),
        out.append(hashes[rows].astype(np.uint32)),
        out.append(rows.astype(code)),
        code,
        out.append(odd.astype(np.int64)),
        len(odd),
    )


class KeyIndex:
    """Finds the rows of keys by an index that lies in a buffer."""

    def __init__(self, keys: Store, buffer: SharedBuffer, layout: IndexLayout) -> None:
        self.keys = keys
        self._buffer, self._layout = buffer, layout
        self._hashes = self._numbers(layout.hashes, layout.keys, "I")
        self._rows = self._numbers(layout.rows, layout.keys, layout.code)
        bits = min(max(0, layout.keys.bit_length() - 3), _MOST_BUCKET_BITS)
        self._shift = _HASH_BITS - bits
        limits = np.arange((1 << bits) + 1, dtype=np.int64) << self._shift
        self._buckets: list[int] = (
            np.searchsorted(np.asarray(self._hashes), limits).tolist() if layout.keys else [0, 0]
        )
        self._odd: dict[Any, int] | None = None

    def _numbers(self, offset: int, count: int, code: str) -> memoryview[Any]:
        nbytes = count * np.dtype(code).itemsize
        numbers: memoryview[Any] = self._buffer.view[offset : offset + nbytes].cast(code)  # type: ignore[call-overload]
        return numbers

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
        if self._odd is None:
            rows = self._numbers(self._layout.odd, self._layout.odd_count, "q").tolist()
            self._odd = {self.keys[row]: row for row in rows}
        return self._odd.get(key, -1)

    def __reduce__(self) -> Any:
        return KeyIndex, (self.keys, self._buffer, self._layout)


def index_of(keys: Store) -> KeyIndex:
    """Make the index of keys that are in memory, or in a file, already."""
    with new_builder() as out:
        layout = write_index(hashes_of(keys), out)
        return KeyIndex(keys, out.seal(), layout)


def pickled_missing(data: Mapping[Any, Any]) -> bytes:
    """The function that a mapping calls for keys that it does not have, pickled; empty if that is a KeyError.

    Raises:
        TypeError: If a store could not do the same.
    """
    method = getattr(type(data), "__missing__", None)
    if method is None:
        return b""
    name = type(data).__qualname__
    if method is Counter.__missing__:
        return pickle.dumps(int)
    if method is not defaultdict.__missing__:
        raise TypeError(
            f"{name} defines __missing__, which a shared mapping would not call: share a plain dict of its "
            "items, shmloader.share(dict(data)), for which a missing key is a KeyError"
        )
    factory = data.default_factory  # type: ignore[attr-defined]
    if factory is None:
        return b""
    try:
        return pickle.dumps(factory)
    except Exception as error:
        raise TypeError(
            f"the default_factory {factory!r} of this {name} cannot be pickled, as other processes need it "
            f"({type(error).__name__}: {error}): make it a function of a module, or share a plain dict, "
            "shmloader.share(dict(data)), for which a missing key is a KeyError"
        ) from error


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
        """See `SharedObject.form`."""
        return {"rows": self.KIND}

    def describe(self) -> StoreDescription:
        """See `SharedObject.describe`."""
        return replace(self.rows.describe(), kind=self.KIND)

    def to_arrow(self) -> Any:
        """The members, or a ``pyarrow.Table`` with ``key`` and ``value``; see `SharedObject.to_arrow`."""
        return self.rows.to_arrow()

    def __repr__(self) -> str:
        return describe_rows(self, self.rows, self.describe())

    def __reduce__(self) -> Any:
        return type(self), (self.rows, self._index)


class MappingStore(KeyedStore, Mapping[Any, Any]):
    """A read-only mapping in shared memory, in the order of the dict that it was made from.

    Keys whose types define a hash or an equality of their own are found through a dict, which each
    process makes of those keys when it first looks for such a one.

    Made from a ``Counter`` or ``defaultdict``, it answers as that does for a key that it does not have;
    nothing is inserted.
    """

    KIND = "mapping"

    def __init__(self, rows: RowStore, index: KeyIndex, missing: bytes = b"") -> None:
        """Read a mapping; ``missing`` is what `pickled_missing` gave."""
        super().__init__(rows, index)
        self.missing = missing
        self._values = rows.column("value") if len(rows) else rows
        self._factory: Callable[[], Any] | None = None

    def __getitem__(self, key: Any) -> Any:
        row = self._index.row_of(key)
        if row < 0:
            return self._missing_value(key)
        return self._values[row]

    def _missing_value(self, key: Any) -> Any:
        if not self.missing:
            raise KeyError(key)
        if self._factory is None:
            self._factory = pickle.loads(self.missing)
        return self._factory()

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or ``default``: as of a dict, also where ``[key]`` makes up a value."""
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
        """See `KeyedStore.to_arrow`."""
        return super().to_arrow() if len(self) else pa.table({"key": pa.nulls(0), "value": pa.nulls(0)})

    @property
    def form(self) -> dict[str, Any]:
        """See `SharedObject.form`."""
        return form_of_mapping(self.missing)

    def __reduce__(self) -> Any:
        return MappingStore, (self.rows, self._index, self.missing)


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
        """The type of what ``&``, ``|`` and ``-`` give: sets of the calling process."""
        return set(values)
