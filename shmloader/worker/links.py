"""A worker's end of its connection with the main process: two pipes of a process, two queues of a thread.

The other ends: `workers.processes` and `workers.threads`.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from queue import SimpleQueue
from typing import Any, NamedTuple

from shmloader.memory.segment import Descriptor, OwnDescriptor
from shmloader.wire.records import REQUEST_NBYTES, SPIN_NS


class Pipes(NamedTuple):
    """A worker process's ends, and the file for its stacks; crosses the process boundary once."""

    requests: Descriptor  # read end of the pipe that brings requests
    answers: Descriptor  # write end of the pipe that takes answers
    stacks: Descriptor  # the file that takes this worker's Python stack when the main process asks for it


class ProcessLink:
    """The link of a worker process."""

    in_thread = False
    dataset = None

    def __init__(self, pipes: Pipes) -> None:
        self.wait_ns = 0  # that the last `receive` waited
        self.received_ns = 0  # when it returned, by ``time.perf_counter_ns()``
        self._requests_fd = pipes.requests.fd
        os.set_blocking(self._requests_fd, False)
        self._poller = select.poll()
        self._poller.register(self._requests_fd, select.POLLIN)
        self._answers_fd = pipes.answers.fd

    def receive(self) -> bytes:
        """The next record; after records that came quickly it looks for ``SPIN_NS`` before it sleeps.

        Raises `BrokenPipeError` if the main process wants nothing more of this worker; so does `send`.
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

    def end_if_closed(self) -> None:
        """Do nothing: reading the pipe tells that the main process wants nothing more."""


class Wakeup:
    """A descriptor that is readable from `ring` to `clear`, and at first; closed when no thread has it."""

    def __init__(self) -> None:
        self._event = OwnDescriptor(os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self.fd = self._event.fd

    def ring(self) -> None:
        """Wake whoever waits for it."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget all rings; look for what they told of after it."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)


class ThreadLink:
    """The link of a worker thread, which the main process's thread has too."""

    in_thread = True

    def __init__(self, wakeup: Wakeup) -> None:
        self.requests: SimpleQueue[bytes] = SimpleQueue()
        self.answers: deque[bytes] = deque()
        self.ended = False  # whether the thread has ended
        self.error: BaseException | None = None  # that has ended it
        self.dataset: Any = None  # a copy for the next epoch, if it is to take a new one
        self.wait_ns = self.received_ns = 0
        self.closed = False  # whether the main process wants nothing more
        self._wakeup = wakeup  # the main process's thread waits for it

    def receive(self) -> bytes:
        """The next record; sleeps until there is one."""
        began_ns = time.perf_counter_ns()
        record = self.requests.get()
        self.received_ns = now_ns = time.perf_counter_ns()
        self.wait_ns = now_ns - began_ns
        self.end_if_closed()
        return record

    def send(self, record: bytes) -> None:
        """Send a record, and wake the main process's thread."""
        self.end_if_closed()
        self.answers.append(record)
        self._wakeup.ring()

    def end_if_closed(self) -> None:
        """Raise `BrokenPipeError` once the batches are not wanted: a thread cannot be ended from outside."""
        if self.closed:
            raise BrokenPipeError("the main process wants nothing more")

    def renew(self, dataset: Any) -> None:
        """Give the worker a dataset for its next epoch; called in the main process's thread."""
        self.dataset = dataset

    def close(self) -> None:
        """Break the link for the worker; called in the main process's thread."""
        self.closed = True
        self.requests.put(b"")

    def end(self, error: BaseException | None) -> None:
        """Note that the worker ends; called in its thread."""
        self.error, self.ended = error, True
        self._wakeup.ring()
        del self._wakeup  # a log may keep an exception of the thread, and so this link


Link = ProcessLink | ThreadLink
