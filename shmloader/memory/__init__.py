"""Shared memory: the only package that knows memfd and mmap.

A segment gives memory to numbered slots. All slots of an iterator lie in one memfd, ``SLOT_STRIDE`` bytes
apart, so that each can grow without moving. It has no name and no entry in /dev/shm, and the size of that
mount does not limit it. The kernel frees it when the last process that maps it has ended, for any reason.
Slots of 2 MiB and more get huge pages if the kernel has them.

Memory is reserved before it is touched: touching a page for which there is no memory is a SIGBUS.
"""

from shmloader.memory.mapping import PAGE_NBYTES, Extent, whole_pages, why_unavailable
from shmloader.memory.segment import Descriptor, Segment

__all__ = ["PAGE_NBYTES", "Descriptor", "Extent", "Segment", "whole_pages", "why_unavailable"]
