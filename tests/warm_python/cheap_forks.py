"""Makes forks of this process cheap: its memory lies in huge pages, of which a fork copies far less.

A fork copies an entry for each page of 4 KiB that a process has. In a process with torch and many tests, a
loader with two workers takes 90 ms of a processor for a short epoch, and 67 ms with huge pages.
"""

import ctypes
import os
from pathlib import Path

_HUGE = 2 << 20  # bytes of a page
_MADV_COLLAPSE = 25  # <linux/mman.h>, since Linux 6.1; before, and where there are none, nothing changes


def collapse_pages() -> None:
    """Put the private memory of this process into huge pages, where it fills them."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        addresses, permissions, *_, path = [*line.split(maxsplit=5), ""][:6]
        if permissions == "rw-p" and path in {"", "[heap]"}:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            for start in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                madvise(start, _HUGE, _MADV_COLLAPSE)
