"""A worker thread's connection with the main process's own thread: two queues, and access to the slots."""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue

from shmloader.shared_memory import Extent, Segment


class ThreadLink:
    """The `Link` of a worker thread: two queues of records.

    Args:
        wakeup: The queue at which the main process's thread waits; one item is enough to wake it.

    Attributes:
        tasks: Records for the worker.
        dones: Records for the main process, which is woken after each.
        ended: Whether the thread has ended.
        error: What it has ended by, if that was not the main process.
        wait_ns: See `Link`.
        closed: Likewise.
    """

    def __init__(self, wakeup: SimpleQueue[None]) -> None:
        self.tasks: SimpleQueue[bytes] = SimpleQueue()
        self.dones: deque[bytes] = deque()
        self.ended = False
        self.error: BaseException | None = None
        self.wait_ns = 0
        self.closed = False
        self._wakeup = wakeup

    def receive(self) -> bytes:
        """See `Link.receive`."""
        began_ns = time.perf_counter_ns()
        record = self.tasks.get()
        self.wait_ns = time.perf_counter_ns() - began_ns
        if self.closed:
            raise BrokenPipeError("the main process wants nothing more")
        return record

    def send(self, record: bytes) -> None:
        """See `Link.send`."""
        if self.closed:
            raise BrokenPipeError("the main process wants nothing more")
        self.dones.append(record)
        self._wake()

    def close(self) -> None:
        """In the main process's thread: let the worker find the link broken."""
        self.closed = True
        self.tasks.put(b"")

    def end(self, error: BaseException | None) -> None:
        """In the worker: it ends."""
        self.error, self.ended = error, True
        self._wake()

    def _wake(self) -> None:
        if self._wakeup.empty():  # else it will look at the new records too
            self._wakeup.put(None)


class RevocableSegment:
    """The iterator's `Segment` as a worker thread has it, until that is revoked.

    A worker process has descriptors of its own. A thread that went on using those of an iterator that was
    closed could meet another file under the same number, or make an object that nobody removes.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._revoked = False
        # Reentrant: the iterator may be found to be garbage in the middle of a call, and revokes this.
        self._lock = threading.RLock()

    def reserve(self, slot: int, held_nbytes: int, nbytes: int) -> int:
        """See `Segment.reserve`."""
        with self._lock:
            self._check()
            reserved_nbytes = self._segment.reserve(slot, held_nbytes, nbytes)
            if self._revoked:
                self._segment.discard(slot, reserved_nbytes)
            self._check()
            return reserved_nbytes

    def map(self, slot: int, nbytes: int) -> Extent:
        """See `Segment.map`."""
        with self._lock:
            self._check()
            return self._segment.map(slot, nbytes)

    def discard(self, slot: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """See `Segment.discard`."""
        with self._lock:
            self._check()
            self._segment.discard(slot, nbytes, kept_nbytes)

    def close(self) -> None:
        """The owner's: a worker that closed the segment would take the slots from all others."""
        raise NotImplementedError("only the iterator closes its segment")

    def revoke(self) -> None:
        """From now on refuse everything, as a broken link does; returns when no call is under way."""
        with self._lock:
            self._revoked = True

    def _check(self) -> None:
        if self._revoked:
            raise BrokenPipeError("the loader was closed")
