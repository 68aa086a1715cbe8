"""`BatchRecorder`: takes the times of batches while a loader is profiled. Main process."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec

from shmloader.indices.packed_indices import unpack_index_batch
from shmloader.messages import shown
from shmloader.statistics import Recorder
from shmloader.wire.records import BatchTimes

_P = ParamSpec("_P")

MOST_BATCHES = 10_000
"""Entries that are kept for percentiles and pictures: of those before them there are only `Sums`."""

_MOST_SLOW = 5  # samples that are named
_NAMED_S = 0.001  # a quicker sample is none of them
_TELLING = 50  # times as long as a call of `tell` took passes until the next one
_JOINED_NS = 4_000_000  # quicker batches are noted together
_OUTLIER = 8.0  # times as long as the others of its batch: such a sample holds its batch up


class Returned(NamedTuple):
    """A batch that ``next()`` has returned, or several quick ones in a row."""

    began_ns: int  # when the program's step before it began, by ``time.perf_counter_ns()``
    step_s: float  # of the program since the batch before; 0 for an epoch's first batch
    wait_s: float  # that ``next()`` waited
    sampler_s: float
    next_s: float  # of all else in ``next()``
    held: int  # batches that the program held then
    batches: int = 1  # their number; seconds are sums


class Made(NamedTuple):
    """A batch that a worker has made; ``excess_s`` is what outliers among its samples took too long."""

    worker_id: int
    times: BatchTimes
    excess_s: float


@dataclass
class Sums:
    """Sums over all batches of a profile; those of workers count a batch for each that it stands for."""

    batches: int = 0  # returned
    steps: int = 0  # of the program: not of a batch at which it leaves an epoch
    step_s: float = 0.0
    wait_s: float = 0.0
    sampler_s: float = 0.0
    next_s: float = 0.0
    held: int = 0  # the most batches that the program held
    made: Counter[int] = field(default_factory=Counter)  # batches of each worker; from here on: of workers
    fetch_s: float = 0.0
    collate_s: float = 0.0
    write_s: float = 0.0
    idle_s: float = 0.0
    cpu_s: float = 0.0
    delay_s: float = 0.0
    copied_nbytes: int = 0
    header_nbytes: int = 0
    excess_s: float = 0.0  # of outliers

    def add_step(self, step_s: float, *, has_batch: bool) -> None:
        """Add what the program has done between two calls; ``has_batch`` if the first gave one."""
        self.step_s += step_s
        self.steps += has_batch

    def add_returned(self, one: Returned) -> None:
        """Add all but the program's steps, which `add_step` has added."""
        self.batches += one.batches
        self.wait_s += one.wait_s
        self.sampler_s += one.sampler_s
        self.next_s += one.next_s
        self.held = max(self.held, one.held)

    def add_made(self, one: Made) -> None:
        """Add the times of a worker."""
        times, batches = one.times, one.times.batches
        self.made[one.worker_id] += batches
        self.fetch_s += times.fetch_s * batches
        self.collate_s += times.collate_s * batches
        self.write_s += times.write_s * batches
        self.idle_s += times.wait_s * batches
        self.cpu_s += times.cpu_s * batches
        self.delay_s += times.delay_s * batches
        self.copied_nbytes += times.copied_nbytes * batches
        self.header_nbytes += times.header_nbytes * batches
        self.excess_s += one.excess_s


class BatchRecorder:
    """Records one loader; see `shmloader.statistics.Recorder`.

    Args:
        every_s: How often to call ``tell``.
        tell: Called that often as ``next()`` begins, before it takes a batch, so that no batch is lost if it
            raises. Its own time counts nowhere. None for never.

    Attributes:
        returned, made: The last 10,000 entries.
        sums: Sums over all.
        slowest: Seconds of the slowest samples, by name.
    """

    def __init__(self, every_s: float = 1.0, tell: Callable[[], object] | None = None) -> None:
        self.returned: deque[Returned] = deque(maxlen=MOST_BATCHES)
        self.made: deque[Made] = deque(maxlen=MOST_BATCHES)
        self.sums = Sums()
        self.slowest: dict[str, float] = {}
        self._every_ns, self._tell = int(every_s * 1e9), tell
        self._told_ns = time.perf_counter_ns()
        self._is_due = False
        self._has_begun = False  # an epoch that it measures
        self._has_batch = False  # the program, since its last call of `next()`
        self._ended_ns = 0
        self._sampler = _Timed(iter(()))
        self._last = 0, 0  # what `end_next` was told
        self._begin(0, 0)

    def begin_epoch(self) -> None:
        """Begin an epoch: what the program did since the last one is no step."""
        self.note_returned()
        self._has_begun, self._has_batch, self._ended_ns = True, False, 0

    def time_sampler(self, batches: Iterator[Any]) -> Iterator[Any]:
        """An iterator over the same index batches that is timed."""
        self._sampler, self._sampler_ns = _Timed(batches), 0
        return self._sampler

    def begin_next(self, waited_ns: int) -> None:
        """Note that the program asks for a batch."""
        if self._is_due:
            self._call_tell()
        now_ns = time.perf_counter_ns()
        if not self._ended_ns:
            self._begin(now_ns, waited_ns)  # what iter() has drawn does not count
        else:
            step_ns = now_ns - self._ended_ns - (waited_ns - self._last[0])
            self._step_ns += step_ns
            self.sums.add_step(step_ns / 1e9, has_batch=self._has_batch)
            self._has_batch = False
        self._ended_ns, self._last = now_ns, (waited_ns, self._last[1])  # it may ask again, if none is here

    def _begin(self, now_ns: int, waited_ns: int) -> None:
        self._began_ns, self._waited_ns = now_ns, waited_ns
        self._step_ns = self._batches = 0
        self._sampler_ns = self._sampler.spent_ns

    def end_next(self, waited_ns: int, held: int) -> None:
        """Note that it gets one."""
        self._ended_ns = now_ns = time.perf_counter_ns()
        self._batches += 1
        self._has_batch = True
        self._last = waited_ns, held
        if now_ns - self._began_ns < _JOINED_NS:
            return
        self.note_returned()
        self._begin(now_ns, waited_ns)
        self._is_due = self._tell is not None and now_ns - self._told_ns >= self._every_ns

    def end(self) -> None:
        """End the calls of ``tell``: an iterator may outlive the profile."""
        self._tell, self._is_due = None, False

    def _call_tell(self) -> None:
        began_ns, self._is_due = time.perf_counter_ns(), False
        try:
            if self._tell is not None:
                self._tell()
        finally:
            self._told_ns = time.perf_counter_ns()
            spent_ns = self._told_ns - began_ns
            self._every_ns = max(self._every_ns, spent_ns * _TELLING)
            self._began_ns += spent_ns
            if self._ended_ns:
                self._ended_ns += spent_ns

    def note_returned(self) -> None:
        """Note the batches that were returned since the last entry."""
        if not self._batches:
            return
        (waited_ns, held), step_ns = self._last, self._step_ns
        sampler_ns = self._sampler.spent_ns - self._sampler_ns
        wait_ns = waited_ns - self._waited_ns
        next_ns = max(0, self._ended_ns - self._began_ns - step_ns - wait_ns - sampler_ns)
        times = (step_ns / 1e9, wait_ns / 1e9, sampler_ns / 1e9, next_ns / 1e9)
        entry = Returned(self._began_ns, *times, held, self._batches)
        self.returned.append(entry)
        self.sums.add_returned(entry)
        self._begin(self._ended_ns, waited_ns)

    def note_times(self, worker_id: int, times: BatchTimes, payload: bytes) -> None:
        """Take a worker's times of a batch, if that is of an epoch that began in this profile."""
        if not self._has_begun:
            return
        slow_s, excess_s = times.slowest_s or times.fetch_s, 0.0
        if slow_s >= _NAMED_S and (
            len(self.slowest) < _MOST_SLOW
            or slow_s > min(self.slowest.values())
            or slow_s > times.fetch_s / 4
        ):
            indices = _indices(payload)
            self._name(slow_s, indices, times)
            others = len(indices) - times.slowest_count
            if times.slowest_count and others:
                usual_s = max(times.fetch_s - slow_s, 0.0) / others * times.slowest_count
                excess_s = slow_s - usual_s if slow_s > _OUTLIER * usual_s else 0.0
        entry = Made(worker_id, times, excess_s)
        self.made.append(entry)
        self.sums.add_made(entry)

    def _name(self, slow_s: float, indices: list[Any], times: BatchTimes) -> None:
        """Keep the sample, or the samples that were fetched together, if they are among the slowest."""
        slow = indices[times.slowest_begin :][: times.slowest_count or None]
        # An empty index batch, or samples of a stream, which have no indices.
        if not slow or slow[0] is None or slow[0] is True:
            return
        name = f"dataset[{shown(slow[0])}]" if len(slow) == 1 else f"one of the samples {shown(slow)}"
        self.slowest[name] = max(slow_s, self.slowest.get(name, 0.0))
        if len(self.slowest) > _MOST_SLOW:
            del self.slowest[min(self.slowest, key=lambda known: self.slowest[known])]


class Recorders:
    """Two recorders as one: of a profile, and of another one around it."""

    def __init__(self, outer: Recorder, inner: Recorder) -> None:
        self.outer, self.inner = outer, inner
        self.begin_epoch = _both(outer.begin_epoch, inner.begin_epoch)
        self.begin_next = _both(outer.begin_next, inner.begin_next)
        self.end_next = _both(outer.end_next, inner.end_next)
        self.note_times = _both(outer.note_times, inner.note_times)

    def time_sampler(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Both time it."""
        return self.inner.time_sampler(self.outer.time_sampler(batches))


def without(recorder: Recorder | None, ended: Recorder) -> Recorder | None:
    """A recorder without one in it, which need not be the one that began last."""
    if recorder is ended or not isinstance(recorder, Recorders):
        return None if recorder is ended else recorder
    if recorder.inner is ended:
        return recorder.outer
    outer = without(recorder.outer, ended)
    return recorder.inner if outer is None else Recorders(outer, recorder.inner)


def _both(first: Callable[_P, None], second: Callable[_P, None]) -> Callable[_P, None]:
    def call(*given: _P.args, **named: _P.kwargs) -> None:
        first(*given, **named)
        second(*given, **named)

    return call


class _Timed:
    """An iterator whose time is summed up in ``spent_ns``."""

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self.spent_ns = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began_ns = time.perf_counter_ns()
        try:
            return next(self._inner)
        finally:
            self.spent_ns += time.perf_counter_ns() - began_ns


def _indices(payload: bytes) -> list[Any]:
    """The indices of a packed index batch, which may be a single one."""
    indices = unpack_index_batch(payload, len(payload))
    return list(indices) if isinstance(indices, (list, tuple, memoryview)) else [indices]
