"""Records out and records in: tasks to the workers of one iterator, and what they answer.

Knows slots, generations, parts and what becomes of the tasks of a worker that is replaced; knows nothing of
samplers and of the order in which batches are returned. Main process only.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from shmloader.errors import LoaderClosed, LoaderError, SharedMemoryExhausted
from shmloader.sampling.index_batches import PackedInts, pack_index_batch, unpack_index_batch
from shmloader.slots import Slot, SlotPool
from shmloader.slots.inspection import Inspection, Publication
from shmloader.slots.inspection import wanted as inspection_wanted
from shmloader.slots.spills import Spills
from shmloader.statistics import Counters
from shmloader.supervisor import Worker, Workers, log_replacement, worker_timeout
from shmloader.wire.messages import (
    CONTINUE,
    DETACHED,
    END,
    INLINE_NBYTES,
    MARK,
    PART,
    RESUME,
    RESUMED,
    SPILLED,
    SPIN_NS,
    TASK,
    DoneFields,
    Task,
    pack_task,
    unpack_done,
)

_EXPEL_S = 1.0  # how long another thread may take to notice that the loader was closed
_MOST_DEATHS = 2  # a batch that has ended so many workers is not tried again


class Patience(NamedTuple):
    """What is done about workers that die or do not answer.

    Attributes:
        timeout_s: Most seconds to wait for any record; 0 waits as long as the workers live.
        restarts: How many dead or silent workers are replaced before one of them is an error.
    """

    timeout_s: float
    restarts: int


class Exchange:
    """Everything that passes between one iterator and its workers.

    Args:
        pool: The slots.
        crew: The workers.
        counters: The loader's counters.
        patience: See `Patience`.

    Attributes:
        outstanding: Tasks that were sent and whose batches were not returned yet, by number, in the order in
            which they were sent: the worker, the index batch, the slot. The index batch is packed: a sampler
            may fill the same list again for the next one.
        arrived: The workers' answers to those whose batch is here, by number, in order of arrival.
        ended: Workers that have said, since this was last emptied, that their dataset is exhausted.
        joining: Workers that were started later and have not said yet that they are there.
        warning: What the user is to be warned of with the next batch, or "".
        inspection: The checks of ``SHMLOADER_DEBUG=1``, or None.
        before_sleep: Called when the main process is about to sleep for want of a batch, or None.
        settled: False while something is half done. It stays so if an exception that can come between any
            two lines (``KeyboardInterrupt``) cuts that short: then what is recorded here is not to be
            trusted any more. While the main process sleeps, all is settled.
        thread: The thread that began last what is, or was, half done.
    """

    def __init__(self, pool: SlotPool, crew: Workers, counters: Counters, patience: Patience) -> None:
        self.pool = pool
        self.crew = crew
        self.outstanding: dict[int, tuple[int, bytes, Slot]] = {}
        self.arrived: dict[int, DoneFields] = {}
        self.ended: list[int] = []
        self.joining: set[int] = set()
        self.settled = True
        self.thread = 0
        self.warning = ""
        self.before_sleep: Callable[[], None] | None = None
        self._counters = counters
        self._spills = Spills(pool, counters)
        self._timeout_s = patience.timeout_s if patience.timeout_s > 0 else None
        self._restarts_left = patience.restarts
        self._deaths: dict[int, int] = {}  # workers that ended at a task, by its number
        self._generation = 0
        self._resuming: set[int] = set()  # workers that have not come to this generation yet
        self._voided: dict[int, int] = {}  # the worker of each slot that is granted for an abandoned epoch
        self.inspection = Inspection(pool) if inspection_wanted() else None
        self._waiter: int | None = None  # the thread that waits
        self._wait_ns = 0  # how long the last wait took
        self._images: dict[int, tuple[npt.NDArray[np.uint8], int]] = {}  # batches sent in parts

    # --- out

    def send(self, worker_id: int, seq: int, index_batch: object) -> None:
        """Send a task, with a slot to make its batch in."""
        slot = self.pool.grant()
        payload = pack_index_batch(index_batch)
        self.outstanding[seq] = worker_id, payload, slot
        self._send_task(self.crew.workers[worker_id], seq, payload, slot)

    def _send_task(self, worker: Worker, seq: int, payload: bytes, slot: Slot) -> None:
        nbytes = len(payload)
        pool = self.pool
        if nbytes > INLINE_NBYTES:
            pool.reserve(slot, nbytes).view[:nbytes] = payload
            payload = b""
        elif slot.nbytes == 0:
            pool.reserve(slot, 1)  # so that there is always room for a part, or for an error
        worker.send(
            pack_task(
                TASK,
                self._generation,
                seq,
                slot.number,
                slot.nbytes,
                pool.typical_nbytes or pool.largest_nbytes,
                slot.limit_nbytes,
                nbytes,
                payload,
            )
        )

    def mark(self) -> None:
        """Let the workers keep their generators' states: what is sent from now on may be in vain."""
        for worker in self.crew.workers:
            worker.send(Task(MARK, self._generation).pack())

    def resume(self, shared_seed: int | None, epoch: int = 0, *, put_back: bool = False) -> None:
        """Void what is outstanding, and tell all workers that a new epoch begins.

        Args:
            shared_seed: What torch's DataPipes are seeded with in all workers.
            epoch: Epochs of the iterator before this one.
            put_back: Whether their generators are to go on from where they were at the last `mark`.

        Workers finish what they were sent, as torch's do: what a dataset draws from its generators must
        not depend on when the epoch was abandoned. Those batches are dropped and their slots freed, and
        this returns when all workers have come to the new epoch.
        """
        self._generation += 1
        for done in self.arrived.values():
            self.pool.give_back(self.pool.slots[done[4]])
        for seq, (worker_id, _, slot) in self.outstanding.items():
            if seq not in self.arrived:
                self._voided[slot.number] = worker_id
        self.outstanding.clear()
        self.arrived.clear()
        self._images.clear()
        self._deaths.clear()
        workers = self.crew.workers
        self._resuming = {worker.worker_id for worker in workers} - self.joining
        self._send_resume(workers, shared_seed, epoch, put_back=put_back)
        while self._resuming:
            self.receive()
        self.ended.clear()
        self.pool.trim()

    def _send_resume(
        self, workers: Iterable[Worker], shared_seed: int | None, epoch: int, *, put_back: bool = False
    ) -> None:
        payload = pickle.dumps(shared_seed, 5)
        nbytes = len(payload)
        task = Task(RESUME, self._generation, epoch, int(put_back), payload_nbytes=nbytes, payload=payload)
        for worker in workers:
            worker.send(task.pack())

    def welcome(self, worker: Worker, shared_seed: int | None, epoch: int) -> None:
        """Have a worker that was started in the middle of an epoch say when it is there: see `joining`."""
        self.joining.add(worker.worker_id)
        self._send_resume([worker], shared_seed, epoch)

    # --- in

    def look_for_joining(self) -> None:
        """Take in what workers that are `joining` have said."""
        for worker_id in list(self.joining):
            worker = self.crew.workers[worker_id]
            records = worker.receive()
            if records:
                self._accept(worker, records)
            elif records is None or worker.is_dead():
                self._recover(worker, None)

    def receive(self, worker_id: int | None = None) -> None:
        """Take records in: those of one worker if there are some, else wait for any worker's.

        Raises:
            WorkerDied: If a worker has ended and is not to be replaced; the others are stopped.
            WorkerTimeout: If nothing came within the timeout, and no worker is to be replaced for it.
            LoaderClosed: If the loader was closed meanwhile, by another thread.
        """
        if worker_id is not None:
            worker = self.crew.workers[worker_id]
            records = worker.receive()
            if records == b"" and self._wait_ns < self.crew.look_again_ns:
                records = self._look_again(worker)
            if records:
                self._accept(worker, records)
                return
            if records is None:
                self._recover(worker, None)
                return
        self._wait(worker_id)

    def _look_again(self, worker: Worker) -> bytes | None:
        """Wait for a worker's records without sleeping, for a moment, as `worker` does and says why."""
        began_ns = now_ns = time.perf_counter_ns()
        records: bytes | None = b""
        while records == b"" and now_ns - began_ns < SPIN_NS:
            os.sched_yield()
            records = worker.receive()
            now_ns = time.perf_counter_ns()
        self._wait_ns = now_ns - began_ns
        self._counters.wait_for_workers_ns += self._wait_ns
        return records

    def _wait(self, worker_id: int | None) -> None:
        crew = self.crew
        if worker_id is not None and self.before_sleep is not None:
            self.before_sleep()
        began_ns = time.perf_counter_ns()
        self._waiter = threading.get_ident()
        self.settled = True
        try:
            ready = crew.wait(self._timeout_s)
        finally:
            self._waiter = None
        self.settled = False
        self._wait_ns = time.perf_counter_ns() - began_ns
        self._counters.wait_for_workers_ns += self._wait_ns
        if crew.interrupted:
            self.settled = True
            raise LoaderClosed("the loader was closed by another thread while this one waited for a batch")
        if not ready:
            self._recover(self._silent(worker_id), self._timeout_s)
        for worker in ready:
            # What a dead worker had written before it died is read first: it is whole.
            records = worker.receive()
            if records:
                self._accept(worker, records)
            elif records is None or worker.is_dead():
                self._recover(worker, None)

    def _accept(self, worker: Worker, records: bytes) -> None:
        counters, pool = self._counters, self.pool
        for done in unpack_done(records):
            kind, flags, generation, seq, number, nbytes, offset, header_nbytes, wait_ns = done
            if wait_ns:
                counters.workers_wait_for_slots_ns += wait_ns
            if kind >= RESUMED:
                self._accept_batchless(worker, done)
                continue
            slot = pool.slots[number]
            if self.inspection is not None:
                self._inspect(self.inspection, worker, done)
            used_nbytes = offset + header_nbytes
            pool.publish(slot, nbytes, 0 if flags & SPILLED else used_nbytes)
            if flags & SPILLED:
                pool.note_size(used_nbytes)
            if used_nbytes > counters.largest_batch_nbytes:  # noqa: PLR1730 - for every batch; max() shows
                counters.largest_batch_nbytes = used_nbytes
            if flags & DETACHED:
                counters.detached += 1
            if generation != self._generation:
                self._voided.pop(number, None)
                pool.give_back(slot)
            elif kind == END:
                pool.give_back(slot)
                self.ended.append(worker.worker_id)
            else:
                self.arrived[seq] = done
        if pool.shortage is not None:
            self._run_short(pool.shortage)

    def _inspect(self, inspection: Inspection, worker: Worker, done: DoneFields) -> None:
        _, flags, generation, seq, number, nbytes, offset, header_nbytes, _ = done
        if generation == self._generation and not flags & SPILLED:
            holder_id, _, granted = self.outstanding.get(seq, (-1, None, None))
            publication = Publication(worker.worker_id, seq, nbytes, offset, header_nbytes)
            task = None if granted is None else (holder_id, granted)
            inspection.published(self.pool.slots[number], publication, task)

    def _run_short(self, shortage: SharedMemoryExhausted) -> NoReturn:
        self.crew.close("the host's memory is too small for its slots", grace_s=0.0)
        self.pool.close()
        self.settled = True
        raise shortage

    def _accept_batchless(self, worker: Worker, done: DoneFields) -> None:
        """Take in a record after which the worker still has the slot, or never had one."""
        kind, generation = done[0], done[2]
        if kind == PART:
            self._accept_part(worker, done)
        elif generation == self._generation:  # an interrupted resume's answer is stale
            self._resuming.discard(worker.worker_id)
            self.joining.discard(worker.worker_id)

    def _accept_part(self, worker: Worker, done: DoneFields) -> None:
        """Copy a piece of a batch that is larger than its slot, and ask for the next one."""
        _, _, generation, seq, number, nbytes, total, piece, _ = done
        if generation == self._generation:
            image, filled = self._images.get(seq) or (np.empty(total, np.uint8), 0)
            self.pool.read_part(self.pool.slots[number], nbytes, image[filled : filled + piece])
            self._images[seq] = (image, filled + piece)
        worker.send(Task(CONTINUE, generation, seq, number).pack())

    def take(self, done: DoneFields) -> tuple[npt.NDArray[np.uint8], bytes]:
        """The memory of a batch that is here: its slot under a lease or, spilled, a private copy.

        Args:
            done: The worker's answer.

        Returns:
            The anchor of all its leaves, and the header.
        """
        pool = self.pool
        _, flags, _, seq, number, _, begin, header_nbytes, _ = done
        slot = pool.slots[number]
        end = begin + header_nbytes
        if not flags & SPILLED and pool.can_lease():
            anchor, view = pool.lease(slot)
            if self.inspection is not None:
                self.inspection.leased(slot, seq, bytes(view[begin:end]), begin)
            if pool.notice:
                self.warning = self.warning or self._spills.notice()
            return anchor, bytes(view[begin:end])
        if flags & SPILLED:
            image, _ = self._images.pop(seq)
            pool.give_back(slot)
            warning = self._spills.too_large(len(image), slot.limit_nbytes)
        else:
            image = pool.spill(slot)
            warning = self._spills.kept(len(image))
        self.warning = self.warning or warning
        return image, image[begin:end].tobytes()

    def expel(self) -> None:
        """Make another thread leave `receive` with `LoaderClosed`, now and from now on."""
        self.crew.interrupt()
        this_thread = threading.get_ident()
        deadline = time.monotonic() + _EXPEL_S
        while time.monotonic() < deadline:
            # What this very thread has left half done, an exception has cut short.
            if (self.settled or self.thread == this_thread) and self._waiter in (None, this_thread):
                return
            time.sleep(0.001)

    # --- workers that die or do not answer

    def _held_by(self, worker_id: int | None) -> dict[int, bytes]:
        """Packed index batches sent to a worker (or to any, for None) and not answered, by number."""
        return {
            seq: payload
            for seq, (holder_id, payload, _) in self.outstanding.items()
            if seq not in self.arrived and worker_id in (None, holder_id)
        }

    def _silent(self, worker_id: int | None) -> Worker:
        """The worker that is waited for: that of the next batch or, as all are silent, the oldest task's."""
        if worker_id is None:
            worker_id = min(self._resuming, default=0)
        elif worker_id not in {holder_id for holder_id, _, _ in self.outstanding.values()}:
            worker_id = next(iter(self.outstanding.values()))[0]
        return self.crew.workers[worker_id]

    def _recover(self, worker: Worker, silent_s: float | None) -> None:
        """Replace a worker that is dead, or has been silent for ``silent_s``, or raise the error for it."""
        # What it has still said counts: those tasks are done.
        while records := worker.receive():
            self._accept(worker, records)
            if silent_s is not None:
                return  # it has answered in this very moment
        payloads = self._held_by(worker.worker_id)
        held = {seq: _read(payload) for seq, payload in payloads.items()}
        culprit = next(iter(held), -1)
        deaths = self._deaths[culprit] = self._deaths.get(culprit, 0) + 1
        if self._restarts_left <= 0 or (culprit >= 0 and deaths >= _MOST_DEATHS):
            self._fail(worker, silent_s, held, deaths if culprit >= 0 else 0)
        self._restarts_left -= 1
        self._counters.worker_restarts += 1
        stack = "" if silent_s is None else self.crew.stack_of(worker)
        pid = worker.pid
        try:
            fresh = self.crew.restart(worker)
        except Exception as error:
            error.add_note(f"It was to replace worker {worker.worker_id} (pid {pid}), with {held!s:.200}")
            raise
        log_replacement(fresh, pid, held.get(culprit), silent_s, self._restarts_left, stack)
        self._hand_over(fresh, payloads)

    def _hand_over(self, worker: Worker, payloads: dict[int, bytes]) -> None:
        """Give a new worker the tasks of the one that it replaces, in the same order and the same slots."""
        for number in [n for n, holder_id in self._voided.items() if holder_id == worker.worker_id]:
            del self._voided[number]
            self.pool.revoke(self.pool.slots[number])
        self._resuming.discard(worker.worker_id)  # it was started in this epoch
        self.joining.discard(worker.worker_id)
        for seq, payload in payloads.items():
            slot = self.outstanding[seq][2]
            self._images.pop(seq, None)
            self._send_task(worker, seq, payload, slot)

    def _fail(self, worker: Worker, silent_s: float | None, held: dict[int, object], deaths: int) -> NoReturn:
        """Raise the death or the silence of a worker."""
        indices = tuple(held.values())
        why = f"{deaths} workers have ended at the first of its index batches." if deaths > 1 else ""
        error: LoaderError
        if silent_s is None:
            error = self.crew.died(worker, indices, self._spills.figures(), why)
            self.crew.close(f"worker {worker.worker_id} died", grace_s=0.0)
            self.pool.close()
        else:
            waiting_for = tuple(map(_read, self._held_by(None).values()))
            error = worker_timeout(self.crew, worker, silent_s, waiting_for, why)
        self.settled = True
        raise error


def _read(payload: bytes) -> object:
    """A packed index batch, to be told of."""
    try:
        index_batch = unpack_index_batch(payload, len(payload))
    except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
        return f"<an index batch whose unpickling raises {type(error).__name__}>"
    return index_batch.tolist() if isinstance(index_batch, PackedInts) else index_batch
