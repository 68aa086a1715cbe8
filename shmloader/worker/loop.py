"""The worker's loop. Runs in the worker process or thread.

It takes one task at a time: read a record, fetch samples, collate them into the granted slot, publish. A
worker ends when its link is closed. A worker process also ends when the main process dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmloader import torch_private
from shmloader.codec import Encoded, Encoder
from shmloader.codec.slot_allocator import SlotAllocator, set_current_allocator
from shmloader.failures.bad_samples import Report
from shmloader.failures.exceptions import capture, drop_notes, forget_frames
from shmloader.indices.packed_indices import unpack_index_batch
from shmloader.memory import Segment
from shmloader.messages import shown
from shmloader.wire import records as wire
from shmloader.wire.stream_records import NOTHING_DRAWN
from shmloader.worker.collate import install_slot_collate, is_own
from shmloader.worker.dataset_setup import DatasetSetup
from shmloader.worker.epoch_settings import EpochCall, EpochSettings, owners_in
from shmloader.worker.fetcher import Fetcher, FetchRules
from shmloader.worker.handover import Handover
from shmloader.worker.heap import WarmHeap
from shmloader.worker.links import Link
from shmloader.worker.map_fetchers import around_each_batch, before_each_sample, make_fetcher
from shmloader.worker.placement import Placement
from shmloader.worker.probe import BatchProbe
from shmloader.worker.random_state import Generators, SampleSeeds, worker_seeds

_PIECE_NBYTES = 1 << 20, 1 << 16  # the size to which a slot is grown for pieces, or less if the host has less


@dataclass(frozen=True)
class WorkerArguments:
    """The arguments of a worker, besides its link; they cross the process boundary once."""

    worker_id: int  # 0 to ``num_workers - 1``
    num_workers: int  # workers of this iterator
    segment: Segment  # the iterator's shared memory, to attach to
    dataset: Any
    rules: FetchRules
    base_seed: int
    # Calls of ``set_epoch()`` that a process makes first: it replaces another, and its dataset has already
    # heard of the next epoch.
    calls: list[EpochCall]
    init_fn: Callable[[int], None] | None  # the user's ``worker_init_fn``, called after seeding
    seeds_samples: bool  # whether the generators are seeded for each sample (``dispatch="dynamic"``)
    places: bool  # whether results of torch's calls are made in the slot
    max_nbytes: int | None = None  # of private memory, beyond which the worker is replaced


class Loop:
    """One worker: its state from task to task, and what it does with each."""

    def __init__(self, arguments: WorkerArguments, link: Link, heap: WarmHeap | None = None) -> None:
        in_thread = link.in_thread
        self._arguments = arguments
        self._heap = heap
        self._link = link
        self._in_thread = in_thread
        self._allocator = SlotAllocator(arguments.segment)
        self._encoder = Encoder(self._allocator)
        collate_fn = install_slot_collate(arguments.rules.collate_fn, in_thread=in_thread)
        self._placement = Placement(self._allocator, is_on=arguments.places and not in_thread)
        if is_own(collate_fn):
            collate_fn = self._placement.around(collate_fn)
        self._rules = arguments.rules._replace(collate_fn=collate_fn, in_worker=True)
        self._probe: BatchProbe | None = None
        self._dataset = arguments.dataset
        self._owners: list[Any] = []  # of the dataset's ``set_epoch()``, once they have been looked for
        self._setup = DatasetSetup()
        self._fetcher: Fetcher | None = None
        self._start_error: BaseException | None = None
        self._changeover_error: BaseException | None = None  # for good: further draws would be wrong
        seeds = worker_seeds(arguments.base_seed, arguments.worker_id)
        self._seed, self._rng = seeds.torch_seed, Generators(seeds)
        self._seeds: SampleSeeds | None = None
        if arguments.seeds_samples:
            self._seeds = SampleSeeds(self._rng, arguments.base_seed, in_thread=in_thread)
        limit = arguments.max_nbytes
        self._handover = None if limit is None else Handover(limit, self._rng, heap)
        self._is_over = False  # another worker goes on
        self._ended = False  # the iterable dataset is exhausted in this epoch
        self._pid = os.getpid()
        self._place = f"thread {threading.current_thread().name!r}" if in_thread else f"pid {self._pid}"
        self._wait_ns = self._received_ns = 0
        self._later: deque[wire.Request] = deque()
        self._settings = bytearray()  # of the coming epoch, as far as they have arrived

    def run(self) -> None:
        """Start, and answer tasks until the main process closes the link."""
        try:
            with contextlib.suppress(BrokenPipeError):  # nobody waits for an answer
                self._start()
                set_current_allocator(self._allocator)
                while not self._is_over:
                    self._serve()
        finally:
            set_current_allocator(None)
            # A reference cycle through the fetcher would keep a thread's dataset until the next garbage
            # collection.
            self._fetcher = None
            self._setup.end()  # after the stream, whose ``finally`` blocks may need what was set up
            self._allocator.close()

    def _start(self) -> None:
        """Start as torch's worker does between seeding and the first task, in the same order."""
        arguments = self._arguments
        self._info = info = torch_private.WorkerInfo(
            id=arguments.worker_id,
            num_workers=arguments.num_workers,
            seed=self._seed,
            dataset=self._dataset,
            rng=self._rng,
            worker_method="thread" if self._in_thread else "multiprocessing",
        )
        torch_private.set_worker_info(info, in_thread=self._in_thread)
        try:
            if arguments.calls and not self._in_thread:
                EpochSettings(arguments.calls).make_calls(owners_in(self._dataset))
            if arguments.init_fn is not None:
                arguments.init_fn(arguments.worker_id)
            self._setup.begin(info)  # after it, since it may change the dataset
            self._fetcher = self._make_fetcher()
        except BaseException as error:  # noqa: BLE001 - raised in the main process, with the first batch
            self._start_error, self._fetcher = error, None  # nothing of the last epoch may come in this one

    def _measure(self, request: wire.Measure) -> None:
        """Measure the batches from now on, or no longer."""
        self._probe = BatchProbe() if request.is_on else None
        if self._fetcher is not None:
            self._fetcher.measure(self._probe)

    def _make_fetcher(self) -> Fetcher:
        dataset, rules = self._dataset, self._rules
        if self._seeds is not None:
            dataset = before_each_sample(dataset, rules, self._seeds.seed_next)
        if self._link.in_thread:
            dataset = before_each_sample(dataset, rules, self._link.end_if_closed)
        dataset = around_each_batch(dataset, rules, self._placement)
        fetcher = make_fetcher(dataset, rules, self._arguments.worker_id, self._arguments.num_workers)
        fetcher.measure(self._probe)
        return fetcher

    def _serve(self) -> None:
        """Answer one request."""
        if self._later:
            request, self._wait_ns = self._later.popleft(), 0
            self._received_ns = time.perf_counter_ns()
        else:
            request = wire.unpack_request(self._link.receive())
            self._wait_ns, self._received_ns = self._link.wait_ns, self._link.received_ns
        if type(request) is wire.MakeBatch:
            if self._probe is not None:
                self._probe.begin(self._received_ns, self._encoder.copied_nbytes)
            self._work(request)
        elif type(request) is wire.BeginEpoch:
            self._begin_epoch(request)
        elif type(request) is wire.Measure:
            self._measure(request)
        elif self._handover is not None:
            self._change_over(request, self._handover)

    def _change_over(self, request: wire.Request, handover: Handover) -> None:
        """Hand over to another worker, or take over from one; a failure is raised with each further batch."""
        try:
            if type(request) is wire.TakeOver:
                handover.receive(self._dataset, *request)
                self._changeover_error = self._start_error  # which the next epoch's beginning would drop
            elif type(request) is wire.HandOver:
                state = handover.pack(self._dataset, self._arguments.rules.collate_fn)
                for records in wire.handed_over(state, handover.nbytes):
                    self._link.send(records)
                self._is_over = True
        except BrokenPipeError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the main process, with the next batch
            self._changeover_error = error
            if type(request) is wire.HandOver:  # the main process waits for it
                self._link.send(wire.pack_handed_over(0, 0, 0, b""))

    def _begin_epoch(self, request: wire.BeginEpoch) -> None:
        """Begin a new epoch, once all settings are here, with the same dataset object, as torch does."""
        self._settings[request.begin :] = request.piece
        if len(self._settings) < request.total_nbytes:
            return
        if not request.total_nbytes:  # this worker was started with the settings
            self._link.send(wire.pack_epoch_begun(request.epoch))
            return
        if self._heap is not None:
            self._heap.trim_if_short()
        if self._handover is not None:
            self._handover.begin_epoch()
        self._ended, self._start_error = False, None
        self._rules = self._rules._replace(stream=self._rules.stream.from_the_beginning())
        try:
            settings: EpochSettings = pickle.loads(self._settings)
            if settings.calls and self._in_thread:
                self._setup.end()
                self._dataset = self._link.dataset
                self._start()
                return
            if settings.calls:
                self._owners = self._owners or owners_in(self._dataset)
                settings.make_calls(self._owners)
            self._setup.begin(self._info)  # again, if it has raised in the last epoch
            self._fetcher = self._make_fetcher()
        except BaseException as error:  # noqa: BLE001 - raised in the main process, with the first batch
            self._start_error, self._fetcher = error, None

    def _work(self, task: wire.MakeBatch) -> None:
        """Make one batch, or an exception in its place, and publish it."""
        allocator = self._allocator
        index_batch: Any = None
        try:
            allocator.begin(task.slot, task.slot_nbytes, task.limit_nbytes, task.hint_nbytes)
            payload = task.payload
            if task.payload_nbytes > wire.INLINE_NBYTES:
                payload = allocator.read(task.payload_nbytes)
            index_batch = unpack_index_batch(payload, task.payload_nbytes)
            if self._seeds is not None:
                self._seeds.begin(task.epoch, task.position)
            made = self._make_and_encode(index_batch)
            if made is None:
                allocator.release()
                self._link.send(wire.pack_stream_ended(task.seq, allocator.nbytes))
                return
            encoded, flags = made
        except BaseException as error:
            if os.getpid() != self._pid:
                raise  # a process that the user's code forked is no worker: the exception ends it
            self._link.end_if_closed()
            if index_batch is None:  # its slot could not be mapped, say
                with contextlib.suppress(Exception):
                    index_batch = unpack_index_batch(task.payload, task.payload_nbytes)
            report = self._report_on(error, index_batch)
            flags = wire.REPORTED | wire.DETACHED * allocator.restart()
            encoded = self._encoder.encode(report)
        self._publish(task, encoded, flags)

    def _make_and_encode(self, index_batch: Any) -> tuple[Encoded, int] | None:
        """Make a batch, and put it into the slot; returns the flags of its `Published` too.

        None if the stream has ended. This frame alone has the batch, and with it views of the slot.
        """
        batch = self._make(index_batch)
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a process that the dataset forked has come back from it, and ends here: its parent makes "
                "the batch. End it with os._exit()"
            )
        if self._ended:
            return None
        if self._probe is not None:
            self._probe.note_made()
        leaves: list[tuple[int, int]] | None = [] if self._placement.is_on else None
        # Objects in the batch that pickle themselves may allocate in the slot meanwhile.
        encoded = self._encoder.encode(batch, leaves)
        if leaves is not None:
            self._placement.settle(leaves, encoded.header_end)
        flags = wire.REPORTED * (type(batch) is Report)
        handover = self._handover
        if handover is not None and handover.is_due(self._dataset, self._arguments.rules.collate_fn):
            flags |= wire.FULL
        return encoded, flags

    def _publish(self, task: wire.MakeBatch, encoded: Encoded, flags: int) -> None:
        """Report a batch that is complete in the slot; one that does not fit in it is sent in pieces."""
        allocator = self._allocator
        if encoded.spilled is not None:
            # The pieces are written over what the user's code may keep.
            flags |= wire.SPILLED | wire.DETACHED * allocator.restart()
            self._send_pieces(task, encoded.spilled)
        if allocator.release():
            flags |= wire.DETACHED
            self._placement.note_kept()
        begin, end = encoded.header_begin, encoded.header_end
        if self._heap is not None and end > self._heap.enough_nbytes:
            self._heap.note_batch(end)
        made_ns = time.perf_counter_ns() - self._received_ns
        answer = wire.pack_published(task.seq, allocator.nbytes, begin, end, self._wait_ns, made_ns, flags)
        if self._probe is not None:
            copied = self._encoder.copied_nbytes
            answer = self._probe.end(task.seq, self._wait_ns, copied, end - begin) + answer
        self._link.send(answer)

    def _make(self, index_batch: Any) -> Any:
        """Fetch and collate, allocating in the slot; sets ``_ended`` instead of returning a batch."""
        if self._changeover_error is not None:
            raise self._changeover_error
        if self._start_error is not None:
            error, self._start_error = self._start_error, None
            raise error
        if self._ended:
            return None
        if self._fetcher is None:
            raise RuntimeError("this worker's dataset could not be started; its first batch says why")
        try:
            batch = self._fetcher.fetch(index_batch)
        except StopIteration:
            if not self._rules.iterable:
                raise
            self._ended = True
            return None
        except BaseException as error:
            drop_notes(error, self._received_ns)
            raise
        return self._placement.with_news(batch) if self._placement.has_news else batch

    def _report_on(self, error: BaseException, index_batch: Any) -> Report:
        """The record that goes in place of a batch whose making raised."""
        name = f"shmloader worker {self._arguments.worker_id} ({self._place})"
        where = f"Raised in {name}, while it made the batch of indices {shown(index_batch)}"
        self._placement.drop()
        report, fetcher = Report(error=capture(error, where), stream=NOTHING_DRAWN), self._fetcher
        if fetcher is not None:
            report = report._replace(bad_samples=fetcher.take_bad_samples(), stream=fetcher.place())
        forget_frames(error)  # they hold the samples, and leaves in the slot
        return report

    def _send_pieces(self, task: wire.MakeBatch, spilled: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Send a batch that is larger than its slot: piece by piece, through the slot."""
        allocator = self._allocator
        for most_nbytes in _PIECE_NBYTES:
            if allocator.ensure(min(allocator.limit_nbytes, most_nbytes, len(spilled))) is not None:
                break
        view = allocator.view()
        for begin in range(0, len(spilled), len(view)):
            piece = spilled[begin : begin + len(view)]
            view[: len(piece)] = piece.data
            self._link.send(wire.pack_piece_ready(task.seq, allocator.nbytes, len(spilled), len(piece)))
            while type(request := wire.unpack_request(self._link.receive())) is not wire.SendNextPiece:
                self._later.append(request)  # the piece was not copied out yet
