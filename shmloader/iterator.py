"""One pass over a loader with worker processes: tasks out, batches in, sampler order.

Which worker gets which task, and when the sampler is asked for its next index batch, follow torch's
``_MultiProcessingDataLoaderIter`` step by step: datasets that draw random numbers depend on both. With
``dispatch="dynamic"`` they do not, and `dispatch` decides.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
import warnings
import weakref
from collections.abc import Iterator
from threading import get_ident, main_thread
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shmloader import torch_private
from shmloader.codec import Decoder
from shmloader.device.pinning import pin_batch
from shmloader.diagnostics.bad_samples import LEFT_OUT, count, take_report, warn_of_bad_samples
from shmloader.diagnostics.callers import level_of_the_program
from shmloader.diagnostics.exceptions import restore
from shmloader.errors import LoaderClosed, LoaderError, SpillWarning
from shmloader.host.interrupts import HeldInterrupts
from shmloader.sampling.array_samplers import index_arrays
from shmloader.sampling.next_epoch import NOTHING, EpochPrefetch, prefetch_for
from shmloader.scheduling.autotune import Autotune
from shmloader.scheduling.dispatch import Balance, is_dynamic
from shmloader.scheduling.exchange import Exchange, Patience
from shmloader.scheduling.tuning import Beginning, Tuning, make_pool
from shmloader.slots import SlotPool
from shmloader.statistics import Counters
from shmloader.supervisor import THREAD, Workers, start_workers
from shmloader.wire.messages import FAILURE, REPORTED, DoneFields
from shmloader.worker.fetch import FetchRules
from shmloader.worker.loop import WorkerArguments

_NOBODY = -1, None, None


class SlotIterator(torch_private.BaseIterator):
    """Iterates over a loader whose workers collate into slots.

    Lives in the main process and starts no thread there. Its workers run until the epoch's end, or with
    ``persistent_workers`` until the iterator dies or is closed.

    Args:
        loader: The loader; its arguments are read now, as frameworks set some late.
        counters: The loader's counters.
        autotune: What chooses the number of workers or of batches in advance, if that is to be chosen.

    Attributes:
        pool: The slots, for statistics.
    """

    def __init__(self, loader: Any, counters: Counters, autotune: Autotune | None = None) -> None:
        super().__init__(loader)
        if loader.prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"  # torch's words
            )
        self._in_order: bool = loader.in_order
        self._on_error: str = loader.on_error
        self._most_tasks = int(loader.prefetch_factor) * int(self._num_workers)
        self._most_workers = self._num_workers if autotune is None else autotune.most_workers
        self._counters = counters
        self._counts_samples = self._dataset_kind == torch_private.ITERABLE_KIND
        self._decoder = Decoder()
        in_turns = self._in_order and not is_dynamic(loader)
        self._prefetch = prefetch_for(loader, self._index_sampler, in_turns=in_turns)
        self.pool = make_pool(loader, autotune)
        crew: Workers | None = None
        try:
            crew = self._crew = self._start_workers(loader)
            # Runs when the iterator dies and at interpreter exit; refers to the parts, not to the iterator.
            self._finalizer = weakref.finalize(self, _stop, os.getpid(), crew, self.pool)
            patience = Patience(self._timeout, loader.worker_restarts)
            self._exchange = Exchange(self.pool, crew, counters, patience)
        except BaseException:
            with HeldInterrupts():
                if crew is not None:
                    crew.close()
                self.pool.close()
            raise
        try:
            self._balance = self._make_balance(loader) if is_dynamic(loader) else None
            self._tuning: Tuning | None = None
            if autotune is not None:
                exchange, balance = self._exchange, self._balance
                self._tuning = Tuning(autotune, loader, exchange, balance, counters, self._begins)
            self._reset(loader, first_iter=True)
        except BaseException:
            self.close("its first tasks could not be sent")
            raise

    def _start_workers(self, loader: Any) -> Workers:
        init_fn = loader.worker_init_fn
        if isinstance(self._dataset, torch_private.DATAPIPES):
            init_fn = functools.partial(
                torch_private.sharding_worker_init_fn, init_fn, self._world_size, self._rank
            )
        rules = FetchRules(
            iterable=self._dataset_kind == torch_private.ITERABLE_KIND,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            collate_fn=self._collate_fn,
            on_error=loader.on_error,
        )
        make_arguments = functools.partial(
            WorkerArguments,
            num_workers=self._most_workers,
            main_pid=os.getpid(),
            segment=self.pool.segment,
            dataset=self._dataset,
            rules=rules,
            base_seed=int(self._base_seed),
            init_fn=init_fn,
            seeds_samples=is_dynamic(loader),
        )
        # What differs from epoch to epoch; not the iterator, which must die alone.
        begins = self._begins = Beginning(self._shared_seed)

        def arguments_of(worker_id: int) -> WorkerArguments:
            return make_arguments(worker_id=worker_id, shared_seed=begins.shared_seed, epoch=begins.epoch)

        self.pool.keeps_granted = loader.worker_type == THREAD
        return start_workers(loader, arguments_of)

    def _make_balance(self, loader: Any) -> Balance:
        exchange = self._exchange
        weak_widen = weakref.WeakMethod(self._widen)  # the exchange must not keep the iterator alive

        def before_sleep() -> None:
            widen = weak_widen()
            if widen is not None:
                widen()

        exchange.before_sleep = before_sleep
        return Balance(
            self.pool,
            int(self._num_workers),
            int(loader.prefetch_factor),
            self._timeout,
            exchange.outstanding,
            exchange.arrived,
        )

    # --- epochs

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch; with persistent workers, after voiding what is left of the last one."""
        self._counters.begin_epoch()
        super()._reset(loader, first_iter)
        self._sampler_iter = index_arrays(self._index_sampler) or self._sampler_iter
        self._check_open()
        self._exchange.thread = get_ident()
        self._exchange.settled = False
        self._held_back: list[Any] = []  # a batch whose warning was an error
        self._begins.shared_seed = self._shared_seed
        self._active = [True] * self._most_workers  # False: its iterable dataset is exhausted
        self._strict_turns = self._in_order and self._balance is None  # until a worker drops out
        if first_iter or not self._take_next_epoch():
            self._send_seq = 0  # number of the next task
            self._next_seq = 0  # number of the next batch to return
            self._num_tasks = [0] * self._most_workers  # tasks whose batch was not returned, by worker
            self._turns: Iterator[int] = itertools.cycle(range(self._num_workers))
        if self._balance is not None:
            self._balance.begin()
        if self._prefetch is not None:
            self._prefetch.begin_epoch()
        if self._tuning is not None:
            self._tuning.begin_epoch()
        for _ in range(self.pool.most_tasks - self._send_seq + self._next_seq):
            self._issue_task()
        self._exchange.settled = True

    def _take_next_epoch(self) -> bool:
        """Begin another epoch; whether its first tasks were sent already, and rightly so."""
        prefetch = self._prefetch
        self._begins.epoch += 1
        sent = 0 if prefetch is None else prefetch.sent
        if prefetch is not None and sent and self._next_seq >= self._send_seq:
            sampler_iter = prefetch.take()
            if sampler_iter is not None:
                self._sampler_iter = sampler_iter
                self._next_seq = self._send_seq + 1
                self._send_seq = self._next_seq + sent
                self._turns = prefetch.turns
                self._counters.epochs_prefetched += 1
                self.pool.trim()
                return True
        self._counters.epochs_in_vain += sent > 0
        self._exchange.resume(self._shared_seed, self._begins.epoch, put_back=sent > 0)
        return False

    def _issue_task(self) -> None:
        """Send the next index batch to the worker that is to have it."""
        try:
            index_batch = next(self._sampler_iter)
        except StopIteration:
            if self._prefetch is not None:
                self._issue_task_of_next_epoch(self._prefetch)
            return
        except Exception:
            self._exchange.settled = True  # the sampler's own error: as in torch, the next call goes on
            raise
        worker_id = next(self._turns) if self._strict_turns else self._choose_worker()
        if worker_id is not None:
            self._num_tasks[worker_id] += 1
            self._exchange.send(worker_id, self._send_seq, index_batch)
            self._send_seq += 1

    def _issue_task_of_next_epoch(self, prefetch: EpochPrefetch) -> None:
        """Send a task of the next epoch. One number is left out before the first: there this epoch ends."""
        index_batch = prefetch.draw()
        if index_batch is NOTHING:
            return
        if not prefetch.sent:
            self._exchange.mark()
        prefetch.sent += 1
        worker_id = next(prefetch.turns)
        self._num_tasks[worker_id] += 1
        self._exchange.send(worker_id, self._send_seq + prefetch.sent, index_batch)

    def _choose_worker(self) -> int | None:
        """The next worker in turn that is active (and, out of order, has room for a task), or a free one."""
        if self._balance is not None:
            return self._balance.choose(self._send_seq)
        for _ in range(self._num_workers):
            worker_id = next(self._turns)
            if self._active[worker_id] and (self._in_order or self._has_room(worker_id)):
                return worker_id
        return None

    def _has_room(self, worker_id: int) -> bool:
        return self._num_tasks[worker_id] < self._most_tasks // sum(self._active)

    def _widen(self) -> None:
        """Give workers that run out of tasks further ones, while the program waits for a slow batch."""
        balance, outstanding = self._balance, self._exchange.outstanding
        if balance is None or not balance.is_stalled(self._next_seq):
            return
        while balance.may_widen(len(outstanding)):
            if not self._issue_task_ahead():
                return

    def _refill(self, balance: Balance) -> None:
        """After a batch was returned, fill the window as far as it was widened before."""
        balance.note_return()
        while balance.may_refill(len(self._exchange.outstanding)):
            if not self._issue_task_ahead():
                return

    def _tune(self, tuning: Tuning) -> None:
        """Measure, and do what is chosen; if more tasks are, send them."""
        pool, outstanding = self.pool, self._exchange.outstanding
        before = pool.most_tasks
        tuning.note_return()
        if pool.most_tasks != before:
            self._most_tasks = tuning.choice.tasks
            sent = -1
            while sent != len(outstanding) < pool.most_tasks:
                sent = len(outstanding)
                self._issue_task()

    def _issue_task_ahead(self) -> bool:
        """Send a task beyond those that the pool was made for, if the sampler has one."""
        seq = self._send_seq
        self._issue_task()
        sent = self._send_seq - seq
        self._counters.tasks_ahead += sent
        return sent > 0

    # --- batches

    def __next__(self) -> Any:
        # torch's own __next__ opens a profiler range (10 us) and counts an IterableDataset's samples.
        try:
            if self._counts_samples or torch_private.profiler_enabled():
                return super().__next__()
            batch = self._next_data()
        except (LoaderError, OSError, ValueError, LookupError, AssertionError) as error:
            if self._crew.interrupted or isinstance(error, LoaderClosed):
                if not main_thread().is_alive():
                    raise SystemExit from error  # in a daemon thread, while the interpreter ends
                if not isinstance(error, LoaderError):
                    # close() was called in the middle of this, by a signal handler of this very thread.
                    raise LoaderClosed(f"this iterator was closed: {self._crew.closed_because}") from error
            raise
        self._num_yielded += 1
        return batch

    def _next_data(self) -> Any:
        """The next batch; torch's name for it, as its own ``__next__`` calls it."""
        exchange = self._exchange
        if not exchange.settled:
            self._abandon()
        if self._held_back:
            return self._held_back.pop()
        exchange.thread = get_ident()
        exchange.settled = False
        arrived, outstanding = exchange.arrived, exchange.outstanding
        while True:
            seq = self._next_seq
            if arrived and (seq in arrived or not self._in_order):
                batch = self._return_batch(seq if seq in arrived else next(iter(arrived)))
                if batch is not LEFT_OUT:
                    if not self._num_yielded:
                        self._counters.note_first_batch()
                    self._counters.last_next_ns = time.perf_counter_ns()
                    return batch
                exchange.settled = False
                continue
            if seq >= self._send_seq:
                break
            worker_id, _, _ = outstanding.get(seq, _NOBODY)
            if worker_id < 0 or not self._active[worker_id]:
                # Returned out of order, or its worker's iterable dataset ended before it.
                outstanding.pop(seq, None)
                self._next_seq += 1
                continue
            if not self._crew.workers:
                self._check_open()
            exchange.receive(worker_id)
            while exchange.ended:
                self._end_worker(exchange.ended.pop())
        exchange.settled = True
        if not self._persistent_workers:
            self._shutdown_workers()
        warn_of_bad_samples(self._counters, self._on_error)
        raise StopIteration

    def _end_worker(self, worker_id: int) -> None:
        """Give an exhausted worker no more tasks; it says so once for each that it has."""
        if self._active[worker_id]:
            self._active[worker_id] = self._strict_turns = False
            self._issue_task()

    def _return_batch(self, seq: int) -> Any:
        exchange = self._exchange
        if not self._crew.workers:
            self._check_open()
        worker_id, _, _ = exchange.outstanding.pop(seq)
        done = exchange.arrived.pop(seq)
        if seq == self._next_seq:
            self._next_seq += 1
        self._num_tasks[worker_id] -= 1
        anchor, header = exchange.take(done)
        if len(exchange.outstanding) < self.pool.most_tasks:
            self._issue_task()
        elif self._balance is not None:
            self._refill(self._balance)
        if self._tuning is not None:
            self._tune(self._tuning)
        try:
            batch = self._unpack(done, anchor, header)
        except Exception:
            exchange.settled = True
            raise
        del anchor
        if exchange.warning and batch is not LEFT_OUT:
            self._warn(batch)
        exchange.settled = True
        return batch

    def _unpack(self, done: DoneFields, anchor: npt.NDArray[np.uint8], header: bytes) -> Any:
        """What a worker's answer holds for the program: a batch, or the exception in its place, raised."""
        batch = self._decoder.decode(anchor, header)
        if done[0] == FAILURE:
            self._counters.failures += 1
            count(batch.bad_samples, self._counters)
            error = restore(batch)
            self._exchange.settled = True  # whatever it is, it is the worker's
            raise error
        if done[1] & REPORTED:
            batch = take_report(batch, self._counters)
            if batch is LEFT_OUT:
                return batch
        self._counters.batches += 1
        if self._pin_memory:
            self._counters.pin_copies += 1
            batch = pin_batch(batch, self._pin_memory_device)
        return batch

    def _warn(self, batch: Any) -> None:
        """Say what is to be said; where the program's filters make that an error, the batch comes next."""
        warning, self._exchange.warning = self._exchange.warning, ""
        self._held_back.append(batch)
        self._exchange.settled = True
        warnings.warn(warning, SpillWarning, stacklevel=level_of_the_program())
        self._held_back.clear()

    # --- the end

    def _abandon(self) -> NoReturn:
        """Close after an exception that came between two lines; batches may have been lost by it."""
        self._exchange.settled = True
        self.close("an exception (Ctrl-C?) interrupted it in the middle of its work")
        self._check_open()
        raise AssertionError

    def _check_open(self) -> None:
        if not self._crew.workers:
            self._exchange.settled = True
            raise LoaderClosed(
                f"this iterator cannot go on: {self._crew.closed_because}. Call iter(loader) for a new one."
            )

    @property
    def closed(self) -> bool:
        """Whether the iterator cannot be used for another epoch."""
        return not self._crew.workers or not self._exchange.settled

    def oldest_leases(self) -> tuple[str, ...]:
        """With ``SHMLOADER_DEBUG=1``, the batches that the program has held for longest; see `Inspection`."""
        inspection = self._exchange.inspection
        return () if inspection is None else inspection.oldest_leases()

    @property
    def _workers(self) -> list[Any]:
        """The processes, under the name at which Ultralytics looks for them in torch's iterator."""
        return self._crew.processes

    def _shutdown_workers(self) -> None:
        """Stop the workers; named as in torch's iterator, where frameworks call it."""
        with HeldInterrupts():  # the finalizer runs once, and to its end
            self._finalizer()

    def close(self, because: str = "close() was called") -> None:
        """Stop the workers and free the slots; batches that the program holds stay valid.

        Args:
            because: The reason, for whoever calls ``next()`` later.
        """
        self._crew.closed_because = self._crew.closed_because or because
        self._held_back = []
        if self._crew.workers:
            self._exchange.expel()
        self._shutdown_workers()


def _stop(owner_pid: int, crew: Workers, pool: SlotPool) -> None:
    if os.getpid() == owner_pid:
        with HeldInterrupts():
            crew.interrupt()  # at the interpreter's end a daemon thread may be waiting for a batch
            crew.close()
            pool.close()
    else:  # a copy in a forked child: the workers and the memory are the parent's
        crew.leave_to_parent()
