"""Mappings and sets as stores: their items as rows, and an index of the keys' hashes in shared memory.

The index takes five to eight bytes per key, once on the host. A process that looks keys up makes a list of at
most 4,097 numbers; a dict only of keys whose types are not known here. Python's hash of a str differs from
process to process, so keys are hashed in a way that does not.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pyarrow as pa

from shmloader.store.base import SharedObject, Store
from shmloader.store.columns.key_hashes import HASH_BITS, Numbers, hash_of, hashes_of
from shmloader.store.description import StoreDescription, describe_rows
from shmloader.store.list_methods import equal
from shmloader.store.memory import MemoryWriter
from shmloader.store.saving import form_of_mapping
from shmloader.store.sealed_buffer import SharedBuffer

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _Key = TypeVar("_Key", default=Any)
    _Value_co = TypeVar("_Value_co", covariant=True, default=Any)
    _Member_co = TypeVar("_Member_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    _Key, _Value_co, _Member_co = map(TypeVar, ("_Key", "_Value_co", "_Member_co"))

_MOST_BUCKET_BITS = 12  # 0.15 MB in each process that looks keys up


def write_index(hashes: Numbers, writer: MemoryWriter) -> Callable[[Store, SharedBuffer], KeyIndex]:
    """Write the index of the keys of all rows, by their hashes; returns the function that makes it."""
    odd = np.flatnonzero(hashes < 0)
    rows = np.argsort(hashes, kind="stable")[len(odd) :]  # the odd ones, -1, come first
    number = np.min_scalar_type(len(hashes))
    arrays = hashes[rows].astype(np.uint32), rows.astype(number), odd.astype(number)
    makes = list(map(writer.array, arrays))
    return lambda keys, buffer: KeyIndex(keys, *(make(buffer) for make in makes))


class KeyIndex:
    """Finds the rows of keys by arrays in shared memory: hashes, ascending, of 32 bits, and the row of each.

    Keys of the ``odd`` rows have no hash.
    """

    def __init__(self, keys: Store, hashes: Numbers, rows: Numbers, odd: Numbers) -> None:
        self.keys = keys
        self._arrays = hashes, rows, odd
        # Items of these are ints of Python.
        self._hashes = memoryview(cast("Any", hashes))
        self._rows = memoryview(cast("Any", rows))
        bits = min(max(0, len(hashes).bit_length() - 3), _MOST_BUCKET_BITS)
        self._shift = HASH_BITS - bits
        limits = np.arange((1 << bits) + 1, dtype=np.int64) << self._shift
        self._buckets: list[int] = np.searchsorted(hashes, limits).tolist()
        self._rows_of_odd: dict[Any, int] | None = None

    def row_of(self, key: Any) -> int:
        """The row of a key, or -1."""
        hashed = hash_of(key)
        if hashed is None:
            if self._rows_of_odd is None:
                self._rows_of_odd = {self.keys[row]: row for row in self._arrays[2].tolist()}
            return self._rows_of_odd.get(key, -1)
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

    def rows_of_one_key(self) -> list[int] | None:
        """Two rows that have the same key, of which `row_of` finds one; None if all keys differ."""
        hashes, rows, odd = self._arrays
        alike = rows[1:][hashes[1:] == hashes[:-1]]
        for row in chain(alike.tolist(), odd.tolist()):
            found = self.row_of(self.keys[row])
            if found not in (-1, row):  # -1 of a NaN, which equals none
                return sorted((found, row))
        return None

    def __reduce__(self) -> Any:
        return KeyIndex, (self.keys, *self._arrays)


def index_of(keys: Store) -> KeyIndex:
    """Make the index of keys that are in memory, or in a file, already."""
    with MemoryWriter() as writer:
        make = write_index(hashes_of(keys), writer)
        return make(keys, writer.seal())


def factory_of(data: Mapping[Any, Any]) -> Callable[[], Any] | None:
    """A copy of the function that a mapping calls for keys that it lacks; None if those are a KeyError.

    TypeError if a store could not do the same.
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

    def __init__(self, rows: Any, index: KeyIndex) -> None:
        self.rows = rows
        self._index = index
        self.row_of: Callable[[object], int] = index.row_of  # -1 if there is none

    def __contains__(self, key: object) -> bool:
        return self.row_of(key) >= 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stored_keys)

    @property
    def stored_keys(self) -> Any:
        """The keys of all rows, as a store."""
        return self._index.keys

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def form(self) -> dict[str, Any]:
        """The kind of the mapping, as its file has it."""
        return {"rows": self.KIND}

    def describe(self) -> StoreDescription:
        """The description of the rows, under the kind of the mapping."""
        rows: StoreDescription = self.rows.describe()
        return replace(rows, kind=self.KIND)

    def to_arrow(self) -> Any:
        """The members, or a ``pyarrow.Table`` with ``key`` and ``value``."""
        return self.rows.to_arrow()

    def __repr__(self) -> str:
        return describe_rows(self, self.rows, self.describe())

    def __reduce__(self) -> Any:
        return type(self), (self.rows, self._index)


class MappingStore(KeyedStore, Mapping[_Key, _Value_co]):
    """A read-only mapping in shared memory, in the order of the dict that it was made from.

    Keys of types that are not known here, such as custom classes, are found through a dict, which each
    process makes of those keys when it first looks for such a one.

    Made from a ``Counter`` or ``defaultdict``, it answers as that does for a key that it does not have;
    nothing is inserted.

    Attributes:
        default_factory: Makes the values of keys that it lacks; None if it raises KeyError.
    """

    KIND = "mapping"

    def __init__(self, rows: Any, index: KeyIndex, factory: Callable[[], _Value_co] | None = None) -> None:
        """Read a mapping; the ``factory`` makes the values of keys that it lacks."""
        super().__init__(rows, index)
        self.stored_values: Any = rows.column("value") if len(rows) else rows
        self.value_at: Callable[[int], _Value_co] = self.stored_values.__getitem__
        self.default_factory = factory

    def plain(self) -> dict[_Key, _Value_co]:
        """A dict of the items, in this process's memory, without views at any depth."""
        return dict(zip(self, self.stored_values.plain(), strict=True))

    def __getitem__(self, key: _Key) -> _Value_co:
        row = self.row_of(key)
        if row >= 0:
            return self.value_at(row)
        if self.default_factory is None:
            raise KeyError(key)
        return self.default_factory()

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, or ``default`` as for a dict, also if ``[key]`` would make up a value."""
        row = self.row_of(key)
        return default if row < 0 else self.value_at(row)

    def __reversed__(self) -> Any:
        return reversed(self.stored_keys)

    def keys(self) -> KeysView[_Key]:
        """The keys, in order."""
        return _Keys(self)

    def items(self) -> ItemsView[_Key, _Value_co]:
        """The items, in order."""
        return _Items(self)

    def values(self) -> ValuesView[_Value_co]:
        """The values, in order."""
        return _Values(self)

    def copy(self) -> dict[_Key, _Value_co]:
        """A dict of the items, in this process's memory."""
        return dict(self.items())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """One object, as of a dict: NumPy would take the keys of a mapping for items of a list."""
        found = np.empty(1, object)
        found[0] = self
        return found.reshape(()).astype(object if dtype is None else dtype, copy=False)

    def __or__(self, other: Any) -> dict[Any, Any]:
        return self.copy() | dict(other) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> dict[Any, Any]:
        return dict(other) | self.copy() if isinstance(other, Mapping) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mapping):
            return NotImplemented
        alike = len(self) == len(other)
        return alike and all(key in other and equal(value, other[key]) for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]  # as of a dict

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with ``key`` and ``value``, also without any."""
        return super().to_arrow() if len(self) else pa.table({"key": pa.nulls(0), "value": pa.nulls(0)})

    @property
    def form(self) -> dict[str, Any]:
        """The kind of the mapping and its default factory, as its file has them."""
        return form_of_mapping(self.default_factory)

    def __reduce__(self) -> Any:
        return MappingStore, (self.rows, self._index, self.default_factory)


class _Keys(KeysView[Any]):
    _mapping: MappingStore

    def __reversed__(self) -> Any:
        return reversed(self._mapping)


class _Values(ValuesView[Any]):
    _mapping: MappingStore

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping.stored_values)

    def __reversed__(self) -> Any:
        return reversed(self._mapping.stored_values)


class _Items(ItemsView[Any, Any]):
    _mapping: MappingStore

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self._mapping, self._mapping.values(), strict=True)

    def __reversed__(self) -> Any:
        return zip(reversed(self._mapping), reversed(self._mapping.stored_values), strict=True)


def _as_set(name: str) -> Callable[..., Any]:
    """A method of sets, called on a set of the members."""

    def method(self: Any, *others: Iterable[Any]) -> Any:
        return getattr(set(self), name)(*others)

    return method


class SetStore(KeyedStore, AbstractSet[_Member_co]):
    """A read-only set in shared memory."""

    KIND = "set"

    @classmethod
    def _from_iterable(cls, values: Iterable[Any]) -> Any:
        """The result type of ``&``, ``|`` and ``-``: sets of the calling process."""
        return set(values)

    _METHODS = ("copy", "union", "intersection", "difference", "symmetric_difference", "issubset")
    copy, union, intersection, difference, symmetric_difference, issubset = map(_as_set, _METHODS)

    def issuperset(self, other: Iterable[Any]) -> bool:
        """See ``set.issuperset``."""
        return all(value in self for value in other)
