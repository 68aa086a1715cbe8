"""A reader's end of its connection to a server, and the slots behind it."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
from collections import deque
from typing import Any

from shmloader.codec import Decoder
from shmloader.errors import LoaderClosed, LoaderError, ResumeError, ServerDied
from shmloader.failures.bad_samples import Report
from shmloader.failures.exceptions import restore
from shmloader.host_sockets import receive_descriptors
from shmloader.interrupts import HeldInterrupts
from shmloader.serving import meeting, records
from shmloader.serving.mapped import MappedSlots
from shmloader.serving.records import ANSWER, RAISES, Stored
from shmloader.slots import ByteArray

# Of links that are not closed: the garbage collector, which finalizes in any order, would close them before
# what the program holds is private memory, and the server would use it again.
_ends: set[socket.socket] = set()


class Link:
    """Asks a server, and reads what it sends. One thread at a time may use it.

    An exception, such as Ctrl-C, may end any call between any two instructions: then nothing is lost, and
    the same call can be made again. So requests have numbers, say things that may be said twice, and a
    message is looked at and noted before it is taken out of the socket.
    """

    def __init__(self, name: str, timeout_s: float, about: dict[str, Any]) -> None:
        self.name = name
        self._end, self.pid = meeting.connect(name, timeout_s)
        try:
            self.welcome, fd = meeting.greet(self._end, self.pid, name, about)
        except BaseException:
            self._end.close()
            raise
        self.slots = MappedSlots(fd)
        self._decoder = Decoder()
        self._owner_pid = os.getpid()
        self._requests = 0
        self._epoch = self._epoch_here = 0  # the request for an epoch; the one whose batches come now
        self._before = 0  # batches of that one before this reader's first
        self._told = 0  # up to which batch the server knows that this process wants them
        self._batches: deque[Stored] = deque()  # of the epoch, in order
        self._is_over = False  # whether the epoch has no more
        self._why_not: tuple[ByteArray, bytes] | None = None  # the epoch cannot begin: the answer, held
        self._answers: dict[int, Stored] = {}  # to requests
        self._closed: Exception | None = None
        _ends.add(self._end)

    # --- out

    def ask(self, wants: int) -> int:
        """Ask for an epoch, see `Request`, and leave the present one; returns the request's number."""
        self._forget_epoch()
        self._epoch = self._requests + 1
        return self._request(records.ASK, wants)

    def leave(self) -> None:
        """Leave the present epoch."""
        self._forget_epoch()
        self._request(records.LEAVE, 0)

    def state(self, taken: int) -> Any:
        """The loader's state after so many batches of the epoch; -1 for between epochs."""
        return self._answer_to(self._request(records.STATE, taken))

    def load(self, text: bytes) -> None:
        """Have the loader's next epoch continue from a state. Raises what that raises."""
        if len(text) > records.MOST_STATE_NBYTES:
            raise ResumeError(
                f"a state of {len(text):,} bytes cannot be sent to the process that serves {self.name!r}: "
                f"{records.MOST_STATE_NBYTES:,} are the most. Load it there, before serve()"
            )
        self._answer_to(self._request(records.LOAD, 0, text))

    def begun(self) -> int:
        """Wait until the epoch begins; returns how many of its batches were before. Raises why it cannot."""
        while self._epoch_here != self._epoch:
            if self._epoch in self._answers:
                self._why_not = self._why_not or self.slots.lease(self._answers[self._epoch])
                raise restore(self._decoder.decode(*self._why_not))
            self._receive()
        return self._before

    def _request(self, kind: int, value: int, text: bytes = b"") -> int:
        if os.getpid() != self._owner_pid:
            raise LoaderError(f"{self.name!r} was attached to by this process's parent: attach here, too")
        self._requests = number = self._requests + 1
        released = self.slots.released()
        told = released[: records.MOST_RELEASED]  # more is told with the next request
        with contextlib.suppress(OSError):  # what the server has sent before its end is still to be read
            self._end.send(records.pack_request(kind, value, number, told, text))
            del released[: len(told)]
        return number

    # --- in

    def next(self, number: int) -> Stored | None:
        """The batch of a number in the epoch, None after its end; those before it are done with.

        The same one may be asked for again.
        """
        batches = self._batches
        while True:
            while batches and batches[0].number < number:
                batches.popleft()
                self.slots.drop_last()
            if number - self._told >= self.welcome["tell_every"]:
                self._request(records.NEXT, number)
                self._told = number
            if batches:
                return batches[0]
            if self._is_over:
                return None
            self._receive()

    def read(self, stored: Stored) -> Any:
        """Read what was stored; raise it if it is an exception."""
        thing = self._decoder.decode(*self.slots.lease(stored))
        if stored.flags & RAISES:
            raise restore(thing)
        return thing.batch if type(thing) is Report else thing

    def _answer_to(self, request: int) -> Any:
        while request not in self._answers:
            self._receive()
        try:
            return self.read(self._answers[request])
        finally:
            self.slots.pass_over(self._answers.pop(request))  # where it could not be read

    def _receive(self) -> None:
        if self._closed is not None:
            raise copy.copy(self._closed)  # the traceback of one that is kept would refer to this object
        try:
            message = self._end.recv(records.MOST_NBYTES, socket.MSG_PEEK)
            if message and message[0] == records.EPOCH:  # a second look would double its descriptors
                with HeldInterrupts():
                    message, fds, is_short = receive_descriptors(self._end, records.MOST_NBYTES, 1)
                    if is_short:
                        self._closed = meeting.no_descriptor(self.name)
                        return
                    request, number = records.unpack_epoch(message)
                    self.slots.begin(fds)
                    self._before = self._told = number
                    self._epoch_here = request
                return
            self._note(message)
            self._end.recv(1)  # all of it
        except ConnectionResetError:  # it has not read all before its end; what it has sent is still here
            return

    def _note(self, message: bytes) -> None:
        kind = message[0] if message else 0
        if kind == records.STORED:
            for stored in records.unpack_stored(message):
                if stored.flags & ANSWER:
                    self._answers[stored.number] = stored
                elif self._epoch_here == self._epoch:
                    self._batches.append(stored)
                else:
                    self.slots.pass_over(stored)
        elif kind == records.END:
            self._is_over = self._epoch_here == self._epoch
        elif kind == records.CLOSED:
            self._closed = LoaderClosed(message[1:].decode())
        else:
            self._closed = self._closed or ServerDied(
                f"process {self.pid}, which served {self.name!r} to this one, has ended", pid=self.pid
            )

    def _forget_epoch(self) -> None:
        """Forget what came of the epoch, what will come, and answers that nobody has waited for."""
        self._epoch, self._is_over, self._why_not = 0, False, None
        self.slots.drop_last()
        for answer in self._answers.values():
            self.slots.pass_over(answer)
        self._answers.clear()
        while self._batches:
            self.slots.pass_over(self._batches[0])
            self._batches.popleft()

    def interrupt(self) -> None:
        """End what another thread waits for; the server does not hear of it yet. Called before `close`."""
        self._closed = self._closed or LoaderClosed(f"{self.name!r}: close() of this reader was called")
        with contextlib.suppress(OSError):  # the connection is closed
            self._end.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Let go of everything; batches that the program holds become private memory."""
        if os.getpid() == self._owner_pid:
            self.slots.close()  # before the server hears of it
        self._end.close()
        _ends.discard(self._end)
