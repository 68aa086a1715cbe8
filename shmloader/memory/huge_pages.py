"""Huge pages for slots and stores, if the kernel has them: fewer page faults, and fewer TLB misses.

``fallocate`` reserves a file's memory in small pages; ``madvise(MADV_COLLAPSE)`` (Linux 6.1) makes a huge
page of a part that has one page at least. So one page of each part is reserved, the part is collapsed, and
``fallocate`` reserves what is left. docs/decisions/0024 has the figures.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import time

from shmloader.errors import SharedMemoryExhausted
from shmloader.memory.mapping import HUGE_NBYTES, PAGE_NBYTES, libc, map_aligned

_PIECE_NBYTES = 8 * HUGE_NBYTES  # asked for at once
_MOST_PIECE_S = 0.025
"""Most processor time for a piece after which the next one is asked for; 5 ms are usual."""

_MADV_COLLAPSE = 25

_refused = sys.platform != "linux" or os.environ.get("SHMLOADER_HUGE_PAGES") == "0"


def take_huge_pages(fd: int, offset: int, held_nbytes: int, nbytes: int) -> bool:
    """Reserve as much of a part of a file as possible in huge pages; no more than asked for.

    The rest is not reserved, and neither is anything that would take long: the kernel then searches for whole
    pieces of memory and moves other pages. If the kernel lacks the call or refuses it, this process does not
    ask again.

    The part begins at ``offset``, a multiple of ``HUGE_NBYTES``; ``held_nbytes`` of it are reserved already,
    and may be in use; ``nbytes`` are wanted in all. Returns whether asking for more makes sense at the
    moment. Raises `OSError` if the system gives no memory at all.
    """
    global _refused  # noqa: PLW0603 - an answer of this host
    begin, end = held_nbytes // HUGE_NBYTES * HUGE_NBYTES, nbytes // HUGE_NBYTES * HUGE_NBYTES
    if _refused or begin >= end:
        return not _refused
    try:
        # Privately: a child that another thread forks meanwhile would keep a shared mapping, and a memfd that
        # has one cannot be sealed.
        mapping, address = map_aligned(HUGE_NBYTES, end - begin, mmap.MAP_PRIVATE, fd, offset + begin)
    except SharedMemoryExhausted:  # of address space
        return False
    with contextlib.closing(mapping):
        for start in range(begin, end, _PIECE_NBYTES):
            began_s = time.thread_time()  # not the time that others have had the processor
            stop = min(start + _PIECE_NBYTES, end)
            for page in range(start, stop, HUGE_NBYTES):
                os.posix_fallocate(fd, offset + page, PAGE_NBYTES)
            if libc.madvise(address + start - begin, stop - start, _MADV_COLLAPSE) != 0:
                # Any other error is temporary: no memory in one piece, a page in use.
                _refused = ctypes.get_errno() == errno.EINVAL
                return False
            if time.thread_time() - began_s > _MOST_PIECE_S:
                return False
    return True


def make_pages_huge(address: int, nbytes: int, most_s: float) -> None:
    """Make huge pages of a mapped part of a file that is complete, for so much processor time at most.

    Small pages are copied. A last incomplete huge page stays as it is, and so does everything if the address
    is not a multiple of ``HUGE_NBYTES``.
    """
    if _refused or address % HUGE_NBYTES:
        return
    end_s = time.thread_time() + most_s
    for start in range(address, address + nbytes - HUGE_NBYTES + 1, HUGE_NBYTES):
        if libc.madvise(start, HUGE_NBYTES, _MADV_COLLAPSE) != 0 or time.thread_time() > end_s:
            return
