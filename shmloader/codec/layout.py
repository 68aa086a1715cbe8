"""Where leaves lie in a slot. Pure arithmetic: no memory is touched here.

A slot holds one batch::

    [ leaf 0 | leaf 1 | ... | header ]

Every leaf starts at a multiple of ``ALIGNMENT`` (a cache line, and enough for any SIMD load). The header
comes last because the number of leaves is known only when the batch has been collated; it is read by its
offset, which the worker's message carries.

The **leaf table** lists the leaves in the order in which the batch's structure refers to them.
"""

from __future__ import annotations

import pickle
from typing import NamedTuple

import numpy as np
import torch

ALIGNMENT = 64
"""Bytes; every leaf's offset in its slot is a multiple of this."""

TENSOR, ARRAY, BYTES, REST = 0, 1, 2, 3
"""Kinds of leaf: a dense CPU tensor, an ndarray, and raw bytes (storages, pickle buffers). ``REST`` stands
for an object without a leaf, whose pickle follows the structure's."""


def align(nbytes: int) -> int:
    """Round up to the next multiple of ``ALIGNMENT``."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


class DtypeCode(NamedTuple):
    """How a dtype of torch travels: its number in the leaf table and its NumPy carrier.

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


class Leaf(NamedTuple):
    """One entry of a leaf table.

    Attributes:
        kind: ``TENSOR``, ``ARRAY``, ``BYTES`` or ``REST``.
        code: Position in ``DTYPES``.
        offset: Bytes from the slot's start.
        shape: Sizes in items; row-major.
    """

    kind: int
    code: int
    offset: int
    shape: tuple[int, ...]


def pack_leaves(leaves: list[Leaf]) -> bytes:
    """Write a leaf table: short, since it lies in the slot, and quick to write in one call."""
    return pickle.dumps([tuple(leaf) for leaf in leaves], 5)


def unpack_leaves(packed: bytes) -> list[Leaf]:
    """Read what `pack_leaves` wrote."""
    return [Leaf._make(row) for row in pickle.loads(packed)]
