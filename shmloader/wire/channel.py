"""A worker's end of its connection with the main process: records in, records out.

It does not read their contents. A worker process has two pipes, a worker thread two queues.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from queue import SimpleQueue
from typing import Any, NamedTuple

from shmloader.memory import Descriptor
from shmloader.wire.records import REQUEST_NBYTES, SPIN_NS


class Pipes(NamedTuple):
    """A worker process's ends, and the file for its stacks; crosses the process boundary once.

    Attributes:
        requests: Read end of the pipe that brings requests.
        answers: Write end of the pipe that takes answers.
        stacks: The file that takes this worker's Python stack when the main process asks for it.
    """

    requests: Descriptor
    answers: Descriptor
    stacks: Descriptor


class PipeLink:
    """The link of a worker process, over its pipes.

    Attributes:
        wait_ns: Nanoseconds that the last `receive` waited.
        received_ns: When it returned, by ``time.perf_counter_ns()``.
        closed: Whether the main process is known to want nothing more.
    """

    def __init__(self, pipes: Pipes) -> None:
        self.wait_ns = self.received_ns = 0
        self.closed = False  # reading the pipe tells
        self._requests_fd = pipes.requests.fd
        os.set_blocking(self._requests_fd, False)
        self._poller = select.poll()
        self._poller.register(self._requests_fd, select.POLLIN)
        self._answers_fd = pipes.answers.fd

    def receive(self) -> bytes:
        """The next record; sleeps until there is one, unless the last ones came quickly: see `SPIN_NS`.

        Raises:
            BrokenPipeError: If the main process wants nothing more of this worker; so does `send`.
        """
        began_ns = time.perf_counter_ns()
        spin_until_ns = began_ns + SPIN_NS if self.wait_ns < SPIN_NS else 0
        while True:
            try:
                record = os.read(self._requests_fd, REQUEST_NBYTES)
            except BlockingIOError:
                if spin_until_ns and time.perf_counter_ns() < spin_until_ns:
                    os.sched_yield()
                else:
                    self._poller.poll()
            else:
                if not record:
                    raise BrokenPipeError("the main process closed the task pipe")
                self.received_ns = now_ns = time.perf_counter_ns()
                self.wait_ns = now_ns - began_ns
                return record

    def send(self, record: bytes) -> None:
        """Send a record."""
        os.write(self._answers_fd, record)


class ThreadLink:
    """The link of a worker thread: two queues of records.

    Args:
        wakeup: The queue at which the main process's thread waits; one item is enough to wake it.

    Attributes:
        ended: Whether the thread has ended.
        error: The exception that has ended it; None if the main process has.
        requests, answers: The records each way.
        dataset: A copy of the dataset for the worker's next epoch, if it is to take a new one.
        wait_ns, received_ns, closed: As of a `PipeLink`.
    """

    def __init__(self, wakeup: SimpleQueue[None]) -> None:
        self.requests: SimpleQueue[bytes] = SimpleQueue()
        self.answers: deque[bytes] = deque()
        self.ended = False
        self.error: BaseException | None = None
        self.dataset: Any = None
        self.wait_ns = self.received_ns = 0
        self.closed = False
        self._wakeup = wakeup

    def receive(self) -> bytes:
        """The next record; sleeps until there is one. It and `send` raise as those of a `PipeLink`."""
        began_ns = time.perf_counter_ns()
        record = self.requests.get()
        self.received_ns = now_ns = time.perf_counter_ns()
        self.wait_ns = now_ns - began_ns
        if self.closed:
            raise BrokenPipeError("the main process wants nothing more")
        return record

    def send(self, record: bytes) -> None:
        """Send a record, and wake the main process's thread."""
        if self.closed:
            raise BrokenPipeError("the main process wants nothing more")
        self.answers.append(record)
        self._wake()

    def close(self) -> None:
        """Break the link for the worker; called in the main process's thread."""
        self.closed = True
        self.requests.put(b"")

    def end(self, error: BaseException | None) -> None:
        """Note that the worker ends; called in its thread."""
        self.error, self.ended = error, True
        self._wake()

    def _wake(self) -> None:
        if self._wakeup.empty():  # else it will look at the new records too
            self._wakeup.put(None)


Link = PipeLink | ThreadLink
