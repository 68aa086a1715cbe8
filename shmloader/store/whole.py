"""One ndarray or one tensor as a store, and as an array or tensor that is passed on by handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.leaves import wrap_tensor
from shmloader.sampling.index_batches import BY_VALUE
from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.arrays import (
    Array,
    ArrayKind,
    Stacked,
    array_of_tensor,
    kind_of_array,
    kind_of_tensor,
    memory_of,
    view_items,
)
from shmloader.store.base import BufferStore, Store, StoreDescription, Written, finish, row_array
from shmloader.store.kept import Kept, KeptValue
from shmloader.store.one_buffer import new_builder
from shmloader.store.output import output_array


class BlockLayout(NamedTuple):
    """Where the one array of a store lies.

    Attributes:
        kind: What it is.
        shape: Of what is stored, which for Fortran order is the transpose.
        offset: Of the first item.
        python_nbytes: As in `StoreDescription`.
    """

    kind: ArrayKind
    shape: tuple[int, ...]
    offset: int
    python_nbytes: int


class _BlockStore(BufferStore, Store):
    """What the stores of one array and of one tensor have in common."""

    def __init__(self, buffer: SharedBuffer, layout: BlockLayout) -> None:
        super().__init__(buffer, layout)
        self._layout = layout
        block = view_items(buffer, layout.kind, layout.offset, layout.shape)
        self._block: Array = block.T if layout.kind.fortran else block

    def __len__(self) -> int:
        return len(self._block)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in items."""
        shape: tuple[int, ...] = self._block.shape
        return shape

    def describe(self) -> StoreDescription:
        """See `SharedObject.describe`."""
        kind = "array" if self._layout.kind.torch_dtype is None else "tensor"
        return StoreDescription(kind, len(self), self.buffer.nbytes, self._layout.python_nbytes)

    def take(self, indices: Any, out: Any = None) -> Any:
        """See `Store.take`."""
        rows = row_array(indices, len(self))
        if out is None:
            return self._taken(self._block.take(rows, axis=0))
        target = output_array(out, (len(rows), *self.shape[1:]), self._layout.kind)
        # The bounds are checked. With mode="raise" NumPy would gather elsewhere first, and copy. Its take is
        # as quick as torch.index_select in one thread, which is what a worker has.
        self._block.take(rows, axis=0, out=target, mode="clip")
        return out

    def _taken(self, array: Array) -> Any:
        return array

    def alone(self, rows: Sequence[int]) -> Store:
        """See `Store.alone`."""
        with new_builder() as out:
            kind = self._layout.kind._replace(fortran=False)
            chosen = self._block[np.asarray(rows, np.int64)]
            store: Store = finish(out, (type(self), _append(chosen, kind, out)))
            return store

    def to_arrow(self) -> Any:
        """See `SharedObject.to_arrow`: an array, of fixed-size lists where there are two dimensions."""
        import pyarrow as pa

        block = self._block.view()
        block.flags.writeable = False
        if block.dtype.kind not in "iufmM" or block.ndim > 2 or not block.flags.c_contiguous:
            raise TypeError(f"an array of {block.dtype} with shape {block.shape} has no Arrow type")
        try:
            flat = pa.array(block.reshape(-1))
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise TypeError(f"an array of {block.dtype} has no Arrow type") from error
        return flat if block.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, block.shape[1])


class ArrayStore(_BlockStore):
    """An ndarray. A row is what indexing the array gives: a scalar, or a read-only view."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The items' dtype."""
        dtype: np.dtype[Any] = self._block.dtype
        return dtype

    @property
    def array(self) -> SharedArray:
        """The whole array, read-only; passed on by handle, like the store."""
        return _shared_array(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False and dtype not in (None, self.dtype):
            raise ValueError("a conversion of dtype needs a copy")
        return np.array(self._block, dtype=dtype) if copy else np.asarray(self._block, dtype=dtype)

    def row(self, index: int) -> Any:
        """See `Store.row`."""
        return self._block[index]


class TensorStore(_BlockStore):
    """A tensor. A row is a tensor over shared memory, with a storage of its own bytes alone.

    Writing to one changes what this process reads, and nobody else.
    """

    def __init__(self, buffer: SharedBuffer, layout: BlockLayout) -> None:
        super().__init__(buffer, layout)
        dtype = layout.kind.torch_dtype or torch.uint8
        self._tensor = wrap_tensor(self._block, dtype)
        native = self._tensor.dtype == torch.from_numpy(self._block[:0]).dtype
        self._row: Callable[[Any], torch.Tensor] = (
            torch.from_numpy if native else lambda array: wrap_tensor(array, dtype)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The items' dtype."""
        return self._tensor.dtype

    @property
    def tensor(self) -> SharedTensor:
        """The whole tensor; passed on by handle, like the store."""
        return _shared_tensor(self)

    def row(self, index: int) -> Any:
        """See `Store.row`."""
        return self._row(self._block[index, ...])

    def _taken(self, array: Array) -> Any:
        return self._row(array)


class SharedArray(np.ndarray[Any, Any]):
    """A read-only ndarray in shared memory, which is passed to other processes by handle.

    Everything that is computed from it, rows and slices too, is an ordinary ndarray.
    """

    _store: ArrayStore | None = None

    def __array_finalize__(self, obj: Any) -> None:
        self._store = None  # of views, until `_shared_array` says otherwise

    @property
    def store(self) -> ArrayStore | None:
        """The store whose array this is; None for an array that was made from it."""
        return self._store

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = np.asarray(array)
        return plain[()] if return_scalar or not plain.ndim else plain

    def __getitem__(self, key: Any) -> Any:
        return self.view(np.ndarray)[key]

    def __copy__(self) -> Any:
        return self if self._store else np.asarray(self).copy()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._store is None:
            return np.asarray(self).__reduce_ex__(protocol)
        return _shared_array, (self._store,)


def _shared_array(store: ArrayStore) -> SharedArray:
    array = np.asarray(store).view(SharedArray)
    array._store = store  # noqa: SLF001 - of the class above
    return array


class SharedTensor(torch.Tensor):
    """A tensor in shared memory, which is passed to other processes by handle.

    The result of every operation on it is an ordinary tensor. Writing to it changes what this process
    reads, and nobody else.
    """

    _store: TensorStore | None = None
    _plain: torch.Tensor

    @property
    def store(self) -> TensorStore | None:
        """The store whose tensor this is."""
        return self._store

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _without_class(super().__torch_function__(func, types, args, kwargs or {}))  # type: ignore[no-untyped-call]

    def __getitem__(self, key: Any) -> Any:
        return self._plain[key]

    def __len__(self) -> int:
        return len(self._plain)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _shared_tensor, (self._store,)


def _without_class(result: Any) -> Any:
    if isinstance(result, SharedTensor):
        return torch.Tensor.as_subclass(result, torch.Tensor)
    if isinstance(result, tuple | list) and any(isinstance(item, SharedTensor) for item in result):
        return type(result)(map(_without_class, result))
    return result


def _shared_tensor(store: TensorStore) -> SharedTensor:
    plain = store._tensor  # noqa: SLF001 - of the class above
    tensor = plain.as_subclass(SharedTensor)
    tensor._plain, tensor._store = plain, store  # noqa: SLF001
    return tensor


BY_VALUE[SharedArray] = np.asarray
BY_VALUE[SharedTensor] = _without_class


def write_array(data: Array, out: BufferBuilder, kept: Kept | None = None) -> Written:
    """Write an ndarray without Python objects in it, of at least one dimension.

    Args:
        data: The array.
        out: Where to.
        kept: What is there already; what is written is added.
    """
    if not data.ndim:
        raise TypeError(
            f"an array without dimensions is one value ({data!r:.80}), not rows: there is nothing in it that "
            "would be worth sharing. Share array.reshape(1), or leave it as it is"
        )
    kind = kind_of_array(data)
    if kind is None:
        raise TypeError(f"an array of {data.dtype} with shape {data.shape} has no rows of plain items")
    return ArrayStore, _once(data, data.T if kind.fortran else data, kind, out, kept)


def write_tensor(data: torch.Tensor, out: BufferBuilder, kept: Kept | None = None) -> Written:
    """Write a dense CPU tensor of at least one dimension; see `write_array`."""
    resolved = data.resolve_conj().resolve_neg()
    kind = kind_of_tensor(resolved)
    if kind is None or not resolved.dim():
        raise TypeError(
            f"only dense CPU tensors without gradients, of at least one dimension, can be shared; this one "
            f"has {data.dim()} dimensions, {data.dtype}, {data.layout}, device {data.device}, "
            f"requires_grad={data.requires_grad}. See Tensor.detach(), Tensor.cpu(), Tensor.to_dense() and "
            "Tensor.reshape(1)."
        )
    return TensorStore, _once(resolved, array_of_tensor(resolved, kind.dtype), kind, out, kept)


def _once(
    data: Array | torch.Tensor, array: Array, kind: ArrayKind, out: BufferBuilder, kept: Kept | None
) -> BlockLayout:
    """Write the items of an array or tensor, unless they are kept already."""
    if kept is None:
        return _append(array, kind, out)
    keys = id(data), memory_of(data, kind)
    for key in keys:
        found = kept.get(key, data)
        if found is not None and isinstance(found.column, Stacked) and found.column.kind == kind:
            kept.refer_to(key)
            offset = found.column.offset + found.place * array.nbytes
            return BlockLayout(kind, found.column.shape, offset, array.nbytes)
    layout = _append(array, kind, out)
    column = Stacked(1, kind, layout.shape, layout.offset)
    for key in keys:
        kept.add(key, KeptValue(data, column, 0, array.nbytes))
    return layout


def _append(array: Array, kind: ArrayKind, out: BufferBuilder) -> BlockLayout:
    out.reserve(out.nbytes + array.nbytes)  # before any page is touched
    flat = np.ascontiguousarray(array).reshape(-1)
    return BlockLayout(kind, array.shape, out.append(flat.view(np.uint8)), array.nbytes)
