"""Columns whose rows are of several kinds: each kind is a column of its own, as in Arrow's dense union."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.columns import Column, Scope, arrow_buffer

MOST_KINDS = 127
"""Kinds that one column may have: as many as Arrow's union."""


class Union(NamedTuple):
    """Rows of several kinds.

    Attributes:
        rows: How many.
        tags: Offset of the kind of each row, one byte.
        places: Offset of each row's number within its kind, 32 bits.
        kinds: A column for each kind.
    """

    rows: int
    tags: int
    places: int
    kinds: tuple[Column, ...]

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        tags = scope.items(self.tags, self.rows, "b")
        places = scope.items(self.places, self.rows, "i")
        readers = ", ".join(map(scope.reader, self.kinds))
        return f"({readers})[{tags}[i]]({places}[i])"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        children = [kind.to_arrow(memory) for kind in self.kinds]
        tags = _arrow_numbers(memory, pa.int8(), self.rows, self.tags)
        places = _arrow_numbers(memory, pa.int32(), self.rows, self.places)
        return pa.UnionArray.from_dense(tags, places, children)


def _arrow_numbers(memory: SharedBuffer, kind: Any, rows: int, offset: int) -> Any:
    import pyarrow as pa

    nbytes = rows * kind.bit_width // 8
    return pa.Array.from_buffers(kind, rows, [None, arrow_buffer(memory, offset, nbytes)])


def encode_union(
    values: list[Any],
    keys: Sequence[Hashable],
    encode_kind: Callable[[Any, list[Any]], Column],
    out: BufferBuilder,
) -> Column:
    """Encode values by kind.

    Args:
        values: The values.
        keys: The kind of each; at most ``MOST_KINDS`` different ones.
        encode_kind: Called with a kind and its values.
        out: Where to.

    Returns:
        A union, or the one kind's column where there is but one.
    """
    tag_of = {key: tag for tag, key in enumerate(dict.fromkeys(keys))}
    if len(tag_of) == 1:
        return encode_kind(keys[0], values)
    tags = np.fromiter(map(tag_of.__getitem__, keys), np.int8, len(keys))
    places = np.empty(len(keys), np.int32)
    kinds = []
    for key, tag in tag_of.items():
        chosen = tags == tag
        group = list(compress(values, chosen.tolist()))
        places[chosen] = np.arange(len(group), dtype=np.int32)
        kinds.append(encode_kind(key, group))
    return Union(len(values), out.append(tags), out.append(places), tuple(kinds))
