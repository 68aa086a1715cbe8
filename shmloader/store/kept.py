"""What has been encoded and may be referred to again: by later chunks, and by later stores of one buffer."""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.shared_memory.sealed_buffer import BufferBuilder
from shmloader.store.arrays import array_of_tensor, kind_of_tensor
from shmloader.store.columns import Column

LARGE_NBYTES = 1 << 12
"""Values from here on are worth an entry each in `Kept`, also if they have not repeated yet."""

LEAST_NBYTES = 16
"""Bytes in a store of a value that is worth a place, and a call when it is read."""

MOST_COLUMNS = 64
"""Columns inside one that is kept: chunks that refer to it describe it again."""

_MOST_KEPT = 1 << 17
_MOST_IN_COLUMNS = 1 << 23
_SAMPLED = 512

Ids = np.ndarray[Any, np.dtype[np.int64]]


class KeptValue(NamedTuple):
    """A value that is in shared memory already.

    Attributes:
        value: The object, alive: no other object can get its ``id``.
        column: The column that holds it; None for bare memory.
        place: Its row there; for bare memory the offset.
        nbytes: Of shared memory that it took, about.
    """

    value: Any
    column: Column | None
    place: int
    nbytes: int


class WrittenColumn(NamedTuple):
    """All values of a column.

    Attributes:
        values: The objects, alive, in the column's order.
        column: The column.
        nbytes: Of shared memory that each took, on the average.
    """

    values: list[Any]
    column: Column
    nbytes: int


class FoundInColumn(NamedTuple):
    """Some values that are in a column.

    Attributes:
        column: The column.
        which: Their numbers among the values that were looked for.
        places: Their rows in the column.
    """

    column: WrittenColumn
    which: Ids
    places: np.ndarray[Any, np.dtype[np.int32]]


class Kept:
    """What has been encoded and may be referred to again, by ``id`` or another key.

    Bounded in number. Where nobody else keeps the rows (``streamed``), also bounded in size, except for the
    few that were used last: what is kept here would otherwise be gone.

    Attributes:
        streamed: Whether rows are gone when their chunk has been encoded.
        once_nbytes: Bytes of values each of which was the only one in its column: more rows do not add to
            them.
        refers_back: Whether anything of ``earlier`` has been referred to.
    """

    def __init__(
        self,
        out: BufferBuilder,
        streamed: bool = False,
        earlier: Kept | None = None,
        remembers_columns: bool = False,
    ) -> None:
        """Keep nothing yet.

        Args:
            out: Where values are appended.
            streamed: See above.
            earlier: What other stores in the same memory have encoded; it is only read.
            remembers_columns: Whether `remember` keeps columns as wholes, for stores that come later.
        """
        self.streamed = streamed
        self.once_nbytes = 0
        self.refers_back = False
        self._out = out
        self._earlier = earlier
        self._values: dict[Hashable, KeptValue] = {}  # those used last are last
        self._digests: dict[Hashable, bytes] = {}
        self._nbytes = 0
        self._remembers_columns = remembers_columns
        self._columns: dict[type, list[WrittenColumn]] = {}
        self._in_columns = 0
        self._indexes: dict[type, _Index] = {}

    def __bool__(self) -> bool:
        return bool(self._values) or bool(self._earlier)

    def __contains__(self, key: object) -> bool:
        return key in self._values or (self._earlier is not None and key in self._earlier)

    def has_any(self, keys: set[Any]) -> bool:
        """Whether any of some keys is here."""
        if self._values and not self._values.keys().isdisjoint(keys):
            return True
        return self._earlier is not None and self._earlier.has_any(keys)

    def has_any_id(self, kind: type, ids: Ids) -> bool:
        """Whether any of some values is here, or seems to be in a column that an earlier store has written.

        Args:
            kind: The values' type.
            ids: Of the values, ascending. Those in columns are looked for by a sample.
        """
        if self._has_kept_id(ids):
            return True
        earlier = self._earlier
        return earlier is not None and (earlier.has_any_id(kind, ids) or earlier.has_in_columns(kind, ids))

    def _has_kept_id(self, ids: Ids) -> bool:
        if not self._values:
            return False
        if len(self._values) > len(ids):
            return not self._values.keys().isdisjoint(ids.tolist())
        kept = np.array([key for key in self._values if type(key) is int], np.int64)
        return bool(_found(ids, kept)[1].any())

    def has_in_columns(self, kind: type, ids: Ids) -> bool:
        """Whether any of a sample of these values is in a column that is remembered."""
        index = self._index(kind)
        return index is not None and bool(_found(index.ids, ids[:: len(ids) // _SAMPLED + 1])[1].any())

    def get(self, key: Hashable, value: Any) -> KeptValue | None:
        """What is kept under a key, and now the last to be forgotten.

        Args:
            key: The key.
            value: What has it now. The code that makes a stream's rows runs between two chunks, and may have
                written to it: then it is not what is kept.
        """
        kept = self._values.get(key)
        if kept is None:
            return None if self._earlier is None else self._earlier.get(key, value)
        if self.streamed:
            del self._values[key]
            if _digest(value) != self._digests[key]:
                self._nbytes -= kept.nbytes
                return None
            self._values[key] = kept
        return kept

    def in_earlier_columns(self, kind: type, ids: Ids) -> list[FoundInColumn]:
        """Which of some values are in columns of earlier stores that are remembered.

        Args:
            kind: The values' type.
            ids: Of the values.

        Returns:
            For each column some of them are in: which, the column with most of them first.
        """
        return [] if self._earlier is None else self._earlier.in_columns(kind, ids)

    def in_columns(self, kind: type, ids: Ids) -> list[FoundInColumn]:
        """As `in_earlier_columns`, but in columns that are remembered here."""
        index = self._index(kind)
        return self.in_earlier_columns(kind, ids) if index is None else index.find(ids)

    def refer_to(self, key: Hashable) -> None:
        """Say that what `get` gave is being referred to."""
        if key not in self._values:
            self.refers_back = True

    def add(self, key: Hashable, kept: KeptValue) -> None:
        """Keep a value, and perhaps forget others."""
        if key in self._values:
            return
        self._values[key] = kept
        if self.streamed:
            self._digests[key] = _digest(kept.value)
        self._nbytes += kept.nbytes
        while len(self._values) > _MOST_KEPT or (self._is_too_much() and len(self._values) > 8):
            oldest = next(iter(self._values))
            self._nbytes -= self._values.pop(oldest).nbytes
            self._digests.pop(oldest, None)

    def _is_too_much(self) -> bool:
        return self.streamed and self._nbytes > max(16 << 20, self._out.nbytes // 16)

    def remember(self, kind: type, values: list[Any], column: Column, nbytes: int) -> None:
        """Keep a column as a whole, for stores that come later, if any do.

        Costs nothing but the list until a later store has values of that type.

        Args:
            kind: The values' type.
            values: All values of the column, which live as long as this does.
            column: The column.
            nbytes: Of shared memory that it took.
        """
        if not self._remembers_columns or nbytes < LEAST_NBYTES * len(values):
            return
        if weight_of(column) <= MOST_COLUMNS:
            self._columns.setdefault(kind, []).append(WrittenColumn(values, column, nbytes // len(values)))

    def take_over(self, other: Kept) -> None:
        """Keep what a store in the same memory has kept, now that it is complete."""
        for key, kept in other._values.items():
            self.add(key, kept)
        for kind, columns in other._columns.items():
            self._indexes.pop(kind, None)
            for column in columns:
                if self._in_columns + len(column.values) <= _MOST_IN_COLUMNS:
                    self._in_columns += len(column.values)
                    self._columns.setdefault(kind, []).append(column)

    def ids(self) -> Iterator[int]:
        """The ids of values that have an entry here or in what is earlier."""
        yield from (key for key in self._values if type(key) is int)
        if self._earlier is not None:
            yield from self._earlier.ids()

    def _index(self, kind: type) -> _Index | None:
        index = self._indexes.get(kind)
        if index is None and kind in self._columns:
            index = self._indexes[kind] = _Index(self._columns[kind])
        return index


class _Index:
    """Finds values of columns by ``id``.

    Attributes:
        ids: All of them, ascending.
    """

    def __init__(self, columns: list[WrittenColumn]) -> None:
        lengths = [len(column.values) for column in columns]
        ids = np.concatenate([ids_of(column.values) for column in columns])
        order = np.argsort(ids, kind="stable")
        self.ids: Ids = ids[order]
        self._columns = columns
        self._numbers = np.repeat(np.arange(len(columns), dtype=np.int32), lengths)[order]
        self._places = (order - np.repeat(np.cumsum(lengths) - lengths, lengths)[order]).astype(np.int32)

    def find(self, ids: Ids) -> list[FoundInColumn]:
        """See `Kept.in_earlier_columns`."""
        at, are_there = _found(self.ids, ids)
        which = np.flatnonzero(are_there)
        at = at[which]
        numbers = self._numbers[at]
        counts = np.bincount(numbers, minlength=len(self._columns))
        found = []
        for number in np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist():
            mine = numbers == number
            found.append(FoundInColumn(self._columns[number], which[mine], self._places[at[mine]]))
        return found


def ids_of(values: list[Any]) -> Ids:
    """The ``id`` of each value."""
    return np.fromiter(map(id, values), np.int64, len(values))


def _found(ascending: Ids, wanted: Ids) -> tuple[Ids, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Where numbers would be among others that ascend, and whether they are there."""
    at = np.searchsorted(ascending, wanted)
    at[at == len(ascending)] = 0
    return at, ascending[at] == wanted


def weight_of(column: Any) -> int:
    """How many columns are in one, itself included."""
    parts = column if isinstance(column, tuple) else ()
    return hasattr(column, "expression") + sum(weight_of(part) for part in parts if isinstance(part, tuple))


def _digest(value: Any) -> bytes:
    """What tells whether a value has been written to; equal for the same value only."""
    if isinstance(value, torch.Tensor) and kind_of_tensor(value) is not None:
        value = array_of_tensor(value, DTYPES[CODE_OF_TORCH_DTYPE[value.dtype]].carrier)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    if not isinstance(value, memoryview):
        try:
            value = pickle.dumps(value, 5)
        except Exception:  # noqa: BLE001 - then it cannot be told
            value = secrets.token_bytes(16)
    return hashlib.blake2b(value, digest_size=16).digest()
