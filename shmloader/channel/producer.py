"""The producer's end of a queue."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shmloader.channel.end import End
from shmloader.channel.outbox import NoSlot, Outbox
from shmloader.channel.parts import Parts
from shmloader.channel.roles import Role
from shmloader.errors import SharedMemoryExhausted
from shmloader.wire.queue_records import UNIT_NBYTES, unpack_grants

_Made = TypeVar("_Made")
_READ_NBYTES = UNIT_NBYTES * 256


class Producer(End):
    """Puts objects, in the process that claimed this role."""

    role, other = Role.PRODUCER, Role.CONSUMER

    def __init__(self, parts: Parts, started: list[object]) -> None:
        super().__init__(parts, started)
        self._room = 0  # objects that may be put before the next grant
        self._outbox = Outbox(parts.segment.duplicate(), parts.inline_nbytes, parts.roles)

    def put(self, obj: object, deadline: float | None) -> None:
        """Put an object, once there is room for it. The caller has entered; see `Queue.put`."""
        self._once_possible(deadline, self._write, obj)
        try:
            record = self._outbox.finish()
        except SharedMemoryExhausted:
            self._busy = False
            raise
        self._room -= 1
        os.write(self._sent_fd, record)  # the pipe is large enough for all that there is room for
        self._roles.count(self.role)
        self._busy = False

    def _write(self, obj: object) -> None:
        """Write an object, and stay ``_busy`` until it is sent."""
        self._busy = True
        try:
            self._outbox.write(obj)
        except BaseException:
            self._busy = False
            raise

    def new_empty(self, size: tuple[int, ...], dtype: torch.dtype, deadline: float | None) -> torch.Tensor:
        """Memory for the next object; see `Queue.new_empty`."""
        return self._once_possible(deadline, self._outbox.new_empty, size, dtype)

    def _once_possible(self, deadline: float | None, call: Callable[..., _Made], *of: Any) -> _Made:
        """Make a call once there is room for an object, and again once a slot is granted if it needs one."""
        while not self._room:
            self._receive(deadline)
        while True:
            with contextlib.suppress(NoSlot):
                return call(*of)
            self._receive(deadline)

    def _receive(self, deadline: float | None) -> None:
        """Sleep until there are grants, and receive them."""
        for grant in unpack_grants(self._receive_some(_READ_NBYTES, deadline)):
            if grant is None:
                self.note_closed()
                break
            self._room += 1
            if grant.slot >= 0:
                self._outbox.add(grant)
        self._busy = False

    def give_up(self) -> None:
        """Give up all memory that the consumer does not use."""
        self._outbox.close()
