"""Pickles the structure of any batch, and says which memory its leaves are.

What is not plain is reduced to what is: a tensor to its storage, a permuted tensor to its memory in order.
The functions at the end undo that in the main process.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from shmloader import torch_private
from shmloader.codec.header import MARKER
from shmloader.codec.layout import CODE_OF_NUMPY_DTYPE, CODE_OF_TORCH_DTYPE


def _as_leaf() -> tuple[Any, ...]:
    # A C function that returns its argument's item. New objects at each call: the pickler would refer
    # back to ones that it has seen.
    return operator.getitem, ([MARKER], 0)


class BatchPickler(ForkingPickler):
    """Pickles the structure of a batch; hands the memory of its leaves to an `Encoder`.

    As torch's transport does, it knows the reducers that programs register with ``multiprocessing``.
    """

    def __init__(
        self,
        file: io.BytesIO,
        add_tensor: Callable[[torch.Tensor, tuple[int, ...]], None],
        add_array: Callable[[np.ndarray[Any, Any], int], None],
        add_bytes: Callable[[Any], None],
    ) -> None:
        super().__init__(file, 5, True, self._add_buffer)
        self._add_tensor = add_tensor
        self._add_array = add_array
        self._add_bytes = add_bytes

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is not MARKER:
            self._add_bytes(buffer)

    def reducer_override(self, obj: Any) -> Any:
        """See ``pickle.Pickler``; called for all but built-in containers, numbers and strings."""
        kind = type(obj)
        if kind is torch.Tensor:
            return self._reduce_tensor(obj)
        if kind is np.ndarray:
            return self._reduce_array(obj)
        if kind is torch.nn.Parameter and obj.device.type == "cpu":
            return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            self._add_bytes(obj)
            return _storage_of, ([MARKER],)
        if isinstance(obj, torch_private.TypedStorage):
            untyped = torch_private.untyped(obj)
            if untyped.device.type == "cpu":
                return torch_private.typed_storage, (untyped, obj.dtype)
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return torch_private.reduce_tensor(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if not (
            tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.dtype in CODE_OF_TORCH_DTYPE
            and not tensor.is_nested
        ):
            return torch_private.reduce_tensor(tensor)
        if tensor.requires_grad:
            if not tensor.is_leaf:
                raise RuntimeError(
                    "a batch holds a tensor that requires grad and is not a leaf of the autograd graph: a "
                    "graph cannot cross processes. Call tensor.detach() on it, in the dataset or in "
                    "collate_fn."
                )
            return _requiring_grad, (tensor.detach(),)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        shape = tuple(tensor.shape)
        contiguous = tensor.is_contiguous()
        # A contiguous tensor may have any stride where a size is 1: grey images in channels_last have.
        if contiguous and (1 not in shape or tensor.stride() == _row_major(shape)):
            self._add_tensor(tensor, shape)
            return _as_leaf()
        strides = tensor.stride()
        if contiguous or _is_permuted(tensor):
            self._add_tensor(tensor, (tensor.numel(),))
            return _with_strides, ([MARKER], shape, strides)
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 < span < tensor.numel():  # items overlap: expanded, unfolded
            self._add_tensor(tensor, (span,))
            return _with_strides, ([MARKER], shape, strides)
        self._add_tensor(tensor.contiguous(), shape)
        return _as_leaf()

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = array.dtype
        if dtype.hasobject:
            return NotImplemented
        if dtype.byteorder == ">":
            # As torch's transport has it: unpickling brings arrays to the machine's byte order.
            dtype = dtype.newbyteorder("=")
            array = array.astype(dtype)
        if array.flags.c_contiguous and dtype.metadata is None:
            code = CODE_OF_NUMPY_DTYPE.get(dtype)
            if code is not None:
                self._add_array(array, code)
                return _as_leaf()
        order = "C"
        if not array.flags.c_contiguous:
            if array.flags.f_contiguous:
                order = "F"
            else:
                array = np.ascontiguousarray(array)
        self._add_bytes(array)
        return _as_array, ([MARKER], array.shape, dtype, order)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_permuted(tensor: torch.Tensor) -> bool:
    """Whether the items fill one gapless block, in some order of the dimensions (channels last, say)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def _with_strides(leaf: list[torch.Tensor], shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    whole: torch.Tensor = torch.empty(0, dtype=leaf[0].dtype, device="cpu")
    return whole.set_(leaf[0].untyped_storage(), 0, shape, strides)


def _storage_of(leaf: list[np.ndarray[Any, Any]]) -> torch.UntypedStorage:
    return torch.from_numpy(leaf[0]).untyped_storage()


def _as_array(
    leaf: list[np.ndarray[Any, Any]], shape: tuple[int, ...], dtype: np.dtype[Any], order: Any
) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, leaf[0], order=order)
