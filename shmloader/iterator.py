"""One pass over a loader with worker processes: tasks out, batches in, sampler order.

Which worker gets which task, and when the sampler is asked for its next index batch, follow torch's
``_MultiProcessingDataLoaderIter`` step by step: datasets that draw random numbers depend on both.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import time
import warnings
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shmloader import torch_private
from shmloader.codec import Decoder
from shmloader.errors import LoaderClosed, SpillWarning, WorkerTimeout
from shmloader.failures import restore
from shmloader.fetch import FetchRules
from shmloader.limits import memory_headroom
from shmloader.messages import (
    CONTINUE,
    DETACHED,
    END,
    FAILURE,
    INLINE_NBYTES,
    PART,
    RESUME,
    RESUMED,
    SPILLED,
    TASK,
    Done,
    Task,
)
from shmloader.pinning import pin_batch
from shmloader.segment import Descriptor, new_segment
from shmloader.slots import Slot, SlotPool, SlotState
from shmloader.statistics import Counters
from shmloader.worker import WorkerArguments
from shmloader.workers import Worker, Workers, check_importable


class _Outstanding:
    """A task that was sent and whose batch was not returned yet."""

    __slots__ = ("done", "index_batch", "worker_id")

    def __init__(self, worker_id: int, index_batch: object) -> None:
        self.worker_id = worker_id
        self.index_batch = index_batch
        self.done: Done | None = None


class SlotIterator(torch_private.BaseIterator):
    """Iterates over a loader whose workers collate into slots.

    Lives in the main process and starts no thread there. Its workers run until the epoch's end, or with
    ``persistent_workers`` until the iterator dies or is closed.

    Args:
        loader: The loader; its arguments are read now, as frameworks set some late.
        counters: The loader's counters.
    """

    def __init__(self, loader: Any, counters: Counters) -> None:
        super().__init__(loader)
        if loader.prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"  # torch's words
            )
        self._in_order: bool = loader.in_order
        self._most_tasks: int = loader.prefetch_factor * self._num_workers
        self._counters = counters
        self._decoder = Decoder()
        self._generation = 0
        self._closed_because = ""
        self._finished = False
        budget_nbytes = loader.memory_budget_nbytes
        if budget_nbytes is None:
            budget_nbytes = memory_headroom().available_nbytes // 2
        self._pool = SlotPool(new_segment(), self._most_tasks, budget_nbytes)
        try:
            self._crew = self._start_workers(loader)
        except BaseException:
            self._pool.close()
            raise
        # Runs when the iterator dies and at interpreter exit; refers to the parts, not to the iterator.
        self._finalizer = weakref.finalize(self, _stop, os.getpid(), self._crew, self._pool)
        try:
            self._reset(loader, first_iter=True)
        except BaseException:
            self.close("its first tasks could not be sent")
            raise

    def _start_workers(self, loader: Any) -> Workers:
        context = loader.multiprocessing_context or torch.multiprocessing
        init_fn = loader.worker_init_fn
        check_importable(
            context,
            {"dataset": self._dataset, "collate_fn": self._collate_fn, "worker_init_fn": init_fn},
        )
        if isinstance(self._dataset, torch_private.DATAPIPES):
            init_fn = functools.partial(
                torch_private.sharding_worker_init_fn, init_fn, self._world_size, self._rank
            )
        rules = FetchRules(
            iterable=self._dataset_kind == torch_private.ITERABLE_KIND,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            collate_fn=self._collate_fn,
        )
        make_arguments = functools.partial(
            WorkerArguments,
            num_workers=self._num_workers,
            main_pid=os.getpid(),
            segment=self._pool.segment,
            dataset=self._dataset,
            rules=rules,
            base_seed=int(self._base_seed),
            shared_seed=self._shared_seed,
            init_fn=init_fn,
        )

        def arguments_of(worker_id: int, tasks: Descriptor, dones: Descriptor) -> WorkerArguments:
            return make_arguments(worker_id=worker_id, tasks=tasks, dones=dones)

        return Workers(context, arguments_of, self._num_workers)

    # --- epochs

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch; with persistent workers, after voiding what is left of the last one."""
        super()._reset(loader, first_iter)
        self._check_open()
        self._finished = False
        self._sampler_done = False
        self._send_seq = 0  # number of the next task
        self._next_seq = 0  # number of the next batch to return
        self._outstanding: dict[int, _Outstanding] = {}
        self._arrived: dict[int, None] = {}  # batches that are here, in order of arrival
        self._images: dict[int, tuple[npt.NDArray[np.uint8], int]] = {}  # batches sent in parts
        self._num_tasks = [0] * self._num_workers  # tasks whose batch was not returned, by worker
        if not first_iter:
            self._resume_workers()
            self._pool.trim()
        self._active = [True] * self._num_workers  # False: its iterable dataset is exhausted
        self._turns = itertools.cycle(range(self._num_workers))
        for _ in range(self._most_tasks):
            self._issue_task()

    def _resume_workers(self) -> None:
        """Tell the workers of the new epoch and wait until each has left the old one.

        They finish what they were sent, as torch's do: what a dataset draws from its generators must not
        depend on when the epoch was abandoned. Those batches are dropped and their slots freed.
        """
        self._generation += 1
        payload = pickle.dumps(self._shared_seed, 5)
        for worker in self._crew.workers:
            worker.send(Task(RESUME, self._generation, payload_nbytes=len(payload), payload=payload))
        self._to_resume = self._num_workers
        while self._to_resume:
            self._receive_some()

    def _issue_task(self) -> None:
        """Send the next index batch to the worker whose turn it is, with a slot to make it in."""
        try:
            index_batch = next(self._sampler_iter)
        except StopIteration:
            self._sampler_done = True
            return
        worker_id = self._choose_worker()
        if worker_id is None:
            return
        payload = pickle.dumps(index_batch, 5)
        pool, slot = self._pool, self._pool.grant()
        inline = len(payload) <= INLINE_NBYTES
        if not inline:
            extent = pool.reserve(slot, len(payload))
            memoryview(extent.buffer).cast("B")[: len(payload)] = payload
        task = Task(
            TASK,
            self._generation,
            self._send_seq,
            slot.number,
            slot.version,
            slot.nbytes,
            pool.largest_nbytes,
            slot.limit_nbytes,
            len(payload),
            payload if inline else b"",
        )
        self._outstanding[self._send_seq] = _Outstanding(worker_id, index_batch)
        self._num_tasks[worker_id] += 1
        self._send_seq += 1
        self._crew.workers[worker_id].send(task)

    def _choose_worker(self) -> int | None:
        """The next worker in turn that is active (and, out of order, has room for a task)."""
        most = self._most_tasks // max(1, sum(self._active))
        for _ in range(self._num_workers):
            worker_id = next(self._turns)
            if self._active[worker_id] and (self._in_order or self._num_tasks[worker_id] < most):
                return worker_id
        return None

    # --- batches

    def __next__(self) -> Any:
        # torch's own __next__ opens a profiler range (10 us) and counts an IterableDataset's samples.
        if self._dataset_kind == torch_private.ITERABLE_KIND or torch_private.profiler_enabled():
            return super().__next__()
        batch = self._next_data()
        self._num_yielded += 1
        return batch

    def _next_data(self) -> Any:
        if self._finished:
            raise StopIteration
        self._check_open()
        while True:
            seq = self._head()
            if seq is None:
                self._finished = True
                if not self._persistent_workers:
                    self._shutdown_workers()
                raise StopIteration
            if seq in self._arrived:
                return self._return_batch(seq)
            self._receive_some(self._outstanding[seq].worker_id)

    def _head(self) -> int | None:
        """The number of the batch to return next, here or awaited; None at the epoch's end."""
        if not self._in_order and self._arrived:
            return next(iter(self._arrived))
        while self._next_seq < self._send_seq:
            task = self._outstanding.get(self._next_seq)
            if task is not None:
                if task.done is not None or self._active[task.worker_id]:
                    return self._next_seq
                # Its worker's iterable dataset ended before it: there is no such batch.
                del self._outstanding[self._next_seq]
            self._next_seq += 1
        return None

    def _return_batch(self, seq: int) -> Any:
        task = self._outstanding.pop(seq)
        del self._arrived[seq]
        if seq == self._next_seq:
            self._next_seq += 1
        done = task.done
        assert done is not None
        self._num_tasks[task.worker_id] -= 1
        memory = self._take(done, self._pool.slots[done.slot])
        self._issue_task()
        batch = self._decoder.decode(memory, done.header_offset, done.header_nbytes)
        del memory
        if done.kind == FAILURE:
            self._counters.failures += 1
            raise restore(batch)
        self._counters.batches += 1
        if self._pin_memory:
            self._counters.pin_copies += 1
            batch = pin_batch(batch, self._pin_memory_device)
        return batch

    def _take(self, done: Done, slot: Slot) -> npt.NDArray[np.uint8]:
        """The memory of a published batch: the slot under a lease or, spilled, a private copy."""
        if done.flags & SPILLED:
            image, _ = self._images.pop(done.seq)
            self._pool.give_back(slot)
            self._count_spill(len(image), f"a batch needs {len(image):,} bytes")
            return image
        if self._sampler_done or self._pool.can_lease():
            return self._pool.lease(slot)
        image = self._pool.spill(slot)
        kept, pool = self._pool.count(SlotState.LEASED), self._pool
        over_budget = pool.committed_nbytes + len(image) > pool.budget_nbytes
        self._count_spill(len(image), f"the program keeps {kept} batches" if over_budget else "")
        return image

    def _count_spill(self, nbytes: int, why: str) -> None:
        """Count a batch moved to private memory; warn once if the memory budget was the reason."""
        counters = self._counters
        counters.spills += 1
        counters.spilled_nbytes += nbytes
        if not why or counters.warned_of_spills:
            return
        counters.warned_of_spills = True
        budget_nbytes = self._pool.budget_nbytes
        needed = (self._most_tasks + 2) * max(nbytes, self._pool.largest_nbytes)
        warnings.warn(
            f"{why}, and the slots' memory budget is {budget_nbytes:,} bytes: batches beyond it are "
            "copied to private memory, which is correct but slower. A budget for this loader's slots is at "
            f"least {needed:,} bytes (memory_budget_nbytes=...), plus what the program keeps; else use a "
            "smaller batch_size, prefetch_factor or num_workers.",
            SpillWarning,
            stacklevel=6,  # whoever called next()
        )

    # --- records

    def _receive_some(self, worker_id: int | None = None) -> None:
        """Take records in: those of one worker if there are some, else wait for any worker's."""
        crew = self._crew
        if worker_id is not None:
            worker = crew.workers[worker_id]
            dones = worker.receive()
            if dones is None:
                self._fail(worker)
            if dones:
                for done in dones:
                    self._accept(worker, done)
                return
        began_ns = time.perf_counter_ns()
        ready = crew.wait(self._timeout if self._timeout > 0 else None)
        self._counters.wait_for_workers_ns += time.perf_counter_ns() - began_ns
        if not ready:
            raise WorkerTimeout(
                f"DataLoader timed out after {self._timeout} seconds: none of {self._num_workers} worker(s) "
                f"has finished a batch; outstanding index batches: {self._held_by(None)!s:.300}"
            )
        for worker in ready:
            # What a dead worker had written before it died is read first: it is whole.
            dones = worker.receive()
            for done in dones or ():
                self._accept(worker, done)
            if not dones and (dones is None or crew.is_dead(worker)):
                self._fail(worker)

    def _accept(self, worker: Worker, done: Done) -> None:
        counters, pool = self._counters, self._pool
        counters.workers_wait_for_slots_ns += done.wait_ns
        if done.kind == RESUMED:
            self._to_resume -= 1
            return
        slot = pool.slots[done.slot]
        if done.kind == PART:
            self._accept_part(worker, done, slot)
            return
        used_nbytes = done.header_offset + done.header_nbytes
        spilled = bool(done.flags & SPILLED)
        pool.publish(slot, done.version, done.slot_nbytes, 0 if spilled else used_nbytes)
        counters.detached += bool(done.flags & DETACHED)
        if done.generation != self._generation:
            pool.give_back(slot)
        elif done.kind == END:
            pool.give_back(slot)
            if self._active[worker.worker_id]:
                self._active[worker.worker_id] = False
                self._issue_task()
        else:
            counters.largest_batch_nbytes = max(counters.largest_batch_nbytes, used_nbytes)
            self._outstanding[done.seq].done = done
            self._arrived[done.seq] = None

    def _accept_part(self, worker: Worker, done: Done, slot: Slot) -> None:
        """Copy a piece of a batch that is larger than its slot, and ask for the next one."""
        if done.generation == self._generation:
            total, piece = done.header_offset, done.header_nbytes
            image, filled = self._images.get(done.seq) or (np.empty(total, np.uint8), 0)
            self._pool.read_part(slot, done.version, done.slot_nbytes, image[filled : filled + piece])
            self._images[done.seq] = (image, filled + piece)
        worker.send(Task(CONTINUE, done.generation, done.seq, done.slot))

    def _held_by(self, worker_id: int | None) -> tuple[object, ...]:
        """Index batches sent to a worker (or any) and not received from it."""
        return tuple(
            task.index_batch
            for task in self._outstanding.values()
            if task.done is None and worker_id in (None, task.worker_id)
        )

    def _fail(self, worker: Worker) -> None:
        """Raise the death of a worker, after stopping the others."""
        error = self._crew.died(worker, self._held_by(worker.worker_id))
        self.close(f"worker {worker.worker_id} died")
        raise error

    # --- the end

    def _check_open(self) -> None:
        if not self._crew.workers:
            why = self._closed_because or "it was shut down, or this process was forked from its own"
            raise LoaderClosed(f"this iterator has no workers: {why}; call iter(loader) for a new one")

    @property
    def closed(self) -> bool:
        """Whether the iterator's workers were stopped."""
        return not self._finalizer.alive

    @property
    def _workers(self) -> list[Any]:
        """The processes, under the name at which Ultralytics looks for them in torch's iterator."""
        return [worker.process for worker in self._crew.workers]

    def _shutdown_workers(self) -> None:
        """Stop the workers; named as in torch's iterator, where frameworks call it."""
        self._finalizer()

    def close(self, because: str) -> None:
        """Stop the workers and free the slots; batches that the program holds stay valid.

        Args:
            because: The reason, for whoever calls ``next()`` later.
        """
        self._closed_because = self._closed_because or because
        self._shutdown_workers()

    @property
    def pool(self) -> SlotPool:
        """The slots, for statistics."""
        return self._pool


def _stop(owner_pid: int, crew: Workers, pool: SlotPool) -> None:
    if os.getpid() == owner_pid:
        crew.close()
        pool.close()
    else:  # a copy in a forked child: the workers and the memory are the parent's
        crew.drop_descriptors()
