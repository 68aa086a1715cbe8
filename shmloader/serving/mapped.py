"""A reader's side of the slots: mapped so that its writes stay its own, and let go when no view is left."""

from __future__ import annotations

import os
import weakref

import numpy as np

from shmloader.memory import Extent, Segment
from shmloader.memory.private_pages import PrivatePages
from shmloader.memory.segment import OwnDescriptor
from shmloader.serving.records import ANSWER, COPY, IN_OWN, Stored
from shmloader.slots import ByteArray

_UINT8 = np.dtype(np.uint8)  # quicker to use than the type


class _Slots:
    """The slots of one segment of the server, as this process maps them."""

    def __init__(self, fd: int) -> None:
        self.segment = Segment(OwnDescriptor(fd))
        self.extents: dict[int, Extent] = {}


class MappedSlots:
    """Leases what a server has stored. A batch that this process holds never changes, whatever others do.

    An exception may come between any two instructions: what was leased last is kept until the next one, so
    that a call that was cut short can be made again.
    """

    def __init__(self, fd: int) -> None:
        self._own = _Slots(fd)  # of the server's own segment
        self._batches: _Slots | None = None  # of its iterator's
        self._pages = PrivatePages()
        # What was leased, by ``seq``: its anchor, whose death ends the lease, and its memory.
        self._leases: dict[int, tuple[weakref.ref[ByteArray], Extent]] = {}
        self._released: list[int] = []  # of which the server has to be told
        self._last: tuple[int, ByteArray] | None = None  # ``seq`` and anchor
        self.copies = 0

    @property
    def held(self) -> int:
        """The number of batches that this process holds in shared memory."""
        return sum(anchor() is not None for anchor, _ in list(self._leases.values()))

    def begin(self, fds: list[int]) -> None:
        """Take the descriptor of an epoch's segment, if it has one; it is this object's from now on."""
        for fd in fds:
            if self._batches is None or not os.path.sameopenfile(self._batches.segment.fileno(), fd):
                if self._batches is not None:
                    self._batches.segment.close()
                self._batches = _Slots(fd)
            else:
                os.close(fd)

    def lease(self, stored: Stored) -> tuple[ByteArray, bytes]:
        """The memory and the header of something stored; it is held until the last view is gone.

        Where the server asks for it, it is copied and not held. Raises `SharedMemoryExhausted` if this
        process has no address space; then it is as it was.
        """
        flags, seq, _, slot, nbytes, begin, end = stored
        last = self._last
        if last is not None and last[0] == seq:  # its slot may be another thing's, if it was copied
            return last[1], last[1][begin:end].tobytes()
        slots = self._own if flags & IN_OWN else self._batches
        assert slots is not None
        extent = slots.extents.get(slot)
        if extent is None or extent.nbytes != nbytes:
            extent = slots.extents[slot] = slots.segment.map(slot, nbytes, private=True)
        header = bytes(extent.view[begin:end])
        if flags & COPY:
            anchor = np.empty(end, _UINT8)
            anchor[:] = np.frombuffer(extent.buffer, np.uint8)[:end]
            self._last = seq, anchor
            self.pass_over(stored)
            self.copies += 1
            return anchor, header
        anchor = np.ndarray(nbytes, _UINT8, extent.buffer)
        if not flags & ANSWER:
            self._last = seq, anchor
        self._leases[seq] = weakref.ref(anchor), extent
        return anchor, header

    def drop_last(self) -> None:
        """Keep what was leased last no longer."""
        self._last = None

    def pass_over(self, stored: Stored) -> None:
        """Let something go, unless it was read."""
        if stored.seq not in self._leases:
            self._released.append(stored.seq)

    def released(self) -> list[int]:
        """The things that were let go, by ``seq``, with this process's writes undone.

        The caller takes out those of which it has told the server.
        """
        for seq in [seq for seq, (anchor, _) in self._leases.items() if anchor() is None]:
            self._pages.drop(self._leases[seq][1])
            self._released.append(seq)
            del self._leases[seq]
        return self._released

    def close(self) -> None:
        """Turn what is held into private memory, in place, and let go of the server's memory."""
        self._last = None
        for anchor, extent in list(self._leases.values()):
            if anchor() is not None:
                extent.detach()
        self._leases.clear()
        for slots in (self._own, self._batches):
            if slots is not None:
                slots.segment.close()
        self._pages.close()
