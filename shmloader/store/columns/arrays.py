"""Columns of ndarrays, tensors and NumPy scalars: one block if shapes agree, else one run of items.

Reading gives views of shared memory. ndarrays are read-only. Tensors cannot be; they lie over the private
mapping, so that a write is seen by this process alone, as in a list of tensors that a worker inherited. Each
tensor has a storage of its own bytes alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import types as arrow

from shmloader.codec.array_kinds import Array, ArrayKind, array_of_tensor, is_plain
from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.store.columns.buffers import numbers_to_arrow, offsets_of_lengths
from shmloader.store.columns.compiled import Scope, ends_of, numbers_of, octets_of
from shmloader.store.columns.types import ArrayType, PythonType, ScalarType, is_list, mask_of
from shmloader.store.sealed_buffer import SharedBuffer

_TENSOR_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODE_OF_TORCH_DTYPE}


def is_native(dtype: np.dtype[Any]) -> bool:
    """Whether Arrow has the items of a dtype as numbers."""
    return dtype.kind in "iuf" and dtype.itemsize <= 8 and dtype.isnative


def items_of(flat: Array) -> Any:
    """An Arrow array over the items of a flat, contiguous array: numbers, or bytes."""
    return numbers_to_arrow(flat if is_native(flat.dtype) else flat.view(np.uint8))


def scalars_to_arrow(values: list[Any], dtype: np.dtype[Any]) -> Any:
    """A column of NumPy scalars that all have this dtype."""
    flat = np.array(values, dtype)
    kind = ScalarType(
        pa.from_numpy_dtype(dtype) if is_native(dtype) else pa.binary(dtype.itemsize), dtype=dtype.str
    )
    return kind.wrap(numbers_to_arrow(flat, kind.storage_type))


def arrays_to_arrow(values: list[Any], kind: ArrayKind) -> Any:
    """A column of ndarrays or tensors of one kind."""
    if kind.torch_dtype is not None:
        arrays = [array_of_tensor(value, kind.dtype) for value in values]
    else:
        arrays = values
    shapes = {array.shape for array in arrays}
    flat = np.concatenate([array.ravel() for array in arrays], dtype=kind.dtype)
    items = items_of(flat)
    width = 1 if is_native(kind.dtype) else kind.dtype.itemsize
    names = {"dtype": kind.dtype.str}
    if kind.torch_dtype is not None:
        names["tensor"] = str(kind.torch_dtype).removeprefix("torch.")
    # How many fixed-size lists of no items there are Arrow cannot tell: such arrays are kept as ragged ones.
    if len(shapes) == 1 and len(flat):
        shape = shapes.pop()
        storage = pa.FixedSizeListArray.from_arrays(items, math.prod(shape) * width)
        return ArrayType(storage.type, shape=list(shape), **names).wrap(storage)
    sizes = np.array([array.shape for array in arrays], np.int64)
    lists = lists_to_arrow(sizes.prod(axis=1) * width, items)
    if kind.ndim > 1:
        shape = pa.FixedSizeListArray.from_arrays(numbers_to_arrow(sizes.reshape(-1)), kind.ndim)
        lists = pa.StructArray.from_arrays([lists, shape], ["items", "shape"])
    return ArrayType(lists.type, ndim=kind.ndim, **names).wrap(lists)


def of_any_shape(column: Any) -> Any:
    """A column of arrays as one that may also have arrays of other shapes, over the same items."""
    storage, said = column.storage, dict(column.type.parameters)
    shape = said.pop("shape", None)
    if shape is None:
        return column
    if arrow.is_null(storage.type):  # arrays without items, in files of before
        lengths, mask = np.zeros(len(column), np.int64), None
        items = items_of(np.empty(0, dtype_named(said["dtype"])))
    else:
        lengths = np.full(len(column), storage.type.list_size)
        mask = mask_of(column)
        begin = storage.offset * storage.type.list_size
        items = storage.values[begin : begin + int(lengths.sum())]
    lists = lists_to_arrow(lengths, items)
    if len(shape) > 1:
        sizes = numbers_to_arrow(np.array(shape * len(column), np.int64))
        shapes = pa.FixedSizeListArray.from_arrays(sizes, len(shape))
        lists = pa.StructArray.from_arrays([lists, shapes], ["items", "shape"], mask=mask)
    elif mask is not None:
        lists = type(lists).from_arrays(lists.offsets, lists.values, mask=mask)
    return ArrayType(lists.type, ndim=len(shape), **said).wrap(lists)


def lists_to_arrow(lengths: Any, items: Any) -> Any:
    """A column of lists of these lengths, over the items of all."""
    offsets = offsets_of_lengths(lengths)
    make = pa.ListArray if offsets.itemsize == 4 else pa.LargeListArray
    return make.from_arrays(numbers_to_arrow(offsets), items)


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of a string in a column's type.

    Raises:
        ValueError: If columns cannot have it; a dtype with Python objects would be pointers.
    """
    try:
        dtype: np.dtype[Any] | None = np.dtype(name)
    except (TypeError, SyntaxError, ValueError):
        dtype = None
    if dtype is None or not is_plain(dtype):
        raise ValueError(f"{name!r} is no dtype that a column can have")
    return dtype


def _kind_of_type(kind: PythonType) -> ArrayKind:
    """The kind of a column's arrays; ValueError where its type contradicts itself."""
    parameters = kind.parameters
    dtype, torch_dtype = dtype_named(parameters.get("dtype", "")), None
    if "tensor" in parameters:
        torch_dtype = _TENSOR_DTYPES.get(parameters["tensor"])
        if torch_dtype is None or DTYPES[CODE_OF_TORCH_DTYPE[torch_dtype]].carrier != dtype:
            raise ValueError(f"tensors of {parameters['tensor']!r} are not kept as {dtype}")
    shape = parameters.get("shape")
    if shape is not None and not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"{shape!r} is no shape")
    return ArrayKind(dtype, len(shape) if shape is not None else int(parameters["ndim"]), torch_dtype)


# Reading.


def scalars_of(column: Any) -> tuple[Array, ArrayKind]:
    """All NumPy scalars of a column as one array.

    Raises:
        ValueError: If the type contradicts itself, or the storage is too short.
    """
    dtype, storage = dtype_named(column.type.parameters["dtype"]), column.storage
    width = storage.type.bit_width // 8
    if width != dtype.itemsize:
        raise ValueError(f"{dtype} over {storage.type} means nothing")
    flat = np.frombuffer(octets_of(storage, 1), dtype, len(storage), storage.offset * width)
    return flat, ArrayKind(dtype, 0)


def block_of(column: Any, memory: SharedBuffer | None = None) -> tuple[Array, ArrayKind] | None:
    """All arrays of a column as one, if they have one shape; None if they differ.

    Raises:
        ValueError: If the type contradicts itself, or the storage is too short.
    """
    kind, shape = _kind_of_type(column.type), column.type.parameters.get("shape")
    if shape is None:
        return None
    storage = column.storage
    if arrow.is_null(storage.type) and 0 in shape:  # arrays without items, in files of before
        return np.empty((len(storage), *shape), kind.dtype), kind
    if not arrow.is_fixed_size_list(storage.type):
        raise ValueError(f"arrays of shape {shape} over {storage.type} mean nothing")
    width = storage.type.list_size
    size = _size_of(storage.type.value_type, kind)
    flat = _flat(storage.values, kind, memory)
    begin = storage.offset * width // size
    return flat[begin : begin + len(storage) * width // size].reshape(len(storage), *shape), kind


def _size_of(items: Any, kind: ArrayKind) -> int:
    """The number of Arrow's items that are one of NumPy's."""
    if items == (pa.from_numpy_dtype(kind.dtype) if is_native(kind.dtype) else None):
        return 1
    if items == pa.uint8():
        return kind.dtype.itemsize
    raise ValueError(f"arrays of {kind.dtype} over {items} mean nothing")


def _flat(values: Any, kind: ArrayKind, memory: SharedBuffer | None) -> Array:
    """All items of a column; writable for tensors in shared memory."""
    buffer = values.buffers()[1]
    if buffer is None or not buffer.size:
        return np.empty(0, kind.dtype)
    offset = 0
    source: Any = buffer
    if (
        kind.torch_dtype is not None
        and memory is not None
        and 0 <= buffer.address - memory.address < memory.nbytes
    ):
        source, offset = memory.private, buffer.address - memory.address
    nbytes = (len(values) + values.offset) * values.type.bit_width // 8
    # Not np.ndarray(shape, dtype, source): that looks behind a read-only view.
    return np.frombuffer(source, kind.dtype, min(nbytes, buffer.size) // kind.dtype.itemsize, offset)


def array_expression(column: Any, scope: Scope) -> str:
    """Source of the array or tensor in row ``i``."""
    found = block_of(column, scope.memory)
    if found is not None:
        block, kind = found
        dots = "" if kind.ndim else ", ..."  # else a scalar
        return _as_rows(f"{scope.bind(block)}[i{dots}]", kind, scope)
    kind = _kind_of_type(column.type)
    storage = column.storage
    lists = storage.field(0) if arrow.is_struct(storage.type) else storage
    if not is_list(lists.type):
        raise ValueError(f"arrays over {storage.type} mean nothing")
    size = _size_of(lists.type.value_type, kind)
    ends: Any = ends_of(lists)
    if size > 1:
        ends = np.asarray(ends) // size
    named = scope.bind(ends)
    value = f"{scope.bind(_flat(lists.values, kind, scope.memory))}[{named}[i] : {named}[i + 1]]"
    if kind.ndim > 1:
        sizes = storage.field(1)
        flat = np.asarray(numbers_of(sizes.values, 1, "q", len(sizes.values)))
        shapes = flat[sizes.offset * kind.ndim :][: len(sizes) * kind.ndim].reshape(len(sizes), kind.ndim)
        value += f".reshape({scope.bind(shapes)}[i])"
    return _as_rows(value, kind, scope)


def _as_rows(array: str, kind: ArrayKind, scope: Scope) -> str:
    """The expression of what a stored array stands for."""
    if scope.copy:
        array += ".copy()"
    if kind.torch_dtype is None:
        return array
    if DTYPES[CODE_OF_TORCH_DTYPE[kind.torch_dtype]].native:
        return f"{scope.bind(torch.from_numpy)}({array})"
    return f"{scope.bind(wrap_tensor)}({array}, {scope.bind(kind.torch_dtype)})"
