"""Recovery from workers that die or do not answer: they are replaced, or their error is raised.

Main process only. A replaced worker's slots and index batches are those of the one before it; the batch at
which it died is blamed, and two deaths at one batch are an error.
"""

from __future__ import annotations

import logging

from shmloader.errors import WorkerTimeout
from shmloader.indices.packed_indices import PackedInts, unpack_index_batch
from shmloader.interrupts import Lifecycle
from shmloader.messages import shown
from shmloader.pages import page
from shmloader.slots import Place, PlaceTable
from shmloader.workers import Worker, Workers

_log = logging.getLogger("shmloader")
_MOST_DEATHS = 2  # a batch at which so many workers have died is not tried again
_TOLD_AHEAD = (
    "It was not replaced: loader.set_epoch() has told the dataset of the next epoch meanwhile, and was not "
    "called before this one, so a new worker's dataset would be of another epoch than the others'. Call "
    "loader.set_epoch() before each epoch, also the first one."
)


def silent_worker(table: PlaceTable, workers: Workers, due_from: int | None) -> Worker:
    """The worker to blame if none has answered in time: that of the due batch, or of the oldest task."""
    if due_from is None:
        unanswered = table.making() or list(table.void.values())
        due_from = unanswered[0].worker_id if unanswered else 0
    return workers.workers[due_from]


def replace(
    worker: Worker,
    silent_s: float | None,
    table: PlaceTable,
    workers: Workers,
    lifecycle: Lifecycle,
    restarts_left: int,
    *,
    unsent: int = 0,
    can_be_told: bool = True,
) -> Worker:
    """A new worker in place of one that is dead, or has been silent for ``silent_s``.

    ``unsent`` of its tasks it was not sent yet. Unless the new one ``can_be_told``, its dataset would be of
    another epoch.

    Raises:
        WorkerDied, WorkerTimeout: If it is not to be replaced.
        Exception: Any that kept the new one from starting, with a note; all workers are stopped.
    """
    held = table.making(worker.worker_id)
    culprit = held[0] if held and worker.has_begun(table.unanswered[worker.worker_id] - unsent) else None
    deaths = 1 if culprit is None else culprit.count_death()
    is_final = not restarts_left or deaths >= _MOST_DEATHS
    if is_final or not can_be_told:
        why = "" if is_final else _TOLD_AHEAD
        # No local variable: its traceback refers to this frame, and so to the iterator and the dataset.
        if silent_s is None:
            raise lifecycle.expect(_death(worker, table, workers, deaths, why))
        raise lifecycle.expect(_timeout(worker, silent_s, table, workers, deaths, why))
    pid, stack = worker.pid, "" if silent_s is None else f"\n{workers.stack_of(worker.worker_id)}"
    fresh = _restart(worker, workers, lifecycle, f", with {shown(list(map(_indices, held)))}")
    _log.warning(
        "shmloader worker %d (pid %d) %s %s and was replaced by pid %d; %d more restart(s).%s",
        fresh.worker_id,
        pid,
        "died" if silent_s is None else f"was silent for {silent_s} s",
        "while it made no batch" if culprit is None else f"at the index batch {shown(_indices(culprit))}",
        fresh.pid,
        restarts_left - 1,
        stack,
    )
    return fresh


def succeed(worker: Worker, private_nbytes: int, workers: Workers, lifecycle: Lifecycle) -> Worker:
    """A new worker in place of one that has handed over its state, and ends by itself.

    Raises:
        Exception: Any that kept the new one from starting, with a note; all workers are stopped.
    """
    pid = worker.pid
    fresh = _restart(worker, workers, lifecycle, has_left=True)
    _log.info(
        "shmloader worker %d (pid %d) had %d bytes of private memory and was replaced by pid %d",
        fresh.worker_id,
        pid,
        private_nbytes,
        fresh.pid,
    )
    return fresh


def _restart(
    worker: Worker, workers: Workers, lifecycle: Lifecycle, held: str = "", *, has_left: bool = False
) -> Worker:
    try:
        return workers.restart(worker.worker_id, has_left=has_left)
    except Exception as error:
        error.add_note(f"It was to replace worker {worker.worker_id} (pid {worker.pid}){held}")
        lifecycle.expect(error)
        raise


def _death(worker: Worker, table: PlaceTable, workers: Workers, deaths: int, why: str) -> Exception:
    """The error for a worker that has died, once all are stopped; ``deaths`` are those at its first task."""
    why = f"{deaths} workers have ended at the first of its index batches." if deaths > 1 else why
    indices = tuple(map(_indices, table.making(worker.worker_id)))
    error = workers.died(worker.worker_id, indices, table.report(), why)
    workers.close(f"worker {worker.worker_id} died", grace_s=0.0)
    table.close()
    return error


def _timeout(
    worker: Worker, silent_s: float, table: PlaceTable, workers: Workers, deaths: int, why: str
) -> WorkerTimeout:
    """The error for workers that do not answer, with the stack of the one that is to make the next batch."""
    if deaths > 1:
        why = "Another worker has ended at the first of its index batches before."
    outstanding = shown(tuple(map(_indices, table.making())))
    return WorkerTimeout(
        f"DataLoader timed out after {silent_s} seconds: none of {len(workers.workers)} worker(s) "
        f"has finished a batch.{why and ' '}{why} "
        "If a batch may take so long, raise timeout=; else something hangs, and the stack below says "
        f"where; {page('docs/messages.md')} has the usual reasons. The next is due from worker "
        f"{worker.worker_id} ({worker.place}); outstanding index batches: {outstanding}\n"
        + workers.stack_of(worker.worker_id)
    )


def _indices(place: Place) -> object:
    """A task's index batch, for messages."""
    try:
        index_batch = unpack_index_batch(place.payload, len(place.payload))
    except Exception as error:  # noqa: BLE001 - unpickling runs the program's code
        return f"<an index batch whose unpickling raises {type(error).__name__}>"
    return index_batch.tolist() if isinstance(index_batch, PackedInts) else index_batch
