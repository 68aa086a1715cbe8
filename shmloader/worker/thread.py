"""A worker thread: its end of the two queues, and its way into the loop. Main side: `workers.threads`."""

from __future__ import annotations

import os
import time
import traceback
from collections import deque
from queue import SimpleQueue
from typing import Any

from shmloader.torch_private import use_one_core_in_this_thread
from shmloader.worker.loop import Loop, WorkerArguments


class ThreadLink:
    """The `Link` of a worker thread: two queues of records, which the main process's thread has too.

    Args:
        wakeup: The queue at which the main process's thread waits; one item is enough to wake it.
    """

    in_thread = True

    def __init__(self, wakeup: SimpleQueue[None]) -> None:
        self.requests: SimpleQueue[bytes] = SimpleQueue()
        self.answers: deque[bytes] = deque()
        self.ended = False  # whether the thread has ended
        # The exception that has ended it; None if the main process has.
        self.error: BaseException | None = None
        self.dataset: Any = None
        self.wait_ns = self.received_ns = 0
        self.closed = False
        self._wakeup = wakeup

    def receive(self) -> bytes:
        """The next record; sleeps until there is one."""
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
        self._wake()

    def _wake(self) -> None:
        if self._wakeup.empty():  # else it will look at the new records too
            self._wakeup.put(None)


def run_in_thread(arguments: WorkerArguments, link: ThreadLink) -> None:
    """Entry point of a worker thread. The program's global generators are left alone."""
    use_one_core_in_this_thread()
    pid = os.getpid()
    try:
        Loop(arguments, link).run()
    except BaseException:
        if os.getpid() == pid:
            raise
        # In a process that the dataset forked this is the only thread: its end aborts the interpreter.
        traceback.print_exc()
        os._exit(1)
