"""Kinds of ndarrays and tensors that share a dtype, and tensors as the ndarrays that carry their items."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor

Array = np.ndarray[Any, Any]


class ArrayKind(NamedTuple):
    """The properties that all arrays of one column share."""

    dtype: np.dtype[Any]  # of tensors that of the NumPy carrier
    ndim: int
    torch_dtype: torch.dtype | None = None  # of tensors


def kind_of_array(array: Array) -> ArrayKind | None:
    """The kind of column that an ndarray fits in; None if it fits in no column of arrays."""
    return ArrayKind(array.dtype, array.ndim) if is_plain(array.dtype) else None


_OF_OTHERS = 2  # the ``isbuiltin`` of dtypes that other libraries add, such as a float8


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Whether a string identifies a dtype: numbers, times and texts that have bytes, of NumPy's own."""
    return dtype.kind in "biufcmMSU" and dtype.itemsize > 0 and dtype.isbuiltin != _OF_OTHERS


_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def kind_of_tensor(tensor: torch.Tensor) -> ArrayKind | None:
    """The kind of column that a tensor fits in; None if it fits in no column of arrays."""
    code = CODE_OF_TORCH_DTYPE.get(tensor.dtype)
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    if code is None or not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return None
    return ArrayKind(DTYPES[code].carrier, tensor.dim(), tensor.dtype)


def wrap_array(array: Array, kind: ArrayKind) -> Any:
    """The object that a stored array stands for: itself, or a tensor over its memory."""
    return array if kind.torch_dtype is None else wrap_tensor(array, kind.torch_dtype)


def array_of_tensor(tensor: torch.Tensor, carrier: np.dtype[Any]) -> Array:
    """A tensor's items as a C-ordered ndarray of its carrier dtype; a view if it is contiguous."""
    tensor = tensor.contiguous()
    if DTYPES[CODE_OF_TORCH_DTYPE[tensor.dtype]].native:
        return tensor.numpy()
    # By a dtype of the same size: to any other, a stride is in the way that one item may have.
    array: Array = tensor.view(_SAME_SIZE[carrier.itemsize]).numpy().view(carrier)
    return array
