"""Batch to slot; runs in the worker."""

from __future__ import annotations

import ctypes
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.header import MARKER, SIZES, pickle_marked
from shmloader.codec.layout import ARRAY, BYTES, CODE_OF_TORCH_DTYPE, REST, TENSOR, Leaf, pack_leaves
from shmloader.codec.pickler import BatchPickler
from shmloader.codec.slot_writer import SlotWriter

_UINT8 = CODE_OF_TORCH_DTYPE[torch.uint8]
_REST = Leaf(REST, 0, 0, ())
_NAMES = frozenset({str})  # as keys, 1, 1.0 and True are one, and so are 0.0 and -0.0
_MOST_HEADERS = 64  # for each slot
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
        self._whole: _Copy | None = None  # the last tensor that lies in no other one
        self._pickler = BatchPickler(self._file, self._add_tensor, self._add_array, self._add_bytes)

    def encode(self, batch: object) -> Encoded:
        """Write a batch into the slot that the writer holds.

        Leaves that lie in the slot already stay where they are. The others are copied in, after the slot
        was grown to what the whole batch needs.
        """
        header = self._known_header(batch)
        if header is not None:
            return self._commit(header)
        try:
            header = self._new_header(batch)
            if header is None:
                self._leaves.clear()
                self._copies.clear()
                self._whole = None
                self._pickler.dump(batch)
                header = _join(self._leaves, self._file.getvalue())
            return self._commit(header)
        finally:
            # The memo and the copies refer to the batch, which must be free to die now.
            self._pickler.clear_memo()
            self._leaves.clear()
            self._copies.clear()
            self._whole = None
            self._file.seek(0)
            self._file.truncate()

    def _known_header(self, batch: object) -> bytes | None:
        """The header of a batch that is all outputs of the writer in new containers, else None.

        In any other batch an object may occur twice, or contain itself, and must arrive so.
        """
        if batch is not self._writer.collated or batch is None:
            return None
        recipe = self._writer.recipe
        if recipe is not None and recipe.header is not None and isinstance(batch, dict):
            strings = [batch[name] for name in recipe.strings]
            return recipe.header + pickle.dumps(strings, 5) if strings else recipe.header
        key: list[object] = []
        rest: list[object] = []
        if not _describe(batch, self._writer.leaf_of, key, rest):
            return None
        headers, where = self._writer.headers, tuple(key)
        header = headers.get(where)
        if header is None:
            # The key lists, among the structure, the leaves in their order.
            header = _join([item for item in key if type(item) is Leaf], pickle_marked(_marked(batch)))
            if len(headers) >= _MOST_HEADERS:
                headers.clear()
            headers[where] = header
        if recipe is not None:
            recipe.header = header
        return header + pickle.dumps(rest, 5) if rest else header

    def _new_header(self, batch: object) -> bytes | None:
        """The header of a collated batch whose tensors do not lie in outputs yet, else None.

        The first batches are such: nothing is reserved for their slots. Their headers are as short as those
        that follow, so that all slots need the same number of pages.
        """
        if batch is not self._writer.collated or batch is None:
            return None
        leaf_of: dict[int, Leaf] = {}
        for tensor in _tensors(batch):
            outputs_leaf = self._writer.leaf_of.get(id(tensor))
            if id(tensor) in leaf_of or (outputs_leaf is None and not _is_plain(tensor)):
                return None
            if outputs_leaf is None:
                self._add_tensor(tensor, tuple(tensor.shape))
                outputs_leaf = self._leaves[-1]
            leaf_of[id(tensor)] = outputs_leaf
        key: list[object] = []
        rest: list[object] = []
        if not _describe(batch, leaf_of, key, rest):
            return None
        header = _join([item for item in key if type(item) is Leaf], pickle_marked(_marked(batch)))
        return header + pickle.dumps(rest, 5) if rest else header

    def _commit(self, header: bytes) -> Encoded:
        """Make room, move in what lies elsewhere, write the header."""
        writer = self._writer
        offset = writer.place(len(header))
        total = offset + len(header)
        image = None
        if writer.ensure(total):
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
        """Add ``tensor``'s memory, from its first item on, as a leaf of ``shape``.

        What lies within the tensor before it, in the same storage, arrives as a view of the same memory.
        """
        dtype = tensor.dtype
        item = dtype.itemsize
        nbytes = math.prod(shape) * item
        code = CODE_OF_TORCH_DTYPE[dtype]
        address, whole = tensor.data_ptr(), self._whole
        if whole is not None and nbytes:
            into = address - whole.address
            if 0 <= into <= whole.nbytes - nbytes and (whole.offset + into) % item == 0:
                self._leaves.append(Leaf(TENSOR, code, whole.offset + into, shape))
                return
        copies = len(self._copies)
        self._add_leaf(TENSOR, code, shape, address, nbytes, item, tensor)
        if len(self._copies) > copies:
            self._whole = self._copies[-1]

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


def _join(leaves: list[Leaf], structure: bytes) -> bytes:
    table = pack_leaves(leaves)
    return b"".join((SIZES.pack(len(table), len(structure)), table, structure))


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    """The tensors in built-in containers, in their order."""
    if type(item) is torch.Tensor:
        yield item
    elif type(item) in (dict, list, tuple):
        for value in item.values() if type(item) is dict else item:
            yield from _tensors(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but its items in row-major order."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype in CODE_OF_TORCH_DTYPE
        and not (tensor.is_nested or tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and 1 not in tensor.shape
    )


def _describe(item: Any, leaf_of: dict[int, Leaf], key: list[object], rest: list[object]) -> bool:
    """Collect what an item consists of, in the order in which it is pickled.

    Args:
        item: The batch or a part of it.
        leaf_of: The writer's outputs, by the identity of their tensors.
        key: Gets what the header depends on.
        rest: Gets what must be pickled anew.

    Returns:
        False if there is anything in it that is not plain.
    """
    kind = type(item)
    if kind is torch.Tensor:
        leaf = leaf_of.get(id(item))
        if leaf is None:
            return False
        key.append(leaf)
        return True
    if kind is dict:
        names = tuple(item)
        if not set(map(type, names)) <= _NAMES:
            return False
        key += (dict, names)
        for value in item.values():
            leaf = leaf_of.get(id(value))  # the identity of an output is nobody else's
            if leaf is not None:
                key.append(leaf)
            elif not _describe(value, leaf_of, key, rest):
                return False
        return True
    if kind in (list, tuple) and set(map(type, item)) in _STRINGS:
        key.append(_REST)
        rest.append(item)
        return True
    if kind is list or kind is tuple:
        key += (kind, len(item))
        return all(_describe(value, leaf_of, key, rest) for value in item)
    return False


def _marked(item: Any) -> Any:
    """A copy of a plain batch with a marker in the place of each leaf and each list of strings."""
    if type(item) is dict:
        return {key: _marked(value) for key, value in item.items()}
    if type(item) in (list, tuple) and set(map(type, item)) not in _STRINGS:
        return type(item)(map(_marked, item))
    return MARKER
