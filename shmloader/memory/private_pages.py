"""Pages of private mappings that this process has written to: found quickly, and dropped.

The kernel's page map tells which pages of a private mapping are copies (``PAGEMAP_SCAN``, Linux 6.7), in a
tenth of the time that reading all pages anew would take. docs/decisions/0059 has the figures.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from shmloader.memory.mapping import Extent, libc

if sys.platform != "win32":
    import fcntl

_MADV_DONTNEED = 4
_SCAN = struct.Struct("12Q")  # `struct pm_scan_arg` of linux/fs.h
_SPAN, _SPAN_BEGIN, _NO_SPAN = struct.Struct("2Q"), 2 * 8, (0, 0)  # addresses within it
_PAGEMAP_SCAN = 0xC0006610 | _SCAN.size << 16  # _IOWR('f', 16, struct pm_scan_arg)
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 4, 8, 16


class PrivatePages:
    """Finds and drops the private pages of this process's mappings; it holds one descriptor."""

    def __init__(self) -> None:
        self._fd = -1
        if sys.platform == "linux":
            self._region = ctypes.create_string_buffer(3 * 8)
            # The first region whose pages are present or swapped, and not the file's.
            inverted, all_of, any_of = _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED
            region = ctypes.addressof(self._region), 1, 1
            about = 0, *_NO_SPAN, 0, *region, inverted, all_of, any_of, _IS_PRESENT
            self._request = bytearray(_SCAN.pack(_SCAN.size, *about))
            try:
                self._fd = os.open("/proc/self/pagemap", os.O_RDONLY)
            except OSError:
                return  # then all pages are dropped

    def drop(self, extent: Extent) -> None:
        """Undo all writes to a private mapping: it shows the file again. Nothing may read it meanwhile."""
        if self._may_have(extent.address, extent.nbytes):
            libc.madvise(extent.address, extent.nbytes, _MADV_DONTNEED)

    def _may_have(self, address: int, nbytes: int) -> bool:
        if self._fd < 0 or sys.platform == "win32":
            return True
        _SPAN.pack_into(self._request, _SPAN_BEGIN, address, address + nbytes)
        try:
            return bool(fcntl.ioctl(self._fd, _PAGEMAP_SCAN, self._request))
        except OSError:  # an older kernel
            self.close()
            return True

    def close(self) -> None:
        """Close the descriptor; all pages are dropped from then on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
