"""The producer's end of a queue."""

from __future__ import annotations

import os

import torch

from shmloader.channel.end import End
from shmloader.channel.outbox import Outbox
from shmloader.channel.parts import Parts
from shmloader.channel.roles import Role, Roles
from shmloader.errors import QueueClosed, SharedMemoryExhausted
from shmloader.wire.queue_records import UNIT_NBYTES, unpack_grants

_READ_NBYTES = UNIT_NBYTES * 256


class Producer(End):
    """Puts objects, in the process that claimed this role."""

    role, other = Role.PRODUCER, Role.CONSUMER

    def __init__(self, parts: Parts, roles: Roles, started: list[object]) -> None:
        super().__init__(parts, roles, started)
        self._room = 0  # objects that may be put before the next grant
        self._deadline: float | None = None  # of the present call
        self._outbox = Outbox(parts.segment.duplicate(), parts.inline_nbytes, self._receive)

    def put(self, obj: object, deadline: float | None) -> None:
        """Put an object, once there is room for it. The caller has entered; see `Queue.put`."""
        self._deadline = deadline
        while not self._room:
            self._receive()
        self._busy = True
        try:
            self._outbox.write(obj)
        except BaseException:
            self._busy = False
            raise
        try:
            record = self._outbox.finish()
        except SharedMemoryExhausted:
            self._busy = False
            raise
        self._room -= 1
        try:
            os.write(self._sent_fd, record)  # the pipe is large enough for all that there is room for
        except BrokenPipeError:
            self._busy = False
            self.note_closed()
            raise QueueClosed(self.closed) from None
        self._roles.put_another()
        self._busy = False

    def new_empty(self, size: tuple[int, ...], dtype: torch.dtype, deadline: float | None) -> torch.Tensor:
        """Memory for the next object; see `Queue.new_empty`."""
        self._deadline = deadline
        while not self._room:
            self._receive()
        return self._outbox.new_empty(size, dtype)

    def _receive(self) -> None:
        """Sleep until there are grants, and receive them."""
        for grant in unpack_grants(self._receive_some(_READ_NBYTES, self._deadline)):
            if grant is None:
                self.note_closed()
                break
            self._room += grant.has_room
            if grant.slot >= 0:
                self._outbox.add(grant)
        self._busy = False

    def give_up(self) -> None:
        """Give up all memory that the consumer does not use."""
        self._outbox.close()
