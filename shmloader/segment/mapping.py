"""Pages of shared memory as one process maps them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from typing import Any

from shmloader.errors import SharedMemoryExhausted

PAGE_NBYTES = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value
_mremap: Any = getattr(_libc, "mremap", None)  # Linux
if _mremap is not None:
    _mremap.restype = ctypes.c_void_p
    _mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
MAP_FIXED = 0x10
"""For `map_pages`: Python's ``mmap`` lacks it."""
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


def whole_pages(nbytes: int) -> int:
    """Round up to whole pages, at least one."""
    return max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES


class Extent:
    """The memory of one slot as this process maps it.

    The mapping lives as long as ``buffer`` does: arrays over it keep it alive after the segment is
    closed or has mapped the slot anew.

    Attributes:
        address: Where it starts in this process.
        nbytes: Its length, whole pages.
        version: The version of the slot's memory.
        buffer: A ctypes array over it, writable.
        view: The same as a memoryview of bytes.
    """

    __slots__ = ("address", "buffer", "nbytes", "version", "view")

    def __init__(self, address: int, nbytes: int, version: int, owner: object) -> None:
        self.address = address
        self.nbytes = nbytes
        self.version = version
        buffer: Any = (ctypes.c_ubyte * nbytes).from_address(address)
        # The owner's death unmaps; the array is the last thing that every view leads to.
        buffer.owner = owner
        self.buffer = buffer
        self.view = memoryview(buffer).cast("B")

    def detach(self) -> None:
        """Turn this mapping, in place, into private memory with the same contents.

        Views in this process keep their address and their values; writes to the slot through other mappings
        no longer reach them. Other threads may be reading: the copy takes the mapping's place in one step.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if _mremap is None:
            contents = ctypes.string_at(self.address, self.nbytes)
            map_pages(self.address, self.nbytes, flags | MAP_FIXED, -1, 0)
            ctypes.memmove(self.address, contents, self.nbytes)
            return
        copied = map_pages(None, self.nbytes, flags, -1, 0)
        ctypes.memmove(copied, self.address, self.nbytes)
        _move_pages(copied, self.nbytes, self.address)


class Mapping:
    """Unmaps when it dies. A Python ``mmap`` would hold one more descriptor per slot."""

    __slots__ = ("address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        # A Ctrl-C may have cut __init__ short: then there is nothing that this object could unmap.
        with contextlib.suppress(AttributeError):
            munmap(self.address, self.nbytes)


def map_pages(address: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int:
    """``mmap``, for reading and writing, without the duplicate of the descriptor that Python's keeps.

    Args:
        address: Where to map, with ``MAP_FIXED``; None for anywhere.
        nbytes: How much.
        flags: ``MAP_*``.
        fd: Of what; -1 with ``MAP_ANONYMOUS``.
        offset: From where in it, a multiple of the page size.

    Returns:
        The address. Nothing unmaps it.

    Raises:
        SharedMemoryExhausted: If it cannot be had.
    """
    mapped = _libc.mmap(address, nbytes, _READ_WRITE, flags, fd, offset)
    if mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise SharedMemoryExhausted(
            f"mapping {nbytes:,} bytes of shared memory failed: {os.strerror(code)}. The address space may "
            "be limited (ulimit -v) or the number of mappings (vm.max_map_count).",
            needed_nbytes=nbytes,
        )
    return int(mapped)


def map_aligned(nbytes: int, flags: int, fd: int, offset: int, alignment: int) -> int:
    """`map_pages` at an address that is a multiple of ``alignment``, as huge pages need it.

    Raises:
        SharedMemoryExhausted: If it cannot be had, with ``alignment`` bytes more for a moment.
    """
    anywhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    space_nbytes = whole_pages(nbytes) + alignment
    space = map_pages(None, space_nbytes, anywhere, -1, 0)
    address = -(-space // alignment) * alignment
    try:
        map_pages(address, nbytes, flags | MAP_FIXED, fd, offset)
    except BaseException:
        unmap(space, space_nbytes)
        raise
    end = address + whole_pages(nbytes)
    unmap(space, address - space)
    unmap(end, space + space_nbytes - end)
    return address


def unmap(address: int, nbytes: int) -> None:
    """Undo a `map_pages`, or a part of it; nothing where ``nbytes`` is 0."""
    if nbytes:
        _libc.munmap(address, nbytes)


def map_copy_on_write(fd: int, nbytes: int) -> Extent:
    """Map the beginning of a file so that what this process writes there stays its own.

    Args:
        fd: The file; may be closed afterwards.
        nbytes: How much, at least one byte.

    Raises:
        SharedMemoryExhausted: If there is no address space for it.
    """
    nbytes = whole_pages(nbytes)
    # Pages that nobody writes need no backing, so they are not to be charged for.
    address = map_pages(None, nbytes, mmap.MAP_PRIVATE | _MAP_NORESERVE, fd, 0)
    return Extent(address, nbytes, 0, Mapping(address, nbytes))


def _move_pages(address: int, nbytes: int, to: int) -> None:
    """Move a mapping to where another one is, which it replaces."""
    if _mremap(address, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(to)) == _MAP_FAILED:
        code = ctypes.get_errno()
        _libc.munmap(address, nbytes)
        raise SharedMemoryExhausted(f"moving a mapping of {nbytes:,} bytes failed: {os.strerror(code)}")
