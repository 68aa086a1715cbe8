"""The shared memory of all slots of one iterator, a memfd; and descriptors that reach worker processes."""

from __future__ import annotations

import errno
import mmap
import os
from multiprocessing import reduction
from typing import Any

from shmloader.errors import SharedMemoryExhausted
from shmloader.interrupts import HeldInterrupts
from shmloader.memory.huge_pages import take_huge_pages
from shmloader.memory.limits import check_headroom, exhausted
from shmloader.memory.mapping import HUGE_NBYTES, MAP_NORESERVE, MAP_POPULATE, Extent, libc, whole_pages

SLOT_STRIDE = 1 << 38
"""Bytes between the starts of two slots in one memfd: address space of a sparse file, not memory."""

_KEEP_SIZE_PUNCH_HOLE = 0x1 | 0x2


class Descriptor:
    """A file descriptor that reaches a worker under every start method.

    Under fork it is inherited as it is; under spawn and forkserver ``multiprocessing`` passes it while the
    process is being started.
    """

    fd = -1

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self, close: Any = os.close) -> None:
        """Close it in this process, once."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close(fd)

    def __reduce__(self) -> tuple[Any, tuple[Any, Any]]:
        return _received_descriptor, (type(self), reduction.DupFd(self.fd))


class OwnDescriptor(Descriptor):
    """A file descriptor that is closed when nobody has the object any more."""

    def __del__(self, close: Any = os.close) -> None:
        # A finalizer would run at the interpreter's end before others have stopped to use it. This may come
        # when this module's names are gone and, in a garbage cycle, before the owner's `close`.
        try:  # noqa: SIM105
            self.close(close)
        except OSError:  # the program has closed all that were open
            pass


def _received_descriptor(kind: type[Descriptor], duplicate: Any) -> Descriptor:
    return kind(duplicate.detach())


class Segment:
    """Memory for numbered slots: one sparse memory file, which the main process alone owns and closes."""

    def __init__(self, descriptor: OwnDescriptor | None = None) -> None:
        with HeldInterrupts():  # until the descriptor has an owner
            self._descriptor = descriptor or OwnDescriptor(os.memfd_create("shmloader-slots"))

    def reserve(self, slot: int, held_nbytes: int, nbytes: int) -> int:
        """Make a slot of ``held_nbytes`` at least ``nbytes`` large; its contents stay.

        Returns the bytes (whole pages) that the slot has now. Raises `SharedMemoryExhausted` if the host
        cannot give that much; nothing was touched.
        """
        nbytes = whole_pages(nbytes)
        more_nbytes = nbytes - held_nbytes
        check_headroom(more_nbytes, f"a slot needs {more_nbytes:,} more bytes of shared memory")
        if nbytes > SLOT_STRIDE:
            raise SharedMemoryExhausted(
                f"one batch needs {nbytes:,} bytes, more than a slot can have ({SLOT_STRIDE:,})",
                needed_nbytes=nbytes,
            )
        try:
            if nbytes >= HUGE_NBYTES:
                take_huge_pages(self._descriptor.fd, slot * SLOT_STRIDE, held_nbytes, nbytes)
            os.posix_fallocate(self._descriptor.fd, slot * SLOT_STRIDE, nbytes)
        except OSError as error:
            self.discard(slot, nbytes, held_nbytes)  # what could be had of it
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            failed = f"reserving {nbytes:,} bytes of shared memory for a slot failed: {error.strerror}"
            raise exhausted(failed, nbytes, code=error.errno) from error
        return nbytes

    def map(self, slot: int, nbytes: int, *, private: bool = False, fills: bool = False) -> Extent:
        """Map a slot that was reserved, by this process or another one, if there is address space for it.

        With ``private``, what is written to the mapping stays in this process. Who ``fills`` the slot has all
        its pages mapped at once: a fault for each would take ten times as long.
        """
        flags = mmap.MAP_PRIVATE | MAP_NORESERVE if private else mmap.MAP_SHARED
        flags |= MAP_POPULATE if fills else 0
        return Extent(nbytes, flags, self._descriptor.fd, slot * SLOT_STRIDE)

    def fileno(self) -> int:
        """The descriptor, to be sent to another process."""
        return self._descriptor.fd

    def discard(self, slot: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """Give back a slot's memory, which nothing reads, but for its first ``kept_nbytes`` (whole pages)."""
        begin = slot * SLOT_STRIDE + kept_nbytes
        libc.fallocate(self._descriptor.fd, _KEEP_SIZE_PUNCH_HOLE, begin, nbytes - kept_nbytes)

    def duplicate(self) -> Segment:
        """The same memory with a separate descriptor, for a worker thread, which may outlive the owner."""
        return Segment(OwnDescriptor(os.dup(self._descriptor.fd)))

    def close(self) -> None:
        """Drop this object's hold on all slots; mapped extents live on while they are used."""
        self._descriptor.close()

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return Segment, (self._descriptor,)
