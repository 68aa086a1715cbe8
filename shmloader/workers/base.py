"""The base of workers, whether they are processes or threads."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from shmloader.memory.mapping import libc
from shmloader.messages import shown
from shmloader.worker.loop import WorkerArguments

_PR_SET_NAME, _NAME_NBYTES = 15, 15

MOST_WAIT_S = 2e6
"""The longest wait, 23 days: ``poll`` takes no more than 31 bits of ms."""

MakeArguments = Callable[[int], WorkerArguments]
"""Makes a worker's arguments from its number."""


class BaseWorkers(ABC):
    """All workers of one iterator; `ProcessWorkers` and `ThreadWorkers` have the same further methods."""

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
        # `__del__`, which stops them only once. At the interpreter's end a module's names may be gone.
        try:
            if not self.closed:
                self.close()
        except AttributeError:
            pass

    @abstractmethod
    def close(self, because: str = ..., grace_s: float = ...) -> None:
        """Stop all workers, which may take ``grace_s`` to finish their present sample. Only once."""

    def close_for(self, because: str) -> None:
        """Give the reason for a `close` that is about to come, unless there is one."""
        self.closed_because = self.closed_because or because

    def renew_datasets(self) -> None:
        """Give threads new copies of the dataset for the next epoch; processes have datasets of their own."""
        return

    @abstractmethod
    def leave_to_parent(self) -> None:
        """Forget the workers, in a process that the program forked: they are the parent's."""


def describe_held(indices: tuple[object, ...]) -> str:
    """A sentence on the index batches that a dead worker held, or ""."""
    return f" It held {len(indices)} index batch(es): {shown(list(indices))}" if indices else ""


def name_worker(worker_id: int, dataset: Any = None) -> None:
    """Name the calling thread after a worker, for ``ps``, ``top`` and debuggers: ``shm3:ImageFolder``.

    Linux shows 15 bytes, of a process those of its first thread; threads that it starts later inherit them.
    """
    kind = "" if dataset is None else f":{type(dataset).__name__}"
    name = f"shm{worker_id}{kind}".encode()[:_NAME_NBYTES].decode(errors="ignore")
    if libc is not None:
        libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


live: weakref.WeakSet[BaseWorkers] = weakref.WeakSet()
"""Workers that were started and not closed yet."""


def _leave_all_to_parent() -> None:
    for workers in list(live):
        workers.leave_to_parent()
    live.clear()


# Any child process inherits the descriptors of all workers.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_all_to_parent)
