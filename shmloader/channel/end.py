"""One end of a queue in the process that uses it: its turn, its sleep, and the death of the other end."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import Any, ClassVar

from shmloader.channel.parts import Parts
from shmloader.channel.roles import Party, Role, exit_code_of, has_children
from shmloader.errors import LoaderError, PeerDied, QueueClosed
from shmloader.interrupts import HeldInterrupts
from shmloader.memory.segment import OwnDescriptor
from shmloader.messages import ending_of
from shmloader.wire.queue_records import CLOSED_RECORD

LOOK_S = 1.0
"""How long to sleep at most before looking again at who is there: no wake-up is waited for blindly."""


class Elapsed(Exception):
    """The deadline of a call has come."""


class End:
    """The base of the producer's and the consumer's end; several threads may use one in turn.

    ``started`` are the ``Popen`` objects of processes that this one has started with the queue.
    """

    role: ClassVar[Role]
    other: ClassVar[Role]

    def __init__(self, parts: Parts, started: list[Any]) -> None:
        pipes = parts.objects_read, parts.grants_write, parts.grants_read, parts.objects_write
        received, sent = pipes[:2] if self.role is Role.CONSUMER else pipes[2:]
        self.lock = threading.RLock()
        self.closed = ""  # why nothing more will come or go, once that is so
        self._received_fd, self._sent_fd = received.fd, sent.fd
        self._roles = parts.roles
        self._started = started
        self._busy = False  # the records are being changed: an exception then leaves them incomplete
        self._epoll = select.epoll()  # of what the other end can be heard by: its pipe, and its death
        self._epoll.register(received.fd, select.EPOLLIN)
        self._peer: Party | None = None  # the process at the other end, once it has used it
        self._death = OwnDescriptor(-1)  # readable at the end of that process
        self._slept = False  # the last `_receive_some` has

    def fileno(self) -> int:
        """A descriptor that is readable while the other end has sent something, or has died."""
        return self._epoll.fileno()

    # --- turns

    def enter(self, deadline: float | None) -> None:
        """Wait for other threads to leave; the caller releases the ``lock``.

        Raises:
            Elapsed: If they have not by the deadline.
            LoaderError: If an exception has cut an earlier call short, or this thread is inside one.
        """
        if not self.lock.acquire(blocking=False):
            wait_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not self.lock.acquire(timeout=min(wait_s, threading.TIMEOUT_MAX)):
                raise Elapsed
        if self._busy:
            self.lock.release()
            raise LoaderError(
                f"the process that {self.role.does} was interrupted within a call, or makes another one in a "
                "signal handler: objects may be lost, so the queue cannot be used any more"
            )

    # --- what comes, and sleep

    def _receive_some(self, most_nbytes: int, deadline: float | None) -> bytes:
        """Sleep until there are records, and read some; it is ``_busy`` then. See `wait` for errors."""
        slept, self._slept = self._slept, False
        while not self.closed:
            if slept:  # as the last time, so that is likely now too
                self.wait(deadline)
                self._slept = True
            self._busy = True
            try:
                return os.read(self._received_fd, most_nbytes)
            except BlockingIOError:
                self._busy = False
                slept = True
        raise QueueClosed(self.closed)

    def wait(self, deadline: float | None) -> None:
        """Sleep until the other end may have sent something.

        Raises:
            Elapsed: If it has not by the deadline.
            PeerDied: If it has died, and all that it had sent was received.
            QueueClosed: If another thread has closed the queue.
        """
        while True:
            self._find_peer()
            left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            try:
                ready = {fd for fd, _ in self._epoll.poll(max(0.0, left_s))}
            except (OSError, ValueError):
                if not self.closed:
                    raise
                ready = set()  # a signal handler of this thread has closed the queue
            if self._received_fd in ready:
                return
            if self.closed:
                raise QueueClosed(self.closed)
            if self._peer is None:
                self._check_that_others_live()
            elif self._death.fd in ready or not (
                self._death.fd >= 0 or self._peer.is_this_process or self._peer.is_alive()
            ):
                if any(fd == self._received_fd for fd, _ in self._epoll.poll(0)):
                    return  # it has sent something just before
                raise self._error_of(self._peer)
            if deadline is not None and time.monotonic() >= deadline:
                raise Elapsed

    def _find_peer(self) -> None:
        """Look who is at the other end, if that is unknown, and watch its process."""
        if self._peer is None and (peer := self._roles.who(self.other)) is not None:
            with HeldInterrupts():
                if not peer.is_this_process:
                    self._death = OwnDescriptor(peer.watch())
                    if self._death.fd >= 0:
                        self._epoll.register(self._death.fd, select.EPOLLIN)
                self._peer = peer

    def _check_that_others_live(self) -> None:
        """Raise `PeerDied` if every process has ended that could have used the other end."""
        others, forks = self._roles.others(), self._roles.forks
        if threading.active_count() > 1 or not (others or self._started or forks):  # a thread here may
            return
        if any(party.is_alive() for party in others):
            return
        if any(getattr(one, "pid", None) is None or one.poll() is None for one in self._started):
            return
        if forks and has_children():  # one of them may not have noted itself yet
            return
        started = self._started
        pid = others[-1].pid if others else started[-1].pid if started else -1
        code = exit_code_of(pid, started) if pid >= 0 else None
        names = ", ".join(map(str, others)) or (f"pid {pid}" if started else "forked processes of this one")
        raise PeerDied(
            f"no process {self.other.does} any more: those that had it have ended before they used it: "
            f"{names}; the last one {ending_of(code)}. Its own error output says why if it could.",
            pid=pid,
            exit_code=code,
        )

    def _error_of(self, peer: Party) -> PeerDied:
        code = exit_code_of(peer.pid, self._started)
        lost = "All that it had put was got. A producer that is done calls queue.close()."
        if peer.role is Role.CONSUMER:
            lost = f"Objects that it had not got are lost: {self._roles.waiting()}."
        said = f"the process that {peer.role.does}, {peer}, {ending_of(code)}. {lost}"
        return PeerDied(said, pid=peer.pid, exit_code=code)

    # --- the end

    def note_closed(self) -> None:
        """Note that the other end was closed."""
        self.closed = f"the process that {self.other.does}, {self._roles.who(self.other)}, has closed it"

    def close_from_outside(self, most_s: float) -> bool:
        """Close it once other threads have left, for which they have so many seconds; whether they have.

        The other end is told, and what it does not use is given up.
        """
        heard = bool(self.closed)  # from the other end
        if not self.lock.acquire(timeout=0):
            self.closed = self.closed or "this process has closed the queue"
            if not self.lock.acquire(timeout=most_s):
                return False
        try:
            if self._busy:  # in a signal handler of a thread that is inside, or one has cut a call short
                return False
            if not heard:
                with contextlib.suppress(OSError):  # nobody is there to hear it
                    os.write(self._sent_fd, CLOSED_RECORD)
            self.give_up()
            self.close()
            self.closed = "this process has closed the queue"
            return True
        finally:
            self.lock.release()

    def give_up(self) -> None:
        """Give up all memory that nobody uses."""

    def close(self) -> None:
        """Give up the descriptors of this end, but for the pipes, which the queue owns."""
        self._epoll.close()
        self._death.close()
