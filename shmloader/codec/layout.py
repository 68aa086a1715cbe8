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

import pickle
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes; every leaf's offset in its slot is a multiple of this."""

TENSOR, ARRAY, BYTES = 0, 1, 2
"""Kinds of leaf: a dense CPU tensor, an ndarray, and raw bytes (storages, pickle buffers)."""


def align(nbytes: int) -> int:
    """Round up to the next multiple of ``ALIGNMENT``."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class DtypeCode(NamedTuple):
    """A dtype of torch as it travels: its number in the leaf table and its NumPy carrier.

    Attributes:
        torch_dtype: The tensor's dtype.
        carrier: A NumPy dtype of the same item size.
        native: Whether ``torch.from_numpy`` of the carrier has ``torch_dtype`` already.
    """

    torch_dtype: torch.dtype
    carrier: np.dtype[np.generic]
    native: bool


_NATIVE = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64".split()
_NATIVE += "float16 float32 float64 complex64 complex128".split()
# Dense dtypes that NumPy lacks; those that this torch does not have are left out.
_CARRIED = "bfloat16 complex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
_CARRIED += ["float8_e8m0fnu"]


def _dtype_codes() -> list[DtypeCode]:
    codes = [DtypeCode(getattr(torch, n), np.dtype(n), True) for n in _NATIVE if hasattr(torch, n)]
    for name in _CARRIED:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            codes.append(DtypeCode(dtype, np.dtype(f"u{dtype.itemsize}"), False))
    return codes


DTYPES = _dtype_codes()
"""Dtype codes are positions in this list; both sides of a pipe run the same version of it."""

CODE_OF_TORCH_DTYPE = {code.torch_dtype: i for i, code in enumerate(DTYPES)}
CODE_OF_NUMPY_DTYPE = {code.carrier: i for i, code in enumerate(DTYPES) if code.native}

LONE_LEAF = pickle.dumps(pickle.PickleBuffer(bytearray(1)), 5, buffer_callback=lambda _: None)
"""The pickled structure of a batch that is one leaf. Neither side calls pickle for it."""

_ROW = struct.Struct("<BBxxIq")
"""Kind, dtype code, number of dimensions, offset; the sizes of the dimensions follow, as i64."""


class Leaf(NamedTuple):
    """One leaf of a batch.

    Attributes:
        kind: ``TENSOR``, ``ARRAY`` or ``BYTES``.
        code: Position in ``DTYPES``.
        offset: Bytes from the slot's start.
        shape: Sizes in items; row-major.
    """

    kind: int
    code: int
    offset: int
    shape: tuple[int, ...]

    def pack(self) -> bytes:
        """The leaf's row in the table."""
        ndim = len(self.shape)
        return struct.pack(f"<BBxxIq{ndim}q", self.kind, self.code, ndim, self.offset, *self.shape)


def unpack_table(table: bytes) -> list[Leaf]:
    """Read the rows that `Leaf.pack` wrote, one behind the other."""
    leaves, begin = [], 0
    while begin < len(table):
        kind, code, ndim, offset = _ROW.unpack_from(table, begin)
        begin += _ROW.size
        leaves.append(Leaf(kind, code, offset, struct.unpack_from(f"<{ndim}q", table, begin)))
        begin += 8 * ndim
    return leaves


def join_header(structure: Iterable[bytes], rows: Iterable[bytes]) -> bytes:
    """A header of a pickled structure, in pieces, and packed leaves."""
    table = b"".join(rows)
    return b"".join((*structure, table, len(table).to_bytes(4, "little")))


def table_of(header: bytes) -> bytes:
    """The leaf table of a header. The structure needs no length: its pickle has an end of its own."""
    return header[-4 - int.from_bytes(header[-4:], "little") : -4]
