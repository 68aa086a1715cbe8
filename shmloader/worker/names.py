"""The name of a worker in ``ps``, ``top`` and debuggers: ``shm3:ImageFolder``.

Linux has a name for each thread, of at most 15 bytes; a process shows that of its first thread. Threads that
a worker starts later have its name too, unless they are given another one.
"""

from __future__ import annotations

from typing import Any

from shmloader.memory.mapping import libc

_PR_SET_NAME = 15
_MOST_NBYTES = 15


def name_worker(worker_id: int, dataset: Any = None) -> None:
    """Name the calling thread after a worker: its number, and the class of the dataset once that is there."""
    kind = "" if dataset is None else f":{type(dataset).__name__}"
    name = f"shm{worker_id}{kind}".encode()[:_MOST_NBYTES].decode(errors="ignore")
    if libc is not None:
        libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
