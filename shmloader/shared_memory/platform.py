"""The parts of the operating system that shared memory is made with, looked for in one place.

Importing this never fails. Where something is missing, `why_unavailable` names it, and the loader loads as
torch's does.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

_FUNCTIONS_OF_OS = ("memfd_create", "posix_fallocate")


def _load_libc() -> tuple[Any, str | None]:
    """The C library, its functions with their signatures; or nothing, and the reason."""
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError) as error:  # TypeError: on Windows
        return None, f"the C library cannot be called (ctypes.CDLL(None): {error})"
    try:
        library.mmap.restype = library.mremap.restype = pointer
        library.mmap.argtypes = [pointer, size, number, number, number, offset]
        library.mremap.argtypes = [pointer, size, size, number]
        library.madvise.argtypes = [pointer, size, number]
        library.fallocate.argtypes = [number, number, offset, offset]
    except AttributeError as error:
        return None, f"the C library lacks a function ({error})"
    return library, None


libc, _why_no_libc = _load_libc()
"""The C library, with ``errno`` in ``ctypes.get_errno()``; None where `why_unavailable` gives a reason."""


def why_unavailable() -> str | None:
    """The reason why this platform has no shared memory for slots, or None if it has."""
    for name in _FUNCTIONS_OF_OS:
        if not hasattr(os, name):
            return f"Python's os.{name} is missing"
    return _why_no_libc
