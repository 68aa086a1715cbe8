"""The workers of one iterator as the main process sees them, whether they are processes or threads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shmloader.errors import WorkerDied
from shmloader.messages import shown
from shmloader.worker.loop import WorkerArguments

MakeArguments = Callable[[int], WorkerArguments]
"""Makes a worker's arguments from its number."""


class Worker(Protocol):
    """One worker."""

    worker_id: int  # 0 to ``num_workers - 1``
    pid: int  # the id of the process that it runs in
    place: str  # where it runs, for messages: ``"pid 17"``, say

    def send(self, record: bytes) -> None:
        """Send a packed request, without waiting."""

    def receive(self) -> bytes | None:
        """The records that have arrived, b"" for none; None if it can send no more."""

    def has_begun(self, unanswered: int) -> bool:
        """Whether it has taken one of its ``unanswered`` tasks, which may be why it ended or is silent."""

    def is_dead(self) -> bool:
        """Whether it has ended, and sent all that it will send."""


class Workers(Protocol):
    """All workers of one iterator."""

    workers: Sequence[Worker]  # by their number; empty after `close`
    # ``multiprocessing`` process objects by number, which answer ``pid``, ``is_alive()`` and ``exitcode``
    # after the end too.
    processes: list[Any]
    closed_because: str = ""  # the reason why they were stopped, or are about to be
    closed: bool = False
    interrupted: bool = False
    look_again_ns: int = 0  # how long to look for a record before `wait`, while records come quickly
    given_nbytes: int = 0  # bytes of the large arrays that only the worker started last has
    pickled_nbytes: int = 0  # bytes of the pickle that a worker was sent; 0 if it was forked

    def __del__(self) -> None:
        # Usually nothing is left to do. But a Ctrl-C may have cut `__init__` short, or the iterator's
        # finalizer, which runs only once. At the interpreter's end a module's names may be gone.
        try:
            if not self.closed:
                self.close()
        except AttributeError:
            pass

    def add(self) -> Worker:
        """Start one more worker, without a task; if that fails, the others are unchanged."""

    def renew_datasets(self) -> None:
        """Have worker threads begin the next epoch with new copies of the dataset."""
        return  # processes have their own

    def restart(self, worker: Worker) -> Worker:
        """Replace a worker, dead or not, by a new one without a task.

        Raises:
            Exception: Any that kept the new one from starting; then all workers are stopped.
            LoaderClosed: If another thread has closed the loader meanwhile.
        """

    def wait(self, timeout_s: float | None) -> Sequence[Worker]:
        """Wait until workers have sent records or have ended, or for `interrupt`; returns these workers."""

    def interrupt(self) -> None:
        """Make `wait`, in another thread, return at once from now on."""

    def stack_of(self, worker: Worker) -> str:
        """Python stacks of a live worker's threads, or the reason why there are none."""

    def died(self, worker: Worker, indices: tuple[object, ...], memory: str, why: str = "") -> WorkerDied:
        """The error for a dead worker that held these index batches; ``why`` says why it was not restarted.

        It includes the loader's ``memory`` figures if the kernel seems to have killed the worker for memory.
        """

    def close(self, because: str = ..., grace_s: float = ...) -> None:
        """Stop all workers, which may take ``grace_s`` to finish their present sample. Only once."""

    def close_for(self, because: str) -> None:
        """Give the reason for a `close` that is about to come, unless there is one."""
        self.closed_because = self.closed_because or because

    def leave_to_parent(self) -> None:
        """Forget the workers, in a process that the program forked: they are the parent's."""


def describe_held(indices: tuple[object, ...]) -> str:
    """A sentence on the index batches that a dead worker held, or ""."""
    return f" It held {len(indices)} index batch(es): {shown(list(indices))}" if indices else ""


live: weakref.WeakSet[Workers] = weakref.WeakSet()
"""Workers that were started and not closed yet."""


def _leave_all_to_parent() -> None:
    for workers in list(live):
        workers.leave_to_parent()
    live.clear()


# Any child process inherits the write ends of the pipes of requests. While it held one, that worker would not
# see the main process close the pipe.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_all_to_parent)
