"""Kinds of ndarrays, tensors and NumPy scalars: one block if shapes agree, else one run of items.

Reading gives views of shared memory. ndarrays are read-only. Tensors cannot be; they lie over the private
mapping, so that a write is seen by this process alone, as in a list of tensors that a worker inherited. Each
tensor has a storage of its own bytes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import types as arrow

from shmloader.codec.array_kinds import (
    Array,
    ArrayKind,
    array_of_tensor,
    is_plain,
    kind_of_array,
    kind_of_tensor,
    wrap_array,
)
from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.store.columns import buffers
from shmloader.store.columns.kind import Block, Kind, Origin, PythonType, Reader, United
from shmloader.store.columns.mixed import union_of
from shmloader.store.columns.values import Pickles
from shmloader.store.sealed_buffer import SharedBuffer

NUMBERS = "biufc"
"""Kinds of NumPy scalars that become one array."""

_TENSOR_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODE_OF_TORCH_DTYPE}


def _is_native(dtype: np.dtype[Any]) -> bool:
    """Whether Arrow has the items of a dtype as numbers."""
    return dtype.kind in "iuf" and dtype.itemsize <= 8 and dtype.isnative


def _items_of(flat: Array) -> Any:
    """An Arrow array over the items of a flat, contiguous array: numbers, or bytes."""
    return buffers.numbers_to_arrow(flat if _is_native(flat.dtype) else flat.view(np.uint8))


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of a string in a column's type; ValueError if columns cannot have it, as one of pointers."""
    try:
        dtype: np.dtype[Any] | None = np.dtype(name)
    except (TypeError, SyntaxError, ValueError):
        dtype = None
    if dtype is None or not is_plain(dtype):
        raise ValueError(f"{name!r} is no dtype that a column can have")
    return dtype


def _is_of_numpy(kind: type) -> bool:
    """Whether a type is one of NumPy's own scalars, and no subclass, of which a dtype would not tell."""
    return issubclass(kind, np.generic) and kind.__module__ == "numpy"


class Scalars(PythonType, name="scalar", where=_is_of_numpy):
    """NumPy scalars of ``dtype``: numbers, or items of bytes."""

    getter = Kind.getter

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        dtypes = [value.dtype for value in values]
        if isinstance(values[0], str | bytes):  # arrays drop the zeros at their end
            zero: Any = "\0" if isinstance(values[0], str) else b"\0"
            dtypes = [None if value.endswith(zero) else value.dtype for value in values]
        return union_of(values, dtypes, cls._of_dtype)

    @classmethod
    def _of_dtype(cls, dtype: Any, values: list[Any]) -> Any:
        if dtype is None or not is_plain(dtype):
            return Pickles.write(values)
        kind = pa.from_numpy_dtype(dtype) if _is_native(dtype) else pa.binary(dtype.itemsize)
        # An int64 and a longlong have one string, and two types.
        name = dtype.str if np.dtype(dtype.str).type is dtype.type else dtype.char
        return cls.around(buffers.numbers_to_arrow(np.array(values, dtype), kind), dtype=name)

    def items(self, column: Any) -> Array:
        dtype, storage = dtype_named(self.parameters["dtype"]), column.storage
        width = storage.type.bit_width // 8
        if width != dtype.itemsize:
            raise ValueError(f"{dtype} over {storage.type} means nothing")
        return np.frombuffer(buffers.octets_of(storage, 1), dtype, len(storage), storage.offset * width)

    def block(self, column: Any, memory: SharedBuffer | None) -> Block | None:
        flat = self.items(column)
        return Block(flat, ArrayKind(flat.dtype, 0), list) if flat.dtype.kind in NUMBERS else None


class Arrays(PythonType, name="ndarray"):
    """ndarrays of ``dtype``, or tensors with ``tensor``, the name of torch's dtype.

    With ``shape`` all have that shape, and the storage is a fixed-size list of the items of each. Else they
    have ``ndim`` dimensions: the storage is a list, and with more than one dimension a struct of it and of
    the shapes. Items of dtypes that Arrow lacks are bytes.
    """

    takes = (np.ndarray, torch.Tensor)
    is_leaf = False

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        kind_of: Callable[[Any], Any] = kind_of_tensor if type(values[0]) is torch.Tensor else kind_of_array
        return union_of(values, list(map(kind_of, values)), cls._of_kind)

    @classmethod
    def _of_kind(cls, kind: ArrayKind | None, values: list[Any]) -> Any:
        if kind is None:
            return Pickles.write(values)
        names = {"dtype": kind.dtype.str}
        if kind.torch_dtype is not None:
            values = [array_of_tensor(value, kind.dtype) for value in values]
            names["tensor"] = str(kind.torch_dtype).removeprefix("torch.")
        shapes = {array.shape for array in values}
        flat = np.concatenate([array.ravel() for array in values], dtype=kind.dtype)
        width = 1 if _is_native(kind.dtype) else kind.dtype.itemsize
        # How many fixed-size lists of no items there are Arrow cannot tell: such arrays are kept as ragged.
        if len(shapes) == 1 and len(flat):
            shape = list(shapes.pop())
            storage = pa.FixedSizeListArray.from_arrays(_items_of(flat), math.prod(shape) * width)
            return cls.around(storage, shape=shape, **names)
        sizes = np.array([array.shape for array in values], np.int64)
        return cls._ragged(sizes.prod(axis=1) * width, _items_of(flat), sizes, None, names)

    @classmethod
    def _ragged(cls, lengths: Array, items: Any, sizes: Array, mask: Any, names: dict[str, Any]) -> Any:
        """Arrays of these shapes, over the items of all."""
        lists = buffers.lists_to_arrow(lengths, items)
        ndim = sizes.shape[1]
        if ndim > 1:
            shapes = pa.FixedSizeListArray.from_arrays(buffers.numbers_to_arrow(sizes.reshape(-1)), ndim)
            lists = pa.StructArray.from_arrays([lists, shapes], ["items", "shape"], mask=mask)
        elif mask is not None:
            lists = type(lists).from_arrays(lists.offsets, lists.values, mask=mask)
        return cls.around(lists, ndim=ndim, **names)

    def form(self, kind: Any) -> Hashable:
        said = self.parameters
        return self.NAME, said["dtype"], said.get("tensor"), said.get("ndim") or len(said["shape"])

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        if len({str(part.type.parameters) for part in parts}) > 1:
            parts = [part.type.of_any_shape(part) for part in parts]
        return super(Arrays, parts[0].type).unite(parts, united)

    def of_any_shape(self, column: Any) -> Any:
        """A column of arrays as one that may also have arrays of other shapes, over the same items."""
        names, storage = dict(self.parameters), column.storage
        shape = names.pop("shape", None)
        if shape is None:
            return column
        mask = buffers.mask_of(column)
        if arrow.is_null(storage.type):  # arrays without items, in files of before
            lengths, mask = np.zeros(len(column), np.int64), None
            items = _items_of(np.empty(0, dtype_named(names["dtype"])))
        else:
            lengths = np.full(len(column), storage.type.list_size)
            begin = storage.offset * storage.type.list_size
            items = storage.values[begin : begin + int(lengths.sum())]
        return self._ragged(lengths, items, np.array([shape] * len(column), np.int64), mask, names)

    def describe(self, kind: Any) -> str:
        said = self.parameters
        of_tensors = f"tensor {said.get('tensor')} {said.get('shape', '')}".strip()
        return of_tensors if "tensor" in said else super().describe(kind)

    def _array_kind(self) -> ArrayKind:
        """The kind of the arrays; ValueError where the type contradicts itself."""
        said = self.parameters
        dtype, torch_dtype = dtype_named(said.get("dtype", "")), None
        if "tensor" in said:
            torch_dtype = _TENSOR_DTYPES.get(said["tensor"])
            if torch_dtype is None or DTYPES[CODE_OF_TORCH_DTYPE[torch_dtype]].carrier != dtype:
                raise ValueError(f"tensors of {said['tensor']!r} are not kept as {dtype}")
        shape = said.get("shape")
        if shape is not None and not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{shape!r} is no shape")
        return ArrayKind(dtype, len(shape) if shape is not None else int(said["ndim"]), torch_dtype)

    def block(self, column: Any, memory: SharedBuffer | None) -> Block | None:
        shape = self.parameters.get("shape")
        if shape is None or arrow.is_dictionary(self.storage_type):
            return None
        kind, storage = self._array_kind(), column.storage
        if arrow.is_null(storage.type) and 0 in shape:  # arrays without items, in files of before
            block: Array = np.empty((len(storage), *shape), kind.dtype)
        elif arrow.is_fixed_size_list(storage.type):
            width, size = storage.type.list_size, _size_of(storage.type.value_type, kind)
            begin, end = (place * width // size for place in (storage.offset, storage.offset + len(storage)))
            block = _flat(storage.values, kind, memory)[begin:end].reshape(len(storage), *shape)
        else:
            raise ValueError(f"arrays of shape {shape} over {storage.type} mean nothing")
        return Block(block, kind, lambda gathered: [gathered[n, ...] for n in range(len(gathered))])

    def getter(self, column: Any, origin: Origin) -> Reader:
        kind, block = self._array_kind(), self.block(column, origin.memory)
        wrap = kind.torch_dtype is not None
        if block is None:
            read = self._ragged_getter(column, kind, origin)
        elif not kind.ndim:
            read = self._without_dimensions(block.items)
        else:
            read = block.items.__getitem__
        if origin.copy:
            return lambda i: wrap_array(read(i).copy(), kind)
        if wrap and DTYPES[CODE_OF_TORCH_DTYPE[kind.torch_dtype]].native:  # type: ignore[index]
            return lambda i: torch.from_numpy(read(i))
        return (lambda i: wrap_array(read(i), kind)) if wrap else read

    @staticmethod
    def _without_dimensions(items: Array) -> Reader:
        return lambda i: items[i, ...]  # else a scalar

    def _ragged_getter(self, column: Any, kind: ArrayKind, origin: Origin) -> Reader:
        storage = column.storage
        lists = storage.field(0) if arrow.is_struct(storage.type) else storage
        if not (arrow.is_list(lists.type) or arrow.is_large_list(lists.type)):
            raise ValueError(f"arrays over {storage.type} mean nothing")
        size = _size_of(lists.type.value_type, kind)
        ends: Any = buffers.ends_of(lists)
        if size > 1:
            ends = (np.asarray(ends) // size).data
        flat = _flat(lists.values, kind, origin.memory)
        if kind.ndim == 1:
            return lambda i: flat[ends[i] : ends[i + 1]]
        sizes = storage.field(1)
        numbers = np.asarray(buffers.numbers_of(sizes.values, 1, "q", len(sizes.values)))
        shapes = numbers[sizes.offset * kind.ndim :][: len(sizes) * kind.ndim].reshape(len(sizes), kind.ndim)
        return lambda i: flat[ends[i] : ends[i + 1]].reshape(shapes[i])


def _size_of(items: Any, kind: ArrayKind) -> int:
    """The number of Arrow's items that are one of NumPy's."""
    if items == (pa.from_numpy_dtype(kind.dtype) if _is_native(kind.dtype) else None):
        return 1
    if items == pa.uint8():
        return kind.dtype.itemsize
    raise ValueError(f"arrays of {kind.dtype} over {items} mean nothing")


def _flat(values: Any, kind: ArrayKind, memory: SharedBuffer | None) -> Array:
    """All items of a column; writable for tensors: in shared memory as they are, from elsewhere as a copy."""
    buffer = values.buffers()[1]
    if buffer is None or not buffer.size:
        return np.empty(0, kind.dtype)
    source, offset = memoryview(buffer).toreadonly(), 0  # Arrow's own memory may be written to
    if kind.torch_dtype is not None and memory is not None and memory.holds(buffer.address):
        source, offset = memory.private, buffer.address - memory.address
    elif kind.torch_dtype is not None:
        source = memoryview(bytearray(source))
    nbytes = (len(values) + values.offset) * values.type.bit_width // 8
    # Not np.ndarray(shape, dtype, source): that looks behind a read-only view.
    return np.frombuffer(source, kind.dtype, min(nbytes, buffer.size) // kind.dtype.itemsize, offset)
