"""Handlers of leaves: one for each type of object whose memory travels in the slot.

A handler is called by the pickler for every object of its type. It adds the object's memory as a leaf, and
returns what the pickler is to write in the object's place (a reduction, as ``__reduce__`` returns): a call
that puts the object together again around the placeholder of that leaf. In the main process the placeholder
is the leaf, wrapped as its kind says: a tensor for ``TENSOR``, an ndarray for ``ARRAY``, a memoryview for
``BYTES``.
The pickler must meet the placeholder before another leaf is added: their order tells which row is whose.

A type is added by one function in `HANDLERS`; a dtype by its name in `codec.layout`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shmloader.codec.layout import (
    ARRAY,
    BYTES,
    CODE_OF_NUMPY_DTYPE,
    CODE_OF_TORCH_DTYPE,
    DTYPES,
    MOST_DIMENSIONS,
    TENSOR,
)

_UINT8 = CODE_OF_TORCH_DTYPE[torch.uint8]


Add = Callable[[int, int, Sequence[int], int | None, Any], Any]
"""Adds a leaf to the batch that is being pickled: its kind, code and shape, see `Leaf`, the address of its
items, in row-major order, and an owner, which keeps the memory alive until it is copied. Without an address
the owner is a bytes object, which is copied. Returns the placeholder of this leaf. No other leaf may be added
before the pickler meets it."""

Handler = Callable[[Any, Add], Any]
"""Reduces an object for pickling; ``NotImplemented`` if it is pickled as torch does."""


def add_buffer(buffer: pickle.PickleBuffer, add: Add) -> None:
    """Add the memory of a buffer that an object's own reduction leaves out of the pickle."""
    array = np.frombuffer(buffer.raw(), np.uint8)
    add(BYTES, _UINT8, array.shape, _address_of(array), array)  # holds the memory after `buffer.release()`


# --- tensors


def wrap_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over an array of its carrier dtype, with a storage of exactly its own bytes.

    The array's memory is kept alive by the tensor's storage, however the tensor is passed on.
    """
    tensor = torch.from_numpy(array)
    if tensor.dtype == dtype:
        return tensor
    # Not tensor.view(dtype): that would be an autograd view of a hidden base.
    whole: torch.Tensor = torch.empty(0, dtype=dtype, device="cpu")
    return whole.set_(tensor.untyped_storage(), 0, tensor.size(), tensor.stride())


def wrapper_of(kind: int, code: int) -> Callable[[Any], Any]:
    """The function that makes a leaf out of an array over its memory, of its carrier dtype."""
    if kind == BYTES:
        return memoryview  # as an object's own code expects of a buffer: false if it is empty
    if kind == ARRAY:
        return lambda array: array
    dtype = DTYPES[code]
    return torch.from_numpy if dtype.native else functools.partial(wrap_tensor, dtype=dtype.torch_dtype)


def _reduce_tensor(tensor: torch.Tensor, add: Add) -> Any:
    code = CODE_OF_TORCH_DTYPE.get(tensor.dtype)
    dense = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    if code is None or not dense:
        return NotImplemented
    if tensor.requires_grad:
        if not tensor.is_leaf:
            raise RuntimeError(
                "a batch holds a tensor that requires grad and is not a leaf of the autograd graph: a "
                "graph cannot cross processes. Call tensor.detach() on it, in the dataset or in "
                "collate_fn."
            )
        return torch.Tensor.requires_grad_, (tensor.detach(),)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    shape = tensor.shape
    # A contiguous tensor may have any stride where a size is 1: grey images in channels_last have.
    if not tensor.is_contiguous() or 1 in shape:
        strides = tensor.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if strides != row_major(shape) and 0 < span <= tensor.numel():
            # Permuted or overlapping items, with hardly any gaps: the memory is sent as it is.
            placeholder = add(TENSOR, code, (span,), tensor.data_ptr(), tensor)
            return with_strides, ([placeholder], tuple(shape), strides)
        tensor = tensor.contiguous()
    there = tensor.untyped_storage().nbytes()
    if there < tensor.nbytes:
        raise RuntimeError(
            f"a tensor of shape {list(shape)} has {there:,} bytes of memory and needs {tensor.nbytes:,}: it "
            "could not be resized. Make a new one, with clone() or torch.empty()."
        )
    if len(shape) > MOST_DIMENSIONS:
        placeholder = add(TENSOR, code, (tensor.numel(),), tensor.data_ptr(), tensor)
        return with_strides, ([placeholder], tuple(shape), tensor.stride())
    return _as_leaf(add(TENSOR, code, shape, tensor.data_ptr(), tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf as it is: no call makes it anew."""
    plain = tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype in CODE_OF_TORCH_DTYPE
    plain = plain and not (tensor.is_nested or tensor.requires_grad) and tensor.is_contiguous()
    return plain and 1 not in tensor.shape and tensor.dim() <= MOST_DIMENSIONS


def _as_leaf(placeholder: pickle.PickleBuffer) -> tuple[Any, ...]:
    # A C function that returns its argument's item. New objects at each call: the pickler would refer
    # back to ones that it has seen.
    return operator.getitem, ([placeholder], 0)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape."""
    return tuple(math.prod(max(size, 1) for size in shape[place:]) for place in range(1, len(shape) + 1))


def with_strides(leaf: list[torch.Tensor], shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A tensor over the memory of a leaf, which may be on a device."""
    (items,) = leaf
    whole: torch.Tensor = torch.empty(0, dtype=items.dtype, device=items.device)
    return whole.set_(items.untyped_storage(), items.storage_offset(), shape, strides)


def _reduce_parameter(parameter: torch.nn.Parameter, add: Add) -> Any:
    if parameter.device.type != "cpu":
        return NotImplemented
    return torch.nn.Parameter, (parameter.detach(), parameter.requires_grad)


# --- arrays


def _reduce_array(array: np.ndarray[Any, Any], add: Add) -> Any:
    """Reduce an ndarray so that it arrives as with pickle's default protocol, which torch uses.

    Protocol 5 keeps byte order, read-only flags and the order of dimensions. Protocol 4 converts arrays to
    the machine's byte order, makes them writable, and has C and Fortran order only.
    """
    code = CODE_OF_NUMPY_DTYPE.get(array.dtype)
    plain = array.flags.c_contiguous and array.dtype.metadata is None
    if code is not None and plain and (array.flags.writeable or pickle.DEFAULT_PROTOCOL < 5):
        return _as_leaf(add(ARRAY, code, array.shape, _address_of(array), array))
    return array.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _address_of(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# --- storages


def _reduce_storage(storage: torch.UntypedStorage, add: Add) -> Any:
    if storage.device.type != "cpu":
        return NotImplemented
    return _as_storage, ([add(BYTES, _UINT8, (storage.nbytes(),), storage.data_ptr(), storage)],)


def _as_storage(leaf: list[memoryview]) -> torch.UntypedStorage:
    return torch.from_numpy(np.asarray(leaf[0])).untyped_storage()


# --- bytes

LARGE_NBYTES = 16 << 10
_PROBED = 8  # of a list's or dict's first items


@dataclass(slots=True)
class LargeBytes:
    """Stands for a bytes object of at least `LARGE_NBYTES`: the pickler asks for no handler of bytes."""

    value: bytes


def shows_large_bytes(batch: Any, depth: int = 2) -> bool:
    """Whether a batch, its items or theirs, are large bytes: encoded images of samples, a column of them.

    The first items of built-in containers are looked at.
    """
    kind = type(batch)
    if kind is bytes:
        return len(batch) >= LARGE_NBYTES
    if not depth or kind not in (list, tuple, dict):
        return False
    items = batch.values() if kind is dict else batch
    return any(shows_large_bytes(part, depth - 1) for part in itertools.islice(items, _PROBED))


def _reduce_bytes(item: LargeBytes, add: Add) -> Any:
    return as_bytes, ([add(BYTES, _UINT8, (len(item.value),), None, item.value)],)


def as_bytes(leaf: list[memoryview]) -> bytes:
    """The bytes object that a leaf is a copy of."""
    _keep_heap()
    return leaf[0].tobytes()


@functools.cache
def _keep_heap() -> None:
    """Let glibc keep the memory of bytes that are freed, which it else gives back with every batch.

    Once a block as large as this one was freed (none of its pages is used), it keeps up to twice as much.
    """
    np.empty(31 << 20, np.uint8)


HANDLERS: dict[type, Handler] = {
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: _reduce_parameter,
    np.ndarray: _reduce_array,
    torch.UntypedStorage: _reduce_storage,
    LargeBytes: _reduce_bytes,
}
"""By the exact class of an object; subclasses are pickled by their own reductions."""
