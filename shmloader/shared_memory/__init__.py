"""Shared memory: the only package that knows memfd, mmap and ``multiprocessing.shared_memory``.

A `Segment` gives memory to numbered slots. There are two kinds with one interface:

* `MemfdSegment` (Linux): one memfd for all slots, which lie ``SLOT_STRIDE`` bytes apart, so that each can
  grow without moving. No name, no entry in /dev/shm, not bounded by the size of that mount; the kernel
  frees it when the last process that maps it is gone, however that went. Slots of 2 MiB and more get huge
  pages where the kernel has them.
* `NamedSegment` (elsewhere, and on Linux for tests): one named object per slot and version; growing makes
  the next version.

Memory is reserved before it is touched: touching a page that cannot be had is a SIGBUS.
"""

from __future__ import annotations

import os
import sys

from shmloader.shared_memory.base import Descriptor, Segment, open_anonymous_file
from shmloader.shared_memory.huge_pages import HUGE_NBYTES, take_huge_pages
from shmloader.shared_memory.mapping import (
    MAP_NORESERVE,
    PAGE_NBYTES,
    Extent,
    map_copy_on_write,
    map_over,
    take_space,
    whole_pages,
)
from shmloader.shared_memory.memfd import SLOT_STRIDE, MemfdSegment
from shmloader.shared_memory.named import NamedSegment

__all__ = [
    "HUGE_NBYTES",
    "MAP_NORESERVE",
    "PAGE_NBYTES",
    "SLOT_STRIDE",
    "Descriptor",
    "Extent",
    "MemfdSegment",
    "NamedSegment",
    "Segment",
    "map_copy_on_write",
    "map_over",
    "new_segment",
    "open_anonymous_file",
    "take_huge_pages",
    "take_space",
    "wanted_backend",
    "whole_pages",
]


def wanted_backend() -> str:
    """``"memfd"`` or ``"portable"``: what ``SHMLOADER_SEGMENT`` names, else what fits this platform.

    Raises:
        ValueError: If the variable is neither.
    """
    wanted = os.environ.get("SHMLOADER_SEGMENT", "memfd" if sys.platform == "linux" else "portable")
    if wanted not in ("memfd", "portable"):
        raise ValueError(f"SHMLOADER_SEGMENT must be 'memfd' or 'portable', not {wanted!r}")
    return wanted


def new_segment() -> Segment:
    """The segment of `wanted_backend`."""
    return MemfdSegment() if wanted_backend() == "memfd" else NamedSegment()
