"""Views of large lists and dicts inside of rows: over the items of a column, at any depth.

A view costs a microsecond or two, whatever it holds; its items are read when they are asked for. A process
that is being started gets it by handle. Any other pickle of it, and any copy, is the list or dict that it
stands for: so do the samples of a worker arrive.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from typing import Any

from shmloader.store.base import Selection, Store
from shmloader.store.columns.buffers import numbers_of
from shmloader.store.columns.key_hashes import hash_of
from shmloader.store.columns.kind import takes_too
from shmloader.store.columns.lists import Lists, Maps
from shmloader.store.handles import register
from shmloader.store.mapping import MappingStore


class ListView(Selection):
    """A large list inside of a row."""

    def __getitem__(self, index: Any) -> Any:
        return self._store[self._rows[index]] if index.__class__ is int else super().__getitem__(index)

    def __copy__(self) -> Any:
        return list(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(list(self.plain()), memo)

    def __reduce__(self) -> Any:
        return list, (), None, iter(self.plain())


class Pairs:
    """The keys and values of all dicts of a column; hashes and places as their index where dicts are long."""

    def __init__(self, rows: Any) -> None:
        self.rows: Store = rows
        self.keys: Store = rows.column("key")
        self.values: Store = rows.column("value")
        pairs = rows.field(0)
        self.index: Any = None
        if pairs.type.num_fields > 2:
            index = pairs.field("hash"), pairs.field("place")
            self.index = [numbers_of(column, 1, "I", len(column)) for column in index]

    def __reduce__(self) -> Any:
        return Pairs, (self.rows,)


class DictView(MappingStore):
    """A large dict inside of a row."""

    def __init__(self, pairs: Pairs, part: range) -> None:
        self._pairs = pairs
        self._part = part
        self.default_factory = None

    def __len__(self) -> int:
        return len(self._part)

    @property
    def stored_keys(self) -> Any:
        """The keys, in order."""
        return Selection(self._pairs.keys, self._part)

    @property
    def rows(self) -> Any:
        """Records of each key and its value."""
        return Selection(self._pairs.rows, self._part)

    @property
    def stored_values(self) -> Any:
        """The values, in order."""
        return Selection(self._pairs.values, self._part)

    def row_of(self, key: object) -> int:
        """The place of a key, or -1."""
        pairs, begin, end = self._pairs, self._part.start, self._part.stop
        hashed = hash_of(key)
        if hashed is None or pairs.index is None:
            hash(key)  # a TypeError for a list, as of a dict
            return next((row for row, found in enumerate(self) if found is key or found == key), -1)
        hashes, places = pairs.index
        at = bisect_left(hashes, hashed, begin, end)
        while at < end and hashes[at] == hashed:
            place: int = places[at]
            if begin + place < end:  # else the index is of a damaged file
                found = pairs.keys[begin + place]
                if found is key or found == key:
                    return place
            at += 1
        return -1

    def value_at(self, row: int) -> Any:
        """The value in a place."""
        return self._pairs.values[self._part[row]]

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with ``key`` and ``value``."""
        return super().to_arrow().select(["key", "value"])

    def __copy__(self) -> Any:
        return dict(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.plain().items())


register(ListView, lambda view, _: (ListView, (view._store, view._rows)))  # noqa: SLF001 - of this module's
register(DictView, lambda view, _: (DictView, (view._pairs, view._part)))  # noqa: SLF001
takes_too(ListView, Lists)
takes_too(DictView, Maps)
