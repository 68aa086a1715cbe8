"""Records out and records in: tasks to the workers of one iterator, and what they answer.

Knows slots, generations and parts; knows nothing of samplers and of the order in which batches are
returned. Main process only.
"""

from __future__ import annotations

import io
import os
import pickle
import time
import warnings
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from shmloader.errors import SpillWarning, WorkerTimeout
from shmloader.messages import (
    CONTINUE,
    DETACHED,
    END,
    INLINE_NBYTES,
    PART,
    RESUME,
    RESUMED,
    SPILLED,
    TASK,
    DoneFields,
    Task,
    pack_task,
    unpack_done,
)
from shmloader.slots import SlotPool, SlotState
from shmloader.statistics import Counters
from shmloader.workers import Worker, Workers

_LONG_NBYTES = 1024
_SPIN_NS = 50_000


def _is_ints(index_batch: object) -> bool:
    return type(index_batch) is list and type(index_batch[0]) is int


class _CompactPickler(pickle.Pickler):
    """Pickles of a tensor what it shows, not all of the storage that it is a view of."""

    def reducer_override(self, obj: Any) -> Any:
        """See ``pickle.Pickler``."""
        plain = type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided
        if plain and obj.untyped_storage().nbytes() > obj.numel() * obj.element_size():
            return obj.clone().__reduce_ex__(5)
        return NotImplemented


def _pickle_compact(index_batch: object) -> bytes:
    file = io.BytesIO()
    _CompactPickler(file, 5).dump(index_batch)
    return file.getvalue()


class Exchange:
    """Everything that passes between one iterator and its workers.

    Args:
        pool: The slots.
        crew: The workers.
        counters: The loader's counters.
        timeout_s: Most seconds to wait for any record; 0 waits as long as the workers live.

    Attributes:
        outstanding: Tasks that were sent and whose batches were not returned yet, by number, in the order in
            which they were sent: the worker, and the index batch.
        arrived: The workers' answers to those whose batch is here, by number, in order of arrival.
        ended: Workers that have said, since this was last emptied, that their dataset is exhausted.
    """

    def __init__(self, pool: SlotPool, crew: Workers, counters: Counters, timeout_s: float) -> None:
        self.pool = pool
        self.crew = crew
        self.outstanding: dict[int, tuple[int, object]] = {}
        self.arrived: dict[int, DoneFields] = {}
        self.ended: list[int] = []
        self._counters = counters
        self._timeout_s = timeout_s if timeout_s > 0 else None
        self._generation = 0
        self._to_resume = 0
        self._wait_ns = 0  # how long the last wait took
        self._images: dict[int, tuple[npt.NDArray[np.uint8], int]] = {}  # batches sent in parts

    def send(self, worker_id: int, seq: int, index_batch: object) -> None:
        """Send a task, with a slot to make its batch in."""
        payload = pickle.dumps(index_batch, 5)
        if len(payload) > _LONG_NBYTES and not _is_ints(index_batch):
            payload = _pickle_compact(index_batch)
        nbytes = len(payload)
        pool = self.pool
        slot = pool.grant()
        if nbytes > INLINE_NBYTES:
            pool.reserve(slot, nbytes).view[:nbytes] = payload
            payload = b""
        elif slot.nbytes == 0:
            pool.reserve(slot, 1)  # so that there is always room for a part, or for an error
        self.outstanding[seq] = worker_id, index_batch
        self.crew.workers[worker_id].send(
            pack_task(
                TASK,
                self._generation,
                seq,
                slot.number,
                slot.version,
                slot.nbytes,
                pool.largest_nbytes,
                slot.limit_nbytes,
                nbytes,
                payload,
            )
        )

    def resume(self, shared_seed: int | None) -> None:
        """Void what is outstanding, and tell all workers that a new epoch begins.

        Workers finish what they were sent, as torch's do: what a dataset draws from its generators must
        not depend on when the epoch was abandoned. Those batches are dropped and their slots freed, and
        this returns when all workers have come to the new epoch.
        """
        self._generation += 1
        self.outstanding.clear()
        self.arrived.clear()
        self._images.clear()
        payload = pickle.dumps(shared_seed, 5)
        for worker in self.crew.workers:
            worker.send(Task(RESUME, self._generation, payload_nbytes=len(payload), payload=payload).pack())
        self._to_resume = len(self.crew.workers)
        while self._to_resume:
            self.receive()
        self.ended.clear()
        self.pool.trim()

    def receive(self, worker_id: int | None = None) -> None:
        """Take records in: those of one worker if there are some, else wait for any worker's.

        Raises:
            WorkerDied: If a worker has ended; the others are stopped.
            WorkerTimeout: If nothing came within the timeout.
        """
        if worker_id is not None:
            worker = self.crew.workers[worker_id]
            records = worker.receive()
            if records == b"" and self._wait_ns < _SPIN_NS:
                records = self._look_again(worker)
            if records is None:
                self._fail(worker)
            if records:
                self._accept(worker, records)
                return
        self._wait()

    def _look_again(self, worker: Worker) -> bytes | None:
        """Wait for a worker's records without sleeping, for a moment, as `worker` does and says why."""
        began_ns = now_ns = time.perf_counter_ns()
        records: bytes | None = b""
        while records == b"" and now_ns - began_ns < _SPIN_NS:
            os.sched_yield()
            records = worker.receive()
            now_ns = time.perf_counter_ns()
        self._wait_ns = now_ns - began_ns
        self._counters.wait_for_workers_ns += self._wait_ns
        return records

    def _wait(self) -> None:
        crew = self.crew
        began_ns = time.perf_counter_ns()
        ready = crew.wait(self._timeout_s)
        self._wait_ns = time.perf_counter_ns() - began_ns
        self._counters.wait_for_workers_ns += self._wait_ns
        if not ready:
            raise WorkerTimeout(
                f"DataLoader timed out after {self._timeout_s} seconds: none of {len(crew.workers)} "
                f"worker(s) has finished a batch; outstanding index batches: {self._held_by(None)!s:.300}"
            )
        for worker in ready:
            # What a dead worker had written before it died is read first: it is whole.
            records = worker.receive()
            if records:
                self._accept(worker, records)
            elif records is None or crew.is_dead(worker):
                self._fail(worker)

    def _accept(self, worker: Worker, records: bytes) -> None:
        counters, pool = self._counters, self.pool
        for done in unpack_done(records):
            kind, flags, generation, seq, number, version, nbytes, offset, header_nbytes, wait_ns = done
            if wait_ns:
                counters.workers_wait_for_slots_ns += wait_ns
            if kind == RESUMED:
                self._to_resume -= generation == self._generation  # an interrupted resume's is stale
                continue
            if kind == PART:
                self._accept_part(worker, done)
                continue
            slot = pool.slots[number]
            used_nbytes = offset + header_nbytes
            pool.publish(slot, version, nbytes, 0 if flags & SPILLED else used_nbytes)
            if flags & SPILLED:
                pool.note_size(used_nbytes)
            counters.largest_batch_nbytes = max(counters.largest_batch_nbytes, used_nbytes)
            if flags & DETACHED:
                counters.detached += 1
            if generation != self._generation:
                pool.give_back(slot)
            elif kind == END:
                pool.give_back(slot)
                self.ended.append(worker.worker_id)
            else:
                self.arrived[seq] = done

    def _accept_part(self, worker: Worker, done: DoneFields) -> None:
        """Copy a piece of a batch that is larger than its slot, and ask for the next one."""
        _, _, generation, seq, number, version, nbytes, total, piece, _ = done
        if generation == self._generation:
            image, filled = self._images.get(seq) or (np.empty(total, np.uint8), 0)
            self.pool.read_part(self.pool.slots[number], version, nbytes, image[filled : filled + piece])
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
        _, flags, _, seq, number, _, _, begin, header_nbytes, _ = done
        slot = pool.slots[number]
        end = begin + header_nbytes
        if not flags & SPILLED and pool.can_lease():
            anchor, view = pool.lease(slot)
            return anchor, bytes(view[begin:end])
        if flags & SPILLED:
            image, _ = self._images.pop(seq)
            pool.give_back(slot)
            why = f"a batch of {len(image):,} bytes is larger than a slot may be"
        else:
            image = pool.spill(slot)
            kept = f"the program keeps {pool.count(SlotState.LEASED)} batches"
            why = kept if pool.out_of_budget else ""
        self._count_spill(len(image), why)
        return image, image[begin:end].tobytes()

    def _count_spill(self, nbytes: int, why: str) -> None:
        """Count a batch moved to private memory; warn once if the memory budget was the reason."""
        counters, pool = self._counters, self.pool
        counters.spills += 1
        counters.spilled_nbytes += nbytes
        if not why or counters.warned_of_spills:
            return
        counters.warned_of_spills = True
        needed = pool.base_slots * max(nbytes, pool.largest_nbytes)
        warnings.warn(
            f"{why}, and the slots' memory budget is {pool.budget_nbytes:,} bytes: batches beyond it are "
            "copied to private memory, which is correct but slower. A budget for this loader's slots is at "
            f"least {needed:,} bytes (memory_budget_nbytes=...), plus what the program keeps; else use a "
            "smaller batch_size, prefetch_factor or num_workers.",
            SpillWarning,
            stacklevel=6,  # whoever called next()
        )

    def _held_by(self, worker_id: int | None) -> tuple[object, ...]:
        """Index batches sent to a worker (or to any, for None) and not answered."""
        return tuple(
            index_batch
            for seq, (holder_id, index_batch) in self.outstanding.items()
            if seq not in self.arrived and worker_id in (None, holder_id)
        )

    def _fail(self, worker: Worker) -> NoReturn:
        """Raise the death of a worker, after stopping the others."""
        error = self.crew.died(worker, self._held_by(worker.worker_id))
        self.crew.close(f"worker {worker.worker_id} died")
        self.pool.close()
        raise error
