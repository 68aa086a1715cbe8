"""Slots in one named object each."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

from shmloader.errors import SharedMemoryExhausted
from shmloader.host.limits import shm_free_nbytes
from shmloader.shared_memory.base import check_headroom
from shmloader.shared_memory.mapping import Extent, Mapping, whole_pages


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
        check_headroom(nbytes)
        _check_file_size(nbytes)
        try:
            memory = SharedMemory(self._name(slot, version + 1), create=True, size=nbytes)
        except OSError as error:
            raise _refused(error, nbytes) from error
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


def _refused(error: OSError, nbytes: int) -> SharedMemoryExhausted:
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
        file = path.open("r+b", buffering=0)
    except OSError as error:
        raise _refused(error, nbytes) from error
    with file:
        mapping = Mapping(nbytes, mmap.MAP_SHARED, file.fileno(), 0)
    return mapping.address, mapping


def _allocate_named(memory: SharedMemory, nbytes: int) -> None:
    """Reserve the pages of a new named object where the system can (Linux)."""
    path = Path("/dev/shm") / memory.name.lstrip("/")
    if not path.exists():
        return
    with path.open("r+b", buffering=0) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            free = shm_free_nbytes()
            raise SharedMemoryExhausted(
                f"reserving {nbytes:,} bytes in /dev/shm failed: {error.strerror}; {free or 0:,} bytes are "
                "free there. Use the memfd segment (the default on Linux), or make the mount larger "
                "(docker run --shm-size).",
                needed_nbytes=nbytes,
                available_nbytes=free,
            ) from error
