"""One pass over a loader with workers: batches in the sampler's order. Main process only.

`Scheduler` chooses who makes which batch, `Exchange` sends tasks and receives the answers, `PlaceTable` knows
which batch is next, and the iterator returns it.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from shmloader import interrupts, torch_private
from shmloader.codec import Decoder
from shmloader.errors import LoaderError, NotReady, SpillWarning, warn
from shmloader.exchange.exchange import Exchange
from shmloader.failures.bad_samples import LEFT_OUT, Report, ReportCounts
from shmloader.failures.exceptions import restore
from shmloader.indices.array_samplers import index_arrays
from shmloader.indices.epoch_prefetch import next_epoch_for
from shmloader.indices.samplers import GeneratorStates, generator_states
from shmloader.interrupts import BROKEN, IDLE, HeldInterrupts, Lifecycle
from shmloader.order.auto import Auto
from shmloader.order.scheduler import Scheduler
from shmloader.resume.passes import Pass
from shmloader.resume.states import States
from shmloader.settings import Settings
from shmloader.slots import Place, PlaceTable
from shmloader.slots.place import FREE, MAKING
from shmloader.statistics import Counters, Recorder
from shmloader.store_hooks import hooks
from shmloader.wire.records import REPORTED
from shmloader.wire.stream_records import StreamReport
from shmloader.without_waiting import WithoutWaiting
from shmloader.worker.epoch_settings import EpochCall, EpochSettings
from shmloader.workers import Workers, start_workers, stop_with_program, stop_workers

if TYPE_CHECKING:
    from shmloader.exchange.delivery import Delivery


class SlotIterator(torch_private.OwnOrder, WithoutWaiting):
    """Iterates over a loader whose workers collate into slots.

    Workers run until the epoch's end, or with ``persistent_workers`` until the iterator dies or is closed.
    Several threads may call ``next()``: each batch comes to one of them. `table` has the places.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        one_pass: Pass,
        counters: Counters,
        states: States,
        auto: Auto | None = None,
    ) -> None:
        super().__init__(loader)
        self._sampler_iter = iter(())  # torch asks the sampler twice; what came first would stay in memory
        settings = one_pass.settings
        for name in ("num_workers", "prefetch_factor"):
            if getattr(settings, name) <= 0:  # torch's words, up to the colon
                raise AssertionError(
                    f"{name} must be greater than 0 for MultiProcessingDataLoaderIter: "
                    f"loader.{name} is {getattr(loader, name)}, set it to 2, say"
                )
        self._in_order, self._on_error = settings.in_order, settings.on_error
        self._counters = counters
        self._decoder = Decoder()
        self._lifecycle = Lifecycle()
        self._recorder: Recorder | None = None  # of this epoch, if it is profiled
        self._waits = True  # whether the present call waits for its batch
        self._is_watched = False  # whether `fileno` was called
        self._calls: list[EpochCall] = []  # of ``set_epoch()``, not sent to workers yet
        # Calls that lead a changed dataset back to the present epoch, in a worker that replaces another.
        self._calls_back: list[EpochCall] = []
        self._states = states
        self._base_seed, epoch = one_pass.seeds(int(self._base_seed))
        device = settings.target
        self.table = PlaceTable.for_loader(settings, counters, epoch)
        workers: Workers | None = None
        try:
            workers = self._all_workers = self._start_workers(one_pass, auto)
            self._stop = functools.partial(stop_workers, os.getpid(), workers, self.table)
            stop_with_program(self)
            self._exchange = exchange = Exchange(
                self.table, workers, self._lifecycle, settings.worker_restarts, self._timeout
            )
            self._delivery = self._make_delivery(device)
            next_epoch = next_epoch_for(settings) if settings.prefetch_epochs else None
            self._scheduler = Scheduler(settings, exchange, auto, next_epoch)
            self._in_a_call(lambda: self._begin_epoch(one_pass, further=False))
            self._copies = hooks.watch_copies(loader, workers.processes, counters, workers.pickled_nbytes)
        except BaseException:
            with HeldInterrupts():
                if workers is not None:
                    workers.close("its first tasks could not be sent")
                self.table.close()
            raise

    def _start_workers(self, one_pass: Pass, auto: Auto | None) -> Workers:
        most_workers = self._num_workers if auto is None else auto.most_workers
        calls, seed = self._calls_back, int(self._base_seed)
        return start_workers(one_pass, self.table, self._dataset, most_workers, calls, seed)

    def _make_delivery(self, device: Any) -> Delivery | None:
        """Make the `Delivery` of pinned or device batches, after workers were forked: it initialises CUDA."""
        if device is None and not self._pin_memory:
            return None
        from shmloader.exchange.delivery import Delivery

        pins = self._pin_memory, self._pin_memory_device
        return Delivery(self._exchange, *pins, device, self._in_order)

    # --- epochs

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin a further epoch, with what is left of the last one void; torch's name for it."""
        super()._reset(loader)
        # The workers stay, whatever number the attribute has now.
        settings = replace(Settings.of(loader), num_workers=len(self._all_workers.workers))
        with self._states.begin(settings) as one_pass:
            self._in_a_call(lambda: self._begin_epoch(one_pass, further=True))

    def _in_a_call(self, work: Callable[[], None]) -> None:
        """Do what must not come between the lines of ``next()`` in another thread."""
        lifecycle = self._lifecycle
        try:
            if not lifecycle.enter():
                self.close()
            self._check_open()
            work()
            lifecycle.leave()
            lifecycle.phase = IDLE
        except BaseException as error:
            lifecycle.fail(error)
            if interrupts.is_led_to_by_close(error, self._all_workers.interrupted):
                raise interrupts.closed_meanwhile(self._all_workers.closed_because) from error
            raise

    def _begin_epoch(self, one_pass: Pass, *, further: bool) -> None:
        scheduler, num_workers = self._scheduler, len(self._all_workers.workers)
        is_undivided = one_pass.settings.is_undivided
        self._counters.begin_epoch(num_workers, starts=not further, is_undivided=is_undivided)
        self._recorder = self._counters.recorder
        self._exchange.measure(self._recorder is not None)
        if self._recorder is not None:
            self._recorder.begin_epoch()
        early = scheduler.take_early(discard=bool(self._calls)) if further else None
        batches = self._begin_order(one_pass, early, further=further)
        if early is not None:
            scheduler.go_on(batches)
            return
        if further:
            if self._delivery is not None:
                self._delivery.drop()
            if self._calls:
                self._all_workers.renew_datasets()
            settings = EpochSettings(self._calls)
            pickled = pickle.dumps(settings, 5)
            self._calls = []  # only now: if the sampler raised before, the next attempt has to send them
            self._calls_back.clear()
            self._exchange.begin_epoch(pickled)
        first_worker = 0 if self._stream is None else self._stream.first_worker
        scheduler.begin_epoch(batches, self._progress.done, first_worker)

    def _begin_order(self, one_pass: Pass, early: Iterator[Any] | None, *, further: bool) -> Iterator[Any]:
        """Make torch's draws at the beginning of an epoch; returns its index batches."""
        sampler, generator = self._index_sampler, one_pass.settings.generator
        with self._lifecycle.expects(Exception):  # the sampler's, or that a state cannot be resumed from
            if early is None:
                before: GeneratorStates | None = generator_states(sampler, generator)
                sampler_iter = iter(sampler)
                sampler_iter = index_arrays(sampler) or sampler_iter
            else:
                before, sampler_iter = self._scheduler.states_before_early, early
            seeds = int(self._base_seed), self.table.epoch + further
            batches, self._progress = one_pass.begin(sampler_iter, before, seeds)
        self._stream = one_pass.stream
        return batches if self._recorder is None else self._recorder.time_sampler(batches)

    def await_replacements(self) -> None:
        """Wait until no worker is handing over to a new one, which gets the dataset as it is now."""
        if self._exchange.handed_over and not self.closed:
            self._in_a_call(self._exchange.await_renewed)

    def set_epoch(self, call: EpochCall, before: EpochCall | None) -> None:
        """Have persistent workers make a call of ``set_epoch()`` when the next epoch begins.

        The program's dataset has heard it already, and ``before`` was its last call until then.
        """
        if self._exchange.note_told_ahead(can_tell_back=before is not None) and before is not None:
            self._calls_back.append(before)
        if self._persistent_workers:  # others get the dataset as it is then
            self._calls.append(call)

    # --- batches

    @torch_private.never_compiled
    def __next__(self, waits: bool = True) -> Any:
        lifecycle, progress = self._lifecycle, None
        try:
            if not lifecycle.enter(waits):  # an exception came between two lines, and may have lost batches
                self.close()
                self._check_open()
            self._waits = waits
            self._done_before = self._progress.done
            progress = self._progress  # from here on an interrupt takes back what this call has taken
            # torch's own __next__ opens a profiler range (10 us), and warns of a stream that is longer than
            # len(loader) has said.
            len_called: Any = self._IterableDataset_len_called
            if len_called is not None or torch_private.profiler_enabled():
                with lifecycle.expects(Warning):
                    batch = super().__next__()
            else:
                batch = self._next_data()
                self._num_yielded += 1
            if self._is_watched:  # another thread or task may wait, and the next batch be here
                self._all_workers.tell()  # before another call may clear it, which then waits
            lifecycle.leave()
            lifecycle.phase = IDLE  # last, by a plain assignment: see `Lifecycle`
            return batch  # noqa: TRY300 - an interrupt before the return must be caught
        except BaseException as error:
            if progress is not None and not lifecycle.is_expected(error):
                progress.take_back(self._done_before)
            lifecycle.fail(error)
            if self._is_watched and not isinstance(error, NotReady):
                self._all_workers.tell()
            # No other variable may hold an exception: it would refer to this frame, and so to itself.
            if interrupts.is_led_to_by_close(error, self._all_workers.interrupted):
                raise interrupts.closed_meanwhile(self._all_workers.closed_because) from error
            raise

    def fileno(self) -> int:
        """A descriptor for ``select``: call `try_next` until it raises `NotReady`, then wait for this.

        It is readable when a worker has sent something or has ended, after a call that took a batch (another
        thread may wait for the next one), and for good once the iterator is closed. It stays the same, and
        open, as long as the iterator lives. Only wait for it.
        """
        self._is_watched = True
        return self._all_workers.fileno()

    def _next_data(self) -> Any:
        """The next batch; torch's name for it, as its own ``__next__`` calls it."""
        delivery, table, recorder = self._delivery, self.table, self._recorder
        if recorder is not None:
            self._note_asked(recorder)
        if delivery is not None and delivery.moves and delivery.is_captured():
            raise self._lifecycle.expect(delivery.capture_error())  # no local variable: see `__next__`
        if table.warning or self._counters.last_next_ns >= self._copies.due_ns:
            self._warn()
        while (place := table.due()) is not None:
            if not self._all_workers.workers:
                self._check_open()
            if place.state is MAKING:
                if self._in_order or not table.arrived:
                    self._await(place)
                    continue  # the place may be another task's by now
                place = next(iter(table.arrived.values()))
            made_ns = place.made_ns
            batch = self._return(place)
            if not self._num_yielded:
                self._counters.note_first_batch(made_ns)
            if batch is not LEFT_OUT:
                if delivery is not None and self._exchange.ended_streams:  # of which it has read
                    self._end_streams()
                self._counters.note_return()
                if recorder is not None:
                    recorder.end_next(self._counters.wait_for_workers_ns, table.kept)
                return batch
            self._done_before = self._progress.done
        raise self._end_epoch()

    def _note_asked(self, recorder: Recorder) -> None:
        try:  # `expects` takes 1.5 us, a twentieth of a small batch
            recorder.begin_next(self._counters.wait_for_workers_ns)
        except Exception as error:  # of the program's callback; nothing is taken yet
            self._lifecycle.expect(error)
            raise

    def _end_epoch(self) -> StopIteration:
        with self._lifecycle.expects(LoaderError, Warning):  # that ranks differ; warnings made errors
            if self._stream is not None:
                self._stream.end_epoch(self._progress)
            self._copies.measure(self._all_workers.processes, self._counters.largest_batch_nbytes)
            self._progress.end(self._scheduler.states_before_early)
            if not self._persistent_workers:
                self._shutdown_workers()
            self._copies.warn()
            self._counters.of(ReportCounts).warn(self._on_error)
        return self._lifecycle.expect(StopIteration())

    def _await(self, place: Place) -> None:
        """Receive records from workers, or wait for them, until the batch of a place may be here."""
        scheduler, exchange = self._scheduler, self._exchange
        if self._stream is not None and not scheduler.turns.is_active(place.worker_id):
            self.table.set_void(place)  # its worker's iterable dataset ended before it
            return
        waits = self._waits
        if not (waits and exchange.receive_from(place.worker_id)):
            if scheduler.free_workers is not None:
                scheduler.note_wait(place)
            exchange.receive(place.worker_id, waits=waits)
        if exchange.ended_streams:
            self._end_streams()

    def _end_streams(self) -> None:
        """Have other workers get the tasks of those whose iterable dataset is exhausted."""
        while self._exchange.ended_streams:
            self._scheduler.drop_out(self._exchange.ended_streams.pop())

    def _return(self, place: Place) -> Any:
        """The batch of a place where it has arrived, or ``LEFT_OUT``; raises the exception in its place."""
        # From `take` on, the place may be another task's.
        flags, position, worker_id = place.flags, place.position, place.worker_id
        delivery, finish_copy = self._delivery, None
        try:
            if delivery is not None and delivery.copies_ahead:
                anchor, header, finish_copy = delivery.take(place)
            else:
                anchor, header = self.table.take(place)
        except MemoryError as error:  # the next call takes it, if the program has let go of others
            self._lifecycle.expect(error)
            self._note_if_lost(place, position, worker_id)
            raise
        report: StreamReport | None = None
        try:
            self._scheduler.send_more()
        except Exception:  # the sampler's own is in the batch's place, as in torch
            self._note_done(position, worker_id, report, returned=False)
            raise
        try:
            if delivery is not None and delivery.copies_ahead:
                finish_copy = finish_copy or delivery.begin(place, flags, anchor, header)
            batch = self._decoder.decode(anchor, header) if finish_copy is None else finish_copy()
            del anchor
            if flags & REPORTED:
                report = batch.stream
                batch = self._take_report(batch)
            if delivery is not None and finish_copy is None and batch is not LEFT_OUT:
                batch = delivery.deliver(batch, place)
        except BaseException as error:
            if self._lifecycle.is_from_outside(error):
                raise
            self._note_done(position, worker_id, report, returned=False)  # the next call continues after it
            if isinstance(error, StopIteration):  # it ends the program's loop
                self._progress.end(self._scheduler.states_before_early)
            self._lifecycle.expect(error)
            raise
        if self._stream is None and batch is not LEFT_OUT:
            self._progress.take(position)  # as `_note_done` does it, without a call for each batch
        else:
            self._note_done(position, worker_id, report, returned=batch is not LEFT_OUT)
        return batch

    def _take_report(self, report: Report) -> Any:
        """The batch of a report, or ``LEFT_OUT``; raises the exception in its place."""
        batch = self._counters.of(ReportCounts).take(report, self._counters.batches)
        if report.error:
            self._counters.add("failures")
            raise self._lifecycle.expect(restore(report.error))
        return batch

    def _note_if_lost(self, place: Place, position: int, worker_id: int) -> None:
        """Note that a batch for which there was no memory is done, if no later call can have it either."""
        if place.state is FREE:
            self._note_done(position, worker_id, None, returned=False)
            self._scheduler.send_more()

    def _note_done(
        self, position: int, worker_id: int, report: StreamReport | None, *, returned: bool
    ) -> None:
        """Note that the program has a batch, or an exception in its place, or that the batch is left out."""
        if self._stream is None:
            self._progress.take(position, returned=returned)
        else:
            self._stream.take(self._progress, worker_id, report, returned=returned)

    def _warn(self) -> None:
        """Give a warning that is due; no batch is lost if the program's filters make it an error."""
        with self._lifecycle.expects(Warning):
            if self.table.warning:
                warn(self.table.take_warning(), SpillWarning)
            else:
                self._copies.look(self._all_workers.processes, self._counters.largest_batch_nbytes)
                self._copies.warn()

    def __repr__(self) -> str:
        own = vars(self)  # `__init__` may have raised
        workers = own["_all_workers"].workers if "_all_workers" in own else ()
        returned, state = own.get("_num_yielded", 0), f"{len(workers)} workers" if workers else "closed"
        return f"<{type(self).__name__}: {returned} batches of this epoch returned, {state}>"

    # --- the end

    def _check_open(self) -> None:
        if not self._all_workers.workers:
            raise self._lifecycle.expect(interrupts.cannot_go_on(self._all_workers.closed_because))

    @property
    def closed(self) -> bool:
        """Whether the iterator cannot be used for another epoch."""
        return not self._all_workers.workers or self._lifecycle.phase is BROKEN

    @property
    def _workers(self) -> list[Any]:
        """The processes, under the name at which Ultralytics looks for them in torch's iterator."""
        return self._all_workers.processes

    def _shutdown_workers(self) -> None:
        """Stop the workers; named as in torch's iterator, where frameworks call it."""
        if self._delivery is not None:
            self._delivery.close()
        self.__del__()

    # NOTE: not `weakref.finalize`, which would hold the workers, and they hold the dataset and `collate_fn`.
    # If one of those led to the iterator, the garbage collector could never free them.
    @torch_private.never_compiled
    def __del__(self) -> None:
        if "_stop" in vars(self):  # `__init__` may have raised; at the interpreter's end names may be gone
            with HeldInterrupts():  # `_stop` runs once, and to its end
                vars(self).pop("_stop", lambda: None)()

    def close(self, because: str = "close() was called") -> None:
        """Stop the workers and free the slots; later calls of ``next()`` report the reason."""
        is_broken = self._lifecycle.phase is BROKEN
        self._all_workers.close_for(self._lifecycle.why_broken if is_broken else because)
        if self._all_workers.workers:
            self._all_workers.interrupt()
            self._lifecycle.await_others()
        self._shutdown_workers()
        self._scheduler.discard_early()
