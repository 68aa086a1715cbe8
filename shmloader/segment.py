"""Shared memory: the only module that knows memfd, mmap and ``multiprocessing.shared_memory``.

A `Segment` gives memory to numbered slots. There are two kinds with one interface:

* `MemfdSegment` (Linux): one memfd for all slots, which lie ``SLOT_STRIDE`` bytes apart, so that each can
  grow without moving. No name, no entry in /dev/shm, not bounded by the size of that mount; the kernel
  frees it when the last process that maps it is gone, however that went.
* `NamedSegment` (elsewhere, and on Linux for tests): one named object per slot and version; growing makes
  the next version.

Memory is reserved before it is touched: touching a page that cannot be had is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import sys
import tempfile
from multiprocessing import reduction, resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Protocol, cast

from shmloader.errors import SharedMemoryExhausted
from shmloader.limits import SURE_NBYTES, memory_headroom, shm_free_nbytes

SLOT_STRIDE = 1 << 38
"""Bytes between the starts of two slots in one memfd: address space of a sparse file, not memory."""

PAGE_NBYTES = mmap.PAGESIZE
# Never taken for slots: whatever the program did next would be answered by the OOM killer.
_MOST_SPARE_NBYTES = 64 << 20

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


class _Mapping:
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


def _move_pages(address: int, nbytes: int, to: int) -> None:
    """Move a mapping to where another one is, which it replaces."""
    if _mremap(address, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, ctypes.c_void_p(to)) == _MAP_FAILED:
        code = ctypes.get_errno()
        _libc.munmap(address, nbytes)
        raise SharedMemoryExhausted(f"moving a mapping of {nbytes:,} bytes failed: {os.strerror(code)}")


class Segment(Protocol):
    """Memory for numbered slots; exactly one process, the main one, owns it and closes it."""

    def reserve(self, slot: int, version: int, held_nbytes: int, nbytes: int) -> tuple[int, int]:
        """Make a slot of ``held_nbytes`` at least ``nbytes`` large.

        Returns:
            The version and the bytes (whole pages) that the slot has now. A new version is new memory;
            with the same version the old contents are still there.

        Raises:
            SharedMemoryExhausted: If the host cannot give that much; nothing was touched.
        """

    def map(self, slot: int, version: int, nbytes: int) -> Extent:
        """Map a slot that was reserved, by this process or another one."""

    def discard(self, slot: int, version: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """Give a slot's memory back to the host; nothing may be reading it.

        Its first ``kept_nbytes`` (whole pages) are kept. A segment that can only keep all or nothing keeps
        all where that is not 0.
        """

    def forget_newer(self, slot: int, version: int) -> None:
        """Remove versions of a slot that a dead worker made after ``version`` and never reported."""

    def close(self, slots: int) -> None:
        """Drop the owner's hold on all ``slots`` slots; mapped extents live on while they are used."""


_unchecked_nbytes = 0  # taken by this process since the cgroup's files were read


def _check_headroom(grow_nbytes: int) -> None:
    global _unchecked_nbytes  # noqa: PLW0603 - what this process takes, whichever iterator it is for
    if _unchecked_nbytes + grow_nbytes < SURE_NBYTES:
        _unchecked_nbytes += max(0, grow_nbytes)
        return
    _unchecked_nbytes = 0
    room = memory_headroom()
    spare_nbytes = min(_MOST_SPARE_NBYTES, room.limit_nbytes // 16)
    if grow_nbytes + spare_nbytes > room.available_nbytes:
        raise SharedMemoryExhausted(
            f"a slot needs {grow_nbytes:,} more bytes of shared memory, but only "
            f"{room.available_nbytes:,} of {room.limit_nbytes:,} bytes are available in {room.source}, of "
            f"which {spare_nbytes:,} are left to the program. Use a smaller batch_size, fewer workers or a "
            "smaller prefetch_factor, or raise the limit.",
            needed_nbytes=grow_nbytes,
            available_nbytes=room.available_nbytes,
        )


def open_anonymous_file(name: str) -> int:
    """A descriptor of an empty file without a name, whose contents go with its last descriptor.

    Args:
        name: What ``/proc/<pid>/fd`` shows for it, where it is a memfd.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Descriptor:
    """A file descriptor that reaches a worker under every start method.

    Under fork it is inherited as it is; under spawn and forkserver ``multiprocessing`` passes it while the
    process is being started.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _received_descriptor, (reduction.DupFd(self.fd),)


def _received_descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


def _refused(error: OSError, slot: int, nbytes: int) -> SharedMemoryExhausted:
    """The error for a slot's pages that the system would not give, with what to change."""
    failed = f"reserving {nbytes:,} bytes of shared memory for a slot failed: {error.strerror}"
    if error.errno == errno.EFBIG:
        return SharedMemoryExhausted(
            f"{failed}. All slots lie in one sparse file, this one at {slot * SLOT_STRIDE:,} bytes, and the "
            "size of files is limited (ulimit -f, RLIMIT_FSIZE): lift the limit, or set "
            "SHMLOADER_SEGMENT=portable, whose files are no larger than a batch.",
            needed_nbytes=nbytes,
        )
    room = memory_headroom()
    return SharedMemoryExhausted(
        f"{failed}; {room.available_nbytes:,} bytes are available in {room.source}. Use a smaller "
        "batch_size, fewer workers or a smaller prefetch_factor, or raise the limit.",
        needed_nbytes=nbytes,
        available_nbytes=room.available_nbytes,
    )


class MemfdSegment:
    """All slots in one anonymous, sparse memory file (``memfd_create``)."""

    def __init__(self, descriptor: Descriptor | None = None) -> None:
        self._descriptor = descriptor or Descriptor(os.memfd_create("shmloader-slots", os.MFD_CLOEXEC))

    def __del__(self, close: Any = os.close) -> None:
        # After a Ctrl-C before anybody could own it; `close` is the usual way.
        with contextlib.suppress(AttributeError, OSError):
            if self._descriptor.fd >= 0:
                close(self._descriptor.fd)

    def reserve(self, slot: int, version: int, held_nbytes: int, nbytes: int) -> tuple[int, int]:
        """See `Segment.reserve`."""
        nbytes = whole_pages(nbytes)
        _check_headroom(nbytes - held_nbytes)
        if nbytes > SLOT_STRIDE:
            raise SharedMemoryExhausted(
                f"one batch needs {nbytes:,} bytes, more than a slot can have ({SLOT_STRIDE:,})",
                needed_nbytes=nbytes,
            )
        try:
            os.posix_fallocate(self._descriptor.fd, slot * SLOT_STRIDE, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise _refused(error, slot, nbytes) from error
        return version, nbytes

    def map(self, slot: int, version: int, nbytes: int) -> Extent:
        """See `Segment.map`."""
        address = map_pages(None, nbytes, mmap.MAP_SHARED, self._descriptor.fd, slot * SLOT_STRIDE)
        return Extent(address, nbytes, version, _Mapping(address, nbytes))

    def discard(self, slot: int, version: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """See `Segment.discard`."""
        keep_size_punch_hole = 0x1 | 0x2
        _libc.fallocate(
            self._descriptor.fd,
            keep_size_punch_hole,
            ctypes.c_int64(slot * SLOT_STRIDE + kept_nbytes),
            ctypes.c_int64(nbytes - kept_nbytes),
        )

    def forget_newer(self, slot: int, version: int) -> None:
        """See `Segment.forget_newer`; here a slot grows in place, and what it has grown by is used again."""

    def close(self, slots: int) -> None:
        """See `Segment.close`."""
        if self._descriptor.fd >= 0:
            os.close(self._descriptor.fd)
            self._descriptor.fd = -1

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return MemfdSegment, (self._descriptor,)


class NamedSegment:
    """One named object per slot and version, on ``multiprocessing.shared_memory``.

    Names are made from the segment's own random prefix, the slot and the version, so the owner can remove
    every one of them, also those of a worker that died before it could report. If the owner itself is
    killed, Python's resource tracker removes them.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self._owner_pid = os.getpid() if prefix is None else -1
        self._prefix = prefix or f"shml{secrets.token_hex(4)}"
        self._newest: dict[int, int] = {}  # version of each slot, as far as this process has seen
        # Workers must share the owner's tracker: one of their own would remove names when they exit.
        resource_tracker.ensure_running()

    def _name(self, slot: int, version: int) -> str:
        return f"{self._prefix}_{slot}_{version}"

    def reserve(self, slot: int, version: int, held_nbytes: int, nbytes: int) -> tuple[int, int]:
        """See `Segment.reserve`."""
        nbytes = whole_pages(nbytes)
        if nbytes <= held_nbytes:
            return version, held_nbytes
        _check_headroom(nbytes)
        _check_file_size(nbytes)
        try:
            memory = SharedMemory(self._name(slot, version + 1), create=True, size=nbytes)
        except OSError as error:
            raise _named_refused(error, nbytes) from error
        try:
            _allocate_named(memory, nbytes)
        except SharedMemoryExhausted:
            memory.close()
            memory.unlink()
            raise
        memory.close()
        return version + 1, nbytes

    def map(self, slot: int, version: int, nbytes: int) -> Extent:
        """See `Segment.map`."""
        address, owner = _map_named(self._name(slot, version), nbytes)
        if os.getpid() == self._owner_pid:
            for old in range(self._newest.get(slot, 1), version):
                self._unlink(slot, old)
        self._newest[slot] = version
        return Extent(address, nbytes, version, owner)

    def _unlink(self, slot: int, version: int) -> bool:
        try:
            memory = SharedMemory(self._name(slot, version))
        except FileNotFoundError:
            return False
        memory.close()
        memory.unlink()
        return True

    def discard(self, slot: int, version: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """See `Segment.discard`."""
        if not kept_nbytes:
            self._unlink(slot, version)

    def close(self, slots: int) -> None:
        """See `Segment.close`."""
        if os.getpid() != self._owner_pid:
            return
        for slot in range(slots):
            version = self._newest.get(slot, 0)
            self._unlink(slot, version)
            self.forget_newer(slot, version)
        self._newest.clear()

    def forget_newer(self, slot: int, version: int) -> None:
        """See `Segment.forget_newer`."""
        while self._unlink(slot, version := version + 1):
            pass

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return NamedSegment, (self._prefix,)


def _check_file_size(nbytes: int) -> None:
    """Refuse what the limit on the size of files forbids, before ``SharedMemory`` makes half of it."""
    if sys.platform == "win32":
        return
    import resource

    most_nbytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most_nbytes != resource.RLIM_INFINITY and nbytes > most_nbytes:
        raise SharedMemoryExhausted(
            f"a slot needs {nbytes:,} bytes of shared memory in one file, and files may have {most_nbytes:,} "
            "bytes (ulimit -f, RLIMIT_FSIZE). Lift the limit or use a smaller batch_size.",
            needed_nbytes=nbytes,
        )


def _named_refused(error: OSError, nbytes: int) -> SharedMemoryExhausted:
    return SharedMemoryExhausted(
        f"a shared memory object of {nbytes:,} bytes could not be made or opened: {error.strerror}. Use the "
        "memfd segment (the default on Linux), which needs no names and no descriptors per slot, or raise "
        "the limit.",
        needed_nbytes=nbytes,
    )


def _map_named(name: str, nbytes: int) -> tuple[int, object]:
    """Map a named object: its address, and what must live as long as the mapping is used."""
    path = Path("/dev/shm") / name
    if not path.exists():  # not Linux
        memory = SharedMemory(name)
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(cast(memoryview, memory.buf))), memory
    # Not SharedMemory, which holds two descriptors for as long as it is mapped: programs keep batches.
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _named_refused(error, nbytes) from error
    try:
        address = map_pages(None, nbytes, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    return address, _Mapping(address, nbytes)


def _allocate_named(memory: SharedMemory, nbytes: int) -> None:
    """Reserve the pages of a new named object where the system can (Linux)."""
    path = Path("/dev/shm") / memory.name.lstrip("/")
    if not path.exists():
        return
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        free = shm_free_nbytes()
        raise SharedMemoryExhausted(
            f"reserving {nbytes:,} bytes in /dev/shm failed: {error.strerror}; {free or 0:,} bytes are free "
            "there. Use the memfd segment (the default on Linux), or make the mount larger "
            "(docker run --shm-size).",
            needed_nbytes=nbytes,
            available_nbytes=free,
        ) from error
    finally:
        os.close(fd)


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
