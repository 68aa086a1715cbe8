"""The encoder: a batch to a slot. Runs in the worker."""

from __future__ import annotations

import ctypes
import math
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np

from shmloader.codec.layout import ALIGNMENT, BYTES, DTYPES, LONE_LEAF, Leaf, join_header
from shmloader.codec.leaves import HANDLERS, Add, Memory, memory_of_buffer
from shmloader.codec.slot_allocator import SlotAllocator, make_placeholder


class _Copy(NamedTuple):
    """A leaf that still lies in private memory."""

    offset: int
    address: int
    nbytes: int
    owner: object  # keeps the memory at `address` until it was copied


class Encoded(NamedTuple):
    """A batch after encoding.

    Attributes:
        header_begin: Bytes from the slot's start to the header.
        header_end: Bytes from the slot's start to its end.
        spilled: The whole batch in private memory where it did not fit in the slot, else None.
    """

    header_begin: int
    header_end: int
    spilled: np.ndarray[Any, np.dtype[np.uint8]] | None


class _Written(list[bytes]):
    """A file to write to: the list of all that was written."""

    write = list.append


class _BatchPickler(ForkingPickler):
    """Pickles the structure of a batch; adds the memory of its leaves by ``add``.

    As torch's transport does, it knows the reducers that torch (for sparse and nested tensors, and those of
    other devices) and programs register with ``multiprocessing``.

    Attributes:
        written: The pickle.
        buffers: Left out of the pickle, in its order: placeholders, and buffers of other objects.
    """

    def __init__(self, add: Add) -> None:
        self.written = _Written()
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(self.written, 5, True, self.buffers.append)  # returns None: the buffer is left out
        self._add = add

    def reducer_override(self, obj: Any) -> Any:
        """See ``pickle.Pickler``; called for all but built-in containers, numbers, strings and buffers."""
        handler = HANDLERS.get(type(obj))
        return NotImplemented if handler is None else handler(obj, self._add)


class Encoder:
    """Writes batches into the slots of one `SlotAllocator`; lives in the worker."""

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        self._rows: dict[pickle.PickleBuffer, bytes] = {}  # of the leaves that are no outputs
        self._copies: list[_Copy] = []
        self._pickler = _BatchPickler(self._add)

    def encode(self, batch: object) -> Encoded:
        """Write a batch into the slot that the allocator holds.

        Leaves that lie in the slot already stay where they are; collation leaves their placeholders in the
        batch. The others are copied in, after the slot was grown to what the whole batch needs.
        """
        pickler, outputs = self._pickler, self._allocator.rows
        if type(batch) is pickle.PickleBuffer and batch in outputs:
            return self._commit(join_header((LONE_LEAF,), (outputs[batch],)))
        try:
            pickler.dump(batch)
            rows = [outputs.get(buffer) or self._row_of(buffer) for buffer in pickler.buffers]
            return self._commit(join_header(pickler.written, rows))
        finally:
            # The memo and the copies refer to the batch, which must be free to die now.
            pickler.clear_memo()
            pickler.buffers.clear()
            self._rows.clear()
            self._copies.clear()
            pickler.written.clear()

    def _add(self, memory: Memory) -> pickle.PickleBuffer:
        placeholder = make_placeholder()
        self._rows[placeholder] = self._place(memory).pack()
        return placeholder

    def _row_of(self, buffer: pickle.PickleBuffer) -> bytes:
        """The row of a leaf that is no output, or of a buffer that an object's own reduction leaves out."""
        return self._rows.get(buffer) or self._place(memory_of_buffer(buffer)).pack()

    def _place(self, memory: Memory) -> Leaf:
        """Find a leaf in the slot, or give it a place there and note that it is to be copied."""
        kind, code, shape, address, owner = memory
        item_nbytes = DTYPES[code].carrier.itemsize
        nbytes = math.prod(shape) * item_nbytes
        offset = self._allocator.offset_of(address, nbytes) if nbytes else 0
        if offset is None or offset % (ALIGNMENT if kind == BYTES else item_nbytes):
            offset = self._allocator.place(nbytes)
            self._copies.append(_Copy(offset, address, nbytes, owner))
        return Leaf(kind, code, offset, shape)

    def _commit(self, header: bytes) -> Encoded:
        """Make room, move in what lies elsewhere, write the header."""
        allocator = self._allocator
        offset = allocator.place(len(header))
        total = offset + len(header)
        spilled = None
        if allocator.ensure(total):
            view = allocator.view()
        else:
            spilled = np.empty(total, np.uint8)
            kept = min(total, allocator.nbytes)
            view = memoryview(spilled)  # type: ignore[arg-type]
            view[:kept] = allocator.view()[:kept]
        if self._copies:
            base = spilled.ctypes.data if spilled is not None else allocator.address
            for copy in self._copies:
                ctypes.memmove(base + copy.offset, copy.address, copy.nbytes)
        view[offset:total] = header
        return Encoded(offset, total, spilled)
