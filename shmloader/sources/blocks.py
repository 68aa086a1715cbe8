"""Rows of one array or tensor: a leaf that is gathered with one call."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.codec.array_kinds import Array, array_of_tensor, kind_of_tensor
from shmloader.codec.layout import CODE_OF_NUMPY_DTYPE, CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.indices.packed_indices import Run
from shmloader.sources.base import Gather, NotGathered, Rows, Source, array_of, make_output, within

_ARRAYS = (np.ndarray, np.memmap)


def _array_block(array: Array, dtype: torch.dtype) -> Gather:
    """Rows of a C-contiguous array of a tensor's carrier dtype; ``dtype`` is the batch's."""
    shape = array.shape[1:]

    def gather(rows: Rows) -> torch.Tensor:
        rows = within(rows, len(array))
        out = make_output(len(rows), shape, dtype)
        # The bounds are checked. With mode="raise" NumPy would gather elsewhere first, and copy.
        array.take(rows, axis=0, out=array_of_tensor(out, array.dtype), mode="clip")
        return out

    return gather


def is_array(dataset: object) -> bool:
    """Whether `block_of` may have a source for a dataset."""
    return type(dataset) in _ARRAYS or type(dataset) is torch.Tensor


def block_of(data: Any, *, in_worker: bool) -> Source:
    """The source for the rows of an ndarray or a tensor; `NotGathered` if torch might join them otherwise.

    Without workers, the program may change it at any time: so it is looked at for each batch.
    """
    if type(data) is torch.Tensor:
        if in_worker:
            return Source(_block_of_tensor(data))
        _check_rows(data)
        return Source(functools.partial(_rows_of_tensor, data))
    if type(data) in _ARRAYS:
        array, dtype = _array_of_rows(data)
        if in_worker:
            return Source(_array_block(array, dtype))
        return Source(lambda rows: copied(_array_of_rows(data)[0].take(array_of(rows), axis=0)))
    raise NotGathered(
        f"a {type(data).__qualname__} may make its rows in a way of its own. Pass tensors of the class "
        "torch.Tensor itself (tensor.detach() of a Parameter)"
    )


def copied(array: Array) -> torch.Tensor:
    """An array as a new tensor, in memory of torch's own: what NumPy has seen could not be resized."""
    tensor = torch.tensor(array)
    return tensor if array.size else tensor.new_empty(array.shape)  # an empty array's strides would stay


def _block_of_tensor(tensor: torch.Tensor) -> Gather:
    kind = None if tensor.is_inference() else kind_of_tensor(tensor)
    if kind is None or not _is_of_rows(tensor):
        raise _refused(tensor)
    if tensor.is_contiguous():
        return _array_block(array_of_tensor(tensor, kind.dtype), tensor.dtype)

    def gather(rows: Rows) -> torch.Tensor:
        rows = within(rows, len(tensor))
        out = make_output(len(rows), tensor.shape[1:], tensor.dtype)
        return torch.index_select(tensor, 0, torch.from_numpy(rows), out=out)

    return gather


def _rows_of_tensor(tensor: torch.Tensor, rows: Rows | Run) -> torch.Tensor:
    """Rows in memory of torch's own, from any device. No array is made of the tensor: it may be resized."""
    _check_rows(tensor)
    if type(rows) is Run and tensor.is_cpu and tensor.is_contiguous():
        return tensor.narrow_copy(0, rows.begin, rows.end - rows.begin)  # in half the time of `index_select`
    rows = array_of(rows)
    if tensor.is_cpu:
        return tensor.index_select(0, torch.from_numpy(rows))
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotGathered("the indices cannot be copied to the device while its stream is captured")
    index = torch.from_numpy(within(rows, len(tensor)))  # other devices raise for a wrong one too late
    return tensor.index_select(0, index.to(tensor.device))


_facts = operator.attrgetter("dtype", "layout", "is_nested", "requires_grad")
_PLAIN = {(dtype, torch.strided, False, False) for dtype in CODE_OF_TORCH_DTYPE}
_has_names: Any = getattr(torch.Tensor, "has_names", None)  # newer releases of torch have no names


def _check_rows(tensor: torch.Tensor) -> None:
    plain = type(tensor) is torch.Tensor and _facts(tensor) in _PLAIN
    if not plain or not _is_of_rows(tensor):
        raise _refused(tensor)
    # torch joins the rows to a contiguous tensor, but not those of images in ``channels_last``.
    if tensor.dim() > 3 and tensor.stride()[1:] != torch.empty(tensor.shape[1:], device="meta").stride():
        raise _refused(tensor)


def _is_of_rows(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a first dimension, and no names."""
    return tensor.dim() > 0 and not (_has_names and _has_names(tensor))


def _refused(tensor: torch.Tensor) -> NotGathered:
    if tensor.requires_grad:
        return NotGathered("a tensor requires grad, and so do its rows. Pass tensor.detach()")
    lazy = ", conjugated" if tensor.is_conj() else ""
    return NotGathered(
        f"a tensor of {tensor.dtype}, {tensor.layout}, {tensor.dim()}-d{lazy}, on {tensor.device} cannot "
        "be gathered by rows. Pass a dense tensor on the CPU, of one dimension or more "
        "(tensor.to_dense(), tensor.cpu(), tensor.resolve_conj(); tensor.clone() if it was made in "
        "inference mode)"
    )


def _array_of_rows(data: Array) -> tuple[Array, torch.dtype]:
    """An array or memmap as an ndarray, and the dtype of its batches."""
    array: Array = np.asarray(data).view(np.ndarray)
    if not array.ndim or not array.flags.c_contiguous:
        raise NotGathered(
            f"the rows of an array of shape {array.shape}, strides {array.strides} are not contiguous. Pass "
            "np.ascontiguousarray(array)"
        )
    dtype = joined_dtype(array.dtype, array.ndim)
    if dtype is None:
        raise NotGathered(
            f"torch joins single rows of {array.dtype} to another dtype, or refuses them. Pass an array of a "
            "dtype that torch has, as a tensor (torch.from_numpy(array)) if it has one dimension"
        )
    return array, dtype


@functools.lru_cache(maxsize=64)
def joined_dtype(dtype: np.dtype[Any], ndim: int) -> torch.dtype | None:
    """The dtype that ``default_collate`` gives an array of rows; None if it is not the array's own."""
    code = CODE_OF_NUMPY_DTYPE.get(dtype)
    if code is None or ndim > 1:
        return None if code is None else DTYPES[code].torch_dtype
    try:
        joined: torch.Tensor = default_collate([np.zeros((), dtype)[()]] * 2)
    except (TypeError, ValueError, RuntimeError):
        return None
    return joined.dtype if joined.dtype is DTYPES[code].torch_dtype else None
