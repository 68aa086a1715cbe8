"""The dispatcher: gives tasks slots and sends them, receives answers, replaces dead workers.

Main process only. It does not know samplers, the order in which batches are returned, or whose turn it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from shmloader.errors import LoaderClosed
from shmloader.indices.packed_indices import PackedInts, pack_index_batch, unpack_index_batch
from shmloader.interrupts import WAITING, Lifecycle
from shmloader.messages import shown
from shmloader.slots import SlotPool
from shmloader.slots.inspection import Inspection
from shmloader.slots.inspection import wanted as inspection_wanted
from shmloader.slots.task_ledger import VOID, Ledger, Task
from shmloader.wire.records import (
    DETACHED,
    INLINE_NBYTES,
    SPILLED,
    SPIN_NS,
    EpochBegun,
    PieceReady,
    Published,
    StreamEnded,
    pack_begin_epoch,
    pack_make_batch,
    pack_send_next_piece,
    unpack_answers,
)
from shmloader.workers import Worker, Workers, log_replacement, worker_timeout

ByteArray = npt.NDArray[np.uint8]

_MOST_DEATHS = 2  # a batch at which so many workers have died is not tried again


class Dispatcher:
    """Sends tasks to the workers of one iterator, and receives their answers.

    Args:
        pool: The slots.
        workers: The workers.
        lifecycle: The iterator's, told while this sleeps.
        restarts: Workers that may be replaced.
        timeout_s: Seconds without any answer, after which the worker of the due batch is replaced, or
            `WorkerTimeout` raised; 0 for never.

    Attributes:
        counters: The loader's.
        ledger: All unfinished tasks.
        ended_streams: Workers that have reported, since this was last emptied, that their dataset is
            exhausted.
        joining: Workers that were added later and have sent no record yet.
        restarts_left: Workers that may still be replaced.
        inspection: The checks of ``SHMLOADER_DEBUG=1``, or None.
    """

    def __init__(
        self, pool: SlotPool, workers: Workers, lifecycle: Lifecycle, restarts: int, timeout_s: float
    ) -> None:
        self.pool = pool
        self.workers = workers
        self.lifecycle = lifecycle
        self.counters = pool.counters
        self.restarts_left = restarts
        self.ledger = Ledger(len(workers.workers))
        self.ended_streams: list[int] = []
        self.joining: set[int] = set()
        self.inspection = Inspection(pool) if inspection_wanted() else None
        self._timeout_s = timeout_s if timeout_s > 0 else None  # of any type, as the program gave it
        self._wait_ns = 0  # how long the last wait took

    # --- out

    def send(self, worker_id: int, epoch: int, position: int, index_batch: object) -> None:
        """Send a task, with a slot to make its batch in."""
        payload = pack_index_batch(index_batch)
        self._send_task(self.ledger.send(worker_id, epoch, position, payload, self.pool.grant()))

    def _send_task(self, task: Task) -> None:
        pool, slot, payload = self.pool, task.slot, task.payload
        nbytes = len(payload)
        if nbytes > INLINE_NBYTES:
            pool.reserve(slot, nbytes).view[:nbytes] = payload
            payload = b""
        elif slot.nbytes == 0:
            pool.reserve(slot, 1)  # so that there is always room for a piece, or for an error
        self.workers.workers[task.worker_id].send(
            pack_make_batch(
                task.epoch,
                task.seq,
                task.position,
                slot.number,
                slot.nbytes,
                pool.budget.hint_nbytes,
                slot.limit_nbytes,
                nbytes,
                payload,
            )
        )

    def begin_epoch(self, settings: bytes) -> None:
        """Void all tasks, and have all workers begin a new epoch; returns when those tasks are finished.

        Workers finish the tasks that they have, as torch's do: a dataset's random numbers must not depend on
        when the last epoch was left. Those batches are dropped. There is no wait for workers to begin the
        epoch, since they answer requests in order. ``settings`` are the pickled `EpochSettings`.
        """
        ledger = self.ledger
        ledger.epoch += 1
        for task in list(ledger.arrived.values()):
            ledger.finish(task)
            self.pool.give_back(task.slot)
        for task in ledger.held_by(None):
            ledger.void(task)
        for begin in range(0, len(settings), INLINE_NBYTES):
            piece = settings[begin : begin + INLINE_NBYTES]
            request = pack_begin_epoch(ledger.epoch, len(settings), begin, piece)
            for worker in self.workers.workers:
                worker.send(request)
        while ledger.void_of(None):
            self.receive()
        for worker in list(self.workers.workers):
            if worker.is_dead():  # before it has a batch of this epoch, which would be blamed for it
                self._recover(worker, None)
        self.ended_streams.clear()
        self.pool.trim()

    def welcome(self, worker: Worker) -> None:
        """Ask a worker that was added in the middle of an epoch to report when it is ready: see `joining`.

        It was started with the settings of this epoch.
        """
        self.ledger.add_worker()
        self.joining.add(worker.worker_id)
        worker.send(pack_begin_epoch(self.ledger.epoch, 0, 0, b""))

    # --- in

    def receive_from(self, worker_id: int) -> bool:
        """Receive one worker's records; return whether there were any. Does not sleep.

        Raises:
            WorkerDied: If it has ended and is not to be replaced; the others are stopped.
        """
        worker = self.workers.workers[worker_id]
        records = worker.receive()
        if records == b"" and self._wait_ns < self.workers.look_again_ns:
            records = self._look_again(worker)
        if records:
            self._accept(worker, records)
        elif records is None:
            self._recover(worker, None)
        return records != b""

    def receive(self, due_from: int | None = None) -> None:
        """Sleep until any worker has sent a record, and receive it.

        Args:
            due_from: The worker that has the next batch, to blame for a timeout.

        Raises:
            WorkerDied: If a worker has ended and is not to be replaced; the others are stopped.
            WorkerTimeout: If nothing came within the timeout, and no worker is to be replaced for it.
            LoaderClosed: If the loader was closed meanwhile, by another thread.
        """
        lifecycle = self.lifecycle
        began_ns = time.perf_counter_ns()
        before, lifecycle.phase = lifecycle.phase, WAITING
        ready = self.workers.wait(self._timeout_s and float(self._timeout_s))
        lifecycle.phase = before
        self._note_wait(time.perf_counter_ns() - began_ns)
        if self.workers.interrupted:
            raise lifecycle.expect(
                LoaderClosed("the loader was closed by another thread while this one waited for a batch")
            )
        if not ready:
            self._recover(self._silent_worker(due_from), self._timeout_s)
        self._take_in(ready)

    def look_for_joining(self) -> None:
        """Receive records of workers that are `joining`."""
        self._take_in([self.workers.workers[worker_id] for worker_id in self.joining])

    def _take_in(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            # What a dead worker had written before it died is read first: it is whole.
            records = worker.receive()
            if records:
                self._accept(worker, records)
            elif records is None or worker.is_dead():
                self._recover(worker, None)

    def look_at(self, worker_id: int) -> None:
        """Receive a worker's records that are here already. A death is left for `receive_from` to find."""
        worker = self.workers.workers[worker_id]
        records = worker.receive()
        if records:
            self._accept(worker, records)

    def _look_again(self, worker: Worker) -> bytes | None:
        """Wait a moment for a worker's records without sleeping; see ``SPIN_NS``."""
        began_ns = now_ns = time.perf_counter_ns()
        records: bytes | None = b""
        while records == b"" and now_ns - began_ns < SPIN_NS:
            os.sched_yield()
            records = worker.receive()
            now_ns = time.perf_counter_ns()
        self._note_wait(now_ns - began_ns)
        return records

    def _note_wait(self, wait_ns: int) -> None:
        self._wait_ns = wait_ns
        self.counters.wait_for_workers_ns += wait_ns

    def _accept(self, worker: Worker, records: bytes) -> None:
        for answer in unpack_answers(records):
            if type(answer) is Published:
                self._accept_batch(answer)
            elif type(answer) is PieceReady:
                self._accept_piece(worker, answer)
            elif type(answer) is StreamEnded:
                self._accept_end(worker, answer)
            elif type(answer) is EpochBegun:
                self.joining.discard(worker.worker_id)

    def _accept_batch(self, answer: Published) -> None:
        pool, ledger, counters = self.pool, self.ledger, self.counters
        seq, slot_nbytes, _, used_nbytes, wait_ns, _, flags = answer
        task = ledger.tasks.get(seq) or ledger.void_tasks[seq]  # `_unanswered_task`, without its call
        task.answer, slot = answer, task.slot
        if flags & SPILLED:
            if task.state is not VOID:
                pool.note_pieces(slot, used_nbytes)
            used_nbytes = 0
        pool.publish(slot, slot_nbytes, used_nbytes)
        counters.workers_wait_for_slots_ns += wait_ns
        if flags & DETACHED:
            counters.detached += 1
        if task.state is VOID:
            ledger.end(task)
            pool.give_back(slot)
        else:
            ledger.arrive(task)

    def _unanswered_task(self, seq: int) -> Task:
        return self.ledger.tasks.get(seq) or self.ledger.void_tasks[seq]

    def _accept_piece(self, worker: Worker, answer: PieceReady) -> None:
        """Copy a piece of a batch that is larger than its slot, and ask for the next one."""
        task = self._unanswered_task(answer.seq)
        if task.state is not VOID:
            if task.spilled is None:
                task.spilled, task.spilled_nbytes = np.empty(answer.total_nbytes, np.uint8), 0
            end = task.spilled_nbytes + answer.piece_nbytes
            self.pool.read_piece(task.slot, answer.slot_nbytes, task.spilled[task.spilled_nbytes : end])
            task.spilled_nbytes = end
        worker.send(pack_send_next_piece(answer.seq))

    def _accept_end(self, worker: Worker, answer: StreamEnded) -> None:
        task = self._unanswered_task(answer.seq)
        if task.state is not VOID:
            self.ended_streams.append(worker.worker_id)
        self.ledger.end(task)
        self.pool.publish(task.slot, answer.slot_nbytes, 0)
        self.pool.give_back(task.slot)

    def take(self, task: Task) -> tuple[ByteArray, bytes]:
        """The memory of a batch that has arrived: the anchor of all its leaves, and the header.

        The anchor is a lease on its slot or, if the batch was spilled, a private copy.
        """
        pool, slot, answer = self.pool, task.slot, task.answer
        in_pieces = answer.flags & SPILLED
        if not in_pieces and pool.can_lease():
            anchor, view = pool.lease(slot)
            header = bytes(view[answer.header_begin : answer.header_end])
            if self.inspection is not None:
                self.inspection.leased(slot, task.seq, header)
            return anchor, header
        if in_pieces:
            assert task.spilled is not None
            private = task.spilled
            pool.give_back(slot)
        else:
            private = pool.spill(slot)
        return private, private[answer.header_begin : answer.header_end].tobytes()

    # --- workers that die or do not answer

    def _silent_worker(self, due_from: int | None) -> Worker:
        """The worker that is waited for, if none has answered in time."""
        if due_from is None:
            unanswered = self.ledger.held_by(None) or self.ledger.void_of(None)
            due_from = unanswered[0].worker_id if unanswered else 0
        return self.workers.workers[due_from]

    def _recover(self, worker: Worker, silent_s: float | None) -> None:
        """Replace a worker that is dead, or has been silent for ``silent_s``, or raise the error for it."""
        # Answers that it still sent count: those tasks are done.
        while records := worker.receive():
            self._accept(worker, records)
            if silent_s is not None:
                return  # it has answered in this very moment
        held = self.ledger.held_by(worker.worker_id)
        has_begun = worker.has_begun(self.ledger.unanswered[worker.worker_id])
        culprit = held[0] if held and has_begun else None
        deaths = 1 if culprit is None else culprit.deaths + 1
        if not self.restarts_left or deaths >= _MOST_DEATHS:
            self._fail(worker, silent_s, held, deaths)
        if culprit is not None:
            culprit.deaths = deaths
        self.restarts_left -= 1
        self.counters.worker_restarts += 1
        stack = "" if silent_s is None else self.workers.stack_of(worker)
        pid = worker.pid
        try:
            fresh = self.workers.restart(worker)
        except Exception as error:
            indices = [_indices(task) for task in held]
            error.add_note(f"It was to replace worker {worker.worker_id} (pid {pid}), with {shown(indices)}")
            self.lifecycle.expect(error)
            raise
        index_batch = None if culprit is None else _indices(culprit)
        log_replacement(fresh, pid, index_batch, silent_s, self.restarts_left, stack)
        self._hand_over(fresh, held)

    def _hand_over(self, worker: Worker, held: list[Task]) -> None:
        """Give a new worker the tasks of the one that it replaces, in the same order and the same slots."""
        for task in self.ledger.void_of(worker.worker_id):
            self.ledger.end(task)
            self.pool.revoke(task.slot)
        self.joining.discard(worker.worker_id)
        for task in held:
            task.spilled = None
            self._send_task(task)

    def _fail(self, worker: Worker, silent_s: float | None, held: list[Task], deaths: int) -> NoReturn:
        """Raise `WorkerDied` or `WorkerTimeout` for a worker; ``deaths`` are those at its first task."""
        why = ""
        if deaths > 1 and silent_s is None:
            why = f"{deaths} workers have ended at the first of its index batches."
        elif deaths > 1:
            why = "Another worker has ended at the first of its index batches before."
        if silent_s is not None:
            waiting_for = tuple(map(_indices, self.ledger.held_by(None)))
            raise self.lifecycle.expect(worker_timeout(self.workers, worker, silent_s, waiting_for, why))
        indices = tuple(map(_indices, held))
        error = self.workers.died(worker, indices, self.pool.figures(), why)
        self.workers.close(f"worker {worker.worker_id} died", grace_s=0.0)
        self.pool.close()
        try:
            raise self.lifecycle.expect(error)
        finally:
            del error  # whose traceback refers to this frame, and so to the iterator and the dataset


def _indices(task: Task) -> object:
    """A task's index batch, for messages."""
    try:
        index_batch = unpack_index_batch(task.payload, len(task.payload))
    except Exception as error:  # noqa: BLE001 - unpickling runs the program's code
        return f"<an index batch whose unpickling raises {type(error).__name__}>"
    return index_batch.tolist() if isinstance(index_batch, PackedInts) else index_batch
