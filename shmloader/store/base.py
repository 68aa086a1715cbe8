"""The interface of stores: a read-only sequence over shared memory, passed on by handle."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Self, cast, overload

import numpy as np
import torch

from shmloader.indices.packed_indices import BY_VALUE
from shmloader.store.columns.kind import Block
from shmloader.store.description import StoreDescription, describe_rows
from shmloader.store.handles import is_shared
from shmloader.store.list_methods import ListMethods, RowT_co
from shmloader.store.memory import share_array
from shmloader.store.ranges import Rows
from shmloader.store.read_only import ReadOnly
from shmloader.store.saving import save

_INT64 = np.dtype(np.int64)
_MANY = (list, np.ndarray, torch.Tensor)  # quicker to ask for than a union
_SENT_BY_HANDLE_NBYTES = 1 << 16  # of the numbers of selected rows
_MOST_NUMBERS = 1 << 12  # of a slice that are made at once: about 50 us
_INTERNAL = frozenset(  # what stores offer to the rest of shmloader, and not to programs
    "KIND buffer chunks field form items_between plain row_of rows "
    "stored_keys stored_values value_at whole".split()
)


class SharedObject(ReadOnly, ABC):
    """Base of all stores.

    Lives in any number of processes. Its memory is freed when the last process that has the store, or
    any view of its memory, is gone. Passing it to a process that ``multiprocessing`` starts sends a
    descriptor; under fork nothing is sent. ``copy.copy`` and ``copy.deepcopy`` return the store itself.
    """

    @abstractmethod
    def describe(self) -> StoreDescription:
        """The kind and size of the store, and the size of the same data as Python objects."""

    @abstractmethod
    def to_arrow(self) -> Any:
        """A ``pyarrow`` object with the same rows, over the same memory if all chunks have the same types.

        Values that Arrow has no type for have extension types of shmloader's over ordinary ones.

        Raises:
            TypeError: If this kind of store has none.
        """

    def save(self, path: str | PathLike[str]) -> None:
        """Write the store to a file that ``shmloader.open`` and any Arrow program open.

        The file appears under its name when it is complete and on the disk, and replaces an older one.

        Args:
            path: Where to. ``.arrow``, ``.ipc`` and ``.feather`` are Arrow IPC, ``.parquet`` is Parquet.

        Raises:
            ValueError: For another suffix.
            TypeError: If the kind of store has no Arrow form.
            OSError: If the file cannot be written.
        """
        save(self, path)

    @property
    def form(self) -> dict[str, Any]:
        """The metadata of a saved file, beyond its columns."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory."""
        return self.describe().nbytes

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class Store(SharedObject, ListMethods[RowT_co]):
    """A read-only sequence in shared memory; ``Store[Row]`` for type checkers.

    A subclass defines the number of rows and how to read one; the rest of the sequence's interface is derived
    from these.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> RowT_co:
        """Read one row.

        Args:
            index: Its number, ``0 <= index < len(self)``; not checked.
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
            ``out``; or without it the rows in columns: ndarrays (also for numbers), tensors, lists of
            anything else, and for records a dict of these.

        Raises:
            IndexError: If an index is out of range.
            TypeError: If the rows do not fit in ``out``.
        """

    def plain(self) -> Store[RowT_co]:
        """The same rows, with large lists and dicts inside of them built, and not views."""
        return self

    def column(self, name: str | int) -> Store:
        """One field of all rows, as a store over the same memory; None for dicts that lack the key.

        Args:
            name: A key of the dicts, or a position in the tuples.

        Raises:
            TypeError: If the store has no columns.
            KeyError: If not all rows are records, or all rows of one piece of the store lack it.
        """
        raise TypeError(f"a {type(self).__name__} has no columns: {name!r} cannot be one of them")

    def select(self, indices: Any) -> Store[RowT_co]:
        """The rows of these numbers, in this order, over the same memory.

        Args:
            indices: Row numbers, as for `take`; or a mask: an array or tensor of bool, one for each row.

        Raises:
            IndexError: If an index is out of range, or a mask has another length.
        """
        return Selection(self, row_array(indices, len(self)).copy())

    @overload
    def __getitem__(self, index: int) -> RowT_co: ...
    @overload
    def __getitem__(self, index: str) -> Store: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | Rows | torch.Tensor) -> Store[RowT_co]: ...
    def __getitem__(self, index: Any) -> Any:
        """One row; for a slice, a name, numbers or a mask a view, without a copy."""
        if isinstance(index, slice):
            return Selection(self, range(*index.indices(len(self))))
        if isinstance(index, str):
            return self.column(index)
        if isinstance(index, _MANY) and np.ndim(cast("Any", index)):
            return self.select(index)
        return self.row(row_number(index, len(self)))

    def __getitems__(self, indices: Any) -> list[Any]:
        """The rows of an index batch, as ``torch``'s fetcher asks for them."""
        return list(map(self.row, row_numbers(indices, len(self))))

    def __iter__(self) -> Iterator[RowT_co]:
        return map(self.row, range(len(self)))

    def __repr__(self) -> str:
        return describe_rows(self, self, self.describe())


BY_VALUE.append(Store)


def row_number(index: Any, rows: int) -> int:
    """An index as a row number from 0 on; IndexError or TypeError as for a list."""
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


def row_array(indices: Any, rows: int) -> Rows:
    """Many indices, or a mask, as an array of row numbers from 0 on."""
    if isinstance(indices, torch.Tensor):
        indices = indices.numpy()
    array = np.asarray(indices)
    # As unsigned numbers the negative ones are large: one pass shows that no number is negative or too large.
    is_plain = array.dtype == _INT64 and array.ndim == 1 and array.size and array.flags.c_contiguous
    if is_plain and int(np.maximum.reduce(array.view(np.uint64))) < rows:
        return array
    if array.dtype == np.bool_ and array.ndim == 1:
        if len(array) != rows:
            raise IndexError(f"a mask of {len(array):,} items for a store with {rows:,} rows")
        return np.flatnonzero(array)
    if array.dtype in (np.object_, np.uint64) and array.ndim == 1:  # numbers beyond int64, or none at all
        return np.array([row_number(number, rows) for number in array], np.int64)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"rows are taken by a flat sequence of integers, not by {array.dtype} {array.shape}")
    numbers = array.astype(np.int64, copy=False)
    for number in (numbers.min(), numbers.max()) if numbers.size else ():
        row_number(number, rows)
    return np.where(numbers < 0, numbers + rows, numbers)


class Selection(Store):
    """Some rows of a store: the view that slices and `Store.select` give. Shares the store's memory."""

    def __init__(self, store: Store, rows: range | Rows) -> None:
        """Select ``rows`` of a store, which are row numbers from 0 on."""
        self._store = store
        self._rows = rows
        self._reads = 0
        self._numbers: list[Any] | None = None

    @property
    def whole(self) -> Store:
        """The store that has the rows, and others."""
        return self._store

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:
        """One row, by its number in the selection."""
        return self._store.row(int(self._rows[index]))

    def __getitem__(self, index: Any) -> Any:
        if index.__class__ is int:
            if self._numbers is not None:
                row = self._numbers[index]
                return row.copy() if row.__class__ is list else row  # a list may be changed
            self._reads += 1
            if self._reads == 2 and len(self._rows) <= _MOST_NUMBERS:  # a window, read as a sequence
                self._numbers = self._made_numbers()
        elif isinstance(index, slice):
            return Selection(self._store, self._rows[index])
        return super().__getitem__(index)

    def __getitems__(self, indices: Any) -> list[Any]:
        return self._store.__getitems__(self._whole_numbers(indices))

    def __iter__(self) -> Iterator[Any]:
        if self._numbers is not None:
            return map(list, self._numbers) if type(self._numbers[0]) is list else iter(self._numbers)
        return map(self._store.row, self._rows.tolist() if isinstance(self._rows, np.ndarray) else self._rows)

    def _made_numbers(self) -> list[Any] | None:
        """All rows, made at once, if they are a few numbers of Python, or lists of these, in one block."""
        block = self.items_between(0, len(self))
        chosen: Any = slice(None)
        if block is None:
            block, chosen = self._store.items_between(0, len(self._store)), np.asarray(self._rows)
        if block is None or not block.has_python_numbers or block.items.ndim > 2:
            return None
        is_few = math.prod(block.items.shape[1:]) * len(self._rows) <= _MOST_NUMBERS
        return block.items[chosen].tolist() if is_few else None

    def _whole_numbers(self, indices: Any) -> Rows:
        """Row numbers of the whole store."""
        numbers, rows = row_array(indices, len(self._rows)), self._rows
        return rows.start + rows.step * numbers if isinstance(rows, range) else rows[numbers]

    def select(self, indices: Any) -> Store:
        """Some of these rows, as a store."""
        return self._store.select(self._whole_numbers(indices))

    def plain(self) -> Store:
        """The same rows, without views inside of them."""
        return Selection(self._store.plain(), self._rows)

    def column(self, name: str | int) -> Store:
        """A field of these rows, as a store."""
        return Selection(self._store.column(name), self._rows)

    def take(self, indices: Any, out: Any = None) -> Any:
        """Some of these rows, gathered."""
        return self._store.take(self._whole_numbers(indices), out)

    def describe(self) -> StoreDescription:
        """The store's description for these rows; bytes in proportion, though memory is freed as a whole."""
        whole = self._store.describe()
        part = len(self._rows) / max(1, whole.rows)
        nbytes, python_nbytes = round(whole.nbytes * part), round(whole.python_nbytes * part)
        fields = tuple(replace(field, nbytes=round(field.nbytes * part)) for field in whole.fields)
        return StoreDescription(whole.kind, len(self._rows), nbytes, python_nbytes, fields)

    def items_between(self, begin: int, end: int) -> Block | None:
        """See `ListMethods.items_between`."""
        rows = self._rows[begin:end]
        if not isinstance(rows, range) or rows.step != 1:
            return None
        return self._store.items_between(rows.start, rows.stop)

    def to_arrow(self) -> Any:
        """The rows as Arrow data; those at a distance other than 1 are copied."""
        rows, whole = self._rows, self._store.to_arrow()
        if isinstance(rows, range) and rows.step == 1:
            return whole.slice(rows.start, len(rows))
        return whole.take(np.asarray(rows, np.int64))

    def __reduce__(self) -> Any:
        rows = self._rows
        if isinstance(rows, np.ndarray) and rows.nbytes >= _SENT_BY_HANDLE_NBYTES:
            # Only now: a forked process inherits them, and each piece of shared memory takes a descriptor.
            self._rows = rows if is_shared(rows, None) else share_array(rows)
        return Selection, (self._store, self._rows)
