"""A worker's end of its connection with the main process: records in, records out.

It knows nothing of their contents. A worker process has two pipes; `shmloader.supervisor.threads` has the
link of a worker thread.
"""

from __future__ import annotations

import os
import select
import time
from typing import NamedTuple, Protocol

from shmloader.shared_memory import Descriptor
from shmloader.wire.records import REQUEST_NBYTES, SPIN_NS


class Link(Protocol):
    """A worker's end of its connection with the main process.

    Attributes:
        wait_ns: Nanoseconds that the last `receive` waited.
        closed: Whether it is known already that the main process wants nothing more.
    """

    wait_ns: int
    closed: bool

    def receive(self) -> bytes:
        """The next record; waits until there is one.

        Raises:
            BrokenPipeError: If the main process wants nothing more of this worker.
        """

    def send(self, record: bytes) -> None:
        """Send a record.

        Raises:
            BrokenPipeError: As above.
        """


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
    """The `Link` of a worker process, over its pipes."""

    def __init__(self, pipes: Pipes) -> None:
        self.wait_ns = 0
        self.closed = False  # reading the pipe tells
        self._requests_fd = pipes.requests.fd
        os.set_blocking(self._requests_fd, False)
        self._poller = select.poll()
        self._poller.register(self._requests_fd, select.POLLIN)
        self._answers_fd = pipes.answers.fd

    def receive(self) -> bytes:
        """The next record; sleeps until there is one, unless the last ones came quickly.

        Going to sleep and being woken costs more than a small batch does, on both sides. While records
        come quickly the worker therefore looks again for a moment, letting others have the processor.
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
                self.wait_ns = time.perf_counter_ns() - began_ns
                return record

    def send(self, record: bytes) -> None:
        """See `Link.send`."""
        os.write(self._answers_fd, record)
