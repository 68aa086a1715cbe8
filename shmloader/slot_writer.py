"""A worker's side of a slot: leaves are allocated in it one after the other while a batch is collated.

Allocation is a bump pointer that is never moved back within a task, so no two leaves overlap. A leaf that
does not fit in what is reserved is allocated in private memory by the caller and copied in at the end,
when the size of the whole batch is known and the slot is grown once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shmloader.errors import SharedMemoryExhausted
from shmloader.layout import CODE_OF_TORCH_DTYPE, DTYPES, align
from shmloader.messages import Task
from shmloader.segment import Extent, Segment


def wrap_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over an array of its carrier dtype, with a storage of exactly its own bytes.

    The array's memory is kept alive by the tensor's storage, however the tensor is passed on.
    """
    tensor = torch.from_numpy(array)
    if tensor.dtype == dtype:
        return tensor
    # Not tensor.view(dtype): that would be an autograd view of a hidden base.
    whole: torch.Tensor = torch.empty(0, dtype=dtype)
    return whole.set_(tensor.untyped_storage(), 0, tensor.size(), tensor.stride())


class SlotWriter:
    """Allocates in the slot that the current task grants. One per worker; lives in the worker's process.

    Args:
        segment: The iterator's segment, attached.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._extents: dict[int, Extent] = {}
        self._anchor: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._anchored: Extent | None = None  # what the anchor lies over: the slot may grow after it
        self.extent: Extent | None = None
        self.slot = 0
        self.version = 0
        self.nbytes = 0
        self.limit_nbytes = 0
        self.cursor = 0

    def begin(self, task: Task) -> None:
        """Take the slot that a task grants.

        The slot is grown to the size of the largest batch so far, if the host can give it: then this
        batch's leaves are written in place.
        """
        self.slot, self.version, self.nbytes = task.slot, task.version, task.slot_nbytes
        self.limit_nbytes = max(task.limit_nbytes, task.slot_nbytes)
        self.cursor = 0
        self._anchor = None
        wanted = min(task.hint_nbytes, self.limit_nbytes)
        if wanted > self.nbytes:
            try:
                self._grow(wanted)
            except SharedMemoryExhausted:
                self.limit_nbytes = self.nbytes
        self._remap()

    def read(self, nbytes: int) -> bytes:
        """The first bytes of the slot, before anything is allocated (a long index batch)."""
        assert self.extent is not None
        return bytes(memoryview(self.extent.buffer)[:nbytes])

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate an uninitialised tensor in the slot, or None where it does not fit there."""
        code = CODE_OF_TORCH_DTYPE.get(dtype)
        if code is None or self.extent is None:
            return None
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        offset = self.cursor
        if nbytes == 0 or offset + nbytes > self.nbytes:
            return None
        self.cursor = align(offset + nbytes)
        if self._anchor is None:
            self._anchor = np.ndarray(self.extent.nbytes, np.uint8, self.extent.buffer)
            self._anchored = self.extent
        array = np.ndarray(tuple(shape), DTYPES[code].carrier, self._anchor, offset)
        return torch.from_numpy(array) if DTYPES[code].native else wrap_tensor(array, dtype)

    def place(self, nbytes: int) -> int:
        """Allocate an offset, perhaps beyond what is reserved: `commit` makes room."""
        offset = self.cursor
        self.cursor = align(offset + nbytes)
        return offset

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Where memory of this process lies in the slot's allocated part, or None if it does not."""
        if self.extent is None:
            return None
        offset = address - self.extent.address
        return offset if offset >= 0 and offset + nbytes <= min(self.cursor, self.nbytes) else None

    def ensure(self, nbytes: int, written_nbytes: int) -> bool:
        """Grow the slot to hold ``nbytes``, keeping its first ``written_nbytes``.

        Returns:
            False if that is more than the task's limit or than the host can give.
        """
        if nbytes <= self.nbytes:
            return True
        if nbytes > self.limit_nbytes:
            return False
        before = self.extent
        try:
            self._grow(nbytes)
        except SharedMemoryExhausted:
            return False
        self._remap()
        if before is not None and self.extent is not None and before.version != self.version:
            kept = min(written_nbytes, before.nbytes)
            self._bytes(self.extent)[:kept] = self._bytes(before)[:kept]
        return True

    def release(self) -> bool:
        """End the task: the slot is about to be published.

        If something in this process still views the slot (a collate function that keeps its batches, say),
        those views are moved to private memory, because the slot will be written again.

        Returns:
            Whether that was so.
        """
        anchor, self._anchor = self._anchor, None
        anchored, self._anchored = self._anchored, None
        self.extent = None
        if anchor is None or anchored is None:
            return False
        watch = weakref.ref(anchor)
        del anchor
        if watch() is None:
            return False
        anchored.detach()
        if self._extents.get(self.slot) is anchored:
            del self._extents[self.slot]
        return True

    def view(self) -> memoryview:
        """The slot's bytes, writable."""
        if self.extent is None:
            return memoryview(bytearray())
        return memoryview(self.extent.buffer).cast("B")

    @staticmethod
    def _bytes(extent: Extent) -> memoryview:
        return memoryview(extent.buffer).cast("B")

    def _grow(self, nbytes: int) -> None:
        self.version, self.nbytes = self._segment.reserve(self.slot, self.version, self.nbytes, nbytes)

    def _remap(self) -> None:
        """Map the slot as it is now; mappings are kept from task to task."""
        extent = self._extents.get(self.slot)
        if self.nbytes == 0:
            self.extent = None
            return
        if extent is None or extent.nbytes != self.nbytes or extent.version != self.version:
            extent = self._segment.map(self.slot, self.version, self.nbytes)
            self._extents[self.slot] = extent
        self.extent = extent


class _Current(threading.local):
    writer: SlotWriter | None = None


_current = _Current()


def current_writer() -> SlotWriter | None:
    """The writer of the task that this thread is working on, or None outside one."""
    return _current.writer


def set_current_writer(writer: SlotWriter | None) -> None:
    """Say which slot this thread allocates in."""
    _current.writer = writer
