"""The slot allocator: a worker's side of a slot, where the leaves of a batch are allocated one by one.

Allocation is a bump pointer that is never moved back within a task, so no two leaves overlap. A leaf that
does not fit in what is reserved is allocated in private memory by the caller and copied in at the end,
when the size of the whole batch is known and the slot is grown once.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.layout import (
    CODE_OF_NUMPY_DTYPE,
    CODE_OF_TORCH_DTYPE,
    DTYPES,
    MOST_DIMENSIONS,
    TENSOR,
    align,
    pack_row,
)
from shmloader.codec.leaves import wrap_tensor
from shmloader.errors import SharedMemoryExhausted
from shmloader.memory import PAGE_NBYTES, Extent, Segment, whole_pages
from shmloader.memory.limits import check_headroom


def make_placeholder() -> pickle.PickleBuffer:
    """A pickle buffer that stands for a leaf, by its identity, in a batch that is about to be pickled.

    It is writable: for a read-only buffer the unpickler would wrap its memory once more.
    """
    return pickle.PickleBuffer(bytearray(1))


class Output(NamedTuple):
    """A leaf that collation writes in its slot, and that no user code sees."""

    tensor: torch.Tensor  # over the leaf's memory
    # An array over the same memory, of the carrier dtype, with the first two dimensions as one: what
    # ``numpy.concatenate`` of the samples gives.
    rows: np.ndarray[Any, Any]
    placeholder: pickle.PickleBuffer  # stands for the leaf in the batch that is given to the encoder
    end: int  # where the next leaf begins


_MOST_OUTPUTS = 1024
_Dtype = torch.dtype | np.dtype[Any]


@dataclass(slots=True)
class _Mapped:
    """A slot as mapped in this process, with the outputs that were made over it."""

    extent: Extent
    outputs: dict[tuple[int, int, tuple[int, ...], _Dtype], Output] = field(default_factory=dict)
    placeholders: dict[int, pickle.PickleBuffer] = field(default_factory=dict)  # by ids of outputs' tensors
    rows: dict[pickle.PickleBuffer, bytes] = field(default_factory=dict)  # of the leaf table, by placeholders


class SlotAllocator:
    """Allocates in the slot that the current task grants. One per worker; lives in the worker's process.

    There are two ways to allocate a leaf. `tensor` makes a new tensor, which user code may see and keep.
    `output` is for collation that runs no user code before publishing: for the same place in the same slot,
    shape and dtype it returns the same object again.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._mapped: dict[int, _Mapped] = {}
        self._anchor: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._anchored: Extent | None = None  # the memory under the anchor; the slot may grow later
        self._here: _Mapped | None = None
        self.slot = 0
        self.nbytes = 0
        self.limit_nbytes = 0
        self._may_refuse = True  # False once this task has needed more than was reserved
        self.cursor = 0
        self._kept: list[tuple[weakref.ref[Any], range]] = []  # addresses that user code keeps, by anchors

    def begin(self, slot: int, nbytes: int, limit_nbytes: int, hint_nbytes: int = 0) -> None:
        """Take the slot that a task grants; see `MakeBatch` for the arguments.

        It is grown for a typical batch, to be written in place; if it cannot, pieces are sent anyway.
        """
        self.slot, self.nbytes = slot, nbytes
        self.limit_nbytes = max(nbytes, limit_nbytes)
        self.cursor = 0
        self._may_refuse = True
        here = self._mapped.get(slot)
        if here is None or here.extent.nbytes != nbytes:
            here = self._mapped[slot] = _Mapped(self._map_some(nbytes))
            self.nbytes = here.extent.nbytes
        elif len(here.outputs) > _MOST_OUTPUTS:  # shapes that never repeat; no batch refers to them now
            here = self._mapped[slot] = _Mapped(here.extent)
        self._here = here
        if self.nbytes < hint_nbytes <= self.limit_nbytes:
            with contextlib.suppress(SharedMemoryExhausted):
                self._grow(hint_nbytes)

    def _map_some(self, nbytes: int) -> Extent:
        """Map the slot; if this process is short of address space, as much of its start as possible."""
        while True:
            try:
                return self._segment.map(self.slot, nbytes, fills=True)
            except SharedMemoryExhausted:
                if nbytes > PAGE_NBYTES:
                    nbytes = whole_pages(nbytes // 2)
                elif self._mapped:
                    self._mapped.clear()  # other slots', which can be mapped again
                else:
                    raise

    def read(self, nbytes: int) -> bytes:
        """The slot's first bytes (a long index batch); `SharedMemoryExhausted` if it has not mapped them."""
        if nbytes > self.nbytes:
            raise SharedMemoryExhausted(
                f"an index batch of {nbytes:,} bytes could not be read: this worker could map only "
                f"{self.nbytes:,} bytes of it. Its address space is limited (ulimit -v).",
                needed_nbytes=nbytes,
                available_nbytes=self.nbytes,
            )
        return bytes(self.view()[:nbytes])

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a new, uninitialised tensor in the slot; None if it does not fit there."""
        here = self._here
        code = CODE_OF_TORCH_DTYPE.get(dtype)
        if code is None or here is None or len(shape) > MOST_DIMENSIONS:
            return None
        nbytes = math.prod(shape) * dtype.itemsize
        offset = self.cursor
        if nbytes == 0 or offset + nbytes > self.nbytes or min(shape, default=0) < 0:
            return None  # torch refuses negative sizes
        self.cursor = align(offset + nbytes)
        if self._anchor is None:
            self._anchor = np.ndarray(here.extent.nbytes, np.uint8, here.extent.buffer)
            self._anchored = here.extent
        array = np.ndarray(shape, DTYPES[code].carrier, self._anchor, offset)
        return torch.from_numpy(array) if DTYPES[code].native else wrap_tensor(array, dtype)

    def output(self, items: int, shape: tuple[int, ...], dtype: _Dtype) -> Output | None:
        """Allocate a leaf ``(items, *shape)`` in the slot, or None; NumPy dtypes are ``from_numpy``'s."""
        here = self._here
        if here is None:
            return None
        key = (self.cursor, items, shape, dtype)
        output = here.outputs.get(key)
        if output is None:
            codes: dict[Any, int] = CODE_OF_NUMPY_DTYPE
            if isinstance(dtype, torch.dtype):
                codes = CODE_OF_TORCH_DTYPE
            code, offset, shape = codes.get(dtype), self.cursor, (items, *shape)
            end = offset + math.prod(shape) * dtype.itemsize
            if code is None or len(shape) > MOST_DIMENSIONS or not offset < end <= self.nbytes:
                return None
            array = np.ndarray(shape, DTYPES[code].carrier, here.extent.buffer, offset)
            tensor, placeholder = wrap_tensor(array, DTYPES[code].torch_dtype), make_placeholder()
            output = Output(tensor, array.reshape(-1, *shape[2:]), placeholder, align(end))
            here.outputs[key] = output
            here.placeholders[id(tensor)] = placeholder
            here.rows[placeholder] = pack_row(TENSOR, code, offset, shape)
        self.cursor = output.end
        return output

    def with_placeholders(self, item: Any) -> Any:
        """A batch, or a part of one, with placeholders in place of outputs' tensors."""
        placeholder = None if self._here is None else self._here.placeholders.get(id(item))
        if placeholder is not None:
            return placeholder
        kind = type(item)
        if kind is dict:
            return {key: self.with_placeholders(value) for key, value in item.items()}
        if (kind is list or kind is tuple) and item and type(item[0]) is not str:  # which may be long
            return kind(map(self.with_placeholders, item))
        return item

    @property
    def rows(self) -> dict[pickle.PickleBuffer, bytes]:
        """Rows of the leaf table for this slot's outputs, by their placeholders."""
        return {} if self._here is None else self._here.rows

    def go_back(self, cursor: int) -> None:
        """Give up what was allocated since the cursor was here: it is in no batch."""
        self.cursor = cursor

    def place(self, nbytes: int) -> int:
        """Allocate space; returns its offset, perhaps beyond the reserved memory: `ensure` makes room."""
        offset = self.cursor
        self.cursor = align(offset + nbytes)
        return offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """The offset of an address within the slot's allocated part; None if it is not there."""
        if self._here is None:
            return None
        offset = address - self._here.extent.address
        return offset if 0 <= offset <= min(self.cursor, self.nbytes) - nbytes else None

    def holds(self, address: int) -> bool:
        """Whether an address is in memory that `tensor` has given, in this task or an earlier one."""
        return self.offset_of(address, 0) is not None or any(
            address in addresses and watch() is not None for watch, addresses in self._kept
        )

    def ensure(self, nbytes: int) -> memoryview | None:
        """Grow the slot to hold ``nbytes``, keeping what was written; returns its bytes, see `view`.

        None if that exceeds the task's limit, the host's memory or this process's address space: then the
        batch is spilled. Raises `SharedMemoryExhausted` if spilling, which takes more memory, would make the
        kernel kill a process. At most once in a task.
        """
        if nbytes <= self.nbytes and self._here is not None:
            return self._here.extent.view
        may_refuse, self._may_refuse = self._may_refuse, False
        try:
            if nbytes > self.limit_nbytes:
                raise SharedMemoryExhausted(f"it may have {self.limit_nbytes:,} bytes", needed_nbytes=nbytes)
            self._grow(nbytes)
        except SharedMemoryExhausted as error:
            if may_refuse:  # to spill it would have the kernel kill this process or the main one
                purpose = (
                    f"a batch of {nbytes:,} bytes does not fit in its slot ({error}), and copying it to "
                    f"private memory takes {2 * nbytes:,} bytes"
                )
                check_headroom(2 * nbytes, purpose)
            return None
        return self.view()

    def release(self) -> bool:
        """End the task: the slot is about to be published.

        If something in this process still views the slot (a collate function that keeps its batches, say),
        those views are moved to private memory, because the slot will be written again. Returns whether there
        were any. Raises `SharedMemoryExhausted` if there is no memory for them; then the task has not ended.
        """
        anchor, self._anchor = self._anchor, None
        anchored, self._anchored = self._anchored, None
        here, self._here = self._here, None
        if anchor is None or anchored is None:
            return False
        watch = weakref.ref(anchor)
        del anchor
        if watch() is None:
            return False
        try:
            anchored.detach()
        except BaseException:
            self._anchor, self._anchored, self._here = watch(), anchored, here
            raise
        self._kept = [kept for kept in self._kept if kept[0]() is not None]
        self._kept.append((watch, range(anchored.address, anchored.address + anchored.nbytes)))
        if here is not None and here.extent is anchored:
            del self._mapped[self.slot]
        return True

    def restart(self) -> bool:
        """Give up what was allocated in this task, as `release` does, and begin again at the slot's start.

        An exception in place of a batch, and a batch that is sent in pieces, may overwrite the whole slot.
        Tensors that user code keeps must survive that.
        """
        may_refuse = self._may_refuse
        detached = self.release()
        self.begin(self.slot, self.nbytes, self.limit_nbytes)
        self._may_refuse = may_refuse
        return detached

    def close(self) -> None:
        """Unmap all slots, because the worker ends; memory that user code keeps stays mapped."""
        self._here = self._anchored = self._anchor = None
        self._mapped.clear()
        self._segment.close()

    @property
    def address(self) -> int:
        """The slot's address in this process."""
        assert self._here is not None
        return self._here.extent.address

    def view(self) -> memoryview:
        """The slot's bytes, writable; none outside a task."""
        return memoryview(bytearray()) if self._here is None else self._here.extent.view

    def _grow(self, nbytes: int) -> None:
        """Reserve and map more; if either fails, the slot is as before."""
        reserved = self._segment.reserve(self.slot, self.nbytes, nbytes)
        try:
            extent = self._segment.map(self.slot, reserved, fills=True)
        except SharedMemoryExhausted:
            self._segment.discard(self.slot, reserved, self.nbytes)
            raise
        self.nbytes = reserved
        self._here = self._mapped[self.slot] = _Mapped(extent)


class _Current(threading.local):
    allocator: SlotAllocator | None = None


_current = _Current()


def current_allocator() -> SlotAllocator | None:
    """The allocator of the worker whose thread this is, which allocates nothing outside a task; or None."""
    return _current.allocator


def set_current_allocator(allocator: SlotAllocator | None) -> None:
    """Set the allocator that this thread allocates with, or None."""
    _current.allocator = allocator
