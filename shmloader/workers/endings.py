"""What is said of workers that died or do not answer. Runs in the main process."""

from __future__ import annotations

import logging

from shmloader.errors import WorkerTimeout
from shmloader.workers.interface import Worker, Workers

_log = logging.getLogger("shmloader")


def log_replacement(
    fresh: Worker, pid: int, index_batch: object, silent_s: float | None, restarts_left: int, stack: str
) -> None:
    """Log that a worker was replaced.

    Args:
        fresh: The new one.
        pid: The old one's.
        index_batch: What that was at.
        silent_s: How long it had not answered; None if it had died.
        restarts_left: How many more may be replaced.
        stack: Its stack, or "".
    """
    _log.warning(
        "shmloader worker %d (pid %d) %s at the index batch %.200s and was replaced by pid %d; "
        "%d more restart(s).%s",
        fresh.worker_id,
        pid,
        "died" if silent_s is None else f"was silent for {silent_s} s",
        index_batch,
        fresh.pid,
        restarts_left,
        stack and f"\n{stack}",
    )


def worker_timeout(
    crew: Workers, worker: Worker, silent_s: float, waiting_for: tuple[object, ...], why: str
) -> WorkerTimeout:
    """The error for workers that do not answer, with the stack of one.

    Args:
        crew: The workers.
        worker: Whose batch is the next.
        silent_s: The timeout.
        waiting_for: The index batches of all workers that were not answered.
        why: A sentence on what had been tried, or "".
    """
    return WorkerTimeout(
        f"DataLoader timed out after {silent_s} seconds: none of {len(crew.workers)} worker(s) "
        f"has finished a batch; outstanding index batches: {waiting_for!s:.300}. {why} The next is "
        f"due from worker {worker.worker_id} ({worker.place}), which is at\n"
        f"{crew.stack_of(worker)}"
    )
