"""Slots in one memfd."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from typing import Any

from shmloader.errors import SharedMemoryExhausted
from shmloader.host.interrupts import HeldInterrupts
from shmloader.host.limits import memory_headroom
from shmloader.shared_memory.base import Descriptor, check_headroom
from shmloader.shared_memory.huge_pages import HUGE_NBYTES, take_huge_pages
from shmloader.shared_memory.mapping import Extent, Mapping, whole_pages

SLOT_STRIDE = 1 << 38
"""Bytes between the starts of two slots in one memfd: address space of a sparse file, not memory."""

_libc = ctypes.CDLL(None, use_errno=True)


def _refused(error: OSError, slot: int, nbytes: int) -> SharedMemoryExhausted:
    """The error for a slot's pages that the system would not give, with what to change."""
    failed = f"reserving {nbytes:,} bytes of shared memory for a slot failed: {error.strerror}"
    if error.errno == errno.EFBIG:
        return SharedMemoryExhausted(
            f"{failed}. All slots lie in one sparse file, this one at {slot * SLOT_STRIDE:,} bytes, and the "
            "size of files is limited (ulimit -f, RLIMIT_FSIZE): lift the limit.",
            needed_nbytes=nbytes,
        )
    room = memory_headroom()
    return SharedMemoryExhausted(
        f"{failed}; {room.available_nbytes:,} bytes are available in {room.source}. Use a smaller "
        "batch_size, fewer workers or a smaller prefetch_factor, or raise the limit.",
        needed_nbytes=nbytes,
        available_nbytes=room.available_nbytes,
    )


class MemfdSegment:
    """All slots in one anonymous, sparse memory file (``memfd_create``)."""

    def __init__(self, descriptor: Descriptor | None = None) -> None:
        with HeldInterrupts():  # until somebody owns the descriptor
            self._descriptor = descriptor or Descriptor(os.memfd_create("shmloader-slots", os.MFD_CLOEXEC))

    def __del__(self, close: Any = os.close) -> None:
        # After a Ctrl-C before anybody could own it, or at the interpreter's end, when this module's names
        # may be gone; `close` is the usual way.
        try:
            if self._descriptor.fd >= 0:
                close(self._descriptor.fd)
        except (AttributeError, OSError):
            pass

    def reserve(self, slot: int, held_nbytes: int, nbytes: int) -> int:
        """See `Segment.reserve`."""
        nbytes = whole_pages(nbytes)
        check_headroom(nbytes - held_nbytes)
        if nbytes > SLOT_STRIDE:
            raise SharedMemoryExhausted(
                f"one batch needs {nbytes:,} bytes, more than a slot can have ({SLOT_STRIDE:,})",
                needed_nbytes=nbytes,
            )
        try:
            take_huge_pages(self._descriptor.fd, slot * SLOT_STRIDE, held_nbytes, nbytes)
            os.posix_fallocate(self._descriptor.fd, slot * SLOT_STRIDE, nbytes)
        except OSError as error:
            self.discard(slot, nbytes, held_nbytes)  # what could be had of it
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise _refused(error, slot, nbytes) from error
        return nbytes

    def map(self, slot: int, nbytes: int) -> Extent:
        """See `Segment.map`."""
        fd, offset = self._descriptor.fd, slot * SLOT_STRIDE
        mapping = None
        if nbytes >= HUGE_NBYTES:
            with contextlib.suppress(SharedMemoryExhausted):  # there may be just enough without
                mapping = Mapping(nbytes, mmap.MAP_SHARED, fd, offset, HUGE_NBYTES)
        if mapping is None:
            mapping = Mapping(nbytes, mmap.MAP_SHARED, fd, offset)
        return Extent(mapping.address, nbytes, mapping)

    def discard(self, slot: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """See `Segment.discard`."""
        keep_size_punch_hole = 0x1 | 0x2
        _libc.fallocate(
            self._descriptor.fd,
            keep_size_punch_hole,
            ctypes.c_int64(slot * SLOT_STRIDE + kept_nbytes),
            ctypes.c_int64(nbytes - kept_nbytes),
        )

    def close(self) -> None:
        """See `Segment.close`."""
        if self._descriptor.fd >= 0:
            os.close(self._descriptor.fd)
            self._descriptor.fd = -1

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return MemfdSegment, (self._descriptor,)
