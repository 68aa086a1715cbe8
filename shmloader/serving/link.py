"""A reader's end of its connection to a server, and the slots behind it."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from shmloader.codec import Decoder
from shmloader.errors import LoaderClosed, LoaderError, ServerDied, SharedMemoryExhausted
from shmloader.failures.bad_samples import Report
from shmloader.failures.exceptions import restore
from shmloader.interrupts import HeldInterrupts
from shmloader.serving import meeting, records
from shmloader.serving.mapped import MappedSlots
from shmloader.serving.records import ANSWER, RAISES, Stored


class Link:
    """Asks a server, and reads what it sends. One thread at a time may use it.

    Ctrl-C may end any wait: then nothing is lost, and the next call goes on.
    """

    def __init__(self, name: str, timeout_s: float, job: str | None, join: str) -> None:
        self.name = name
        self._end, self.pid = meeting.connect(name, timeout_s)
        try:
            about = meeting.introduction(job) | {"join": join}
            self.welcome = meeting.greet(self._end, self.pid, name, about)
        except BaseException:
            self._end.close()
            raise
        self.slots = MappedSlots()
        self._decoder = Decoder()
        self._owner_pid = os.getpid()
        self._poller = select.poll()
        self._requests = 0  # that are answered: `ASK`, `STATE`, `LOAD`
        self._epoch = self._epoch_here = -1  # the request for an epoch; the one whose batches come now
        self._batches: deque[Stored | None] = deque()  # not read yet; None for the epoch's end
        self._answers: dict[int, Stored | int] = {}  # to requests; to `ASK` how many batches were before
        self._closed: Exception | None = None

    # --- out

    def ask(self, wants: int) -> int:
        """Ask for an epoch, see `Request`, and leave the present one; returns the request's number."""
        self.leave()
        self._epoch = self._requests + 1
        return self._request(records.ASK, wants)

    def ask_next(self, count: int) -> None:
        """Ask for the ``count``-th batch."""
        self._request(records.NEXT, count)

    def leave(self, *, tell: bool = False) -> None:
        """Forget what came of the present epoch, and what will; tell the server if nothing else does."""
        self._epoch = -1
        while self._batches:
            self._pass_over(self._batches.popleft())
        if tell:
            self._request(records.LEAVE, 0)

    def call(self, kind: int, value: int, fds: list[int]) -> Any:
        """Make a request for a state, or to load one; returns or raises what the server says."""
        answer = self.answer_to(self._request(kind, value, fds))
        return None if isinstance(answer, int) else self._read(answer)

    def _request(self, kind: int, value: int, fds: list[int] | None = None) -> int:
        if os.getpid() != self._owner_pid:
            raise LoaderError(f"{self.name!r} was attached to by this process's parent: attach here, too")
        while True:
            with HeldInterrupts():  # what is told is not told again
                released = self.slots.released()
                message = records.pack_request(kind, value, released[: records.MOST_RELEASED])
                try:
                    socket.send_fds(self._end, [message], fds or [], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError:  # what the server has sent before its end is still to be read
                    return -1
                else:
                    del released[: records.MOST_RELEASED]
                    self._requests += kind in (records.ASK, records.STATE, records.LOAD)
                    return self._requests
            self._wait(select.POLLOUT)

    # --- in

    def next(self) -> Stored | None:
        """The next message of the epoch, which stays until `take`; None at the epoch's end."""
        self._wait_until(lambda: bool(self._batches))
        return self._batches[0]

    def take(self) -> Any:
        """Read what `next` has returned. Raises what was stored as an exception.

        Raises:
            SharedMemoryExhausted: If this process has no address space; the next call tries again.
        """
        return self._read(self._batches.popleft(), again=self._batches)

    def answer_to(self, request: int) -> Stored | int:
        """The answer to a request; a batch's number if that was for an epoch. Raises one that is an error."""
        self._wait_until(lambda: request in self._answers)
        answer = self._answers.pop(request)
        if not isinstance(answer, int) and answer.flags & RAISES:
            self._read(answer)
        return answer

    def _read(self, stored: Stored | None, again: deque[Stored | None] | None = None) -> Any:
        assert stored is not None
        try:
            anchor, header = self.slots.lease(stored)
        except SharedMemoryExhausted:
            if again is not None:
                again.appendleft(stored)
            raise
        thing = self._decoder.decode(anchor, header)
        if stored.flags & RAISES:
            raise restore(thing)
        return thing.batch if type(thing) is Report else thing

    def _wait_until(self, is_here: Callable[[], bool]) -> None:
        while not is_here():
            if self._closed is not None:
                raise self._closed
            with HeldInterrupts():  # a message that is received is noted
                received = self._receive()
            if not received:
                self._wait(select.POLLIN)

    def _wait(self, event: int) -> None:
        self._poller.register(self._end, event)
        self._poller.poll()

    def _receive(self) -> bool:
        """Receive a message; False if there is none."""
        try:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            message, fds, _, _ = socket.recv_fds(self._end, records.MOST_NBYTES, 2, flags)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it has not read all before its end; what it has sent is still here
            return True
        kind = message[0] if message else 0
        if kind == records.STORED:
            self._note(records.unpack_stored(message))
        elif kind == records.EPOCH and fds:
            self._epoch_here, number = records.unpack_epoch(message)
            self.slots.begin(fds)
            self._answers[self._epoch_here] = number
        elif kind == records.END:
            if self._epoch_here == self._epoch:
                self._batches.append(None)
        elif kind == records.CLOSED:
            self._closed = LoaderClosed(message[1:].decode())
        elif kind == records.EPOCH:
            self._closed = LoaderError(f"{self.name!r}: this process may not open more files (ulimit -n)")
        else:
            self._closed = ServerDied(
                f"process {self.pid}, which served {self.name!r} to this one, has ended", pid=self.pid
            )
        return True

    def _note(self, stored: Stored) -> None:
        if stored.flags & ANSWER:
            if stored.number in (self._requests, self._epoch):  # else an interrupt has ended the wait for it
                self._answers[stored.number] = stored
            else:
                self._pass_over(stored)
        elif self._epoch_here == self._epoch:
            self._batches.append(stored)
        else:
            self._pass_over(stored)

    def _pass_over(self, stored: Stored | None) -> None:
        if stored is not None:
            self.slots.pass_over(stored)

    def close(self) -> None:
        """Let go of everything; batches that the program holds become private memory."""
        if os.getpid() == self._owner_pid:
            self.slots.close()  # before the server hears of it
        self._end.close()
        self._batches.clear()
        self._answers.clear()
        self._closed = self._closed or LoaderClosed(f"{self.name!r}: close() of this reader was called")
