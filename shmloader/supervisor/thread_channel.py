"""A worker thread's connection with the main process's own thread: two queues."""

from __future__ import annotations

import time
from collections import deque
from queue import SimpleQueue


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
