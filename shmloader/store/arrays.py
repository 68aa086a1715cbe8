"""Columns of ndarrays and of tensors: one block where shapes agree, one run of items where they do not.

What is read is a view of shared memory. ndarrays are read-only. Tensors cannot be; they lie over the
private mapping, so that a write changes what this process reads and nobody else, as it would in a list of
tensors that a worker inherited. Each tensor has a storage of its own bytes alone: pickling or saving one
does not drag the store along.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.columns import NoArrowTypeError, Scope, items
from shmloader.store.parts import first_offset

Array = np.ndarray[Any, Any]
_LARGE_NBYTES = 1 << 12  # arrays from here on are written one by one, without being joined before


class ArrayKind(NamedTuple):
    """What arrays of one column have in common; for tensors the dtype is that of the NumPy carrier.

    Attributes:
        dtype: NumPy's.
        ndim: Number of dimensions.
        fortran: Whether they are in Fortran order: they are kept as their transposes.
        torch_dtype: For tensors, else None.
        character: Of the dtype, for ndarrays: ``longlong`` is equal to ``int64``, but is another type.
    """

    dtype: np.dtype[Any]
    ndim: int
    fortran: bool = False
    torch_dtype: torch.dtype | None = None
    character: str = ""


def kind_of_array(array: Array) -> ArrayKind | None:
    """What column an ndarray can be in; None if in no column of arrays."""
    if array.dtype.hasobject or not array.dtype.itemsize:
        return None
    return ArrayKind(array.dtype, array.ndim, array.flags.fnc, None, array.dtype.char)


def kind_of_tensor(tensor: torch.Tensor) -> ArrayKind | None:
    """What column a tensor can be in; None if in no column of arrays."""
    code = CODE_OF_TORCH_DTYPE.get(tensor.dtype)
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    if code is None or not plain or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return None
    return ArrayKind(DTYPES[code].carrier, tensor.dim(), False, tensor.dtype)


def memory_of(value: Any, kind: ArrayKind) -> tuple[Any, ...]:
    """What arrays or tensors of a kind have in common if they are views of the same items.

    Equal for two of them while both are alive.
    """
    if kind.torch_dtype is None:
        return value.__array_interface__["data"][0], value.shape, value.strides, kind
    return value.data_ptr(), value.shape, value.stride(), kind


def array_of_tensor(tensor: torch.Tensor, carrier: np.dtype[Any]) -> Array:
    """A tensor's items as a C-ordered ndarray of its carrier dtype; a view where it is contiguous."""
    tensor = tensor.contiguous()
    if DTYPES[CODE_OF_TORCH_DTYPE[tensor.dtype]].native:
        return tensor.numpy()
    flat: Array = tensor.reshape(-1).view(torch.uint8).numpy().view(carrier)
    return flat.reshape(tensor.shape)


class Stacked(NamedTuple):
    """Arrays of one shape.

    Attributes:
        rows: How many.
        kind: What they are.
        shape: Of each as it is stored.
        offset: Of the first.
    """

    rows: int
    kind: ArrayKind
    shape: tuple[int, ...]
    offset: int

    def block(self, memory: SharedBuffer) -> Array:
        """All of them as one array; writable for tensors."""
        return view_items(memory, self.kind, self.offset, (self.rows, *self.shape))

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        dots = "" if self.shape else ", ..."  # else a scalar
        return as_rows(scope, self.kind, f"{scope.bind(self.block(scope.memory))}[i{dots}]")

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        block = self.block(memory)
        if len(self.shape) != 1 or not self.rows or self.kind.dtype.kind not in "iuf":
            raise NoArrowTypeError(f"arrays of {self.kind.dtype} with shape {self.shape} stay out of Arrow")
        block.flags.writeable = False
        return pa.FixedSizeListArray.from_arrays(pa.array(block.reshape(-1)), self.shape[0])


class Ragged(NamedTuple):
    """Arrays of one number of dimensions, at least one, and different shapes.

    Attributes:
        rows: How many.
        kind: What they are.
        size: Items in all of them.
        offset: Of the first item.
        ends: Offset of the ``rows + 1`` positions, in items, 64 bits.
        shapes: Offset of the shapes, 64 bits each size; -1 with one dimension.
    """

    rows: int
    kind: ArrayKind
    size: int
    offset: int
    ends: int
    shapes: int

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        flat = scope.bind(view_items(scope.memory, self.kind, self.offset, (self.size,)))
        ends = scope.items(self.ends, self.rows + 1, "q")
        value = f"{flat}[{ends}[i] : {ends}[i + 1]]"
        if self.kind.ndim > 1:
            sizes = items(scope.memory, self.shapes, self.rows * self.kind.ndim, "q")
            shapes = scope.bind(np.asarray(sizes).reshape(self.rows, self.kind.ndim))
            value += f".reshape({shapes}[i])"
        return as_rows(scope, self.kind, value)

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        if self.kind.ndim != 1 or self.kind.dtype.kind not in "iuf":
            raise NoArrowTypeError(f"arrays of {self.kind.ndim} dimensions are not given to Arrow")
        flat = view_items(memory, self.kind, self.offset, (self.size,))
        flat.flags.writeable = False
        ends = np.asarray(items(memory, self.ends, self.rows + 1, "q"))
        return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat))


def view_items(memory: SharedBuffer, kind: ArrayKind, offset: int, shape: tuple[int, ...]) -> Array:
    """An array over shared memory: read-only, except for tensors."""
    size = math.prod(shape)
    if not size:
        return (
            np.frombuffer(b"", kind.dtype).reshape(shape)
            if kind.torch_dtype is None
            else np.empty(shape, kind.dtype)
        )
    source = memory.view if kind.torch_dtype is None else memory.private
    # Not np.ndarray(shape, dtype, source): that looks behind the read-only view, so that the array could be
    # made writeable again.
    return np.frombuffer(source, kind.dtype, size, offset - first_offset(memory)).reshape(shape)


def as_rows(scope: Scope, kind: ArrayKind, array: str) -> str:
    """The expression of what a stored array stands for."""
    if kind.torch_dtype is None:
        return f"{array}.T" if kind.fortran else array
    if DTYPES[CODE_OF_TORCH_DTYPE[kind.torch_dtype]].native:
        return f"{scope.bind(torch.from_numpy)}({array})"
    return f"{scope.bind(wrap_tensor)}({array}, {scope.bind(kind.torch_dtype)})"


def encode_arrays(values: list[Any], kind: ArrayKind, out: BufferBuilder) -> Stacked | Ragged:
    """Encode ndarrays or tensors of one kind."""
    if kind.torch_dtype is not None:
        arrays = [array_of_tensor(value, kind.dtype) for value in values]
    else:
        arrays = [value.T for value in values] if kind.fortran else values
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1:
        return Stacked(len(arrays), kind, shapes.pop(), append_arrays(arrays, out))
    sizes = np.array([array.shape for array in arrays], np.int64)
    ends = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum(sizes.prod(axis=1), out=ends[1:])
    offset = append_arrays(arrays, out)
    at = out.append(sizes) if kind.ndim > 1 else -1
    return Ragged(len(arrays), kind, int(ends[-1]), offset, out.append(ends), at)


def append_arrays(arrays: list[Array], out: BufferBuilder) -> int:
    """Append the items of arrays of one dtype, in C order, without gaps."""
    nbytes = sum([array.nbytes for array in arrays])
    flat = [array.ravel().view(np.uint8) for array in arrays]
    if nbytes < _LARGE_NBYTES * len(arrays):
        flat = [np.concatenate(flat)]
    return out.append_all(flat)
