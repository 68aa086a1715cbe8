"""Columns of values of varying length: lists, longer tuples, and dicts whose keys vary."""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.columns import Column, Encoder, NoArrowTypeError, Scope, arrow_buffer
from shmloader.store.scalars import Numbers
from shmloader.store.strings import append_offsets


class Lists(NamedTuple):
    """lists (or tuples) of any length: the items of all rows in one column, and where each row ends.

    Attributes:
        rows: How many.
        kind: ``list`` or ``tuple``.
        code: Type of the offsets, ``i`` or ``q``.
        offsets: Of the ``rows + 1`` offsets.
        items: The items of all rows, one after the other.
    """

    rows: int
    kind: type
    code: str
    offsets: int
    items: Column

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        ends = scope.items(self.offsets, self.rows + 1, self.code)
        items = self.items
        if isinstance(items, Numbers) and items.validity < 0:
            value = f"{scope.items(items.offset, items.rows, items.code)}[{ends}[i] : {ends}[i + 1]].tolist()"
        else:
            value = f"[*map({scope.reader(items)}, range({ends}[i], {ends}[i + 1]))]"
        return f"({value})" if self.kind is list else f"(*{value}, )"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        small = self.code == "i"
        nbytes = (self.rows + 1) * np.dtype(self.code).itemsize
        items = self.items.to_arrow(memory)
        kind = pa.list_(items.type) if small else pa.large_list(items.type)
        buffers = [None, arrow_buffer(memory, self.offsets, nbytes)]
        return pa.Array.from_buffers(kind, self.rows, buffers, children=[items])


def encode_lists(values: list[Any], kind: type, encoder: Encoder) -> Lists:
    """Encode lists or tuples."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    code, offsets = append_offsets(lengths, encoder.out)
    items = encoder.encode(list(chain.from_iterable(values)))
    return Lists(len(values), kind, code, offsets, items)


class Maps(NamedTuple):
    """dicts whose keys vary, or are not str: a list of keys and a list of values."""

    rows: int
    keys: Lists
    items: Lists

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        keys, items = self.keys.expression(scope), self.items.expression(scope)
        return f"{scope.bind(dict)}({scope.bind(zip)}({keys}, {items}))"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        raise NoArrowTypeError("dicts whose keys differ from row to row are not given to Arrow")


def encode_maps(values: list[dict[Any, Any]], encoder: Encoder) -> Maps:
    """Encode any dicts."""
    keys = encode_lists(list(map(list, values)), list, encoder)
    items = encode_lists([list(value.values()) for value in values], list, encoder)
    return Maps(len(values), keys, items)
