"""Kinds of lists, sets, and dicts of any keys."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.codec.array_kinds import Array
from shmloader.store.columns.buffers import array_of_ends, ends_of, lists_to_arrow, mask_of, numbers_to_arrow
from shmloader.store.columns.key_hashes import hashes_of
from shmloader.store.columns.kind import (
    MOST_BUILT,
    Block,
    Kind,
    MakeView,
    Origin,
    PythonType,
    Reader,
    United,
    Weights,
    block_of,
    items_of,
    reader_of,
    storage_of,
    type_name,
    weights_at,
    weights_of,
)
from shmloader.store.sealed_buffer import SharedBuffer

_INDEX = [("hash", pa.uint32()), ("place", pa.uint32())]
_MOST_SCANNED = 8  # keys of a dict that are compared one by one


def list_over(items: Any, like: Any, size: int | None, *, is_large: bool) -> Any:
    """Lists of ``items``, at the places of those of other lists; of one ``size``, if there is one."""
    mask = mask_of(like)
    if size is not None:
        part = items[like.offset * size : (like.offset + len(like)) * size]
        return pa.FixedSizeListArray.from_arrays(part, size, mask=mask)
    make, code = (pa.LargeListArray, np.int64) if is_large else (pa.ListArray, np.int32)
    return make.from_arrays(numbers_to_arrow(array_of_ends(like).astype(code)), items, mask=mask)


class _Containers(Kind):
    """Kinds of containers of which heavy ones are views, where these are wanted.

    Attributes:
        builder: Gives the function that builds a row.
        item_weights: Gives the weight of each item that a row may hold.
        view: Gives the function that makes views of rows, and the weight up to which these are built.
    """

    builder: Callable[[Any, Origin], Reader]
    item_weights: Callable[[Any], Weights]
    view: Callable[[Any, Origin], tuple[MakeView, int]]

    def getter(self, column: Any, origin: Origin) -> Reader:
        if origin.views is None:
            return self.builder(column, origin)
        weights = self.weights(column) - 128
        if np.max(weights, initial=0) <= min(MOST_BUILT, origin.views.heaviest_dict):
            return self.builder(column, replace(origin, views=None))  # nor is anything inside of them heavy
        build, ends = self.builder(column, origin), ends_of(storage_of(column))
        make, heaviest = self.view(column, origin)
        heavy = frozenset(np.flatnonzero(np.broadcast_to(weights, len(column)) > heaviest).tolist())
        return lambda i: make(ends[i], ends[i + 1]) if i in heavy else build(i)

    def weights(self, column: Any) -> Weights:
        lists, items = storage_of(column), self.item_weights(column)
        if isinstance(items, int):
            size = getattr(lists.type, "list_size", None)
            return 128 + items * (np.diff(array_of_ends(lists)) if size is None else size)
        return 128 + np.diff(weights_at(np.concatenate([[0], np.cumsum(items)]), array_of_ends(lists)))


class Lists(_Containers, arrow=[pa.list_(pa.null()), pa.large_list(pa.null())]):
    """Lists, as the items of all, and the ends of each; of one length as `FixedLists`."""

    takes = (list,)
    nests = True

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        lengths, items = _items_of(values, encoder, depth)
        if lengths[0] and (lengths == lengths[0]).all():
            return pa.FixedSizeListArray.from_arrays(items, int(lengths[0]))
        return lists_to_arrow(lengths, items)

    def builder(self, column: Any, origin: Origin) -> Reader:
        ends, numbers = ends_of(column), items_of(column.values)
        if isinstance(numbers, memoryview):
            return lambda i: numbers[ends[i] : ends[i + 1]].tolist()
        read = reader_of(column.values, origin)
        return lambda i: [*map(read, range(ends[i], ends[i + 1]))]

    def item_weights(self, column: Any) -> Weights:
        return weights_of(column.values)

    def view(self, column: Any, origin: Origin) -> tuple[MakeView, int]:
        return origin.views.of_lists(column.values, origin), MOST_BUILT

    def form(self, kind: Any) -> Hashable:
        return "list"

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        items = united([part.values for part in parts])
        sizes = {getattr(part.type, "list_size", None) for part in parts}
        size = sizes.pop() if len(sizes) == 1 else None
        is_large = any(arrow.is_large_list(part.type) for part in parts)
        return [
            list_over(some, part, size, is_large=is_large) for part, some in zip(parts, items, strict=True)
        ]

    def describe(self, kind: Any) -> str:
        return f"list of {type_name(kind.value_type)}"


class FixedLists(Lists, arrow=[pa.list_(pa.null(), 1)]):
    """Lists of one length."""

    def builder(self, column: Any, origin: Origin) -> Reader:
        size, numbers = column.type.list_size, items_of(column.values)
        first = column.offset * size
        if isinstance(numbers, memoryview):

            def read_numbers(i: int) -> list[Any]:
                at = first + i * size  # quicker than two looks at a range
                return numbers[at : at + size].tolist()

            return read_numbers
        if size == 1:
            read = reader_of(column.values, origin)
            return lambda i: [read(first + i)]
        return super().builder(column, origin)

    def block(self, column: Any, memory: SharedBuffer | None) -> Block | None:
        size, found = column.type.list_size, block_of(column.values, memory)
        if found is None or not size or found.bit is not None or not found.has_python_numbers:
            return None
        items = found.items[column.offset * size : (column.offset + len(column)) * size]
        return found._replace(items=items.reshape(len(column), size, *items.shape[1:]), stacks=False)

    def describe(self, kind: Any) -> str:
        return f"list of {kind.list_size} {type_name(kind.value_type)}"


def _items_of(values: list[Any], encoder: Any, depth: int) -> tuple[Array, Any]:
    """The number of items of each value, and a column of the items of all."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    return lengths, encoder.encode(list(chain.from_iterable(values)), depth + 1)


def any_lists(values: list[Any], encoder: Any, depth: int) -> Any:
    """A column of lists, also where all are of one length."""
    return lists_to_arrow(*_items_of(values, encoder, depth))


class Sets(PythonType, name="set", over=Lists):
    """Sets or frozensets (``kind``), as lists."""

    takes = (set, frozenset)
    nests = True

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        return cls.around(any_lists(values, encoder, depth), kind=type(values[0]).__name__)


class Maps(_Containers, PythonType, name="dict", over=Lists):
    """Dicts of any keys, as lists of the structs ``key`` and ``value``; other dicts are `Records`.

    Where a dict is long, structs have an index as well: for the keys of each dict the hashes in ascending
    order, ``hash``, and the places in the dict that these are of, ``place``.
    """

    is_leaf = False

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        lengths, keys = _items_of(values, encoder, depth)
        items = encoder.encode([item for value in values for item in value.values()], depth + 1)
        fields = {"key": keys, "value": items}
        if lengths.max() > _MOST_SCANNED:
            fields |= _index_of(list(chain.from_iterable(values)), lengths)
        pairs = pa.StructArray.from_arrays(list(fields.values()), list(fields))
        return cls.around(lists_to_arrow(lengths, pairs))

    def check(self, column: Any) -> None:
        super().check(column)
        pairs = column.type.storage_type.value_type
        fields = [(one.name, one.type) for one in pairs] if arrow.is_struct(pairs) else []
        if [name for name, _ in fields[:2]] != ["key", "value"] or fields[2:] not in ([], _INDEX):
            raise ValueError(f"dicts over {self.storage_type} mean nothing")

    def builder(self, column: Any, origin: Origin) -> Reader:
        ends, pairs = ends_of(column.storage), column.storage.values
        key, value = (reader_of(pairs.field(number), origin) for number in (0, 1))

        def build(i: int) -> dict[Any, Any]:
            part = range(ends[i], ends[i + 1])
            return dict(zip(map(key, part), map(value, part), strict=True))

        return build

    def item_weights(self, column: Any) -> Weights:
        pairs = column.storage.values
        return weights_of(pairs.field(0)) + weights_of(pairs.field(1))

    def view(self, column: Any, origin: Origin) -> tuple[MakeView, int]:
        return origin.views.of_dicts(column.storage.values, origin), origin.views.heaviest_dict

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        if len({part.storage.values.type.num_fields for part in parts}) > 1:
            parts = list(map(_with_index, parts))
        return super().unite(parts, united)


def _with_index(column: Any) -> Any:
    """A column of dicts with an index of their keys."""
    lists, pairs = column.storage, column.storage.values
    if pairs.type.num_fields > 2:
        return column
    ends: Array = np.asarray(ends_of(lists))
    keys = list(map(reader_of(pairs.field(0), Origin()), range(ends[0], ends[-1])))
    begins = np.concatenate([[0], ends, [len(pairs)]])  # of all pairs, also those before and behind
    rest = [None] * int(ends[0]), [None] * (len(pairs) - int(ends[-1]))
    fields = {"key": pairs.field(0), "value": pairs.field(1)}
    fields |= _index_of([*rest[0], *keys, *rest[1]], np.diff(begins))
    whole = pa.StructArray.from_arrays(list(fields.values()), list(fields))
    return column.type.rewrap(list_over(whole, lists, None, is_large=arrow.is_large_list(lists.type)))


def _index_of(keys: list[Any], lengths: Array) -> dict[str, Any]:
    """The index of the keys of dicts with so many each."""
    hashes = hashes_of(keys).astype(np.uint32)  # those of keys without a hash lie anywhere
    owners = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((hashes, owners))
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
    columns = {"hash": hashes[order], "place": (order - begins).astype(np.uint32)}
    return {name: numbers_to_arrow(column) for name, column in columns.items()}
