"""Calls of torch and NumPy whose results can be made in a slot, each with its second way of making them.

A second way gets a function that gives memory in the slot, and the arguments of the call. It returns what
the original call would return (values, shape, strides, dtype), or None if it is not sure of that: then the
original call is made. It changes nothing but the memory that it was given, so it may also raise at any point.
"""

from __future__ import annotations

import importlib.util
import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch

from shmloader import torch_private
from shmloader.codec.leaves import row_major

LEAST_NBYTES = 64 << 10
"""Smaller results are left to torch: what a placed call takes would be seen."""

# Torch's and NumPy's own, while others stand for their names.
own_cat, own_full, own_index_select = torch.cat, torch.full, torch.index_select
own_stack, own_tensor, own_concatenate, own_np_stack = torch.stack, torch.tensor, np.concatenate, np.stack

_LEAST_PART_NBYTES = 2 << 10  # of the first tensor that is joined with others: each is looked at
_dtype = operator.attrgetter("dtype")
_NUMBERS = (bool, int, float)
# The types of torch's functions, and of NumPy's
_KINDS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, classmethod, type(np.stack))

Place = Callable[[Sequence[int], torch.dtype], torch.Tensor | None]
SecondWay = Callable[..., torch.Tensor | torch.UntypedStorage | np.ndarray[Any, Any] | None]


@dataclass(frozen=True, eq=False)
class PlacedCall:
    """One of torch's calls, or of NumPy's."""

    owner: Any  # the module or class that has it
    name: str
    second_way: SecondWay  # makes its result in the slot
    # Whether it is placed in ``dataset[i]`` that gives whole batches, and not in collation.
    of_batches: bool = False
    of_class: bool = False  # whether it is a method of the class itself

    def can_stand(self) -> bool:
        """Whether the name stands for the original call, not for a function of the program's, and may change.

        Numba has to find NumPy's own calls, in functions that it may compile at any time.
        """
        if not isinstance(inspect.getattr_static(self.owner, self.name), _KINDS):
            return False
        # A module that a program has put there for it may have no spec, of which `find_spec` raises.
        return not (self.owner is np and ("numba" in sys.modules or importlib.util.find_spec("numba")))

    def is_passed_on(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Whether NumPy may pass the call on to a class of what it is given (``__array_function__``)."""
        if self.owner is not np:
            return False
        if self.name == "array":  # of which NumPy looks at nothing else; its list may have many numbers
            return named.get("like") is not None
        kinds: set[type] = set()
        for one in (*arguments, *named.values()):
            if type(one) in (list, tuple):
                kinds.update(map(type, one))
            elif hasattr(type(one), "__getitem__"):  # what is in it may have such a class
                return True
            else:
                kinds.add(type(one))
        return any(hasattr(kind, "__array_function__") for kind in kinds - {np.ndarray})

    def __str__(self) -> str:
        owner = self.owner.__name__ if self.owner is np or isinstance(self.owner, type) else "torch"
        return f"{owner}.{self.name}"


def _stack(place: Place, tensors: Any, dim: Any = 0) -> torch.Tensor | None:
    if not _are_plain(tensors) or type(dim) is not int:
        return None
    first = tensors[0]
    shape = list(first.shape)
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, len(tensors))
    out = place(shape, first.dtype)
    return None if out is None else own_stack(tensors, dim, out=out)


def _cat(place: Place, tensors: Any, dim: Any = 0) -> torch.Tensor | None:
    if not _are_plain(tensors) or type(dim) is not int or not tensors[0].ndim:
        return None
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    out = place(shape, first.dtype)
    return None if out is None else own_cat(tensors, dim, out=out)


def _are_plain(tensors: Any) -> bool:
    """Whether joining these tensors into a given one does what joining them does, or raises.

    That converts dtypes in silence, and its result is row-major. It raises for other layouts and devices, and
    for gradients that are recorded.
    """
    if type(tensors) not in (list, tuple) or not tensors or set(map(type, tensors)) != {torch.Tensor}:
        return False
    first = tensors[0]
    return (
        first.is_cpu
        and not first.dtype.is_complex
        and first.nbytes >= max(_LEAST_PART_NBYTES, LEAST_NBYTES // len(tensors))
        and first.stride() == row_major(first.shape)
        and set(map(_dtype, tensors)) == {first.dtype}
    )


def _new(place: Place, size: tuple[Any, ...], dtype: Any, device: Any) -> torch.Tensor | None:
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = tuple(size[0])
    are_sizes = set(map(type, size)) == {int}
    if not are_sizes or device not in (None, "cpu") or type(dtype) is not torch.dtype:
        return None
    return place(size, dtype)


def _empty(place: Place, *size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor | None:
    deterministic: Any = torch.utils.deterministic
    if deterministic.fill_uninitialized_memory and torch.are_deterministic_algorithms_enabled():
        return None
    return _new(place, size, dtype or torch.get_default_dtype(), device)


def _filled(value: int) -> SecondWay:
    def made(place: Place, *size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor | None:
        out = _new(place, size, dtype or torch.get_default_dtype(), device)
        return None if out is None else out.fill_(value)

    return made


_zeros, _ones = _filled(0), _filled(1)


def _full(place: Place, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    if type(fill_value) not in _NUMBERS or not isinstance(size, (tuple, list)):
        return None
    if dtype is None:
        inferred = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}
        dtype = inferred[type(fill_value)]
    out = _new(place, (size,), dtype, device)
    return None if out is None else out.fill_(fill_value)


def _like_its_tensor(second_way: SecondWay) -> SecondWay:
    """The second way of a tensor's ``new_...``, which has the tensor's dtype unless it is told another."""

    def made(place: Place, model: Any, *arguments: Any, **named: Any) -> Any:
        is_plain = type(model) is torch.Tensor and model.is_cpu and model.layout is torch.strided
        return second_way(place, *arguments, dtype=model.dtype, **named) if is_plain else None

    return made


def _tensor(place: Place, data: Any, *, dtype: Any = None, device: Any = None) -> torch.Tensor | None:
    if type(data) is not np.ndarray or data.nbytes < LEAST_NBYTES or not data.flags.c_contiguous:
        return None
    own_dtype = _dtype_of(data)
    if own_dtype.is_complex or dtype not in (None, own_dtype) or device not in (None, "cpu"):
        return None
    out = place(data.shape, own_dtype)
    if out is None or out.numpy().strides != data.strides:  # torch keeps those of dimensions of length 1
        return None
    out.numpy()[...] = data
    return out


def _dtype_of(array: Any) -> torch.dtype:
    """The dtype of torch's that an array's is; raises if there is none."""
    return torch.from_numpy(np.empty(0, array.dtype)).dtype  # of a read-only array it would warn


def _np_stack(place: Place, arrays: Any, axis: Any = 0) -> np.ndarray[Any, Any] | None:
    if type(arrays) in (list, tuple) and set(map(type, arrays)) == {torch.Tensor}:
        arrays = [tensor.numpy() for tensor in arrays]
    if type(axis) is not int or axis or not _are_arrays(arrays) or len(set(map(len, arrays))) > 1:
        return None
    return _joined(place, own_np_stack, arrays, (len(arrays), *arrays[0].shape))


def _concatenate(place: Place, arrays: Any, axis: Any = 0) -> np.ndarray[Any, Any] | None:
    if type(axis) is not int or axis or not _are_arrays(arrays):
        return None
    return _joined(place, own_concatenate, arrays, (sum(map(len, arrays)), *arrays[0].shape[1:]))


def _array(place: Place, arrays: Any) -> np.ndarray[Any, Any] | None:
    return _np_stack(place, arrays)


def _joined(place: Place, own: Any, arrays: Any, shape: Any) -> np.ndarray[Any, Any] | None:
    dtype = _dtype_of(arrays[0])
    out = None if dtype.is_complex else place(shape, dtype)
    if out is None:
        return None
    array = out.numpy()
    if array.dtype.num != arrays[0].dtype.num:  # "longlong" equals "int64"
        return None
    own(arrays, axis=0, out=array)
    return array


def _are_arrays(arrays: Any) -> bool:
    """Whether these are arrays that NumPy joins along the first axis to a row-major one of their dtype."""
    if type(arrays) not in (list, tuple) or not arrays or set(map(type, arrays)) != {np.ndarray}:
        return False
    first = arrays[0]
    return (
        first.ndim > 0
        and first.nbytes >= max(_LEAST_PART_NBYTES, LEAST_NBYTES // len(arrays))
        and first.strides == tuple(first.itemsize * step for step in row_major(first.shape))
        and first.dtype.metadata is None
        and len({(one.dtype, one.dtype.num, one.shape[1:], one.strides) for one in arrays}) == 1
    )


def _pad_sequence(
    place: Place, sequences: Any, batch_first: Any, padding_value: Any, padding_side: Any = "right"
) -> torch.Tensor | None:
    if not _are_plain(sequences) or batch_first is not True or type(padding_value) not in _NUMBERS:
        return None
    arrays = [sequence.numpy() for sequence in sequences]  # whose calls take a third of a tensor's time
    if padding_side != "right" or not arrays[0].ndim or len({one.shape[1:] for one in arrays}) > 1:
        return None
    dtype = sequences[0].dtype
    out = place((len(arrays), max(map(len, arrays)), *arrays[0].shape[1:]), dtype)
    if out is not None:
        # torch takes a double, and raises if that does not fit
        padding = own_full((1,), float(padding_value), dtype=dtype).numpy()
        for row, array in zip(out.numpy(), arrays, strict=True):
            row[: len(array)] = array
            row[len(array) :] = padding
    return out


def _index_select(place: Place, data: Any, dim: Any, index: Any) -> torch.Tensor | None:
    if not _are_rows(data, index) or type(dim) is not int:
        return None
    shape = list(data.shape)
    shape[dim] = len(index)
    out = place(shape, data.dtype)
    return None if out is None else own_index_select(data, dim, index, out=out)


def _getitem(place: Place, data: Any, index: Any) -> torch.Tensor | None:
    if type(index) is list and set(map(type, index)) == {int}:
        index = own_tensor(index)
    out = _index_select(place, data, 0, index)
    if out is not None and out.stride()[1:] != data.stride()[1:]:
        return None  # torch keeps those of dimensions of length 1
    return out


def _are_rows(data: Any, index: Any) -> bool:
    return (
        type(data) is torch.Tensor
        and type(index) is torch.Tensor
        and index.dtype is torch.int64
        and index.ndim == 1
        and index.is_cpu
        and data.is_cpu
        and data.ndim > 0
        and not data.dtype.is_complex
        and not data.requires_grad
        and data.layout is torch.strided
        and not data.is_nested
        and data.is_contiguous()
    )


def _new_shared(place: Place, _: Any, size: Any, *, device: Any = "cpu") -> torch.UntypedStorage | None:
    if type(size) is not int or torch.device(device).type != "cpu":
        return None
    out = place((size,), torch.uint8)
    return None if out is None else out.zero_().untyped_storage()


CALLS = (
    PlacedCall(torch, "stack", _stack),
    PlacedCall(torch, "cat", _cat),
    PlacedCall(torch, "concat", _cat),
    PlacedCall(torch, "empty", _empty),
    PlacedCall(torch, "zeros", _zeros),
    PlacedCall(torch, "ones", _ones),
    PlacedCall(torch, "full", _full),
    PlacedCall(torch, "tensor", _tensor),
    PlacedCall(torch, "index_select", _index_select, of_batches=True),
    PlacedCall(torch.Tensor, "new_empty", _like_its_tensor(_empty)),
    PlacedCall(torch.Tensor, "new_zeros", _like_its_tensor(_zeros)),
    PlacedCall(torch.Tensor, "new_ones", _like_its_tensor(_ones)),
    PlacedCall(torch.Tensor, "new_full", _like_its_tensor(_full)),
    PlacedCall(torch.Tensor, "index_select", _index_select, of_batches=True),
    PlacedCall(torch.Tensor, "__getitem__", _getitem, of_batches=True),
    PlacedCall(torch_private.NN_FUNCTIONS, "pad_sequence", _pad_sequence),
    PlacedCall(torch.UntypedStorage, torch_private.NEW_SHARED, _new_shared, of_class=True),
    PlacedCall(np, "stack", _np_stack),
    PlacedCall(np, "concatenate", _concatenate),
    PlacedCall(np, "array", _array),
)
"""The calls that are watched and placed."""


def own_call(number: int) -> Callable[..., Any]:
    """The original call, by its number in `CALLS`: what a replacement is pickled as."""
    found: Callable[..., Any] = getattr(CALLS[number].owner, CALLS[number].name)
    return found


RESIZES = (
    (torch, "resize_as_"),
    (torch.Tensor, "resize_"),
    (torch.Tensor, "resize_as_"),
    (torch.UntypedStorage, "resize_"),
)
"""Calls for which a placed result has to leave the slot: a storage in the slot cannot grow."""

COMPILERS = ((torch, "compile"), (torch.jit, "script"))
"""Functions that look torch's own calls up by their names."""
