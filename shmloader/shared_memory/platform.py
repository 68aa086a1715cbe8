"""The parts of the operating system that shared memory is made with, looked for in one place.

Importing this never fails. Where something is missing or refused, `why_unavailable` names it, and the loader
loads as torch's does.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Any

from shmloader.errors import LoaderError
from shmloader.host.held_interrupts import HeldInterrupts

_REFUSALS = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP)
"""Answers of a sandbox (gVisor, a seccomp filter) to a system call that it does not let through."""


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
    """The reason why this platform lacks what loading through slots needs, or None if it has it.

    The first call tries the system calls. It needs two descriptors for a moment.
    """
    return _why_no_memory() or _why_missing("eventfd") or _why_refused(_try_wakeup)


def check_memory() -> None:
    """Raise a `LoaderError` with the reason where this platform has no shared memory for stores."""
    if (lack := _why_no_memory()) is not None:
        raise LoaderError(
            f"data cannot be put in shared memory on this platform: {lack}. Use the data as it "
            "is, without share(), share_on_host() or open(): each worker then has a copy of its own, but for "
            "an np.memmap, which all processes share"
        )


def _why_no_memory() -> str | None:
    missing = _why_missing("memfd_create") or _why_missing("posix_fallocate")
    return missing or _why_no_libc or _why_refused(_try_memory)


def _why_missing(name: str) -> str | None:
    return None if hasattr(os, name) else f"Python's os.{name} is missing"


def _why_refused(attempt: Callable[[], str | None]) -> str | None:
    """The refusal that an attempt found, or None. Other errors are left to the call that is meant."""
    with HeldInterrupts():
        try:
            return attempt()
        except OSError:  # no descriptor or no memory is left now: the attempt is made again next time
            return None


@functools.cache
def _try_memory() -> str | None:
    """The first system call for memory that the system refuses; any other error of one is raised."""
    fd, name = -1, "memfd_create"
    try:
        fd = os.memfd_create("shmloader-attempt")
        name = "posix_fallocate"
        os.posix_fallocate(fd, 0, 1)
    except OSError as error:
        return _refusal(name, error)
    finally:
        if fd >= 0:
            os.close(fd)
    return None


@functools.cache
def _try_wakeup() -> str | None:
    """See `_try_memory`; for what wakes the main process."""
    try:
        os.close(os.eventfd(0))
    except OSError as error:
        return _refusal("eventfd", error)
    return None


def _refusal(name: str, error: OSError) -> str:
    if error.errno not in _REFUSALS:
        raise error
    return f"the system refuses os.{name} ({error.strerror})"
