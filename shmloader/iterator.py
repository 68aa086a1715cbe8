"""One pass over a loader with workers: batches in the sampler's order. Main process only.

When the sampler is asked for its next index batch, and which worker gets it, follow torch's
``_MultiProcessingDataLoaderIter`` step by step: datasets that draw random numbers depend on both. With
``dispatch="dynamic"`` they do not, and `FreeWorkers` chooses.
"""

from __future__ import annotations

import functools
import operator
import os
import pickle
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from threading import main_thread
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from shmloader import torch_private
from shmloader.arguments import THREAD, AutoCount, is_dynamic
from shmloader.codec import Decoder
from shmloader.device.pinning import pin_batch
from shmloader.diagnostics.bad_samples import LEFT_OUT, count, take_report, warn_of_bad_samples
from shmloader.diagnostics.callers import level_of_the_program
from shmloader.diagnostics.exceptions import restore
from shmloader.errors import LoaderClosed, LoaderError, SpillWarning
from shmloader.host.interrupts import HeldInterrupts
from shmloader.host.limits import memory_headroom
from shmloader.sampling.array_samplers import index_arrays
from shmloader.sampling.next_epoch import NOTHING, next_epoch_for
from shmloader.scheduling.auto import Auto
from shmloader.scheduling.dispatcher import Dispatcher
from shmloader.scheduling.free_workers import FreeWorkers
from shmloader.scheduling.growth import Growth
from shmloader.scheduling.ledger import Task, TaskState
from shmloader.scheduling.lifecycle import Lifecycle, Phase
from shmloader.scheduling.restarts import RestartPolicy
from shmloader.scheduling.turns import Turns
from shmloader.shared_memory import MemfdSegment
from shmloader.slots import SlotPool
from shmloader.statistics import Counters
from shmloader.supervisor import Workers, start_workers
from shmloader.wire.messages import Published
from shmloader.worker.epoch_settings import DatasetState, EpochSettings
from shmloader.worker.fetch import FetchRules
from shmloader.worker.loop import WorkerArguments


@dataclass
class _Present:
    """Settings of the present epoch, for workers that are started in it.

    Attributes:
        shared_seed: As in `EpochSettings`.
        epoch: Number of the epoch over the iterator's life.
    """

    shared_seed: int | None
    epoch: int = 0


class SlotIterator(torch_private.BaseIterator):
    """Iterates over a loader whose workers collate into slots.

    Starts no thread in the main process. Its workers run until the epoch's end, or with
    ``persistent_workers`` until the iterator dies or is closed. Several threads may call ``next()``: each
    batch comes to one of them.

    Args:
        loader: The loader; its arguments are read now, as frameworks set some late.
        counters: The loader's counters.
        auto: Decides about the number of workers or of batches in advance, if that is ``"auto"``.

    Attributes:
        pool: The slots, for statistics.
    """

    def __init__(self, loader: Any, counters: Counters, auto: Auto | None = None) -> None:
        super().__init__(loader)
        if loader.prefetch_factor <= 0:
            raise AssertionError(
                "prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter"  # torch's words
            )
        self._in_order: bool = loader.in_order
        self._on_error: str = loader.on_error
        self._counters = counters
        self._counts_samples = self._dataset_kind == torch_private.ITERABLE_KIND
        self._decoder = Decoder()
        self._lifecycle = Lifecycle()
        self._next_epoch = next_epoch_for(loader, self._index_sampler)
        self._dataset_state = DatasetState(self._dataset)
        self._sent_early = 0  # tasks of the next epoch
        self._set_epoch: int | None = None
        self.pool = _make_pool(loader)
        workers: Workers | None = None
        try:
            workers = self._crew = self._start_workers(loader, auto)
            # Runs when the iterator dies and at interpreter exit; refers to the parts, not to the iterator.
            self._finalizer = weakref.finalize(self, _stop, os.getpid(), workers, self.pool)
            policy = RestartPolicy(loader.worker_restarts, self._timeout)
            self._dispatcher = Dispatcher(self.pool, workers, counters, policy, self._lifecycle)
        except BaseException:
            with HeldInterrupts():
                if workers is not None:
                    workers.close()
                self.pool.close()
            raise
        try:
            self._make_schedule(loader, auto)
            self._reset(loader, first_iter=True)
        except BaseException:
            self.close("its first tasks could not be sent")
            raise

    def _start_workers(self, loader: Any, auto: Auto | None) -> Workers:
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
            num_workers=self._num_workers if auto is None else auto.most_workers,
            main_pid=os.getpid(),
            segment=self.pool.segment,
            dataset=self._dataset,
            rules=rules,
            base_seed=int(self._base_seed),
            init_fn=init_fn,
            seeds_samples=is_dynamic(loader),
        )
        present = self._present = _Present(self._shared_seed)  # not the iterator, which must die alone

        def arguments_of(worker_id: int) -> WorkerArguments:
            return make_arguments(worker_id=worker_id, shared_seed=present.shared_seed, epoch=present.epoch)

        self.pool.keeps_granted = loader.worker_type == THREAD
        return start_workers(loader, arguments_of)

    def _make_schedule(self, loader: Any, auto: Auto | None) -> None:
        """Choose the policies that decide about tasks."""
        ledger, num_workers = self._dispatcher.ledger, int(self._num_workers)
        self._free_workers: FreeWorkers | None = None
        self._turns: Turns | None = None
        if is_dynamic(loader):
            prefetch_factor = int(loader.prefetch_factor)
            self._free_workers = FreeWorkers(ledger, self.pool, num_workers, prefetch_factor, self._timeout)
        else:
            most_tasks = num_workers * int(loader.prefetch_factor)
            self._turns = Turns(ledger, num_workers, most_tasks, in_order=self._in_order)
        self._schedule: Turns | FreeWorkers = self._turns or self._free_workers  # type: ignore[assignment]
        self._growth: Growth | None = None
        if auto is not None:
            self._growth = Growth(auto, loader, self._dispatcher, self._free_workers, self._counters)

    # --- epochs

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch; torch's name for it. With persistent workers, void what is left of the last one."""
        lifecycle = self._lifecycle
        lifecycle.refuse_reentry()
        try:
            lifecycle.enter()
            self._check_open()
            self._begin_epoch(loader, first_iter=first_iter)
            lifecycle.leave()
            lifecycle.phase = Phase.IDLE
        except BaseException as error:
            lifecycle.fail(error)
            raise

    def _begin_epoch(self, loader: Any, *, first_iter: bool) -> None:
        early = None
        settings = EpochSettings(None, None, {})
        if not first_iter:
            settings = EpochSettings(None, self._set_epoch, self._dataset_state.take_changes())
            early = self._take_early(discard=settings != (None, None, {}))
        self._reset_sampler(loader, early, first_iter=first_iter)
        self._set_epoch = None
        if early is None:
            self._sent = 0  # tasks of this epoch
            self._schedule.begin_epoch()
            self._present.shared_seed = self._shared_seed
            if not first_iter:
                self._present.epoch += 1
                settings = settings._replace(shared_seed=self._shared_seed)
                self._dispatcher.begin_epoch(pickle.dumps(settings, 5))
        self._held_back: list[Any] = []  # a batch whose warning was an error
        self._sent_early = 0
        if self._next_epoch is not None:
            self._next_epoch.begin_epoch()
        if self._growth is not None:
            self._growth.begin_epoch()
        for _ in range(self.pool.most_tasks - self._dispatcher.ledger.outstanding):
            self._issue_task()

    def _reset_sampler(self, loader: Any, early: Iterator[Any] | None, *, first_iter: bool) -> None:
        """Have torch draw what it draws when an epoch begins, and begin to iterate over the sampler."""
        index_sampler = self._index_sampler
        try:
            if early is not None:
                self._index_sampler = early  # then torch's iter() does not ask the sampler again
            super()._reset(loader, first_iter)
        except Exception as error:
            self._lifecycle.expect(error)  # the sampler's own
            raise
        finally:
            self._index_sampler = index_sampler
        if early is None:
            self._sampler_iter = index_arrays(index_sampler) or self._sampler_iter

    def _take_early(self, *, discard: bool) -> Iterator[Any] | None:
        """Begin an epoch whose first tasks were sent already; None if there are none, or of no use."""
        if self._next_epoch is None or not self._sent_early:
            return None
        ledger = self._dispatcher.ledger
        early = self._next_epoch.take(discard=discard or ledger.due() is not None)
        if early is None:
            self._counters.epochs_in_vain += 1
            return None
        self._counters.epochs_prefetched += 1
        ledger.epoch += 1
        self._present.epoch += 1
        self._sent = self._sent_early
        self.pool.trim()
        return early

    def set_epoch(self, epoch: int) -> None:
        """Have the datasets of persistent workers called with ``set_epoch(epoch)`` at the next epoch."""
        self._set_epoch = epoch

    def _issue_task(self) -> bool:
        """Send the next index batch to a worker; whether a task of this epoch was sent."""
        try:
            index_batch = next(self._sampler_iter)
        except StopIteration:
            self._issue_early_task()
            return False
        except Exception as error:
            self._lifecycle.expect(error)  # the sampler's own: as in torch, the next call goes on
            raise
        worker_id = self._schedule.choose()
        if worker_id is None:
            return False
        self._dispatcher.send(worker_id, self._present.epoch, self._sent, index_batch)
        self._sent += 1
        return True

    def _issue_early_task(self) -> None:
        """Send a task of the next epoch, if that may be begun already."""
        if self._next_epoch is None:
            return
        index_batch = self._next_epoch.draw()
        if index_batch is NOTHING:
            return
        if not self._sent_early:
            self._schedule.begin_epoch()
        worker_id = self._schedule.choose()
        assert worker_id is not None  # batches come in order
        self._dispatcher.send(worker_id, self._present.epoch + 1, self._sent_early, index_batch)
        self._sent_early += 1

    def _send_more(self) -> None:
        """After a batch was taken, send what may be sent."""
        ledger, free_workers = self._dispatcher.ledger, self._free_workers
        if ledger.outstanding < self.pool.most_tasks:
            self._issue_task()
        elif free_workers is not None:
            free_workers.note_return()
            while free_workers.may_refill() and self._issue_task_ahead():
                pass
        if self._growth is not None:
            self._growth.note_return()
            while ledger.outstanding < self.pool.most_tasks and self._issue_task():
                pass

    def _send_ahead(self, due: Task) -> None:
        """Give workers that have nothing to do further tasks, while the program waits for a slow batch."""
        free_workers = self._free_workers
        if free_workers is not None and free_workers.is_stalled(due):
            while free_workers.may_widen() and self._issue_task_ahead():
                pass

    def _issue_task_ahead(self) -> bool:
        """Send a task beyond those that the pool was made for, if the sampler has one."""
        sent = self._issue_task()
        self._counters.tasks_ahead += sent
        return sent

    # --- batches

    def __next__(self) -> Any:
        lifecycle = self._lifecycle
        lifecycle.refuse_reentry()
        try:
            lifecycle.enter()
            # torch's own __next__ opens a profiler range (10 us) and counts an IterableDataset's samples.
            if self._counts_samples or torch_private.profiler_enabled():
                batch = super().__next__()
            else:
                batch = self._next_data()
                self._num_yielded += 1
            lifecycle.leave()
            lifecycle.phase = Phase.IDLE  # last, by a plain assignment: see `Lifecycle.leave`
            return batch  # noqa: TRY300 - an interrupt before the return must be caught
        except BaseException as error:
            lifecycle.fail(error)
            # No local variable for an exception: it would refer to this frame, and so to itself.
            if self._is_led_to_by_close(error):
                raise self._closed_meanwhile() from error
            raise

    def _is_led_to_by_close(self, error: BaseException) -> bool:
        """Whether ``close()`` in another thread, or in a signal handler, has led to an exception."""
        if isinstance(error, LoaderClosed):
            return not main_thread().is_alive()
        kinds = (LoaderError, OSError, ValueError, LookupError, AssertionError)
        return self._crew.interrupted and isinstance(error, kinds)

    def _closed_meanwhile(self) -> BaseException:
        if not main_thread().is_alive():
            return SystemExit()  # in a daemon thread, while the interpreter ends
        return LoaderClosed(f"this iterator was closed: {self._crew.closed_because}")

    def _next_data(self) -> Any:
        """The next batch; torch's name for it, as its own ``__next__`` calls it."""
        if self._lifecycle.broken:
            self._abandon()
        if self._held_back:
            return self._held_back.pop()
        ledger = self._dispatcher.ledger
        while True:
            task = ledger.due()
            if task is not None and task.state is TaskState.ARRIVED:
                batch = self._return(task)
            elif ledger.arrived and not self._in_order:
                batch = self._return(next(iter(ledger.arrived.values())))
            elif task is None:
                break
            else:
                self._await(task)
                continue
            if batch is not LEFT_OUT:
                return batch
        raise self._end_epoch()

    def _end_epoch(self) -> StopIteration:
        if not self._persistent_workers:
            self._shutdown_workers()
        try:
            warn_of_bad_samples(self._counters, self._on_error)
        except Warning as error:  # by the program's filters
            self._lifecycle.expect(error)
            raise
        return self._lifecycle.expect(StopIteration())

    def _await(self, task: Task) -> None:
        """Take in what workers have said, or wait for it, until the batch of a task may be here."""
        self._check_open()
        turns, dispatcher = self._turns, self._dispatcher
        if turns is not None and not turns.is_active(task.worker_id):
            dispatcher.ledger.void(task)  # its worker's iterable dataset ended before it
            return
        if not dispatcher.receive_from(task.worker_id):
            self._send_ahead(task)
            dispatcher.receive(task.worker_id)
        while dispatcher.ended_streams:
            worker_id = dispatcher.ended_streams.pop()
            if turns is not None and turns.drop_out(worker_id):
                self._issue_task()

    def _return(self, task: Task) -> Any:
        """The batch of a task that has arrived, or ``LEFT_OUT``; raises the exception in its place."""
        self._check_open()
        dispatcher, answer = self._dispatcher, task.answer
        assert answer is not None
        anchor, header = dispatcher.take(task)
        dispatcher.ledger.finish(task)
        self._send_more()
        try:
            batch = self._unpack(answer, anchor, header)
        except Exception as error:
            self._lifecycle.expect(error)
            raise
        del anchor
        if dispatcher.warning and batch is not LEFT_OUT:
            self._warn(batch)
        return batch

    def _unpack(self, answer: Published, anchor: npt.NDArray[np.uint8], header: bytes) -> Any:
        """What a worker's answer holds for the program: a batch, or the exception in its place, raised."""
        batch = self._decoder.decode(anchor, header)
        if answer.failed:
            self._counters.failures += 1
            count(batch.bad_samples, self._counters)
            raise self._lifecycle.expect(restore(batch))
        if answer.reported:
            batch = take_report(batch, self._counters)
            if batch is LEFT_OUT:
                return batch
        self._counters.batches += 1
        if self._pin_memory:
            self._counters.pin_copies += 1
            batch = pin_batch(batch, self._pin_memory_device)
        return batch

    def _warn(self, batch: Any) -> None:
        """Give the warning; where the program's filters make it an error, the batch comes next."""
        dispatcher = self._dispatcher
        warning, dispatcher.warning = dispatcher.warning, ""
        self._held_back.append(batch)
        try:
            warnings.warn(warning, SpillWarning, stacklevel=level_of_the_program())
        except SpillWarning as error:
            self._lifecycle.expect(error)
            raise
        self._held_back.clear()

    # --- the end

    def _abandon(self) -> NoReturn:
        """Close after an exception that came between two lines; batches may have been lost by it."""
        self.close("an exception (Ctrl-C?) interrupted it in the middle of its work")
        self._check_open()
        raise AssertionError

    def _check_open(self) -> None:
        if not self._crew.workers:
            raise self._lifecycle.expect(
                LoaderClosed(
                    f"this iterator cannot go on: {self._crew.closed_because}. Call iter(loader) for a new "
                    "one."
                )
            )

    @property
    def closed(self) -> bool:
        """Whether the iterator cannot be used for another epoch."""
        return not self._crew.workers or self._lifecycle.broken

    def oldest_leases(self) -> tuple[str, ...]:
        """With ``SHMLOADER_DEBUG=1``, the batches that the program has held for longest; see `Inspection`."""
        inspection = self._dispatcher.inspection
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
            self._crew.interrupt()
            self._lifecycle.await_others()
        self._shutdown_workers()


def _stop(owner_pid: int, workers: Workers, pool: SlotPool) -> None:
    if os.getpid() == owner_pid:
        with HeldInterrupts():
            workers.interrupt()  # at the interpreter's end a daemon thread may be waiting for a batch
            workers.close()
            pool.close()
    else:  # a copy in a forked child: the workers and the memory are the parent's
        workers.leave_to_parent()


def _make_pool(loader: Any) -> SlotPool:
    """The slots of an iterator, within the memory budget that the loader was given or what the host has."""
    available_nbytes = memory_headroom().available_nbytes
    budget_nbytes = loader.memory_budget_nbytes
    num_workers = int(loader.num_workers)
    most_tasks = num_workers * int(loader.prefetch_factor)
    auto = isinstance(loader.num_workers, AutoCount) or isinstance(loader.prefetch_factor, AutoCount)
    if budget_nbytes is None and not auto:
        return SlotPool(MemfdSegment(), most_tasks, available_nbytes // 2, elastic=True, workers=num_workers)
    if budget_nbytes is None:
        budget_nbytes = available_nbytes // 2
    else:  # a plain number, since sums of NumPy's narrow ones overflow
        budget_nbytes = min(operator.index(budget_nbytes), available_nbytes)
    return SlotPool(MemfdSegment(), most_tasks, budget_nbytes)
