"""What the main process needs of workers, whether they are processes or threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shmloader.errors import WorkerDied
from shmloader.worker.loop import WorkerArguments

MakeArguments = Callable[[int], WorkerArguments]
"""Makes a worker's arguments of its number."""


class Worker(Protocol):
    """One worker.

    Attributes:
        worker_id: 0 to ``num_workers - 1``.
        pid: The id of the process that it runs in.
        place: Where it runs, for messages: ``"pid 17"``, say.
    """

    worker_id: int
    pid: int

    @property
    def place(self) -> str:
        """See the class."""

    def send(self, record: bytes) -> None:
        """Send a packed request. Never waits; that the worker is dead is no error here."""

    def receive(self) -> bytes | None:
        """Records that have arrived: none of them as b"", or None if it is seen that none can come."""

    def is_dead(self) -> bool:
        """Whether the worker has ended."""


class Workers(Protocol):
    """All workers of one iterator.

    Attributes:
        closed_because: Why they were stopped.
        look_again_ns: How long to look for a record before `wait`, while records come quickly.
        given_nbytes: Bytes of large arrays that a worker started last was given for itself.
    """

    closed_because: str
    look_again_ns: int
    given_nbytes: int

    @property
    def workers(self) -> Sequence[Worker]:
        """By their number; empty after `close`."""

    @property
    def processes(self) -> list[Any]:
        """Their ``multiprocessing`` process objects, if they have any."""

    def add(self) -> Worker:
        """Start one more worker, sent nothing yet; where that fails, the others are as they were."""

    def dismiss(self) -> None:
        """Let the last worker, which has nothing to do, end. It is not waited for before `close`."""

    def restart(self, worker: Worker) -> Worker:
        """Replace a worker, dead or not, by a new one, which has been sent nothing yet."""

    def wait(self, timeout_s: float | None) -> Sequence[Worker]:
        """Wait until a worker has sent something or has ended, or until `interrupt` is called.

        Args:
            timeout_s: Most seconds to wait, or None for as long as it takes.

        Returns:
            The workers to receive from; empty after the timeout.
        """

    def interrupt(self) -> None:
        """Let `wait`, in another thread, return at once, now and from now on."""

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` was called."""

    def stack_of(self, worker: Worker) -> str:
        """What a live worker is doing: its Python stack, or why it could not be had."""

    def died(self, worker: Worker, indices: tuple[object, ...], memory: str, why: str = "") -> WorkerDied:
        """The error for a dead worker.

        Args:
            worker: The worker.
            indices: The index batches that it held.
            memory: The loader's memory figures, told if the kernel seems to have killed it for memory.
            why: A sentence on what had been tried.
        """

    def close(self, because: str = ..., grace_s: float = ...) -> None:
        """Stop all workers. Only the first call does anything.

        Args:
            because: The reason, kept in ``closed_because``.
            grace_s: Seconds that they may take to finish what is at hand.
        """

    def leave_to_parent(self) -> None:
        """In a process that the program forked: forget the workers, which are the parent's."""
