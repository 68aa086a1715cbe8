"""The system calls that shared memory needs, looked up in one place.

Importing this never fails. If something is missing or refused, `why_unavailable` names it, and the loader
works as torch's does.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

from shmloader.errors import LoaderError
from shmloader.interrupts import HeldInterrupts

_REFUSALS = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP)
"""Answers of a sandbox (gVisor, a seccomp filter) to a system call that it does not let through."""

_allowed: set[str] = set()  # functions of `os` that worked when they were tried


def _load_libc() -> tuple[Any, str | None]:
    """The C library, with the signatures of its functions; or None, and the reason."""
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError) as error:  # TypeError: on Windows
        return None, f"the C library cannot be called (ctypes.CDLL(None): {error})"
    try:
        library.mmap.restype = library.mremap.restype = pointer
        library.mmap.argtypes = [pointer, size, number, number, number, offset]
        library.mremap.argtypes = [pointer, size, size, number]
        library.madvise.argtypes = library.mprotect.argtypes = [pointer, size, number]
        library.fallocate.argtypes = [number, number, offset, offset]
    except AttributeError as error:
        return None, f"the C library lacks a function ({error})"
    return library, None


libc, _why_no_libc = _load_libc()
"""The C library, with ``errno`` in ``ctypes.get_errno()``; None if `why_unavailable` gives a reason."""


def why_unavailable() -> str | None:
    """The reason why this platform lacks what loading through slots needs, or None if it has it.

    The first call tries the system calls. It needs two descriptors for a moment.
    """
    return _why_no_memory() or _why_no("eventfd", lambda: os.close(os.eventfd(0)))


def check_memory() -> None:
    """Raise a `LoaderError` with the reason where this platform has no shared memory for stores."""
    if (lack := _why_no_memory()) is not None:
        raise LoaderError(
            f"data cannot be put in shared memory on this platform: {lack}. Use the data as it "
            "is, without share(), share_on_host() or open(): each worker then has a copy of its own, except "
            "of an np.memmap, which all processes share"
        )


def _why_no_memory() -> str | None:
    no_file = _why_no("memfd_create", lambda: os.close(os.memfd_create("shmloader-attempt")))
    return no_file or _why_no("posix_fallocate", _reserve_a_page) or _why_no_libc


def _reserve_a_page() -> None:
    fd = os.memfd_create("shmloader-attempt")
    try:
        os.posix_fallocate(fd, 0, 1)
    finally:
        os.close(fd)


def _why_no(name: str, attempt: Callable[[], None]) -> str | None:
    """The reason why a function of ``os`` cannot be used; ``attempt`` tries it."""
    if not hasattr(os, name):
        return f"Python's os.{name} is missing"
    if name in _allowed:
        return None
    with HeldInterrupts():
        try:
            attempt()
        except OSError as error:
            if error.errno in _REFUSALS:
                return f"the system refuses os.{name} ({error.strerror})"
            return None  # no descriptor or no memory is left now: the real call will report it
    _allowed.add(name)
    return None
