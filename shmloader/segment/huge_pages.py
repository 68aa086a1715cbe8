"""Huge pages for slots, where the kernel has them: fewer page faults at first, and fewer TLB misses after.

Slots lie in a memfd, whose memory is reserved by ``fallocate`` before anybody touches it, and that takes
small pages. ``madvise(MADV_COLLAPSE)`` (Linux 6.1) makes a huge page of a part of a file where some page is
there. So one page of each part is reserved, the rest is made with it, and what is left by ``fallocate``.
docs/decisions/0024 has the figures.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

from shmloader.errors import SharedMemoryExhausted
from shmloader.segment.mapping import PAGE_NBYTES, map_aligned, unmap

HUGE_NBYTES = 2 << 20
_MADV_COLLAPSE = 25
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_refused = sys.platform != "linux" or os.environ.get("SHMLOADER_HUGE_PAGES") == "0"


def take_huge_pages(fd: int, offset: int, held_nbytes: int, nbytes: int) -> None:
    """Reserve as much of a part of a file as can be had in huge pages; no more than asked for.

    What cannot be had so is left as it is. After the first refusal this process asks no more: a kernel that
    lacks the call always will, and where memory is in pieces, to look for a whole one takes long.

    Args:
        fd: A memfd.
        offset: Where the part begins, a multiple of ``HUGE_NBYTES``.
        held_nbytes: How much of it is reserved already, and may be in use.
        nbytes: How much there is to be.

    Raises:
        OSError: If the system gives no memory at all.
    """
    global _refused  # noqa: PLW0603 - an answer of this host
    begin, end = held_nbytes // HUGE_NBYTES * HUGE_NBYTES, nbytes // HUGE_NBYTES * HUGE_NBYTES
    if _refused or begin >= end:
        return
    for start in range(begin, end, HUGE_NBYTES):
        os.posix_fallocate(fd, offset + start, PAGE_NBYTES)
    try:
        address = map_aligned(end - begin, mmap.MAP_SHARED, fd, offset + begin, HUGE_NBYTES)
    except SharedMemoryExhausted:  # of address space
        return
    if _libc.madvise(address, end - begin, _MADV_COLLAPSE) != 0:
        # A part that another process is just using is no answer of the host's.
        _refused = ctypes.get_errno() not in (errno.EAGAIN, errno.EBUSY)
    unmap(address, end - begin)
