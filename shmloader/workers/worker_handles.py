"""One worker as the main process sees it: a process and its two pipes, or a thread and its queues."""

from __future__ import annotations

import os
import select
import threading
from array import array
from collections import deque
from typing import Any

from shmloader.wire.channel import ThreadLink
from shmloader.wire.records import ANSWER_NBYTES, REQUEST_NBYTES

_READ_NBYTES = ANSWER_NBYTES * 8
_EXIT_CODE_S = 1.0  # how long a fork server may take to tell the exit code of a process that has ended


class ProcessWorker:
    """One worker process and its two pipes.

    Attributes:
        worker_id: 0 to ``num_workers - 1``.
        pid: The id of the process that it runs in.
        place: Where it runs, for messages: ``"pid 17"``, say.
        process: The ``multiprocessing`` process object.
        requests_fd: Write end of the pipe that brings it requests, non-blocking.
        answers_fd: Read end of the pipe that takes its answers, non-blocking.
        death_fd: Becomes readable when the process ends.
        heard: Whether a record came from it yet.
        added: Whether it was added while others worked. Until it is heard it has nothing to finish.
        released: Whether it has ended and this side's descriptors are closed.
    """

    def __init__(self, worker_id: int, process: Any, requests_fd: int, answers_fd: int) -> None:
        self.worker_id = worker_id
        self.process = process
        self.pid: int = process.pid
        self.place = f"pid {self.pid}"
        self.requests_fd = requests_fd
        self.answers_fd = answers_fd
        self.death_fd = _open_death_fd(process)
        self.heard = self.added = self.released = False
        self._unsent: deque[bytes] = deque()
        self._lost = 0  # requests that came after its end

    def send(self, record: bytes) -> None:
        """Send a packed request, without waiting; if the pipe is full, the next call sends it.

        A dead worker's broken pipe is not an error here: its death is found where batches are waited for.
        """
        if self._unsent:
            self._unsent.append(record)
            self.flush()
            return
        try:
            os.write(self.requests_fd, record)
        except BlockingIOError:
            self._unsent.append(record)
        except BrokenPipeError:
            self._lost += 1

    def flush(self) -> bool:
        """Send what an earlier `send` could not; False if the pipe is still full."""
        try:
            while self._unsent:
                os.write(self.requests_fd, self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._lost += len(self._unsent)
            self._unsent.clear()
        return True

    def receive(self) -> bytes | None:
        """The records that have arrived, b"" for none; None if the worker has closed its end."""
        try:
            records = os.read(self.answers_fd, _READ_NBYTES)
        except BlockingIOError:
            return b""
        if self._unsent:
            self.flush()
        if not records:
            return None
        self.heard = True
        return records

    def has_begun(self, unanswered: int) -> bool:
        """Whether it has taken a task yet, so that its end or silence may be due to an index batch.

        The pipe shows it, also after the worker's death: until then all its ``unanswered`` tasks are in the
        pipe.
        """
        if self.heard:
            return True
        import fcntl  # neither of them on Windows
        import termios

        unread = array("i", [0])
        try:
            fcntl.ioctl(self.requests_fd, termios.FIONREAD, unread)
        except (OSError, ValueError):  # the pipe is closed
            return True
        return unread[0] < (unanswered - len(self._unsent) - self._lost) * REQUEST_NBYTES

    def is_dead(self) -> bool:
        """Whether the process has ended, even if other code has taken its exit code."""
        if self.released or self.process.exitcode is not None:
            return True
        if self.death_fd < 0:
            return False
        poller = select.poll()
        poller.register(self.death_fd, select.POLLIN)
        return bool(poller.poll(0))

    def release(self) -> None:
        """Close this side's descriptors; the process has ended."""
        self.released = True
        self.process.join(_EXIT_CODE_S)
        self.close_descriptors()
        if self.process.exitcode is not None:
            # Not Process.close(): the object must still answer is_alive() and exitcode. Its descriptors are
            # in a private attribute; without that they are closed when the object dies.
            popen = getattr(self.process, "_popen", None)
            getattr(popen, "close", lambda: None)()

    def close_pipes(self) -> None:
        """Close the pipes, which tells the worker to end."""
        for fd in (self.requests_fd, self.answers_fd):
            if fd >= 0:
                os.close(fd)
        self.requests_fd = self.answers_fd = -1

    def close_descriptors(self) -> None:
        """Close this side's descriptors; then only the exit code shows whether the process has ended."""
        self.close_pipes()
        if self.death_fd >= 0 and self.death_fd != self.process.sentinel:
            os.close(self.death_fd)
        self.death_fd = -1


class ThreadWorker:
    """One worker thread, which runs in this process; see `ProcessWorker`."""

    def __init__(self, worker_id: int, thread: threading.Thread, link: ThreadLink) -> None:
        self.worker_id = worker_id
        self.thread = thread
        self.link = link
        self.pid = os.getpid()
        self.place = f"thread {thread.name!r}"

    def send(self, record: bytes) -> None:
        """See `ProcessWorker`."""
        self.link.requests.put(record)

    def receive(self) -> bytes:
        """See `ProcessWorker`."""
        answers = self.link.answers
        return b"".join([answers.popleft() for _ in range(len(answers))])

    def has_begun(self, unanswered: int) -> bool:
        """See `ProcessWorker`; a thread is not replaced, so nothing depends on it."""
        return True

    def is_dead(self) -> bool:
        """See `ProcessWorker`."""
        return self.link.ended and not self.link.answers


Worker = ProcessWorker | ThreadWorker


def _open_death_fd(process: Any) -> int:
    # Not the sentinel where it can be helped: it is a pipe, and a process that the worker forked holds
    # it open after the worker's death.
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        return int(process.sentinel)
