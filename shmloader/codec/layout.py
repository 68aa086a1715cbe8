"""Layout of a batch in its slot. Pure arithmetic: no memory is touched here.

A slot holds one batch::

    [ leaf 0 | leaf 1 | ... | header ]

Every leaf starts at a multiple of ``ALIGNMENT`` (a cache line, and enough for any SIMD load). The header
comes last because the number of leaves is known only when the batch has been collated; it is read by its
offset, which the worker's message carries::

    [ pickled structure | leaf table | bytes of the leaf table: u32 ]

The **leaf table** has one row for each leaf, in the order in which the structure refers to them.
"""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes; every leaf's offset in its slot is a multiple of this."""

TENSOR, ARRAY, BYTES = 0, 1, 2
"""Kinds of leaf: a dense CPU tensor, an ndarray, and raw bytes (storages, pickle buffers)."""

MOST_DIMENSIONS = 32
"""For tensors with their shape in the leaf table: NumPy 1 wraps no more, NumPy 2 twice as many."""


def align(nbytes: int) -> int:
    """Round up to the next multiple of ``ALIGNMENT``."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class DtypeCode(NamedTuple):
    """A dtype of torch as it travels: its number in the leaf table and its NumPy carrier."""

    torch_dtype: torch.dtype  # the tensor's dtype
    carrier: np.dtype[np.generic]  # a NumPy dtype of the same item size
    native: bool  # whether ``torch.from_numpy`` of the carrier has ``torch_dtype`` already


_NATIVE = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64".split()
_NATIVE += "float16 float32 float64 complex64 complex128".split()
# Dense dtypes that NumPy lacks. Dtypes that this torch lacks are left out, here and among the native ones.
_CARRIED = "bfloat16 complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
_CARRIED += ["float8_e8m0fnu"]


DTYPES = [DtypeCode(getattr(torch, name), np.dtype(name), True) for name in _NATIVE if hasattr(torch, name)]
_carried = [getattr(torch, name) for name in _CARRIED if hasattr(torch, name)]
DTYPES += [DtypeCode(dtype, np.dtype(f"u{dtype.itemsize}"), False) for dtype in _carried]
"""Dtype codes are positions in this list; both sides of a pipe run the same version of it."""

ITEM_NBYTES = [code.carrier.itemsize for code in DTYPES]
"""Bytes of an item, by dtype code."""

CODE_OF_TORCH_DTYPE = {code.torch_dtype: i for i, code in enumerate(DTYPES)}
CODE_OF_NUMPY_DTYPE = {code.carrier: i for i, code in enumerate(DTYPES) if code.native}

LONE_LEAF = pickle.dumps(pickle.PickleBuffer(bytearray(1)), 5, buffer_callback=lambda _: None)
"""The pickled structure of a batch that is one leaf. Neither side calls pickle for it."""


class Leaf(NamedTuple):
    """One leaf of a batch."""

    kind: int  # ``TENSOR``, ``ARRAY`` or ``BYTES``
    code: int  # position in ``DTYPES``
    offset: int  # bytes from the slot's start
    shape: tuple[int, ...]  # sizes in items; row-major


def pack_row(kind: int, code: int, offset: int, shape: Sequence[int]) -> bytes:
    """A row of the table, of i64: its head (see `unpack_head`), the leaf's offset, its shape."""
    ndim = len(shape)
    return _row_packer(ndim)(ndim << 16 | kind << 8 | code, offset, *shape)


@functools.cache
def _row_packer(ndim: int) -> Callable[..., bytes]:
    return struct.Struct(f"{2 + ndim}q").pack


def rows_of(table: bytes) -> list[tuple[int, int, list[int]]]:
    """Head, offset and shape of each leaf of a table: as `unpack_table`, without an object for each."""
    numbers, rows, begin = memoryview(table).cast("q").tolist(), [], 0
    while begin < len(numbers):
        head = numbers[begin]
        end = begin + 2 + (head >> 16)
        rows.append((head, numbers[begin + 1], numbers[begin + 2 : end]))
        begin = end
    return rows


def unpack_head(head: int) -> tuple[int, int]:
    """Kind and dtype code of a leaf; all leaves of one kind, code and number of dimensions share a head."""
    return head >> 8 & 255, head & 255


def unpack_table(table: bytes) -> list[Leaf]:
    """The leaves of a table."""
    return [Leaf(*unpack_head(head), offset, tuple(shape)) for head, offset, shape in rows_of(table)]


NO_LEAVES = (0).to_bytes(4, "little")
"""The end of a header without leaves."""


def join_header(structure: Iterable[bytes], rows: Iterable[bytes]) -> bytes:
    """A header of a pickled structure, in pieces, and packed leaves."""
    table = b"".join(rows)
    return b"".join((*structure, table, len(table).to_bytes(4, "little")))


def table_of(header: bytes) -> bytes:
    """The leaf table of a header. The structure needs no length: its pickle has an end of its own."""
    return header[-4 - int.from_bytes(header[-4:], "little") : -4]
