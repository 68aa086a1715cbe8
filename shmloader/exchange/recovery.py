"""Recovery from workers that die or do not answer: they are replaced, or their error is raised.

Main process only. A replaced worker's slots and index batches are those of the one before it; the batch at
which it died is blamed, and two deaths at one batch are an error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from shmloader.errors import WorkerTimeout
from shmloader.indices.packed_indices import PackedInts, unpack_index_batch
from shmloader.interrupts import Lifecycle
from shmloader.messages import page, shown
from shmloader.slots import Place, PlaceTable
from shmloader.workers import Worker, Workers

_log = logging.getLogger("shmloader")
_MOST_DEATHS = 2  # a batch at which so many workers have died is not tried again
_TOLD_AHEAD = (
    "It was not replaced: loader.set_epoch() has told the dataset of the next epoch meanwhile, and was not "
    "called before this one, so a new worker's dataset would be of another epoch than the others'. Call "
    "loader.set_epoch() before each epoch, also the first one."
)


@dataclass
class Recovery:
    """Replaces workers of one iterator. If a new one cannot start, all are stopped, and it raises why."""

    table: PlaceTable
    workers: Workers
    lifecycle: Lifecycle
    restarts_left: int  # of workers that die or are silent

    def silent_worker(self, due_from: int | None) -> Worker:
        """The worker to blame if none has answered in time: that of the due batch, or of the oldest task."""
        if due_from is None:
            unanswered = self.table.making() or list(self.table.void.values())
            due_from = unanswered[0].worker_id if unanswered else 0
        return self.workers.workers[due_from]

    def replace(
        self, worker: Worker, silent_s: float | None, stack: str, unsent: int, *, can_be_told: bool
    ) -> Worker:
        """A new worker in place of one that is dead, or has been silent for ``silent_s`` with this stack.

        ``unsent`` of its tasks it was not sent yet. Unless the new one ``can_be_told``, its dataset would be
        of another epoch. Raises `WorkerDied` or `WorkerTimeout` if it is not to be replaced.
        """
        held = self.table.making(worker.worker_id)
        begun = held and worker.has_begun(self.table.unanswered[worker.worker_id] - unsent)
        culprit = held[0] if begun else None
        deaths = 1 if culprit is None else culprit.count_death()
        is_final = not self.restarts_left or deaths >= _MOST_DEATHS
        if is_final or not can_be_told:
            why = "" if is_final else _TOLD_AHEAD
            # No local variable: its traceback refers to this frame, and so to the iterator and the dataset.
            if silent_s is None:
                raise self.lifecycle.expect(self._death(worker, deaths, why))
            raise self.lifecycle.expect(self._timeout(worker, silent_s, stack, deaths, why))
        fresh = self._restart(worker, f", with {shown(list(map(_indices, held)))}")
        self.restarts_left -= 1
        self.table.counters.add("worker_restarts")
        _log.warning(
            "shmloader worker %d (pid %d) %s %s and was replaced by pid %d; %d more restart(s).%s",
            fresh.worker_id,
            worker.pid,
            "died" if silent_s is None else f"was silent for {silent_s} s",
            "while it made no batch" if culprit is None else f"at the index batch {shown(_indices(culprit))}",
            fresh.pid,
            self.restarts_left,
            stack,
        )
        return fresh

    def succeed(self, worker: Worker, private_nbytes: int) -> Worker:
        """A new worker in place of one that has handed over its state, and ends by itself."""
        fresh = self._restart(worker, has_left=True)
        self.table.counters.add("workers_renewed")
        _log.info(
            "shmloader worker %d (pid %d) had %d bytes of private memory and was replaced by pid %d",
            fresh.worker_id,
            worker.pid,
            private_nbytes,
            fresh.pid,
        )
        return fresh

    def _restart(self, worker: Worker, held: str = "", *, has_left: bool = False) -> Worker:
        try:
            return self.workers.restart(worker.worker_id, has_left=has_left)
        except Exception as error:
            error.add_note(f"It was to replace worker {worker.worker_id} (pid {worker.pid}){held}")
            self.lifecycle.expect(error)
            raise

    def _death(self, worker: Worker, deaths: int, why: str) -> Exception:
        """The error for a worker that has died, once all are stopped; ``deaths`` are at its first task."""
        why = f"{deaths} workers have ended at the first of its index batches." if deaths > 1 else why
        indices = tuple(map(_indices, self.table.making(worker.worker_id)))
        error = self.workers.died(worker.worker_id, indices, self.table.report(), why)
        self.workers.close(f"worker {worker.worker_id} died", grace_s=0.0)
        self.table.close()
        return error

    def _timeout(self, worker: Worker, silent_s: float, stack: str, deaths: int, why: str) -> WorkerTimeout:
        """The error for workers that do not answer, with the stack of the one that makes the next batch."""
        if deaths > 1:
            why = "Another worker has ended at the first of its index batches before."
        outstanding = shown(tuple(map(_indices, self.table.making())))
        return WorkerTimeout(
            f"DataLoader timed out after {silent_s} seconds: none of {len(self.workers.workers)} worker(s) "
            f"has finished a batch.{why and ' '}{why} "
            "If a batch may take so long, raise timeout=; else something hangs, and the stack below says "
            f"where; {page('docs/messages.md')} has the usual reasons. The next is due from worker "
            f"{worker.worker_id} ({worker.place}); outstanding index batches: "
            f"{outstanding}{stack}"
        )


def _indices(place: Place) -> object:
    """A task's index batch, for messages."""
    try:
        index_batch = unpack_index_batch(place.payload, len(place.payload))
    except Exception as error:  # noqa: BLE001 - unpickling runs the program's code
        return f"<an index batch whose unpickling raises {type(error).__name__}>"
    return index_batch.tolist() if isinstance(index_batch, PackedInts) else index_batch
