"""The records that cross a process boundary, with their units.

Each worker has one private pipe each way. A record has a fixed size of at most ``PIPE_BUF`` bytes (512 at
the least, by POSIX), so the kernel writes it whole or not at all: a reader never sees half a record, even
if the writer is killed. Ownership of a slot passes with the record that names it, and the pipe is the
memory fence between the two processes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

# Kinds of record from main to worker.
TASK, RESUME, CONTINUE, MARK = 1, 2, 3, 4
# Kinds of record from worker to main.
BATCH, FAILURE, END, RESUMED, PART = 11, 12, 13, 14, 15  # from RESUMED on: no slot is published

# Flags of a record from worker to main.
DETACHED = 1
"""The worker still held views of the slot's memory, and they were moved to private memory."""
SPILLED = 2
"""The batch did not fit in the slot: it was sent in parts, and the header lies in what they make up."""
REPORTED = 4
"""What was published is a `bad_samples.Reported`: a batch, if there is one, and what to count."""

_HEAD = "<HxxIQIQQQQ"
TASK_NBYTES = 256
"""Size of a record from main to worker, inline payload included."""
INLINE_NBYTES = TASK_NBYTES - struct.calcsize(_HEAD)
"""Most bytes of payload that travel in the record itself; a longer one lies at the slot's start."""
_TASK = struct.Struct(f"{_HEAD}{INLINE_NBYTES}s")

_DONE = struct.Struct("<HHIQIQQQQ")
DONE_NBYTES = _DONE.size
"""Size of a record from worker to main."""


SPIN_NS = 50_000
"""How long either side looks for the next record before it sleeps, while records come quickly: being put to
sleep and woken costs more than a small batch does (docs/decisions/0008)."""


class Task(NamedTuple):
    """What the main process asks of a worker.

    Attributes:
        kind: ``TASK`` (make a batch), ``RESUME`` (a new epoch begins; the payload is its shared seed),
            ``CONTINUE`` (the last ``PART`` was copied out) or ``MARK`` (what follows may be in vain: keep the
            generators' states).
        generation: The iterator's epoch counter; replies carry it back.
        seq: Number of the batch in the epoch. For ``RESUME``: of the epoch.
        slot: The slot granted. For ``RESUME``: whether to put back the states of the last ``MARK``.
        slot_nbytes: Bytes reserved for the slot.
        hint_nbytes: Bytes of the largest batch so far: what to reserve before collating.
        limit_nbytes: Bytes up to which the worker may grow the slot.
        payload_nbytes: Length of the packed index batch; beyond ``INLINE_NBYTES`` it lies in the slot.
        payload: The packed index batch, or empty. As received it is padded: read ``payload_nbytes`` of it.
    """

    kind: int
    generation: int
    seq: int = 0
    slot: int = 0
    slot_nbytes: int = 0
    hint_nbytes: int = 0
    limit_nbytes: int = 0
    payload_nbytes: int = 0
    payload: bytes = b""

    def pack(self) -> bytes:
        """The record, ``TASK_NBYTES`` long."""
        return _TASK.pack(*self)


pack_task = _TASK.pack
"""The record of a task from the fields of `Task`, without making one."""

unpack_fields = _TASK.unpack
"""The fields of `Task` from a record, without making one."""


def unpack_task(record: bytes) -> Task:
    """Read a record of `Task.pack`."""
    return Task._make(_TASK.unpack(record))


class Done(NamedTuple):
    """What a worker answers.

    Attributes:
        kind: ``BATCH`` (published), ``FAILURE`` (an exception is published
            in place of a batch), ``END`` (its iterable dataset is exhausted), ``RESUMED`` (a new epoch
            begins) or ``PART`` (a piece of a batch that is larger than its slot).
        flags: ``DETACHED``, ``SPILLED``, ``REPORTED``.
        generation: As in the task.
        seq: As in the task.
        slot: As in the task.
        slot_nbytes: Bytes reserved for the slot now.
        header_offset: Bytes from the slot's start to the header. For ``PART``: the whole batch's bytes.
        header_nbytes: Length of the header. For ``PART``: bytes of this piece, at the slot's start.
        wait_ns: Nanoseconds that the worker waited for this task, that is, for a slot.
    """

    kind: int
    flags: int
    generation: int
    seq: int
    slot: int
    slot_nbytes: int
    header_offset: int
    header_nbytes: int
    wait_ns: int

    def pack(self) -> bytes:
        """The record, ``DONE_NBYTES`` long."""
        return _DONE.pack(*self)


pack_done = _DONE.pack
"""The record from the fields of `Done`, without making one."""


DoneFields = tuple[int, int, int, int, int, int, int, int, int]
"""The fields of `Done`, in order: what is passed on for every batch, without making a named tuple."""

unpack_done: Callable[[bytes], Iterator[DoneFields]] = _DONE.iter_unpack
"""Read one or more whole records of `Done.pack`."""
