"""The exchange of tasks and answers with the workers of one iterator. Main process only.

The flow of a batch, with the states of its place::

    order/scheduler        Exchange                         worker k
    ───────────────        ────────                         ────────
    chooses worker k
    draws indices ──▶ send:     FREE -> MAKING
                           │ MakeBatch: slot, indices ────▶ makes the batch in the slot
                           │                                (larger than that: PieceReady,
                           │                                 copied, SendNextPiece, ...)
                      receive ◀──────────────── Published ──┘
                           │    MAKING -> ARRIVED; FREE if the task is void
    iterator               │
    ────────               │
    next() ◀───── PlaceTable.take: ARRIVED -> LEASED; FREE if it was spilled
       │
    the last view dies: LEASED -> FREE, or GUARDED until an accelerator is done

A worker's death or silence is found where answers are waited for, and `recovery` decides; the places that the
worker was making stay as they are, and are sent to the one that replaces it. This module does not know
samplers, the order in which batches are returned, or whose turn it is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque

from shmloader.errors import LoaderClosed, NotReady, SharedMemoryExhausted
from shmloader.exchange.recovery import Recovery
from shmloader.indices.packed_indices import pack_index_batch
from shmloader.interrupts import WAITING, Lifecycle
from shmloader.slots import Place, PlaceTable
from shmloader.wire import records as wire
from shmloader.workers import Worker, Workers


class Exchange:
    """Sends tasks to the workers of one iterator, and receives their answers.

    After ``timeout_s`` without any answer the worker of the due batch is replaced, or `WorkerTimeout` raised;
    0 is for never.
    """

    def __init__(
        self, table: PlaceTable, workers: Workers, lifecycle: Lifecycle, restarts: int, timeout_s: float
    ) -> None:
        self.table, self.workers, self.lifecycle = table, workers, lifecycle
        self.counters = table.counters
        # Workers that have reported, since this was last emptied, that their dataset is exhausted.
        self.ended_streams: list[int] = []
        self.joining: set[int] = set()  # workers that were added later and have sent no record yet
        self._recovery = Recovery(table, workers, lifecycle, restarts)
        self.told_ahead = False  # whether the program's dataset has heard of an epoch after the present one
        self._can_tell_back = True  # then: whether a new worker's copy can be told of the present one
        self._unsent: deque[Place] = deque()  # granted, and waiting for memory if there are any
        self._timeout_s = timeout_s if timeout_s > 0 else None  # of any type, as the program gave it
        # By worker that was asked to hand over: what has come of its state. Empty while none is replaced so.
        self.handed_over: dict[int, bytearray] = {}
        self._renews = True  # whether a worker with too much memory is asked to
        self._wait_ns = 0  # how long the last wait took
        self._measures = False  # whether workers were told to measure
        self._nothing_since_s: float | None = None  # `receive` without waiting has found nothing since then

    # --- out

    def send(self, worker_id: int, epoch: int, position: int, index_batch: object) -> None:
        """Send a task, with a slot to make its batch in."""
        place = self.table.grant(worker_id, epoch, position, pack_index_batch(index_batch))
        try:
            if self._unsent:
                self._send_unsent()
            self._send(place)
        except SharedMemoryExhausted:  # `receive` tries again, and raises it
            self._unsent.append(place)

    def _send(self, place: Place) -> None:
        """Send a task; raises `SharedMemoryExhausted` if its slot cannot have the memory that it needs."""
        table, payload = self.table, place.payload
        nbytes = len(payload)
        if nbytes > wire.INLINE_NBYTES:
            table.reserve(place, nbytes).view[:nbytes] = payload
            payload = b""
        elif place.nbytes == 0:
            table.reserve(place, 1)  # so that there is always room for a piece, or for an error
        request = wire.pack_make_batch(
            place.epoch,
            place.seq,
            place.position,
            place.number,
            place.nbytes,
            table.budget.hint_nbytes,
            place.limit_nbytes,
            nbytes,
            payload,
        )
        self.workers.workers[place.worker_id].send(request)

    def _send_unsent(self) -> None:
        while self._unsent:
            self._send(self._unsent[0])
            self._unsent.popleft()

    def begin_epoch(self, settings: bytes) -> None:
        """Void all tasks, and have all workers begin a new epoch; returns when those tasks are finished.

        Workers finish the tasks that they have, as torch's do: a dataset's random numbers must not depend on
        when the last epoch was left. Those batches are dropped. There is no wait for workers to begin the
        epoch, since they answer requests in order. ``settings`` are the pickled `EpochSettings`.
        """
        table = self.table
        self.await_renewed()  # a new worker makes their tasks: those that are void would not be sent to it
        self.told_ahead, self._can_tell_back = False, True
        table.abandon()
        for place in self._unsent:  # sent later, a worker would make it of its stream's new epoch
            table.drop(place.seq, place.nbytes)
        self._unsent.clear()
        table.begin_epoch()
        for begin in range(0, len(settings), wire.INLINE_NBYTES):
            piece = settings[begin : begin + wire.INLINE_NBYTES]
            request = wire.pack_begin_epoch(table.epoch, len(settings), begin, piece)
            for worker in self.workers.workers:
                worker.send(request)
        while table.void:
            self.receive()
        for worker in [*self.workers.workers]:
            if worker.is_dead():  # before it has a batch of this epoch, which would be blamed for it
                self._recover(worker, None)
        self.ended_streams.clear()
        table.trim()

    def measure(self, is_on: bool) -> None:
        """Have workers measure the batches of later tasks, or no longer."""
        if is_on != self._measures:
            self._measures = is_on
            for worker in self.workers.workers:
                worker.send(wire.pack_measure(is_on))

    def _tell_to_measure(self, fresh: Worker) -> None:
        if self._measures:
            fresh.send(wire.pack_measure(True))

    def await_renewed(self) -> None:
        """Wait until no worker is handing over; raises what `receive` does."""
        while self.handed_over:
            self.receive()

    def note_told_ahead(self, *, can_tell_back: bool) -> bool:
        """Note that the program's dataset has heard of a further epoch; False if that is known already.

        Until that begins no worker hands over: a new one would draw what it draws with another dataset. One
        that dies is replaced only if the new one can be told of the present epoch.
        """
        if self.told_ahead:
            return False
        self.told_ahead, self._can_tell_back = True, can_tell_back
        return True

    def stop_renewing(self) -> None:
        """Let workers grow from now on: all tasks are sent, and a new worker would come after the last."""
        self._renews = False

    def welcome(self, worker: Worker) -> None:
        """Ask a worker that was added in this epoch to report when it is ready: see `joining`."""
        self.table.add_worker()
        self.counters.note_workers(len(self.workers.workers))
        self.joining.add(worker.worker_id)
        self._tell_to_measure(worker)
        worker.send(wire.pack_begin_epoch(self.table.epoch, 0, 0, b""))

    # --- in

    def receive_from(self, worker_id: int) -> bool:
        """Receive one worker's records; return whether there were any. Does not sleep.

        Raises `WorkerDied` if it has ended and is not to be replaced; the others are stopped.
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

    def receive(self, due_from: int | None = None, *, waits: bool = True) -> None:
        """Sleep until any worker has sent a record, and receive it; ``due_from`` is blamed for a timeout.

        Raises:
            NotReady: If there is none and it is not to wait for one.
            WorkerDied: If a worker has ended and is not to be replaced; the others are stopped.
            WorkerTimeout: If nothing came within the timeout, and no worker is to be replaced for it.
            LoaderClosed: If the loader was closed meanwhile, by another thread.
            SharedMemoryExhausted: If there is no memory for a task; the next call tries again.
        """
        lifecycle = self.lifecycle
        if self._unsent:
            with lifecycle.expects(SharedMemoryExhausted):
                self._send_unsent()
        if waits:
            began_ns = time.perf_counter_ns()
            before, lifecycle.phase = lifecycle.phase, WAITING
            ready = self.workers.wait(self._timeout_s and float(self._timeout_s))
            lifecycle.phase = before
            self._wait_ns = time.perf_counter_ns() - began_ns
            self.counters.note_wait(self._wait_ns)
        else:
            ready = self.workers.ready()
        if self.workers.interrupted:
            raise lifecycle.expect(
                LoaderClosed("the loader was closed by another thread while this one waited for a batch")
            )
        if not (ready or waits or self._is_overdue()):
            why = "the next batch is not here yet. Wait until the iterator's fileno() is readable"
            raise lifecycle.expect(NotReady(why, lifecycle))
        self._nothing_since_s = None
        if not ready:
            silent = self._recovery.silent_worker(due_from)
            stack = f"\n{self.workers.stack_of(silent.worker_id)}"
            ready = self.workers.ready()  # what came while the stack was read counts, of whichever worker
            if not ready:
                self._recover(silent, self._timeout_s, stack)
        for worker in ready:
            # What a dead worker had written before it died is read first: it is whole.
            records = worker.receive()
            if records:
                self._accept(worker, records)
            elif records is None or worker.is_dead():
                self._recover(worker, None)

    def _is_overdue(self) -> bool:
        """Whether `receive` without waiting has found nothing for as long as the timeout, or longer."""
        now_s = time.monotonic()
        if self._nothing_since_s is None:
            self._nothing_since_s = now_s
        return self._timeout_s is not None and now_s - self._nothing_since_s >= float(self._timeout_s)

    def look_for_joining(self) -> None:
        """Receive records of workers that are `joining`."""
        for worker_id in [*self.joining]:
            self.look_at(worker_id)
            if self.workers.workers[worker_id].is_dead():
                self._recover(self.workers.workers[worker_id], None)

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
        while records == b"" and now_ns - began_ns < wire.SPIN_NS:
            os.sched_yield()
            records = worker.receive()
            now_ns = time.perf_counter_ns()
        self._wait_ns = now_ns - began_ns
        self.counters.note_wait(self._wait_ns)
        return records

    def _accept(self, worker: Worker, records: bytes) -> None:
        self._nothing_since_s = None
        for begin in range(0, len(records), wire.ANSWER_NBYTES):
            if records[begin] == wire.PUBLISHED:
                seq, slot_nbytes, header_begin, header_end, wait_ns, made_ns, flags = wire.unpack_published(
                    records, begin
                )
                self.table.arrive(seq, slot_nbytes, header_begin, header_end, made_ns, flags)
                self.counters.note_answer(wait_ns, made_ns)
                if flags:
                    self._accept_flags(worker, flags)
            else:
                self._accept_other(worker, records, begin)

    def _accept_flags(self, worker: Worker, flags: int) -> None:
        self.counters.add("detached", bool(flags & wire.DETACHED))
        renews = self._renews and not self.told_ahead
        if flags & wire.FULL and worker.worker_id not in self.handed_over and renews:
            self.handed_over[worker.worker_id] = bytearray()
            worker.send(wire.pack_hand_over())

    def _accept_other(self, worker: Worker, records: bytes, begin: int) -> None:
        answer = wire.unpack_answer(records, begin)
        if type(answer) is wire.PieceReady:
            self.table.add_piece(*answer)
            worker.send(wire.pack_send_next_piece(answer.seq))
        elif type(answer) is wire.StreamEnded:
            if self.table.drop(*answer):
                self.ended_streams.append(worker.worker_id)
        elif type(answer) is wire.HandedOver:
            state = self.handed_over[worker.worker_id]
            state += answer.piece[: answer.piece_nbytes]
            if not answer.total_nbytes:  # it cannot, and its next batch says why
                del self.handed_over[worker.worker_id]
            elif len(state) == answer.total_nbytes:
                fresh = self._recovery.succeed(worker, answer.private_nbytes)
                for record in wire.take_over(bytes(state)):
                    fresh.send(record)
                self._hand_over(fresh)
        elif type(answer) is wire.EpochBegun:
            self.joining.discard(worker.worker_id)
        elif type(answer) is wire.BatchTimes:
            place, recorder = self.table.unreturned.get(answer.seq), self.counters.recorder
            if place is not None and recorder is not None:
                recorder.note_times(worker.worker_id, answer, place.payload)

    # --- workers that die or do not answer

    def _recover(self, worker: Worker, silent_s: float | None, stack: str = "") -> None:
        """Replace a worker that is dead, or silent for ``silent_s`` with this stack, or raise the error."""
        # Answers that it still sent count: those tasks are done.
        while records := worker.receive():
            self._accept(worker, records)
            if silent_s is not None or self.workers.workers[worker.worker_id] is not worker:
                return  # it has answered in this very moment, or has handed over
        unsent = sum(place.worker_id == worker.worker_id for place in self._unsent)
        fresh = self._recovery.replace(worker, silent_s, stack, unsent, can_be_told=self._can_tell_back)
        self._hand_over(fresh)

    def _hand_over(self, fresh: Worker) -> None:
        """Send a new worker the tasks of the one in whose place it is."""
        self.joining.discard(fresh.worker_id)
        self.handed_over.pop(fresh.worker_id, None)
        self._tell_to_measure(fresh)
        # The same tasks, in the same order and the same slots.
        others = [place for place in self._unsent if place.worker_id != fresh.worker_id]
        self._unsent = deque([*others, *self.table.hand_over(fresh.worker_id)])
        with contextlib.suppress(SharedMemoryExhausted):
            self._send_unsent()
