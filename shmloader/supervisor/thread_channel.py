"""What connects a worker thread with the main process's own: two queues of records, and a bell."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from queue import SimpleQueue


class Bell:
    """Wakes whoever waits for it; rung any number of times before, it wakes once.

    One thread waits at a time. It looks at what there is after it was woken, so that no ring is lost.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held while the bell has not been rung
        self._silent.acquire()

    def ring(self) -> None:
        """Wake the one who waits, or the next one who will."""
        if self._silent.locked():
            with contextlib.suppress(RuntimeError):  # another thread has rung it in this moment
                self._silent.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for it; whether it was rung."""
        if timeout_s is None:
            return self._silent.acquire()
        return self._silent.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))


class ThreadLink:
    """The `Link` of a worker thread: two queues of records.

    Attributes:
        tasks: Records for the worker.
        dones: Records for the main process; the bell rings after each.
        ended: Whether the thread has ended.
        error: What it has ended by, if that was not the main process.
        wait_ns: See `Link`.
        closed: Likewise.
    """

    def __init__(self, bell: Bell) -> None:
        self.tasks: SimpleQueue[bytes] = SimpleQueue()
        self.dones: deque[bytes] = deque()
        self.ended = False
        self.error: BaseException | None = None
        self.wait_ns = 0
        self._bell = bell
        self.closed = False

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
        self._bell.ring()

    def close(self) -> None:
        """In the main process's thread: let the worker find the link broken."""
        self.closed = True
        self.tasks.put(b"")

    def end(self, error: BaseException | None) -> None:
        """In the worker: it ends."""
        self.error, self.ended = error, True
        self._bell.ring()
