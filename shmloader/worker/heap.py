"""The heap of a worker process: memory that batches are made in is kept for the next batch.

glibc maps an allocation of more than 32 MB for itself, and unmaps it when it is freed. So a `collate_fn` that
makes a large batch has each page of it faulted in by the kernel, with every batch. A warm heap takes all from
one place and gives back only what exceeds several batches (docs/decisions/0042).
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any

from shmloader.memory.limits import memory_headroom

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # <malloc.h>
_LEAST_KEPT_NBYTES, _MOST_KEPT_NBYTES = 256 << 20, 1 << 30
_KEPT_BATCHES = 4  # a batch, its parts before they are joined, and the batch before it

_logger = logging.getLogger(__name__)


class WarmHeap:
    """The setting of glibc's allocator in one worker process; the process's other allocations follow it.

    At the end of the heap up to 256 MiB of free memory are kept, or four of the largest batches if they are
    larger, but never more than 1 GiB.
    """

    def __init__(self, glibc: Any, num_workers: int) -> None:
        self._glibc = glibc
        self._num_workers = num_workers
        self._kept_nbytes = _LEAST_KEPT_NBYTES
        self.enough_nbytes = _LEAST_KEPT_NBYTES // _KEPT_BATCHES  # batches of no more need no more kept
        self.is_warm = self._keep() and bool(glibc.mallopt(_M_MMAP_MAX, 0))

    def note_batch(self, nbytes: int) -> None:
        """Keep enough for batches of this size; call it for those of more than ``enough_nbytes``."""
        if _KEPT_BATCHES * nbytes > self._kept_nbytes < _MOST_KEPT_NBYTES:
            self._kept_nbytes = min(_KEPT_BATCHES * nbytes, _MOST_KEPT_NBYTES)
            self.enough_nbytes = nbytes
            self._keep()

    def trim(self) -> None:
        """Give all free memory back to the host."""
        self._glibc.malloc_trim(0)

    def trim_if_short(self) -> None:
        """Give free memory back to the host if it has less than what all workers together may keep."""
        if memory_headroom().available_nbytes < self._num_workers * self._kept_nbytes:
            self.trim()

    def _keep(self) -> bool:
        return bool(self._glibc.mallopt(_M_TRIM_THRESHOLD, self._kept_nbytes))


def warm_heap(num_workers: int) -> WarmHeap | None:
    """Make this process's heap warm, for good; the program's own settings later on go before it.

    Returns None, and nothing is changed, with ``SHMLOADER_WARM_MEMORY=0``, if the environment sets the
    allocator (``MALLOC_...``, ``GLIBC_TUNABLES``), and where the process allocates with another one than
    glibc's: musl, a preloaded jemalloc or tcmalloc.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    is_set |= "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set or os.environ.get("SHMLOADER_WARM_MEMORY") == "0":
        return None
    try:
        program, glibc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
        own, found = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (glibc, program))
        if own != found or not hasattr(glibc, "mallopt") or not hasattr(glibc, "malloc_trim"):
            return None
    except (OSError, AttributeError, TypeError):  # musl, macOS; Windows
        return None
    heap = WarmHeap(glibc, num_workers)
    if heap.is_warm:
        return heap
    _logger.info("glibc refuses mallopt(); workers give memory back with every batch")
    return None
