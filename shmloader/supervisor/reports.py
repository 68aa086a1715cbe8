"""What is said of workers that died or do not answer. Runs in the main process."""

from __future__ import annotations

import logging
import re

from shmloader.errors import WorkerTimeout
from shmloader.supervisor.interface import Worker, Workers

_log = logging.getLogger("shmloader")

# The thread of `watch.end_with` as faulthandler shows it. In a spawned worker its code has no file.
_WATCH_THREAD = re.compile(
    r'Thread .*\n  File "(?:<string>|.*shmloader.worker.watch\.py)", line \d+ in wait\n.*threading\.py'
)


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
        stack and f"\n{_without_watch_thread(stack)}",
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
        f"has finished a batch; outstanding index batches: {waiting_for!s:.300}. {why and why + ' '}"
        "Where a batch may take so long, raise timeout=; else something hangs, and the stack below says "
        f"where. The next is due from worker {worker.worker_id} ({worker.place}), which is at\n"
        f"{_without_watch_thread(crew.stack_of(worker))}"
    )


def _without_watch_thread(stack: str) -> str:
    """A worker's stacks without that of the thread that only waits for the end of the main process."""
    threads = stack.split("\n\n")
    return "\n\n".join(thread for thread in threads if not _WATCH_THREAD.match(thread)) or stack
