"""Kinds of lists, sets, and dicts of any keys."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.codec.array_kinds import Array
from shmloader.store.columns.buffers import ends_of, lists_to_arrow, mask_of, numbers_to_arrow
from shmloader.store.columns.kind import (
    Block,
    Kind,
    Origin,
    PythonType,
    Reader,
    United,
    items_of,
    kind_of,
    reader_of,
    type_name,
)
from shmloader.store.sealed_buffer import SharedBuffer


def list_over(items: Any, like: Any, size: int | None, *, is_large: bool) -> Any:
    """Lists of ``items``, at the places of those of other lists; of one ``size``, if there is one."""
    mask = mask_of(like)
    if size is not None:
        part = items[like.offset * size : (like.offset + len(like)) * size]
        return pa.FixedSizeListArray.from_arrays(part, size, mask=mask)
    if arrow.is_fixed_size_list(like.type):
        ends: Array = np.arange(like.offset, like.offset + len(like) + 1) * like.type.list_size
    else:
        ends = np.asarray(ends_of(like))
    make, code = (pa.LargeListArray, "i8") if is_large else (pa.ListArray, "i4")
    return make.from_arrays(numbers_to_arrow(ends.astype(code)), items, mask=mask)


def _numbers_in(items: Any) -> memoryview[Any] | None:
    """The numbers of a column of these, none of which is null."""
    found = items_of(items)
    return found if isinstance(found, memoryview) else None


class Lists(Kind, arrow=[pa.list_(pa.null()), pa.large_list(pa.null())]):
    """Lists, as the items of all, and the ends of each; of one length as `FixedLists`."""

    takes = (list,)
    is_leaf = False
    nests = True

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        lengths, items = _items_of(values, encoder, depth)
        if lengths[0] and (lengths == lengths[0]).all():
            return pa.FixedSizeListArray.from_arrays(items, int(lengths[0]))
        return lists_to_arrow(lengths, items)

    def getter(self, column: Any, origin: Origin) -> Reader:
        ends, numbers = ends_of(column), _numbers_in(column.values)
        if numbers is not None:
            return lambda i: numbers[ends[i] : ends[i + 1]].tolist()
        read = reader_of(column.values, origin)
        return lambda i: [*map(read, range(ends[i], ends[i + 1]))]

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

    def getter(self, column: Any, origin: Origin) -> Reader:
        size, numbers = column.type.list_size, _numbers_in(column.values)
        first = column.offset * size
        if numbers is not None:
            return lambda i: numbers[first + i * size : first + i * size + size].tolist()
        read = reader_of(column.values, origin)
        if size == 1:
            return lambda i: [read(first + i)]
        return lambda i: [*map(read, range(first + i * size, first + i * size + size))]

    def block(self, column: Any, memory: SharedBuffer | None) -> Block | None:
        size, values = column.type.list_size, column.values
        found = None if values.null_count else kind_of(values.type).block(values, memory)
        if found is None or not size or found.bit is not None or found.rows is not np.ndarray.tolist:
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
    is_leaf = False

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        return cls.around(any_lists(values, encoder, depth), kind=type(values[0]).__name__)

    def maker(self, origin: Origin) -> Callable[[Any], Any]:
        return {kind.__name__: kind for kind in self.takes}[self.parameters["kind"]]


class Maps(PythonType, name="dict", over=Lists):
    """Dicts of any keys, as lists of the structs ``key`` and ``value``; other dicts are `Records`."""

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        lengths, keys = _items_of(values, encoder, depth)
        items = encoder.encode([item for value in values for item in value.values()], depth + 1)
        return cls.around(
            lists_to_arrow(lengths, pa.StructArray.from_arrays([keys, items], ["key", "value"]))
        )

    def getter(self, column: Any, origin: Origin) -> Reader:
        ends, pairs = ends_of(column.storage), column.storage.values
        if not arrow.is_struct(pairs.type) or pairs.type.num_fields != 2:
            raise ValueError(f"dicts over {self.storage_type} mean nothing")
        key, value = (reader_of(pairs.field(number), origin) for number in (0, 1))

        def read(i: int) -> dict[Any, Any]:
            part = range(ends[i], ends[i + 1])
            return dict(zip(map(key, part), map(value, part), strict=True))

        return read
