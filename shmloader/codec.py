"""Batch object to slot and back.

The structure of a batch is pickled (protocol 5); every dense CPU tensor and ndarray in it, wherever it
sits, becomes a leaf of the slot and leaves a marker in the pickle: an out-of-band buffer. Reading puts the
leaf, wrapped without a copy, in the marker's place. Containers, namedtuples, dataclasses and custom batch
classes therefore keep their types without being known here. Other tensors (sparse, quantised, nested,
subclasses) are pickled as torch pickles them, with their storages as leaves.

Header, behind the leaves::

    [ nbytes of the table: u32 | of the structure: u32 | leaf table | pickled structure | pickled rest ]

What default collation returns repeats from batch to batch in all but its bytes. For such batches (built-in
containers of leaves, numbers and strings) table and structure are remembered on both sides, and only the
numbers and strings, the rest, are pickled anew.
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
    REST,
    TENSOR,
    Leaf,
    pack_leaves,
    unpack_leaves,
)
from shmloader.slot_writer import SlotWriter, wrap_tensor

_SIZES = struct.Struct("<II")
_UINT8 = CODE_OF_TORCH_DTYPE[torch.uint8]

# Stands for a leaf in the pickle. Writable: a read-only one would make the reader wrap the leaf again.
_MARKER = pickle.PickleBuffer(bytearray(1))


def _as_leaf() -> tuple[Any, ...]:
    # A C function that returns its argument's item. New objects at each call: the pickler would refer
    # back to ones that it has seen.
    return operator.getitem, ([_MARKER], 0)


def _pickle_marked(structure: object) -> bytes:
    """Pickle a structure that has markers in the place of its leaves."""
    return pickle.dumps(structure, 5, buffer_callback=_leave_out)


def _leave_out(_: pickle.PickleBuffer) -> None:
    """Out of band: what is falsy keeps a buffer out of the pickle."""


_LONE_LEAF = _pickle_marked(_MARKER)
_REST = Leaf(REST, 0, 0, ())
_ATOMS = frozenset({str, bytes, int, float, bool, complex, type(None)})
_STRINGS = ({str}, {bytes})


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
        header = self._known_header(batch)
        if header is not None:
            return self._commit(header, self._writer.cursor)
        try:
            self._pickler.dump(batch)
            structure = self._file.getvalue()
            table = pack_leaves(self._leaves)
            header = b"".join((_SIZES.pack(len(table), len(structure)), table, structure))
            return self._commit(header, self._writer.cursor)
        finally:
            # The memo and the copies refer to the batch, which must be free to die now.
            self._pickler.clear_memo()
            self._leaves.clear()
            self._copies.clear()
            self._file.seek(0)
            self._file.truncate()

    def _known_header(self, batch: object) -> bytes | None:
        """The header of a batch whose leaves are all outputs of the writer, else None."""
        key: list[object] = []
        leaves: list[Leaf] = []
        rest: list[object] = []
        if not self._describe(batch, key, leaves, rest):
            return None
        headers, where = self._writer.headers, tuple(key)
        header = headers.get(where)
        if header is None:
            table, structure = pack_leaves(leaves), _pickle_marked(_marked(batch))
            header = b"".join((_SIZES.pack(len(table), len(structure)), table, structure))
            headers[where] = header
        return header + pickle.dumps(rest, 5) if rest else header

    def _describe(self, item: Any, key: list[object], leaves: list[Leaf], rest: list[object]) -> bool:
        """Collect what an item consists of, in the order in which it is pickled.

        Args:
            item: The batch or a part of it.
            key: Gets what the header depends on.
            leaves: Gets the leaf table.
            rest: Gets what must be pickled anew.

        Returns:
            False if there is anything in it that is not plain.
        """
        kind = type(item)
        if kind is torch.Tensor:
            leaf = self._writer.leaf_of(item)
            if leaf is None:
                return False
            leaves.append(leaf)
            key.append(id(leaf))
            return True
        if kind is dict:
            key += (dict, *item, *map(type, item))
            return all(self._describe(value, key, leaves, rest) for value in item.values())
        if kind in _ATOMS or (kind in (list, tuple) and set(map(type, item)) in _STRINGS):
            leaves.append(_REST)
            key.append(_REST)
            rest.append(item)
            return True
        if kind is list or kind is tuple:
            key += (kind, len(item))
            return all(self._describe(value, key, leaves, rest) for value in item)
        return False

    def _commit(self, header: bytes, written_nbytes: int) -> Encoded:
        """Make room, move in what lies elsewhere, write the header."""
        writer = self._writer
        offset = writer.place(len(header))
        total = offset + len(header)
        image = None
        if writer.ensure(total, written_nbytes):
            view = writer.view()
        else:
            image = np.empty(total, np.uint8)
            kept = min(total, writer.nbytes)
            view = memoryview(image)  # type: ignore[arg-type]
            view[:kept] = writer.view()[:kept]
        if self._copies:
            base = image.ctypes.data if image is not None else writer.address
            for copy in self._copies:
                ctypes.memmove(base + copy.offset, copy.address, copy.nbytes)
        view[offset:total] = header
        return Encoded(offset, len(header), image)

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
        if isinstance(obj, TypedStorage):
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
        if contiguous or _is_permuted(tensor):
            self._add_tensor(tensor, (tensor.numel(),))
            return _with_strides, ([_MARKER], shape, tensor.stride())
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
        return _as_array, ([_MARKER], array.shape, dtype, order)


def _marked(item: Any) -> Any:
    """A copy of a plain batch with a marker in the place of each leaf and each atom."""
    if type(item) is dict:
        return {key: _marked(value) for key, value in item.items()}
    if type(item) in (list, tuple) and set(map(type, item)) not in _STRINGS:
        return type(item)(map(_marked, item))
    return _MARKER


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

    kind: int
    carrier: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None  # set where the carrier's dtype is not the tensor's


class _Known(NamedTuple):
    """A header without its rest, as read once."""

    wraps: list[_Wrap]
    structure: bytes


class Decoder:
    """Reads batches; lives in the main process. Headers repeat, so what they say is remembered."""

    _MOST_HEADERS = 256

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}

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
        table_nbytes, structure_nbytes = _SIZES.unpack_from(header)
        split = _SIZES.size + table_nbytes + structure_nbytes
        fixed = header[:split]  # the object itself where there is no rest
        known = self._known.get(fixed)
        if known is None:
            known = self._remember(fixed, table_nbytes)
        wraps, structure = known
        rest = iter(pickle.loads(memoryview(header)[split:])) if split < header_nbytes else iter(())
        ndarray, from_numpy = np.ndarray, torch.from_numpy
        leaves: list[Any] = []
        for kind, carrier, shape, offset, dtype in wraps:
            if kind == TENSOR:
                array: Any = ndarray(shape, carrier, anchor, offset)
                leaves.append(from_numpy(array) if dtype is None else wrap_tensor(array, dtype))
            elif kind == REST:
                leaves.append(next(rest))
            else:
                leaves.append(ndarray(shape, carrier, anchor, offset))
        return leaves[0] if structure == _LONE_LEAF else pickle.loads(structure, buffers=leaves)

    def _remember(self, fixed: bytes, table_nbytes: int) -> _Known:
        split = _SIZES.size + table_nbytes
        wraps = []
        for kind, code, offset, shape in unpack_leaves(fixed[_SIZES.size : split]):
            entry = DTYPES[code]
            dtype = None if entry.native else entry.torch_dtype
            wraps.append(_Wrap(kind, entry.carrier, shape, offset, dtype))
        if len(self._known) >= self._MOST_HEADERS:
            self._known.clear()
        known = self._known[fixed] = _Known(wraps, fixed[split:])
        return known
