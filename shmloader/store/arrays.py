"""Kinds of ndarrays and tensors that columns can hold.

Imports no pyarrow: workers without stores use this too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES

Array = np.ndarray[Any, Any]

PLAIN_KINDS = "biufcmMSU"
"""Of dtypes that their strings tell."""


class ArrayKind(NamedTuple):
    """The properties that all arrays of one column share; for tensors the dtype is that of the NumPy carrier.

    Attributes:
        dtype: NumPy's.
        ndim: Number of dimensions.
        torch_dtype: For tensors, else None.
    """

    dtype: np.dtype[Any]
    ndim: int
    torch_dtype: torch.dtype | None = None


def kind_of_array(array: Array) -> ArrayKind | None:
    """The kind of column that an ndarray can be in; None if in no column of arrays."""
    return ArrayKind(array.dtype, array.ndim) if has_plain_dtype(array) else None


_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def has_plain_dtype(array: Any) -> bool:
    """Whether the dtype of an array or scalar is told by its string."""
    return array.dtype.kind in PLAIN_KINDS and array.dtype.itemsize > 0 and array.dtype.names is None


def kind_of_tensor(tensor: torch.Tensor) -> ArrayKind | None:
    """The kind of column that a tensor can be in; None if in no column of arrays."""
    code = CODE_OF_TORCH_DTYPE.get(tensor.dtype)
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    if code is None or not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return None
    return ArrayKind(DTYPES[code].carrier, tensor.dim(), tensor.dtype)


def array_of_tensor(tensor: torch.Tensor, carrier: np.dtype[Any]) -> Array:
    """A tensor's items as a C-ordered ndarray of its carrier dtype; a view where it is contiguous."""
    tensor = tensor.contiguous()
    if DTYPES[CODE_OF_TORCH_DTYPE[tensor.dtype]].native:
        return tensor.numpy()
    # By a dtype of the same size: to any other, a stride is in the way that one item may have.
    array: Array = tensor.view(_SAME_SIZE[carrier.itemsize]).numpy().view(carrier)
    return array
