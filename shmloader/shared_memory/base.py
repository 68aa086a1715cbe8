"""The interface of a segment, and descriptors that reach other processes."""

from __future__ import annotations

import os
from multiprocessing import reduction
from typing import Any, Protocol

from shmloader.errors import SharedMemoryExhausted
from shmloader.host.limits import SURE_NBYTES, memory_headroom
from shmloader.shared_memory.mapping import Extent

# Never taken for slots: whatever the program did next would be answered by the OOM killer.
_MOST_SPARE_NBYTES = 64 << 20


class Segment(Protocol):
    """Memory for numbered slots; exactly one process, the main one, owns it and closes it."""

    def reserve(self, slot: int, held_nbytes: int, nbytes: int) -> int:
        """Make a slot of ``held_nbytes`` at least ``nbytes`` large; its contents stay.

        Returns:
            Bytes (whole pages) that the slot has now.

        Raises:
            SharedMemoryExhausted: If the host cannot give that much; nothing was touched.
        """

    def map(self, slot: int, nbytes: int) -> Extent:
        """Map a slot that was reserved, by this process or another one."""

    def discard(self, slot: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """Give a slot's memory back to the host, but for its first ``kept_nbytes`` (whole pages).

        Nothing may be reading what is given back.
        """

    def close(self) -> None:
        """Drop the owner's hold on all slots; mapped extents live on while they are used."""


_unchecked_nbytes = 0  # taken by this process since the cgroup's files were read


def check_headroom(grow_nbytes: int) -> None:
    """Refuse to take more memory than the host has, less what the program needs next.

    Raises:
        SharedMemoryExhausted: With both numbers.
    """
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
        name: The name that ``/proc/<pid>/fd`` shows for it.
    """
    return os.memfd_create(name, os.MFD_CLOEXEC)


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
