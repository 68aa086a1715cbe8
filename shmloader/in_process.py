"""One pass over a loader without workers: torch's single-process loading, with our fetcher."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
import weakref
from typing import Any

from torch.utils.data import DataLoader

from shmloader import torch_private
from shmloader.failures.bad_samples import LEFT_OUT, Report, ReportCounts
from shmloader.failures.exceptions import drop_notes
from shmloader.indices.array_samplers import index_arrays, index_runs
from shmloader.indices.packed_indices import Run, pack_index_batch
from shmloader.indices.samplers import epoch_of, generator_states, states_if_drawn
from shmloader.interrupts import cannot_go_on
from shmloader.resume.passes import Pass
from shmloader.resume.progress import Done
from shmloader.statistics import Counters
from shmloader.wire.records import unpack_answer
from shmloader.wire.stream_records import StreamReport
from shmloader.without_waiting import AlwaysHere
from shmloader.worker.dataset_setup import DatasetSetup, info_without_workers
from shmloader.worker.fetcher import FetchRules
from shmloader.worker.map_fetchers import before_each_sample, make_fetcher
from shmloader.worker.probe import BatchProbe
from shmloader.worker.random_state import Generators, SampleSeeds, worker_seeds


class InProcessIterator(torch_private.SingleProcessIterator, AlwaysHere):
    """Iterates over a loader with ``num_workers=0``; like torch's it refuses a timeout (`AssertionError`)."""

    _closed_because = ""

    def __init__(self, loader: DataLoader[Any], one_pass: Pass, counters: Counters) -> None:
        # Not torch's own constructor: its fetcher would begin to iterate over the dataset.
        settings = one_pass.settings
        self._read_states = functools.partial(generator_states, settings.index_sampler, settings.generator)
        before = self._read_states()
        torch_private.BaseIterator.__init__(self, loader)
        drawn = states_if_drawn(self._index_sampler, settings.generator, before)
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")  # torch's words
        device = settings.target
        self._pins = self._pin_memory or (device is not None and device.type != "mps")
        if device is not None:
            from shmloader.device import numbered

            device = numbered(device)
        self._device = device
        self._counters = counters
        counters.begin_epoch(is_undivided=settings.is_undivided)
        self._on_error: str = settings.on_error
        self._calls: list[None] = []  # that make a batch now
        self._stream = one_pass.stream
        self._report: StreamReport | None = None  # of the batch that was fetched last
        self._noted: tuple[int, Done] | None = None  # the thread that noted a batch, and `done` before that
        self._interrupted = False  # the call before: what it had drawn of a stream is in no batch
        rules = FetchRules.of(settings, None if self._stream is None else self._stream.rules)
        self._recorder = recorder = counters.recorder
        self._probe = None if recorder is None else BatchProbe()
        if recorder is not None:
            recorder.begin_epoch()
        self._seeds: SampleSeeds | None = None
        dataset = self._dataset
        self._base_seed, self._epoch = seeds = one_pass.seeds(int(self._base_seed))
        if settings.seeds_samples and not rules.iterable:
            self._seeds = SampleSeeds(Generators(worker_seeds(seeds[0], 0)), seeds[0], in_thread=False)
            dataset = before_each_sample(dataset, rules, self._seeds.seed_next)
        self._setup = DatasetSetup()
        _open.add(self._setup)
        self._setup.begin(info_without_workers(self._dataset))
        self._dataset_fetcher = make_fetcher(dataset, rules)
        self._dataset_fetcher.measure(self._probe)
        sampler = self._index_sampler
        sampler_iter = index_runs(sampler) or index_arrays(sampler) or self._sampler_iter
        self._sampler_iter, self._progress = one_pass.begin(sampler_iter, drawn, seeds)
        if recorder is not None:
            self._sampler_iter = recorder.time_sampler(self._sampler_iter)
        self._behind = set(self._progress.behind)
        self._position = self._progress.taken - 1  # of the last batch that was asked for

    def close(self, because: str) -> None:
        """End the pass; while calls of other threads make a batch, the last of them does that."""
        self._closed_because = because  # before the look: calls look in the other order
        if not self._calls:
            self._end()

    def _end(self) -> None:
        # First the stream ends: its ``finally`` blocks may need what was set up. `__init__` may have raised.
        own = vars(self)
        own.pop("_dataset_fetcher", None)
        if "_setup" in own:
            self._setup.end()

    def __del__(self) -> None:
        self._end()

    def __repr__(self) -> str:
        returned = vars(self).get("_num_yielded", 0)  # `__init__` may have raised
        return f"<{type(self).__name__}: {returned} batches of this epoch returned, no workers>"

    @torch_private.never_compiled
    def __next__(self, waits: bool = True) -> Any:
        self._noted = None
        try:
            # torch's own opens a profiler range, which takes longer than a small batch, and warns of a stream
            # that is longer than len(loader) has said.
            len_called: Any = self._IterableDataset_len_called
            if len_called is not None or torch_private.profiler_enabled():
                return super().__next__()
            batch = self._next_data()
            self._num_yielded += 1
            return batch  # noqa: TRY300 - an interrupt before the return must be caught
        except BaseException as error:
            if not isinstance(error, Exception):
                self._take_back()
            raise

    def _take_back(self) -> None:
        """Go back to before the batch that this call has noted: after Ctrl-C the program does not get it."""
        noted = self._noted
        if noted is not None and noted[0] == threading.get_ident():  # and no other thread has noted one since
            self._progress.take_back(noted[1])
        self._interrupted = True

    def _next_index(self) -> Any:
        progress = self._progress
        if progress.before is None:
            progress.begin_order(self._read_states(), epoch_of(self._index_sampler))
        while True:
            index_batch = next(self._sampler_iter)
            self._position += 1
            if self._position not in self._behind:
                return index_batch

    def _next_data(self) -> Any:
        self._calls.append(None)
        try:
            if self._closed_because:  # as with workers, an epoch that is over stays so
                raise StopIteration if self._progress.finished else cannot_go_on(self._closed_because)
            return self._make_next()
        finally:
            self._calls.pop()
            if self._closed_because and not self._calls:
                self._end()

    def _make_next(self) -> Any:
        began_ns = time.perf_counter_ns()
        if self._recorder is not None:
            self._recorder.begin_next(0)
        captured = (self._pins or self._device is not None) and self._is_captured()
        while True:
            try:
                index_batch = self._next_index()
                batch = self._measured(index_batch) if self._recorder else self._fetch(index_batch)
            except StopIteration:
                if self._stream is not None:
                    self._stream.end_epoch(self._progress)
                self._progress.end()
                self._setup.end()
                self._counters.of(ReportCounts).warn(self._on_error)
                raise
            except BaseException as error:
                drop_notes(error, began_ns)
                raise
            self._note_taken(returned=batch is not LEFT_OUT)
            if batch is not LEFT_OUT:
                break
        if self._pins and not captured:
            self._counters.add("pin_copies")
            batch = torch_private.pin_memory(batch, self._pin_memory_device)
        if self._device is not None:
            from shmloader.device import to_device

            batch = to_device(batch, self._device)
        self._counters.note_made(began_ns)
        if self._recorder is not None:
            self._recorder.end_next(0, 0)
        return batch

    def _is_captured(self) -> bool:
        """Whether the current stream captures a graph: then batches are not pinned, or not made."""
        from shmloader.device import capture_error, is_capturing

        captured = is_capturing()
        if captured and self._device is not None:
            raise capture_error(self._device)
        return captured

    def _measured(self, index_batch: Any) -> Any:
        """As `_fetch`, while the loader is profiled."""
        recorder, probe = self._recorder, self._probe
        assert recorder is not None
        assert probe is not None
        probe.begin(time.perf_counter_ns(), 0)
        batch = self._fetch(index_batch)
        times = probe.end(self._position, 0, 0, 0)
        if times:
            indices = index_batch.tolist() if type(index_batch) is Run else index_batch
            recorder.note_times(0, unpack_answer(times), pack_index_batch(indices))
        return batch

    def _fetch(self, index_batch: Any) -> Any:
        """A batch, or ``LEFT_OUT``."""
        self._report = None
        try:
            if self._seeds is None:
                batch = self._dataset_fetcher.fetch(index_batch)
            else:
                with self._seeds.as_in_a_worker(self._epoch, self._position):
                    batch = self._dataset_fetcher.fetch(index_batch)
        except StopIteration:
            raise
        except BaseException as error:
            self._report = self._dataset_fetcher.place()
            if isinstance(error, Exception):
                self._note_taken(returned=False)
                self._interrupted = False
            self._counters.add("failures")
            told = Report(bad_samples=self._dataset_fetcher.take_bad_samples())
            self._counters.of(ReportCounts).take(told, self._counters.batches)
            raise
        if type(batch) is not Report:
            if self._interrupted:
                self._report = self._dataset_fetcher.place()
            self._interrupted = False
            return batch
        self._report = batch.stream
        return self._counters.of(ReportCounts).take(batch, self._counters.batches)

    def _note_taken(self, *, returned: bool) -> None:
        self._noted = threading.get_ident(), self._progress.done
        if self._stream is not None:
            self._stream.take(self._progress, 0, self._report, returned=returned)
        elif self._progress.done == (self._position,):
            self._progress.take(self._position, returned=returned)
        else:  # with this one, those before it whose calls were interrupted
            for position in range(self._progress.taken, self._position + 1):
                if position not in self._behind:
                    self._progress.take(position, returned=returned and position == self._position)


_open: weakref.WeakSet[DatasetSetup] = weakref.WeakSet()
"""Setups of passes that live. A pass ends its own as it dies; `weakref.finalize` would keep its dataset."""


@atexit.register
def _end_with_program() -> None:
    for setup in list(_open):
        try:
            setup.end()
        except BaseException:  # noqa: BLE001 - Ctrl-C may leave out no other one
            sys.excepthook(*sys.exc_info())
