"""Recovery from workers that die or do not answer: they are replaced, or their error is raised.

Main process only. A replaced worker's slots and index batches are those of the one before it; the batch at
which it died is blamed, and two deaths at one batch are an error.
"""

from __future__ import annotations

from typing import NoReturn

from shmloader.indices.packed_indices import PackedInts, unpack_index_batch
from shmloader.interrupts import Lifecycle
from shmloader.messages import shown
from shmloader.slots import Place, PlaceTable
from shmloader.workers import Worker, Workers, log_replacement, worker_timeout

_MOST_DEATHS = 2  # a batch at which so many workers have died is not tried again


class Recovery:
    """Replaces the workers of one iterator.

    Args:
        table: The places.
        workers: The workers.
        lifecycle: The iterator's.
        restarts: Workers that may be replaced.
    """

    def __init__(self, table: PlaceTable, workers: Workers, lifecycle: Lifecycle, restarts: int) -> None:
        self._table = table
        self._workers = workers
        self._lifecycle = lifecycle
        self._restarts_left = restarts

    def silent_worker(self, due_from: int | None) -> Worker:
        """The worker that is waited for, if none has answered in time: that of the due batch, say."""
        if due_from is None:
            unanswered = self._table.making() or list(self._table.void.values())
            due_from = unanswered[0].worker_id if unanswered else 0
        return self._workers.workers[due_from]

    def replace(self, worker: Worker, silent_s: float | None) -> Worker:
        """A new worker in place of one that is dead, or has been silent for ``silent_s``.

        Raises:
            WorkerDied, WorkerTimeout: If it is not to be replaced.
            Exception: Any that kept the new one from starting, with a note; all workers are stopped.
        """
        table = self._table
        held = table.making(worker.worker_id)
        culprit = held[0] if held and worker.has_begun(table.unanswered[worker.worker_id]) else None
        deaths = 1 if culprit is None else table.count_death(culprit)
        if not self._restarts_left or deaths >= _MOST_DEATHS:
            self._fail(worker, silent_s, held, deaths)
        self._restarts_left -= 1
        table.counters.worker_restarts += 1
        stack = "" if silent_s is None else self._workers.stack_of(worker)
        pid = worker.pid
        try:
            fresh = self._workers.restart(worker)
        except Exception as error:
            indices = list(map(_indices, held))
            error.add_note(f"It was to replace worker {worker.worker_id} (pid {pid}), with {shown(indices)}")
            self._lifecycle.expect(error)
            raise
        index_batch = None if culprit is None else _indices(culprit)
        log_replacement(fresh, pid, index_batch, silent_s, self._restarts_left, stack)
        return fresh

    def _fail(self, worker: Worker, silent_s: float | None, held: list[Place], deaths: int) -> NoReturn:
        """Raise `WorkerDied` or `WorkerTimeout` for a worker; ``deaths`` are those at its first task."""
        why = ""
        if deaths > 1 and silent_s is None:
            why = f"{deaths} workers have ended at the first of its index batches."
        elif deaths > 1:
            why = "Another worker has ended at the first of its index batches before."
        if silent_s is not None:
            waiting_for = tuple(map(_indices, self._table.making()))
            raise self._lifecycle.expect(worker_timeout(self._workers, worker, silent_s, waiting_for, why))
        indices = tuple(map(_indices, held))
        error = self._workers.died(worker, indices, self._table.report(), why)
        self._workers.close(f"worker {worker.worker_id} died", grace_s=0.0)
        self._table.close()
        try:
            raise self._lifecycle.expect(error)
        finally:
            del error  # whose traceback refers to this frame, and so to the iterator and the dataset


def _indices(place: Place) -> object:
    """A task's index batch, for messages."""
    try:
        index_batch = unpack_index_batch(place.payload, len(place.payload))
    except Exception as error:  # noqa: BLE001 - unpickling runs the program's code
        return f"<an index batch whose unpickling raises {type(error).__name__}>"
    return index_batch.tolist() if isinstance(index_batch, PackedInts) else index_batch
