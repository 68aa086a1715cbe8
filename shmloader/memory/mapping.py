"""The system calls that shared memory needs, and its pages as one process maps them.

Importing this never fails. If something is missing or refused, `why_unavailable` names it, and the loader
works as torch's does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from ctypes import CFUNCTYPE
from types import SimpleNamespace
from typing import Any

import numpy as np

from shmloader.errors import LoaderError, SharedMemoryExhausted
from shmloader.interrupts import HeldInterrupts

PAGE_NBYTES = mmap.PAGESIZE
HUGE_NBYTES = 2 << 20
"""Size of a huge page."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MREMAP_REPLACING, _MREMAP_DONTUNMAP = 1 | 2, 4  # MAYMOVE and FIXED; the second from Linux 5.7 on
_MAP_FIXED = 0x10  # Python's `mmap` lacks it
_PROT_NONE, READ_WRITE = 0, 0x1 | 0x2  # not from Python's `mmap`: on Windows it lacks them
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Pages that are not written need no backing, so the system need not charge for them."""
MAP_POPULATE = 0x8000 if sys.platform == "linux" else 0
"""Pages are mapped with the file, and not one by one as they are used."""

_MEMBARRIER = {"x86_64": 324, "aarch64": 283}  # its number, by machine
_MEMBARRIER_GLOBAL = 1

_REFUSALS = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP)
"""Answers of a sandbox (gVisor, a seccomp filter) to a system call that it does not let through."""

_allowed: set[str] = set()  # functions of `os` that worked when they were tried


def _load_libc() -> tuple[Any, str | None]:
    """The C library, with the signatures of its functions; or None, and the reason."""
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    word = ctypes.c_ulong
    signatures = {
        "mmap": (pointer, pointer, size, number, number, number, offset),
        "mremap": (pointer, pointer, size, size, number, pointer),
        "munmap": (number, pointer, size),
        "madvise": (number, pointer, size, number),
        "mprotect": (number, pointer, size, number),
        "fallocate": (number, number, number, offset, offset),
        "syscall": (ctypes.c_long, ctypes.c_long, number, word),
        "prctl": (number, number, pointer, word, word, word),
    }
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError) as error:  # TypeError: on Windows
        return None, f"the C library cannot be called (ctypes.CDLL(None): {error})"
    try:
        calls = {
            name: CFUNCTYPE(*kinds, use_errno=True)((name, library)) for name, kinds in signatures.items()
        }
    except AttributeError as error:
        return None, f"the C library lacks a function ({error})"
    return SimpleNamespace(**calls), None


libc, _why_no_libc = _load_libc()
"""The C library, with ``errno`` in ``ctypes.get_errno()``; None if `why_unavailable` gives a reason."""


def order_memory() -> None:
    """A fence for all threads of the machine: what each has written is seen before what it reads next.

    It takes about 10 ms, so that the other side of a pair needs none. Some kernels (``nohz_full``) refuse it.
    """
    if libc is not None and (number := _MEMBARRIER.get(os.uname().machine)):
        libc.syscall(number, _MEMBARRIER_GLOBAL, 0)


def why_unavailable() -> str | None:
    """The reason why this platform lacks what loading through slots needs, or None if it has it.

    The first call tries the system calls. It needs two descriptors for a moment.
    """
    return _why_no_memory() or _why_no("eventfd", lambda: os.close(os.eventfd(0)))


def check_memory(
    what: str = "data cannot be put in shared memory",
    instead: str = "Use the data as it is, without share(), share_on_host() or open(): each worker then has "
    "a copy of its own, except of an np.memmap, which all processes share",
) -> None:
    """Raise a `LoaderError` with the reason where this platform has no shared memory.

    It says ``what`` cannot be done, and what to do ``instead``.
    """
    if (lack := _why_no_memory()) is not None:
        raise LoaderError(f"{what} on this platform: {lack}. {instead}")


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


def whole_pages(nbytes: int) -> int:
    """Round up to whole pages, at least one."""
    return max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES


class Extent:
    """A part of a file, such as one slot, as this process maps it: see `map_file` for the arguments.

    The mapping lives as long as ``buffer`` does: arrays over it keep it alive after the segment is
    closed or has mapped the slot anew.
    """

    __slots__ = ("address", "buffer", "nbytes", "view")

    def __init__(self, nbytes: int, flags: int, fd: int, offset: int = 0) -> None:
        owner, self.address = map_file(nbytes, flags, fd, offset)
        self.nbytes = nbytes  # whole pages
        # Writable; every view leads to this array in the end.
        self.buffer: Any = (ctypes.c_ubyte * nbytes).from_address(self.address)
        self.give_to(owner)
        self.view = memoryview(self.buffer).cast("B")

    @property
    def owner(self) -> Any:
        """The object whose death unmaps the memory, or one that keeps it alive."""
        return self.buffer.owner

    def give_to(self, owner: object) -> None:
        """Have an object that keeps the owner alive take its place."""
        self.buffer.owner = owner

    def detach(self) -> None:
        """Turn this mapping, in place, into private memory with the same contents.

        Views in this process keep their address and their values; writes to the slot through other mappings
        no longer reach them. Other threads may be reading: the copy takes the mapping's place in one step.
        """
        copied = take_space(self.nbytes, READ_WRITE, 0)  # all of it is written
        source = address_of(copied)
        ctypes.memmove(source, self.address, self.nbytes)
        # The kernel charges for both places, and refuses only after it has unmapped the target: ask first.
        take_space(self.nbytes, READ_WRITE, 0).close()
        # The source stays mapped, empty. Others might map something in a hole, which its owner would unmap.
        code = self._replace_with(source, _MREMAP_DONTUNMAP)
        if code == errno.EINVAL:
            copied.close()
            code = self._detach_unowned()
        if code:
            raise SharedMemoryExhausted(
                f"moving a mapping of {self.nbytes:,} bytes failed: {os.strerror(code)}. The process keeps "
                "a batch, or a view of one: have it keep a copy (`tensor.clone()`)."
            )

    def _detach_unowned(self) -> int:
        """Detach by a copy without an owner: this kernel unmaps what it moves. Returns an ``errno``."""
        with HeldInterrupts():
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            source = libc.mmap(None, self.nbytes, READ_WRITE, private, -1, 0)
            if source == _MAP_FAILED:
                return ctypes.get_errno()
            ctypes.memmove(source, self.address, self.nbytes)
            if code := self._replace_with(source):
                libc.munmap(source, self.nbytes)
            return code

    def _replace_with(self, source: int, flags: int = 0) -> int:
        """Move private memory over this mapping. Returns an ``errno``."""
        moved = libc.mremap(source, self.nbytes, self.nbytes, _MREMAP_REPLACING | flags, self.address)
        return ctypes.get_errno() if moved == _MAP_FAILED else 0


def take_space(nbytes: int, protection: int, flags: int = MAP_NORESERVE) -> mmap.mmap:
    """Take anonymous, private address space for a later mapping; returns its owner.

    With ``PROT_NONE`` or `MAP_NORESERVE` the system does not charge for it; ``flags`` are 0 if all of it will
    be written. The owner's death unmaps all of it. Raises `SharedMemoryExhausted` if there is not enough.
    """
    try:
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags, protection)
    except OSError as error:
        raise _refused(nbytes, error.errno or 0) from error


def address_of(space: mmap.mmap) -> int:
    """The address of a mapping, also of one that may not be read."""
    return int(np.frombuffer(space, np.uint8, 1).__array_interface__["data"][0])  # `ctypes` imports


def map_file(
    nbytes: int, flags: int, fd: int, offset: int = 0, protection: int = READ_WRITE
) -> tuple[mmap.mmap, int]:
    """Map a part of a file, which may be closed afterwards; returns the owner of the mapping and its address.

    The death of the owner unmaps it, and so does its ``close()``. ``flags`` are ``MAP_SHARED``, or
    ``MAP_PRIVATE`` with or without `MAP_NORESERVE`. From `HUGE_NBYTES` on the address is a multiple of that,
    unless there is too little address space.
    Raises `SharedMemoryExhausted` without address space, `LoaderError` without a C library.
    """
    if libc is None:
        check_memory()
    if nbytes >= HUGE_NBYTES:
        with contextlib.suppress(SharedMemoryExhausted):  # there may be just enough without
            return map_aligned(HUGE_NBYTES, nbytes, flags, fd, offset, protection)
    return map_aligned(PAGE_NBYTES, nbytes, flags, fd, offset, protection)


def map_aligned(
    alignment: int, nbytes: int, flags: int, fd: int, offset: int, protection: int = READ_WRITE
) -> tuple[mmap.mmap, int]:
    """Do the same as `map_file`, always at a multiple of ``alignment``.

    An exception (a Ctrl-C, say) may come between any two instructions of Python, so the file is never mapped
    without an owner. First a Python ``mmap`` takes the address space, which C makes and frees in one step
    each; then the file is mapped there. The ``mmap`` is anonymous because one of a file would hold a
    descriptor (docs/decisions/0028).
    """
    whole_nbytes = -(-nbytes // alignment) * alignment
    # Linux (6.7) begins a mapping of whole huge pages at a multiple of their size.
    space = take_space(whole_nbytes, _PROT_NONE)
    if address_of(space) % alignment:
        del space
        space = take_space(whole_nbytes + alignment, _PROT_NONE)
    address = -(-address_of(space) // alignment) * alignment
    if libc.mmap(address, nbytes, protection, flags | _MAP_FIXED, fd, offset) == _MAP_FAILED:
        raise _refused(nbytes, ctypes.get_errno())
    return space, address


def make_writable(address: int, nbytes: int) -> None:
    """Allow writes to a private mapping that could only be read; they stay in this process.

    Raises `SharedMemoryExhausted` if the system, which may now charge for it, lacks the memory.
    """
    if libc.mprotect(address, nbytes, READ_WRITE) != 0:
        raise _refused(nbytes, ctypes.get_errno())


def _refused(nbytes: int, code: int) -> SharedMemoryExhausted:
    advice = (
        ". The address space may be limited (ulimit -v, ulimit -d) or the number of mappings "
        "(vm.max_map_count)."
    )
    return SharedMemoryExhausted(
        f"mapping {nbytes:,} bytes of shared memory failed: {os.strerror(code)}"
        f"{advice if code == errno.ENOMEM else ''}",
        needed_nbytes=nbytes,
    )


def map_copy_on_write(fd: int, nbytes: int) -> Extent:
    """Map the beginning of a file, which may be closed afterwards; writes to the mapping stay private."""
    return Extent(whole_pages(nbytes), mmap.MAP_PRIVATE | MAP_NORESERVE, fd)
