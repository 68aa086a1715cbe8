"""dicts as stores: the items as rows, and an index of the keys' hashes beside them in shared memory.

The index takes about 9 bytes per key, once on the host; no process builds a dict of its own. Python's hash
of a str differs from process to process, so keys are hashed in a way that does not.
"""

from __future__ import annotations

import numbers
import pickle
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.base import BufferStore, Store, StoreDescription, Written, attach, equal, finish
from shmloader.store.columns import items
from shmloader.store.one_buffer import new_builder
from shmloader.store.rows import RowLayout, RowStore, RowWriter

_HASH_BITS = 32
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


class MappingLayout(NamedTuple):
    """Where the parts of a `MappingStore` lie.

    Attributes:
        pairs: The items, in order, as tuples.
        keys: How many keys are in the index.
        hashes: Offset of their hashes, ascending, 32 bits.
        rows: Offset of the row of each of these, of type ``rows_code``.
        rows_code: ``I`` or ``Q``.
        buckets: Offset of ``2**bits + 1`` positions in the hashes, ``Q``: where hashes that begin with
            these bits start.
        bits: How many bits.
        odd: Offset of the rows whose keys are not in the index, ``q``.
        odd_count: How many.
        missing: What is called for a key that is not there, pickled; empty for KeyError.
    """

    pairs: RowLayout
    keys: int
    hashes: int
    rows: int
    rows_code: str
    buckets: int
    bits: int
    odd: int
    odd_count: int
    missing: bytes


def pickled_missing(data: Mapping[Any, Any]) -> bytes:
    """What a mapping calls for keys that it does not have, pickled; empty if that is a KeyError.

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


class MappingStore(BufferStore, Mapping[Any, Any]):
    """A read-only mapping in shared memory, in the order of the dict that it was made from.

    Keys whose types define a hash or an equality of their own are found through a dict, which each
    process makes of those keys when it first looks for such a one.

    Made from a ``Counter`` or ``defaultdict``, it answers as that does for a key that it does not have;
    nothing is inserted.
    """

    def __init__(self, buffer: SharedBuffer, layout: MappingLayout) -> None:
        super().__init__(buffer, layout)
        self._layout = layout
        self._pairs = _Pairs(buffer, layout.pairs)
        self._keys = self._pairs.column(0)
        self._values = self._pairs.column(1)
        self._hashes = items(buffer, layout.hashes, layout.keys, "I")
        self._rows = items(buffer, layout.rows, layout.keys, layout.rows_code)
        self._buckets = items(buffer, layout.buckets, (1 << layout.bits) + 1, "Q")
        self._shift = _HASH_BITS - layout.bits
        self._odd: dict[Any, int] | None = None
        self._missing: Callable[[], Any] | None = None

    def _row_of(self, key: Any) -> int:
        """The row of a key, or -1."""
        hashed = hash_of(key)
        if hashed is None:
            return self._odd_row_of(key)
        bucket = hashed >> self._shift
        end = self._buckets[bucket + 1]
        place = bisect_left(self._hashes, hashed, self._buckets[bucket], end)
        while place < end and self._hashes[place] == hashed:
            row: int = self._rows[place]
            found = self._keys.row(row)
            if found is key or found == key:
                return row
            place += 1
        return -1

    def _odd_row_of(self, key: Any) -> int:
        if self._odd is None:
            rows = items(self.buffer, self._layout.odd, self._layout.odd_count, "q").tolist()
            self._odd = {self._keys.row(row): row for row in rows}
        return self._odd.get(key, -1)

    def __getitem__(self, key: Any) -> Any:
        row = self._row_of(key)
        if row < 0:
            return self._missing_value(key)
        return self._values.row(row)

    def _missing_value(self, key: Any) -> Any:
        if not self._layout.missing:
            raise KeyError(key)
        if self._missing is None:
            self._missing = pickle.loads(self._layout.missing)
        return self._missing()

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or ``default``: as of a dict, also where ``[key]`` makes up a value."""
        row = self._row_of(key)
        return default if row < 0 else self._values.row(row)

    def __contains__(self, key: object) -> bool:
        return self._row_of(key) >= 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._pairs)

    def items(self) -> ItemsView[Any, Any]:
        """The items, in order."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """The values, in order."""
        return _Values(self)

    def alone(self, rows: Sequence[int]) -> MappingStore:
        """Copy some items, by their numbers, to a store of their own; see `Store.alone`."""
        with new_builder() as out:
            pairs, writer = self._pairs.reading_shared(rows), RowWriter(out)
            chunks = iter(lambda: list(islice(pairs, writer.chunk_rows())), [])
            copy: MappingStore = finish(out, write_items(chunks, writer, out, self._layout.missing))
            return copy

    @property
    def pairs(self) -> Store:
        """The items as a sequence of tuples."""
        return self._pairs

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mapping):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(key in other and equal(value, other[key]) for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]  # as of a dict

    def describe(self) -> StoreDescription:
        """See `SharedObject.describe`."""
        return replace(self._pairs.describe(), kind="mapping")

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with the columns ``key`` and ``value``; see `SharedObject.to_arrow`."""
        import pyarrow as pa

        return pa.table({"key": self._keys.to_arrow(), "value": self._values.to_arrow()})

    def __repr__(self) -> str:
        return f"<MappingStore: {len(self):,} items, {self.nbytes:,} bytes>"


class _Pairs(RowStore):
    @property
    def image(self) -> None:
        """None: what lies in memory is the mapping."""
        return None

    def __reduce__(self) -> Any:
        return _pairs_of, (self.buffer,)


def _pairs_of(buffer: SharedBuffer) -> Store:
    mapping: MappingStore = attach(buffer)
    return mapping.pairs


class _Items(ItemsView[Any, Any]):
    _mapping: MappingStore

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter(self._mapping.pairs)


class _Values(ValuesView[Any]):
    _mapping: MappingStore

    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self._mapping.pairs)


def write_items(
    chunks: Iterable[list[tuple[Any, Any]]], writer: RowWriter, out: BufferBuilder, missing: bytes
) -> Written:
    """Write a mapping's items.

    Args:
        chunks: The items.
        writer: Appends them; nothing has been appended yet.
        out: Where to.
        missing: As in `MappingLayout`.
    """
    keys = _KeyHashes()
    for chunk in chunks:
        writer.append(chunk)
        keys.add([key for key, _ in chunk])
        del chunk  # before the next one is made
    return MappingStore, keys.finish(writer, out, missing)


class _KeyHashes:
    """The hashes of keys, while items are appended."""

    def __init__(self) -> None:
        self._hashes: list[np.ndarray[Any, np.dtype[np.int64]]] = []

    def add(self, keys: Iterable[Any]) -> None:
        """Add the keys of the next rows."""
        hashes = [-1 if (hashed := hash_of(key)) is None else hashed for key in keys]
        self._hashes.append(np.array(hashes, np.int64))

    def finish(self, writer: RowWriter, out: BufferBuilder, missing: bytes) -> MappingLayout:
        """Append the index."""
        hashes = np.concatenate([np.zeros(0, np.int64), *self._hashes])
        odd = np.flatnonzero(hashes < 0)
        rows = np.argsort(hashes, kind="stable")[len(odd) :]  # the odd ones, -1, come first
        hashes = hashes[rows]
        bits = max(0, len(rows).bit_length() - 3)  # four to eight keys in a bucket
        limits = np.arange((1 << bits) + 1, dtype=np.int64) << (_HASH_BITS - bits)
        code = "I" if writer.rows < 1 << 32 else "Q"
        pairs = writer.finish()
        return MappingLayout(
            pairs,
            len(rows),
            out.append(hashes.astype(np.uint32)),
            out.append(rows.astype(code)),
            code,
            out.append(np.searchsorted(hashes, limits).astype(np.uint64)),
            bits,
            out.append(odd.astype(np.int64)),
            len(odd),
            missing,
        )
