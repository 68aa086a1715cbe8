"""The check that the host has memory for a slot or for a copy of a batch."""

from __future__ import annotations

import errno

from shmloader.errors import SharedMemoryExhausted
from shmloader.memory.limits import SURE_NBYTES, Headroom, memory_headroom

_MOST_SPARE_NBYTES = 64 << 20
_ADVICE = "Use a smaller batch_size, fewer workers or a smaller prefetch_factor, or raise the limit."

_unchecked_nbytes = 0  # taken by this process since it last asked for the headroom


def check_headroom(nbytes: int, purpose: str, *, spare: int = 0, advice: str = _ADVICE) -> None:
    """Refuse to take more memory than the host has, before anything is taken.

    The last of the memory is left to the program; otherwise its next allocation would bring the OOM killer.
    Taken bytes are summed up, and compared with the host's memory every ``SURE_NBYTES``.

    ``purpose`` begins the message, such as "a slot needs 8,192 more bytes of shared memory", and ``advice``
    ends it. ``spare`` bytes are left to the program, if that is more than `spare_nbytes`.

    Raises:
        SharedMemoryExhausted: If the host has less.
    """
    global _unchecked_nbytes  # noqa: PLW0603 - what this process takes, whatever it is for
    if _unchecked_nbytes + nbytes < SURE_NBYTES:
        _unchecked_nbytes += max(0, nbytes)
        return
    room = memory_headroom()
    if nbytes + max(spare, spare_nbytes(room)) > room.available_nbytes:
        raise exhausted(purpose, nbytes, room, spare=spare, advice=advice)
    _unchecked_nbytes = 0


def exhausted(
    what: str,
    nbytes: int,
    room: Headroom | None = None,
    *,
    spare: int = 0,
    advice: str = _ADVICE,
    code: int = 0,
) -> SharedMemoryExhausted:
    """The error for memory that the host lacks, or refuses with a ``code``; see `check_headroom`."""
    if code == errno.EFBIG:
        limited = "shared memory is a file, and the size of files is limited: ulimit -f unlimited"
        return SharedMemoryExhausted(f"{what}: {limited}", needed_nbytes=nbytes)
    room = room or memory_headroom()
    return SharedMemoryExhausted(
        f"{what}, but only {room.available_nbytes:,} of {room.limit_nbytes:,} bytes are available in "
        f"{room.source}, of which {max(spare, spare_nbytes(room)):,} are left to the program. {advice}",
        needed_nbytes=nbytes,
        available_nbytes=room.available_nbytes,
    )


def spare_nbytes(room: Headroom) -> int:
    """Bytes of the host's memory that are never taken for slots and copies."""
    return min(_MOST_SPARE_NBYTES, room.limit_nbytes // 16)
