"""Columns of str and bytes: Arrow's buffers of offsets and characters."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.columns import Scope, arrow_buffer, if_valid
from shmloader.store.parts import first_offset
from shmloader.store.scalars import append_validity

_MOST_SMALL_NBYTES = (1 << 31) - 1


class Strings(NamedTuple):
    """str (as UTF-8) or bytes, with or without None.

    Attributes:
        rows: How many.
        text: Whether they are str.
        code: Type of the offsets: ``i`` (32 bits), or ``q`` beyond 2 GiB.
        offsets: Of the ``rows + 1`` offsets.
        data: Of the first byte.
        nbytes: Of all characters.
        validity: Of the bitmap, or -1.
    """

    rows: int
    text: bool
    code: str
    offsets: int
    data: int
    nbytes: int
    validity: int

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        ends = scope.items(self.offsets, self.rows + 1, self.code)
        begin = scope.bind(self.data - first_offset(scope.memory))
        value = f"{scope.bind(scope.memory.mapping)}[{begin} + {ends}[i] : {begin} + {ends}[i + 1]]"
        if self.text:
            value += ".decode()"
        return if_valid(scope, self.validity, self.rows, value)

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        small = self.code == "i"
        if self.text:
            kind = pa.string() if small else pa.large_string()
        else:
            kind = pa.binary() if small else pa.large_binary()
        offsets_nbytes = (self.rows + 1) * np.dtype(self.code).itemsize
        bits = arrow_buffer(memory, self.validity, (self.rows + 7) // 8)
        buffers = [bits, arrow_buffer(memory, self.offsets, offsets_nbytes)]
        return pa.Array.from_buffers(
            kind, self.rows, [*buffers, arrow_buffer(memory, self.data, self.nbytes)]
        )


def append_offsets(lengths: Any, out: BufferBuilder) -> tuple[str, int]:
    """Append the running sums of lengths, from 0 on.

    Returns:
        The type of the offsets (``i`` or ``q``) and where they lie.
    """
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if ends[-1] <= _MOST_SMALL_NBYTES:
        return "i", out.append(ends.astype(np.int32))
    return "q", out.append(ends)


def encode_strings(values: list[Any], text: bool, out: BufferBuilder, nullable: bool) -> Strings:
    """Encode str or bytes, with None if ``nullable``; UnicodeEncodeError for lone surrogates."""
    validity = append_validity(values, out) if nullable else -1
    if nullable:
        values = [value or (b"", "")[text] for value in values]
    if text:
        import pyarrow as pa

        # One call for all of them; the encoding itself would be a call per string.
        arrow = pa.array(values, pa.large_string())
        _, ends, data = arrow.buffers()
        lengths = np.diff(np.frombuffer(ends, np.int64, len(values) + 1))
        views = [memoryview(data)] if data is not None else []
    else:
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        views = values
    code, offsets = append_offsets(lengths, out)
    nbytes = int(sum(map(len, views)))
    return Strings(len(values), text, code, offsets, out.append_all(views), nbytes, validity)
