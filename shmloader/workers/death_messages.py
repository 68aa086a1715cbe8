"""Messages about workers that died or do not answer. Runs in the main process."""

from __future__ import annotations

import contextlib
import logging
import signal

from shmloader.errors import WorkerTimeout
from shmloader.memory.limits import memory_headroom, oom_kills
from shmloader.messages import shown
from shmloader.workers.base import Worker, Workers

_log = logging.getLogger("shmloader")


def log_replacement(
    fresh: Worker, pid: int, index_batch: object, silent_s: float | None, restarts_left: int, stack: str
) -> None:
    """Log that worker ``pid`` died, or was silent for so long, and was replaced by a fresh one.

    ``index_batch`` is the one that it was working on, or None.
    """
    where = "while it made no batch" if index_batch is None else f"at the index batch {shown(index_batch)}"
    _log.warning(
        "shmloader worker %d (pid %d) %s %s and was replaced by pid %d; %d more restart(s).%s",
        fresh.worker_id,
        pid,
        "died" if silent_s is None else f"was silent for {silent_s} s",
        where,
        fresh.pid,
        restarts_left,
        stack and f"\n{stack}",
    )


def worker_timeout(
    workers: Workers, worker: Worker, silent_s: float, waiting_for: tuple[object, ...], why: str
) -> WorkerTimeout:
    """The error for workers that do not answer, with the stack of the one that is to make the next batch."""
    return WorkerTimeout(
        f"DataLoader timed out after {silent_s} seconds: none of {len(workers.workers)} worker(s) "
        f"has finished a batch. {why and why + ' '}"
        "If a batch may take so long, raise timeout=; else something hangs, and the stack below says "
        f"where. The next is due from worker {worker.worker_id} ({worker.place}); "
        f"outstanding index batches: {shown(waiting_for)}\n{workers.stack_of(worker)}"
    )


def describe_death(worker: Worker, code: int | None) -> str:
    """Sentences on the end of a worker, first in torch's words, which people and scripts search for."""
    name = f"shmloader worker {worker.worker_id} ({worker.place})"
    if code is not None and code < 0:
        # torch/csrc/DataLoader.cpp
        torchs = f"DataLoader worker (pid {worker.pid}) is killed by signal: {signal.strsignal(-code)}. "
        how = f"was killed by signal {-code}"
        with contextlib.suppress(ValueError):
            how += f" ({signal.Signals(-code).name})"
    else:
        # torch/utils/data/dataloader.py, _try_get_data
        torchs = f"DataLoader worker (pid(s) {worker.pid}) exited unexpectedly. "
        how = "ended" if code is None else f"exited with code {code}"
    return f"{torchs}{name} {how}."


def describe_held(indices: tuple[object, ...]) -> str:
    """A sentence on the index batches that a dead worker held, or ""."""
    return f" It held {len(indices)} index batch(es): {shown(list(indices))}" if indices else ""


def explain_kill(oom_kills_before: int | None, memory: str) -> str:
    """A sentence on the kernel's out-of-memory killer, if that seems to have ended a worker, or ""."""
    now = oom_kills()
    if now is None or oom_kills_before is None or now <= oom_kills_before:
        return ""
    room = memory_headroom()
    return (
        f" The kernel's out-of-memory killer has ended {now - oom_kills_before} process(es) since the "
        f"workers were started, so this looks like its work: {room.available_nbytes:,} of "
        f"{room.limit_nbytes:,} bytes are available in {room.source}. {memory} Use fewer workers, a "
        "smaller batch_size or prefetch_factor, or less memory per sample in the dataset."
    )
