"""Batch object to slot and back.

The structure of a batch is pickled (protocol 5); every dense CPU tensor and ndarray in it, wherever it
sits, becomes a leaf of the slot and leaves a marker in the pickle: an out-of-band buffer. Reading puts the
leaf, wrapped without a copy, in the marker's place. Containers, namedtuples, dataclasses and custom batch
classes therefore keep their types without being known here. Other tensors (sparse, quantised, nested,
subclasses) are pickled as torch pickles them, with their storages as leaves.

Header, at the slot's end::

    [ bytes of the leaf table: u64 | leaf table | pickled structure ]
"""

from __future__ import annotations

import ctypes
import io
import operator
import pickle
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.storage import TypedStorage

from shmloader import torch_private
from shmloader.layout import (
    ARRAY,
    BYTES,
    CODE_OF_NUMPY_DTYPE,
    CODE_OF_TORCH_DTYPE,
    DTYPES,
    TENSOR,
    Leaf,
    pack_leaves,
    unpack_leaves,
)
from shmloader.slot_writer import SlotWriter, wrap_tensor

_TABLE_NBYTES = struct.Struct("<Q")
_UINT8 = CODE_OF_TORCH_DTYPE[torch.uint8]

# Stands for a leaf in the pickle. Writable: a read-only one would make the reader wrap the leaf again.
_MARKER = pickle.PickleBuffer(bytearray(1))


def _as_leaf() -> tuple[Any, ...]:
    # A C function that returns its argument's item. New objects at each call: the pickler would refer
    # back to ones that it has seen.
    return operator.getitem, ([_MARKER], 0)


class _Copy(NamedTuple):
    """A leaf that still lies in private memory."""

    offset: int
    address: int
    nbytes: int
    keep: object  # owns the memory at `address` until it was copied


class Encoded(NamedTuple):
    """A batch after encoding.

    Attributes:
        header_offset: Bytes from the slot's start to the header.
        header_nbytes: Its length.
        image: The whole batch in private memory where it did not fit in the slot, else None.
    """

    header_offset: int
    header_nbytes: int
    image: np.ndarray[Any, np.dtype[np.uint8]] | None


class Encoder:
    """Writes batches into the slots of one `SlotWriter`; lives in the worker."""

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._file = io.BytesIO()
        self._leaves: list[Leaf] = []
        self._copies: list[_Copy] = []
        self._pickler = _BatchPickler(self._file, self._add_tensor, self._add_array, self._add_bytes)

    def encode(self, batch: object) -> Encoded:
        """Write a batch into the slot that the writer holds.

        Leaves that lie in the slot already stay where they are. The others are copied in, after the slot
        was grown to what the whole batch needs.
        """
        try:
            self._pickler.dump(batch)
            structure = self._file.getvalue()
            table = pack_leaves(self._leaves)
            header = b"".join((_TABLE_NBYTES.pack(len(table)), table, structure))
            written_nbytes = self._writer.cursor
            offset = self._writer.place(len(header))
            self._copies.append(_Copy(offset, 0, len(header), header))
            return self._commit(offset, len(header), written_nbytes)
        finally:
            # The memo and the copies refer to the batch, which must be free to die now.
            self._pickler.clear_memo()
            self._leaves.clear()
            self._copies.clear()
            self._file.seek(0)
            self._file.truncate()

    def _commit(self, header_offset: int, header_nbytes: int, written_nbytes: int) -> Encoded:
        writer, total = self._writer, header_offset + header_nbytes
        if writer.ensure(total, written_nbytes):
            assert writer.extent is not None
            self._copy_to(writer.extent.address)
            return Encoded(header_offset, header_nbytes, None)
        image = np.empty(total, np.uint8)
        kept = min(total, writer.nbytes)
        image[:kept] = np.frombuffer(writer.view(), np.uint8)[:kept]
        self._copy_to(image.ctypes.data)
        return Encoded(header_offset, header_nbytes, image)

    def _copy_to(self, base: int) -> None:
        for offset, address, nbytes, keep in self._copies:
            if address:
                ctypes.memmove(base + offset, address, nbytes)
            elif isinstance(keep, bytes):
                ctypes.memmove(base + offset, keep, nbytes)

    def _add_leaf(
        self,
        kind: int,
        code: int,
        shape: tuple[int, ...],
        address: int,
        nbytes: int,
        item: int,
        keep: object,
    ) -> None:
        offset = self._writer.offset_of(address, nbytes) if nbytes else 0
        if offset is None or offset % item:
            offset = self._writer.place(nbytes)
            self._copies.append(_Copy(offset, address, nbytes, keep))
        self._leaves.append(Leaf(kind, code, offset, shape))

    def _add_tensor(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Add ``tensor``'s memory, from its first item on, as a leaf of ``shape``."""
        dtype = tensor.dtype
        item = dtype.itemsize
        nbytes = tensor.numel() * item
        code = CODE_OF_TORCH_DTYPE[dtype]
        self._add_leaf(TENSOR, code, shape, tensor.data_ptr(), nbytes, item, tensor)

    def _add_array(self, array: np.ndarray[Any, Any], code: int) -> None:
        address = array.__array_interface__["data"][0]
        self._add_leaf(ARRAY, code, array.shape, address, array.nbytes, array.itemsize, array)

    def _add_bytes(self, buffer: pickle.PickleBuffer | torch.UntypedStorage | np.ndarray[Any, Any]) -> None:
        if isinstance(buffer, torch.UntypedStorage):
            address, nbytes = buffer.data_ptr(), buffer.nbytes()
        else:
            array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer.raw(), np.uint8)
            address, nbytes = array.__array_interface__["data"][0], array.nbytes
        self._add_leaf(BYTES, _UINT8, (nbytes,), address, nbytes, 64, buffer)


class _BatchPickler(pickle.Pickler):
    """Pickles the structure of a batch; hands the memory of its leaves to an `Encoder`."""

    def __init__(
        self,
        file: io.BytesIO,
        add_tensor: Callable[[torch.Tensor, tuple[int, ...]], None],
        add_array: Callable[[np.ndarray[Any, Any], int], None],
        add_bytes: Callable[[Any], None],
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._add_buffer)
        self._add_tensor = add_tensor
        self._add_array = add_array
        self._add_bytes = add_bytes

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is not _MARKER:
            self._add_bytes(buffer)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor:
            return self._reduce_tensor(obj)
        if kind is np.ndarray:
            return self._reduce_array(obj)
        if kind is torch.nn.Parameter and obj.device.type == "cpu":
            return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
            self._add_bytes(obj)
            return _storage_of, ([_MARKER],)
        if isinstance(obj, TypedStorage) and obj.device.type == "cpu":
            return torch_private.typed_storage, (torch_private.untyped(obj), obj.dtype)
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
        if tensor.is_contiguous():
            self._add_tensor(tensor, tuple(tensor.shape))
            return _as_leaf()
        if _is_permuted(tensor):
            self._add_tensor(tensor, (tensor.numel(),))
            return _with_strides, ([_MARKER], tuple(tensor.shape), tensor.stride())
        tensor = tensor.contiguous()
        self._add_tensor(tensor, tuple(tensor.shape))
        return _as_leaf()

    def _reduce_array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = array.dtype
        if dtype.hasobject:
            return NotImplemented
        if array.flags.c_contiguous:
            code = CODE_OF_NUMPY_DTYPE.get(dtype)
            if code is not None and dtype.isnative:
                self._add_array(array, code)
                return _as_leaf()
        order = "C"
        if not array.flags.c_contiguous:
            if array.flags.f_contiguous:
                order = "F"
            else:
                array = np.ascontiguousarray(array)
        self._add_bytes(array)
        return _as_array, ([_MARKER], array.shape, dtype, order)


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
    whole: torch.Tensor = torch.empty(0, dtype=leaf[0].dtype)
    return whole.set_(leaf[0].untyped_storage(), 0, shape, strides)


def _storage_of(leaf: list[np.ndarray[Any, Any]]) -> torch.UntypedStorage:
    return torch.from_numpy(leaf[0]).untyped_storage()


def _as_array(
    leaf: list[np.ndarray[Any, Any]], shape: tuple[int, ...], dtype: np.dtype[Any], order: Any
) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, leaf[0], order=order)


class _Wrap(NamedTuple):
    """How to wrap one leaf: a row of the leaf table with its codes looked up."""

    carrier: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    tensor: bool
    dtype: torch.dtype | None  # set where the carrier's dtype is not the tensor's


class Decoder:
    """Reads batches; lives in the main process. Leaf tables repeat, so their reading is remembered."""

    _MOST_TABLES = 256

    def __init__(self) -> None:
        self._tables: dict[bytes, list[_Wrap]] = {}

    def decode(
        self, anchor: np.ndarray[Any, np.dtype[np.uint8]], header_offset: int, header_nbytes: int
    ) -> Any:
        """Rebuild a batch over the memory of ``anchor``.

        Args:
            anchor: uint8, the slot's bytes; every leaf keeps it alive and nothing else does.
            header_offset: Bytes from the slot's start to the header.
            header_nbytes: Its length.
        """
        header = anchor[header_offset : header_offset + header_nbytes].tobytes()
        split = 8 + _TABLE_NBYTES.unpack_from(header)[0]
        packed = header[8:split]
        wraps = self._tables.get(packed)
        if wraps is None:
            wraps = self._remember(packed)
        ndarray, from_numpy = np.ndarray, torch.from_numpy
        leaves: list[Any] = []
        for carrier, shape, offset, tensor, dtype in wraps:
            leaf: Any = ndarray(shape, carrier, anchor, offset)
            if tensor:
                leaf = from_numpy(leaf) if dtype is None else wrap_tensor(leaf, dtype)
            leaves.append(leaf)
        return pickle.loads(memoryview(header)[split:], buffers=leaves)

    def _remember(self, packed: bytes) -> list[_Wrap]:
        wraps = []
        for kind, code, offset, shape in unpack_leaves(packed):
            entry = DTYPES[code]
            dtype = None if entry.native else entry.torch_dtype
            wraps.append(_Wrap(entry.carrier, shape, offset, kind == TENSOR, dtype))
        if len(self._tables) >= self._MOST_TABLES:
            self._tables.clear()
        self._tables[packed] = wraps
        return wraps
