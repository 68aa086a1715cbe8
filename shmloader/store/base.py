"""What every store is: a read-only sequence (or mapping) over shared memory, passed on by handle."""

from __future__ import annotations

import operator
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Self, cast, overload

import numpy as np
import torch

from shmloader.sampling.index_batches import BY_VALUE
from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store import saving
from shmloader.store.advice import add_advice
from shmloader.store.exact_dtypes import dumps
from shmloader.store.parts import BufferPart


@dataclass(frozen=True)
class StoreDescription:
    """What a store is and what it saves.

    Attributes:
        kind: How it represents its rows: ``numbers``, ``strings``, ``bytes``, ``records``, ``arrays``,
            ``lists``, ``objects`` or ``mixed`` for rows of Python objects; ``array``, ``tensor``,
            ``table`` or ``column`` where one such object was shared; ``mapping`` for a dict.
        rows: Rows (items of a mapping).
        nbytes: Bytes of shared memory, once on the host.
        python_nbytes: Estimate of the bytes that the rows take as Python objects, in each process that
            has a copy of its own; from a sample of the rows.
    """

    kind: str
    rows: int
    nbytes: int
    python_nbytes: int


class SharedObject(ABC):
    """Base of all stores.

    Lives in any number of processes. Its memory is freed when the last process that has the store, or
    any view of its memory, is gone. Passing it to a process that ``multiprocessing`` starts sends a
    descriptor; under fork nothing is sent. ``copy.copy`` and ``copy.deepcopy`` return the store itself.
    """

    @abstractmethod
    def describe(self) -> StoreDescription:
        """What the store is, and what the same data would take as Python objects."""

    @abstractmethod
    def to_arrow(self) -> Any:
        """The ``pyarrow`` object over the same memory, without a copy.

        Raises:
            TypeError: If the rows have no common Arrow type.
        """

    def save(self, path: str | PathLike[str]) -> None:
        """Write the store to a file that ``shmloader.open`` opens, on any host.

        Args:
            path: Where to. Its suffix chooses the format.
        """
        saving.save(self, path)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.describe().nbytes

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Store(SharedObject, Sequence[Any]):
    """A read-only sequence in shared memory.

    A subclass says how many rows there are and how to read one; the rest of the sequence's interface
    follows from that.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Any:
        """Read one row.

        Args:
            index: Which one, ``0 <= index < len(self)``; not checked.
        """

    @abstractmethod
    def take(self, indices: Any, out: Any = None) -> Any:
        """Gather many rows, with one call per column and not one per row.

        Args:
            indices: Row numbers: a sequence of int, an integer ndarray or tensor. Negative ones count from
                the end.
            out: Where to put them: a tensor or ndarray of shape ``(len(indices), *row shape)``, such as
                `shmloader.empty` gives; for records a dict of those, by column.

        Returns:
            ``out``; or without it the rows in the form that the store has them in: ndarrays (also for
            numbers), tensors, Arrow tables, lists of anything else, and for records a dict of these.

        Raises:
            IndexError: If an index is out of range.
            TypeError: If the rows do not fit in ``out``.
        """

    def alone(self, rows: Sequence[int]) -> Store:
        """Copy some rows to a store of their own, with no other rows in its memory.

        Runs in the calling process.

        Args:
            rows: Row numbers from 0 on.

        Raises:
            TypeError: If this kind of store has no way to do so.
            SharedMemoryExhausted: If the host has not the memory.
        """
        raise TypeError(
            f"a part of a {type(self).__name__} cannot be saved by itself: save the whole, or share the "
            "rows anew: shmloader.share(iter(part)).save(path)"
        )

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Store: ...
    def __getitem__(self, index: Any) -> Any:
        """One row; for a slice a view, without a copy."""
        rows = len(self)
        if isinstance(index, slice):
            return StoreSlice(self, range(*index.indices(rows)))
        return self.row(row_number(index, rows))

    def __getitems__(self, indices: Any) -> list[Any]:
        """The rows of an index batch, as ``torch``'s fetcher asks for them."""
        row = self.row
        return [row(index) for index in row_numbers(indices, len(self))]

    def read_in_order(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Read rows one by one, as iteration does.

        Where rows are parts of one larger value (nodes of a tree), rows that come one after the other are
        parts of the same one, as in the list that the store was made from.

        Args:
            numbers: Row numbers from 0 on; not checked.
        """
        return map(self.row, numbers)

    def __iter__(self) -> Iterator[Any]:
        return self.read_in_order(range(len(self)))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(map(equal, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __contains__(self, value: object) -> bool:
        return any(equal(row, value) for row in self)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The first row that equals ``value``; ValueError if there is none."""
        for number in range(*slice(start, stop).indices(len(self))):
            if equal(self.row(number), value):
                return number
        raise ValueError(f"{value!r} is not in the store")

    def count(self, value: Any) -> int:
        """How many rows equal ``value``."""
        return sum(equal(row, value) for row in self)

    def __repr__(self) -> str:
        what = self.describe()
        return f"<{type(self).__name__}: {what.rows:,} rows of kind {what.kind!r}, {what.nbytes:,} bytes>"


BY_VALUE[Store] = list


def row_number(index: Any, rows: int) -> int:
    """An index as a row number from 0 on; IndexError or TypeError as a list has them."""
    number = operator.index(index)
    if number < 0:
        number += rows
    if not 0 <= number < rows:
        raise IndexError(f"row {index} of a store with {rows:,} rows")
    return number


def row_numbers(indices: Any, rows: int) -> list[int]:
    """Many indices as row numbers from 0 on; see `row_number`."""
    tolist = getattr(indices, "tolist", None)  # tensors and ndarrays
    numbers = cast("list[int]", list(indices) if tolist is None else tolist())
    if not numbers:
        return numbers
    if set(map(type, numbers)) == {int} and min(numbers) >= 0 and max(numbers) < rows:
        return numbers
    return [row_number(number, rows) for number in numbers]


def row_array(indices: Any, rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """As `row_numbers`, for ``take``."""
    if isinstance(indices, torch.Tensor):
        indices = indices.numpy()
    array = np.asarray(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"rows are taken by a flat sequence of integers, not by {array.dtype} {array.shape}")
    numbers = array.astype(np.int64, copy=False)
    if not numbers.size:
        return numbers
    # As unsigned numbers the negative ones are large: one pass tells that there are none, and none too large.
    if numbers.flags.c_contiguous and int(numbers.view(np.uint64).max()) < rows:
        return numbers
    if array.dtype == np.uint64 and int(array.max()) >= rows:  # as int64 the largest would be negative
        raise IndexError(f"row {int(array.max())} of a store with {rows:,} rows")
    least, most = int(numbers.min()), int(numbers.max())
    if least < -rows or most >= rows:
        raise IndexError(f"row {least if least < -rows else most} of a store with {rows:,} rows")
    return numbers if least >= 0 else np.where(numbers < 0, numbers + rows, numbers)


def equal(one: Any, other: Any) -> bool:
    """Whether two rows are equal: identical, or ``==``; arrays and tensors, also inside rows, as wholes."""
    if one is other:
        return True
    if isinstance(one, _ARRAYS) or isinstance(other, _ARRAYS):
        return _equal_arrays(one, other)
    try:
        return bool(one == other)
    except RecursionError as error:
        add_advice(error, f"comparing a {type(one).__qualname__} with a {type(other).__qualname__}")
        raise
    except (ValueError, RuntimeError):  # an array in it, of which neither is true
        if type(one) is type(other) and isinstance(one, dict):
            return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
        if type(one) is type(other) and isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(equal, one, other))
        raise


_ARRAYS = (np.ndarray, torch.Tensor)


def _equal_arrays(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.layout is not torch.strided or other.layout is not torch.strided:  # torch compares no others
            return one.layout is other.layout and _equal_arrays(one.to_dense(), other.to_dense())
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        alike = one.shape == other.shape and one.dtype.names == other.dtype.names
        return alike and bool((one == other).all())
    return False


class StoreSlice(Store):
    """Some rows of a store, at equal distances: what slicing gives. Shares the store's memory."""

    def __init__(self, store: Store, rows: range) -> None:
        """Look at ``rows`` of a store, which are row numbers from 0 on."""
        self._store = store
        self._range = rows

    @property
    def whole(self) -> Store:
        """The store of which these are some rows."""
        return self._store

    def __len__(self) -> int:
        return len(self._range)

    def row(self, index: int) -> Any:
        """See `Store.row`."""
        return self._store.row(self._range[index])

    def alone(self, rows: Sequence[int]) -> Store:
        """See `Store.alone`."""
        return self._store.alone([self._range[number] for number in rows])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return StoreSlice(self._store, self._range[index])
        return self._store.row(self._range[row_number(index, len(self._range))])

    def __getitems__(self, indices: Any) -> list[Any]:
        numbers = row_numbers(indices, len(self._range))
        return self._store.__getitems__(list(map(self._range.__getitem__, numbers)))

    def read_in_order(self, numbers: Iterable[int]) -> Iterator[Any]:
        """See `Store.read_in_order`."""
        return self._store.read_in_order(map(self._range.__getitem__, numbers))

    def column(self, field: str | int) -> StoreSlice:
        """One field of these rows, over the same memory, where the store has columns; see `RowStore.column`.

        Raises:
            TypeError: If the store has none.
            KeyError: If not all rows of the store are records that have the field.
        """
        column = getattr(self._store, "column", None)
        if column is None:
            raise TypeError(f"a {type(self._store).__name__} has no columns: {field!r} cannot be one of them")
        return StoreSlice(column(field), self._range)

    def take(self, indices: Any, out: Any = None) -> Any:
        """See `Store.take`."""
        rows = self._range
        return self._store.take(rows.start + rows.step * row_array(indices, len(rows)), out)

    def describe(self) -> StoreDescription:
        """As the store's, of these rows; bytes in proportion, since memory is only freed as a whole."""
        whole = self._store.describe()
        share = len(self._range) / max(1, whole.rows)
        return StoreDescription(
            whole.kind, len(self._range), round(whole.nbytes * share), round(whole.python_nbytes * share)
        )

    def to_arrow(self) -> Any:
        """See `SharedObject.to_arrow`; rows at a distance other than 1 are copied."""
        rows, whole = self._range, self._store.to_arrow()
        if rows.step == 1:
            return whole.slice(rows.start, len(rows))
        import pyarrow as pa

        return whole.take(pa.array(rows, pa.int64()))

    def __reduce__(self) -> Any:
        return StoreSlice, (self._store, self._range)


# The end of a buffer says what it holds, so that a buffer alone is enough to make its store:
# [ what the store's class wrote | class, layout and first offset, pickled | length of that pickle | _MAGIC ]
_MAGIC = b"shmstor1"
_TAIL = struct.Struct("<q8s")


class BufferStore(SharedObject):
    """A store that has a buffer, or a part of one; its constructor takes the buffer and a layout.

    Attributes:
        buffer: The shared memory.
    """

    def __init__(self, buffer: SharedBuffer, layout: Any) -> None:
        self.buffer = buffer

    @property
    def image(self) -> memoryview | None:
        """Bytes of which `attach` makes this store anew, in any process; None if it needs others too."""
        if not isinstance(self.buffer, BufferPart):
            return self.buffer.view
        return self.buffer.own if self.buffer.is_alone else None

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.buffer.nbytes

    def __reduce__(self) -> Any:
        return attach, (self.buffer,)


Written = tuple[type[BufferStore], Any]
"""A store that has been written: its class, and what its constructor needs besides the buffer (small and
picklable)."""


def end_with(out: BufferBuilder, written: Written, begin: int = 0) -> None:
    """Append what says which store the memory holds from ``begin`` on."""
    pickled = dumps((*written, begin))
    out.append(pickled + _TAIL.pack(len(pickled), _MAGIC), alignment=1)


def finish(out: BufferBuilder, written: Written) -> Any:
    """Seal what a store's class has appended, together with its layout; returns the store."""
    end_with(out, written)
    kind, layout = written
    return kind(out.seal(), layout)


def attach(buffer: SharedBuffer) -> Any:
    """The store that a buffer holds.

    Raises:
        ValueError: If the buffer was not made by a store.
    """
    view = buffer.view
    nbytes, magic = _TAIL.unpack(view[-_TAIL.size :]) if len(view) >= _TAIL.size else (0, b"")
    if magic != _MAGIC or not 0 < nbytes <= len(view) - _TAIL.size:
        raise ValueError(f"these {len(view):,} bytes are not a store of this version of shmloader")
    kind, layout, begin = pickle.loads(view[-_TAIL.size - nbytes : -_TAIL.size])
    if begin and not isinstance(buffer, BufferPart):  # of a part, the only one that was saved
        buffer = BufferPart(buffer, 0, buffer.nbytes, first=begin)
    return kind(buffer, layout)
