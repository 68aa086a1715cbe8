"""The consumer's end of a queue, which owns the table of places."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np

from shmloader.channel.end import Elapsed, End
from shmloader.channel.parts import Parts, first_grants, grant_slot
from shmloader.channel.roles import Role
from shmloader.codec import Decoder
from shmloader.codec.layout import NO_LEAVES
from shmloader.errors import PeerDied, QueueClosed, SharedMemoryExhausted, SpillWarning, warn
from shmloader.wire import queue_records as records
from shmloader.wire.queue_records import INLINE_HEAD_NBYTES, UNIT_NBYTES, pack_grant, unpack_inline


class Consumer(End):
    """Gets objects, in the process that claimed this role."""

    role, other = Role.CONSUMER, Role.PRODUCER

    def __init__(self, parts: Parts, started: list[object]) -> None:
        super().__init__(parts, started)
        self._decoder = Decoder()
        self._table = parts.table()
        first_grants(self._table)  # they were sent when the queue was made
        self._record = b""  # one that was received and could not be taken yet

    def get(self, deadline: float | None) -> Any:
        """The next object, once it is there. The caller has entered; see `Queue.get`."""
        if self._table.warning:  # before an object is got, since it may be made an exception
            warn(self._table.take_warning(), SpillWarning)
        record = self._record = self._record or self._receive(deadline)
        self._busy = True  # also if it was received by an earlier call
        try:
            anchor, header = (
                self._take_inline(record) if record[0] == records.INLINE else self._take_slot(record)
            )
        except (SharedMemoryExhausted, MemoryError):  # it is not lost: the next call tries again
            self._busy = False
            raise
        self._record = b""
        self._roles.count(self.role)
        self._busy = False
        if header.endswith(NO_LEAVES):
            return pickle.loads(header)
        return self._decoder.decode(anchor, header)

    def _receive(self, deadline: float | None) -> bytes:
        """Sleep until there is an object, and receive its record."""
        record = self._receive_some(UNIT_NBYTES, deadline)
        if record[0] == records.CLOSED:
            self.note_closed()
            self._busy = False
            raise QueueClosed(self.closed)
        if record[0] == records.INLINE:
            more_nbytes = records.whole_units(INLINE_HEAD_NBYTES + unpack_inline(record)[1]) - UNIT_NBYTES
            if more_nbytes:
                record += os.read(self._received_fd, more_nbytes)
        return record

    def _take_inline(self, record: bytes) -> tuple[Any, bytes]:
        """The leaves, in private memory, and the header of an object that lies in its record."""
        header_begin, nbytes = unpack_inline(record)
        begin, end = INLINE_HEAD_NBYTES, INLINE_HEAD_NBYTES + nbytes
        header = record[begin + header_begin : end]
        leaves = None
        if not header.endswith(NO_LEAVES):
            leaves = np.frombuffer(record, np.uint8)[begin : begin + header_begin].copy()
        os.write(self._sent_fd, pack_grant(records.ROOM))
        return leaves, header

    def _take_slot(self, record: bytes) -> tuple[Any, bytes]:
        """The anchor of the leaves, and the header of an object that lies in a slot; another is granted."""
        table = self._table
        seq, slot_nbytes, header_begin, header_end = records.unpack_in_slot(record)
        if seq not in table.arrived:
            table.arrive(seq, slot_nbytes, header_begin, header_end, 0, 0)
        anchor, header = table.take(table.arrived[seq])
        # If memory has become short there are fewer slots than objects that may wait.
        grant = grant_slot(table) if table.has_room() else records.ROOM
        os.write(self._sent_fd, pack_grant(grant))
        return anchor, header

    def has_news(self, deadline: float | None) -> bool:
        """Whether `get` would return an object, or raise, by the deadline."""
        if self.closed or self._record:
            return True
        try:
            self.wait(deadline)
        except Elapsed:
            return False
        except (PeerDied, QueueClosed):
            pass
        return True

    def give_up(self) -> None:
        """Give up all slots but those that are kept, and the one that the producer has open."""
        self._table.close(self._roles.give_up())
