"""Rows of one array or tensor: a leaf that is gathered with one call."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.codec.arrays import Array, array_of_tensor, kind_of_tensor
from shmloader.codec.layout import CODE_OF_NUMPY_DTYPE, DTYPES
from shmloader.sources.base import NotGathered, Rows, Source, make_output, within

_ARRAYS = (np.ndarray, np.memmap)


def _array_block(array: Array, dtype: torch.dtype) -> Source:
    """Rows of a C-contiguous array of a tensor's carrier dtype; ``dtype`` is the batch's."""
    shape = array.shape[1:]

    def gather(rows: Rows) -> torch.Tensor:
        rows = within(rows, len(array))
        out = make_output(len(rows), shape, dtype)
        # The bounds are checked. With mode="raise" NumPy would gather elsewhere first, and copy.
        array.take(rows, axis=0, out=array_of_tensor(out, array.dtype), mode="clip")
        return out

    return Source(gather)


def _strided_block(tensor: torch.Tensor) -> Source:
    """Rows of a tensor that is not contiguous."""

    def gather(rows: Rows) -> torch.Tensor:
        rows = within(rows, len(tensor))
        out = make_output(len(rows), tensor.shape[1:], tensor.dtype)
        return torch.index_select(tensor, 0, torch.from_numpy(rows), out=out)

    return Source(gather)


def is_array(dataset: object) -> bool:
    """Whether `block_of` may have a source for a dataset."""
    return type(dataset) in _ARRAYS or type(dataset) is torch.Tensor


def block_of(data: Any) -> Source:
    """The source for the rows of an ndarray or a tensor.

    Raises:
        NotGathered: If its rows, collated one by one, might give another result.
    """
    if type(data) is torch.Tensor:
        return _block_of_tensor(data)
    if type(data) in _ARRAYS:
        return _block_of_array(np.asarray(data).view(np.ndarray))
    raise NotGathered(
        f"a {type(data).__qualname__} may make its rows in a way of its own. Pass tensors of the class "
        "torch.Tensor itself (tensor.detach() of a Parameter)"
    )


def _block_of_tensor(tensor: torch.Tensor) -> Source:
    if tensor.requires_grad:
        raise NotGathered("a tensor requires grad, and so do its rows. Pass tensor.detach()")
    kind = kind_of_tensor(tensor)
    named = any(getattr(tensor, "names", ()))  # in the releases of torch that have named tensors
    if kind is None or not tensor.dim() or tensor.is_inference() or named:
        lazy = ", conjugated" if tensor.is_conj() else ""
        raise NotGathered(
            f"a tensor of {tensor.dtype}, {tensor.layout}, {tensor.dim()}-d{lazy}, on {tensor.device} cannot "
            "be gathered by rows. Pass a dense tensor on the CPU, of one dimension or more "
            "(tensor.to_dense(), tensor.cpu(), tensor.resolve_conj(); tensor.clone() if it was made in "
            "inference mode)"
        )
    if tensor.is_contiguous():
        return _array_block(array_of_tensor(tensor, kind.dtype), tensor.dtype)
    return _strided_block(tensor)


def _block_of_array(array: Array) -> Source:
    if not array.ndim or not array.flags.c_contiguous:
        raise NotGathered(
            f"the rows of an array of shape {array.shape}, strides {array.strides} are not contiguous. Pass "
            "np.ascontiguousarray(array)"
        )
    dtype = joined_dtype(array)
    if dtype is None:
        raise NotGathered(
            f"torch joins single rows of {array.dtype} to another dtype, or refuses them. Pass an array of a "
            "dtype that torch has, as a tensor (torch.from_numpy(array)) if it has one dimension"
        )
    return _array_block(array, dtype)


def joined_dtype(array: Array) -> torch.dtype | None:
    """The dtype that ``default_collate`` gives the rows of an array; None if it is not the array's own."""
    code = CODE_OF_NUMPY_DTYPE.get(array.dtype)
    if code is None:
        return None
    dtype = DTYPES[code].torch_dtype
    return dtype if array.ndim > 1 or _dtype_of_joined_scalars(array.dtype) is dtype else None


@functools.lru_cache(maxsize=64)
def _dtype_of_joined_scalars(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        joined: torch.Tensor = default_collate([np.zeros((), dtype)[()]] * 2)
    except (TypeError, ValueError, RuntimeError):
        return None
    return joined.dtype
