"""Arrow arrays over the memory of NumPy's arrays and of bytes; buffers of Arrow arrays as memoryviews.

``pyarrow.array`` would work, but imports pandas if that is installed, for 0.2 s and 30 MiB.

Memoryviews and NumPy check bounds, and `ends_of` those of slices of an mmap. So buffers of a damaged file can
give wrong values or an exception, but no access beyond the memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from shmloader.codec.array_kinds import Array

_OCTETS, _TEXTS = (pa.binary(), pa.large_binary()), (pa.string(), pa.large_string())


def numbers_to_arrow(items: Array, kind: Any = None, *, missing: Array | None = None) -> Any:
    """A column of the items of a flat array; where that is contiguous, over its memory.

    Items have the size of those of ``kind``, the dtype's own if none is given. ``missing`` rows are null.
    """
    kind = pa.from_numpy_dtype(items.dtype) if kind is None else kind
    octets = _bits(items) if pa.types.is_boolean(kind) else np.ascontiguousarray(items).view(np.uint8)
    valid = None if missing is None else pa.py_buffer(_bits(~missing))
    return pa.Array.from_buffers(kind, len(items), [valid, pa.py_buffer(octets)])


def texts_to_arrow(values: list[str]) -> Any:
    """A column of texts; UnicodeEncodeError if one has surrogates."""
    joined = "".join(values)
    if joined.isascii():
        return _of_lengths(map(len, values), joined.encode(), _TEXTS)
    del joined
    return octets_to_arrow(list(map(str.encode, values)), _TEXTS)


def octets_to_arrow(values: list[bytes], kinds: Any = _OCTETS) -> Any:
    """A column of bytes, or of texts in UTF-8."""
    file = io.BytesIO()  # bytes.join is slower, and takes 80 bytes for each value
    file.writelines(values)
    return _of_lengths(map(len, values), file.getbuffer(), kinds)


def _of_lengths(lengths: Iterable[int], octets: Any, kinds: Any) -> Any:
    """Bytes or texts of these lengths: of the second kind where they are too long for the first."""
    offsets = offsets_of_lengths(np.fromiter(lengths, np.int64))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(octets)]
    return pa.Array.from_buffers(kinds[offsets.itemsize > 4], len(offsets) - 1, buffers)


def lists_to_arrow(lengths: Array, items: Any) -> Any:
    """A column of lists of these lengths, over the items of all."""
    offsets = offsets_of_lengths(lengths)
    make = pa.ListArray if offsets.itemsize == 4 else pa.LargeListArray
    return make.from_arrays(numbers_to_arrow(offsets), items)


def offsets_of_lengths(lengths: Array) -> Array:
    """The offsets of lists of these lengths, and the end of the last one; int64 only if need be."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets if offsets[-1] >= 1 << 31 else offsets.astype(np.int32)


def _bits(flags: Array) -> Array:
    return np.packbits(flags, bitorder="little")


def mask_of(column: Any) -> Any:
    """The rows of a column that are null; None if none are."""
    return column.is_null() if column.null_count else None


def octets_of(array: Any, number: int) -> memoryview[Any]:
    """A buffer of an Arrow array as bytes; empty if the array has none."""
    buffer = array.buffers()[number]
    return memoryview(b"" if buffer is None else buffer).cast("B")


def bits_of(array: Any, number: int) -> Array:
    """The bytes of a buffer that have the bits of an array's rows: that of the first at ``offset & 7``."""
    return np.asarray(octets_of(array, number))[array.offset >> 3 : (array.offset + len(array) + 7) >> 3]


def numbers_of(array: Any, buffer: int, code: str, count: int) -> memoryview[Any]:
    """``count`` numbers of a buffer, from the array's first row on."""
    octets, size = octets_of(array, buffer), np.dtype(code).itemsize
    whole: memoryview[Any] = octets[: len(octets) // size * size].cast(code)  # type: ignore[call-overload]
    return whole[array.offset : array.offset + count]


def ends_of(column: Any) -> memoryview[int] | range:
    """The offsets at which the texts or lists of a column begin, and the one at which the last ends.

    Memory is sliced by these, so it is an error if they do not ascend. Arrow's ``validate`` sees the
    first and the last; with ``full=True`` it reads the texts too, which may be larger than memory.
    """
    if pa.types.is_fixed_size_list(column.type):
        size, first, rows = column.type.list_size, column.offset, len(column)
        if not size:
            return memoryview(bytes(8 * (rows + 1))).cast("q")
        return range(first * size, (first + rows + 1) * size, size)
    ends = numbers_of(column, 1, "q" if str(column.type).startswith("large") else "i", len(column) + 1)
    array = np.asarray(ends)
    if (array[1:] < array[:-1]).any():
        raise ValueError(f"the offsets of a column of {column.type} do not ascend")
    return ends


def array_of_ends(column: Any) -> Array:
    """See `ends_of`; as int64, since products of lengths are made of them."""
    ends = ends_of(column)
    if isinstance(ends, range):  # which NumPy would go through number by number
        return np.arange(ends.start, ends.stop, ends.step, dtype=np.int64)
    return np.asarray(ends).astype(np.int64, copy=False)
