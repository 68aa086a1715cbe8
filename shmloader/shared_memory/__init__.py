"""Shared memory: the only package that knows memfd and mmap.

A segment gives memory to numbered slots. All slots of an iterator lie in one memfd, ``SLOT_STRIDE`` bytes
apart, so that each can grow without moving. It has no name and no entry in /dev/shm, and the size of that
mount does not bound it. The kernel frees it when the last process that maps it is gone, however that went.
Slots of 2 MiB and more get huge pages where the kernel has them.

Memory is reserved before it is touched: touching a page that cannot be had is a SIGBUS.
"""

from __future__ import annotations

from shmloader.shared_memory.descriptor import Descriptor
from shmloader.shared_memory.headroom import check_headroom, spare_nbytes
from shmloader.shared_memory.huge_pages import HUGE_NBYTES, make_pages_huge, take_huge_pages
from shmloader.shared_memory.mapping import (
    MAP_NORESERVE,
    PAGE_NBYTES,
    Extent,
    map_copy_on_write,
    map_over,
    take_space,
    whole_pages,
)
from shmloader.shared_memory.platform import why_unavailable
from shmloader.shared_memory.segment import SLOT_STRIDE, Segment

__all__ = [
    "HUGE_NBYTES",
    "MAP_NORESERVE",
    "PAGE_NBYTES",
    "SLOT_STRIDE",
    "Descriptor",
    "Extent",
    "Segment",
    "check_headroom",
    "make_pages_huge",
    "map_copy_on_write",
    "map_over",
    "spare_nbytes",
    "take_huge_pages",
    "take_space",
    "whole_pages",
    "why_unavailable",
]
