"""The parts of a queue, as other processes are given them: pipes, shared memory, and limits."""

from __future__ import annotations

import fcntl
import mmap
import operator
import os
import select
from typing import NamedTuple

from shmloader.channel.roles import Roles
from shmloader.interrupts import HeldInterrupts
from shmloader.memory import Descriptor, Segment
from shmloader.memory.limits import memory_headroom
from shmloader.memory.mapping import check_memory
from shmloader.slots import AskedFor, PlaceTable
from shmloader.wire.queue_records import INLINE_HEAD_NBYTES, UNIT_NBYTES, Grant, pack_grant

_WANTED_RECORD_NBYTES = 512  # to which small objects may lie in their records, if the pipe can be so large
_CLOSED_RECORDS = 1  # beside those of objects


class Parts(NamedTuple):
    """All parts of a queue; each process has descriptors of its own."""

    maxsize: int
    budget_nbytes: int
    inline_nbytes: int  # most bytes of an object that lies in its record
    objects_read: Descriptor  # of the pipe to the consumer; all ends of pipes are non-blocking
    objects_write: Descriptor
    grants_read: Descriptor  # of the pipe to the producer
    grants_write: Descriptor
    segment: Segment  # the slots
    roles: Roles

    def table(self) -> PlaceTable:
        """A table of places as at the queue's beginning."""
        return PlaceTable(
            self.segment.duplicate(),
            self.maxsize,
            self.budget_nbytes,
            even_limits=True,
            asked_for=AskedFor("queue", "objects", "maxsize", "maxsize"),
        )

    def close(self) -> None:
        """Close this process's descriptors."""
        for part in self:
            if isinstance(part, Descriptor | Segment | Roles):
                part.close()


def make_parts(maxsize: int, budget_nbytes: int | None) -> Parts:
    """The parts of a new queue, with the grants for its first objects; see `Queue` for the arguments."""
    check_memory("shmloader.Queue cannot be used", "Use multiprocessing.Queue")
    available_nbytes = memory_headroom().available_nbytes
    wanted_nbytes = available_nbytes // 2 if budget_nbytes is None else operator.index(budget_nbytes)
    with HeldInterrupts():
        ends: list[Descriptor] = []
        try:
            objects, grants = _make_pipe(ends), _make_pipe(ends)
            inline_nbytes = _enlarge(objects[1].fd, maxsize)
            _enlarge(grants[1].fd, maxsize)
            budget_nbytes, roles = min(wanted_nbytes, available_nbytes), Roles()
            ends.append(roles.descriptor)
            parts = Parts(maxsize, budget_nbytes, inline_nbytes, *objects, *grants, Segment(), roles)
            table = parts.table()
            for grant in first_grants(table):
                os.write(parts.grants_write.fd, pack_grant(grant))
            table.close()
        except BaseException:
            for end in ends:
                end.close()
            raise
    return parts


def _make_pipe(ends: list[Descriptor]) -> tuple[Descriptor, Descriptor]:
    """Add both ends of a new pipe."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    pipe = Descriptor(read_fd), Descriptor(write_fd)
    ends += pipe
    return pipe


def _enlarge(write_fd: int, records: int) -> int:
    """Let a pipe hold so many records; returns the bytes of an object that each may carry.

    Raises `ValueError` if the system gives no pipe that is large enough.
    """
    records += _CLOSED_RECORDS
    for nbytes in (_WANTED_RECORD_NBYTES, UNIT_NBYTES):
        if fcntl.fcntl(write_fd, fcntl.F_GETPIPE_SZ) < records * nbytes:
            try:
                fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, records * nbytes)
            except OSError:
                continue  # it is more than /proc/sys/fs/pipe-max-size
        break
    # A record that does not fit in the rest of the pipe's last page takes more of the next one.
    pages = fcntl.fcntl(write_fd, fcntl.F_GETPIPE_SZ) // mmap.PAGESIZE
    record_nbytes = mmap.PAGESIZE // -(-records // pages) // UNIT_NBYTES * UNIT_NBYTES
    if record_nbytes < UNIT_NBYTES:
        raise ValueError(
            f"maxsize={records - _CLOSED_RECORDS} is too large: a pipe of this system holds {pages} pages, "
            f"for {pages * (mmap.PAGESIZE // UNIT_NBYTES) - _CLOSED_RECORDS:,} objects at most"
        )
    return min(record_nbytes, select.PIPE_BUF) - INLINE_HEAD_NBYTES


def first_grants(table: PlaceTable) -> list[Grant]:
    """Grant all places of a new table: always the same ones, so they are sent only once."""
    return [grant_slot(table) for _ in range(table.budget.most_tasks)]


def grant_slot(table: PlaceTable) -> Grant:
    """Grant a free place."""
    place = table.grant(0, 0, 0, b"")
    return Grant(place.seq, place.number, place.nbytes, table.budget.hint_nbytes, place.limit_nbytes)
