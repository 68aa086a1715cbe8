"""`BatchRecorder`: takes the times of batches while a loader is profiled. Main process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shmloader.indices.packed_indices import unpack_index_batch
from shmloader.messages import shown
from shmloader.profiling.probe import BatchProbe
from shmloader.wire.records import BatchTimes

MOST_BATCHES = 10_000
"""Batches whose times are kept: those before them are forgotten."""

_MOST_SLOW = 5  # samples that are named
_NAMED_S = 0.001  # a quicker sample is none of them
_TELLING = 50  # times as long as a call of `tell` took passes until the next one
_OUTLIER = 8.0  # times as long as the others of its batch: such a sample holds its batch up


class Returned(NamedTuple):
    """A batch that ``next()`` has returned.

    Attributes:
        began_ns: When it was asked for, by ``time.perf_counter_ns()``.
        step_s: Seconds of the program since the batch before; 0 for an epoch's first batch.
        wait_s, sampler_s, next_s: Seconds that ``next()`` waited; of the sampler; of all else in ``next()``.
        held: Batches that the program held then.
    """

    began_ns: int
    step_s: float
    wait_s: float
    sampler_s: float
    next_s: float
    held: int


class Made(NamedTuple):
    """A batch that a worker has made; ``excess_s`` is what outliers among its samples took too long."""

    worker_id: int
    times: BatchTimes
    excess_s: float


class BatchRecorder:
    """Records one loader; see `shmloader.statistics.Recorder`.

    Args:
        every_s: How often to call ``tell``.
        tell: Called in ``next()`` that often; its own time counts nowhere. None for never.

    Attributes:
        make_probe: Makes the probe of a worker.
        returned, made: The last 10,000 batches.
        slowest: Seconds of the slowest samples, by name.
        num_workers: Workers of the epoch that was begun last.
    """

    def __init__(self, every_s: float = 1.0, tell: Callable[[], object] | None = None) -> None:
        self.make_probe: Callable[[], BatchProbe] = BatchProbe
        self.returned: deque[Returned] = deque(maxlen=MOST_BATCHES)
        self.made: deque[Made] = deque(maxlen=MOST_BATCHES)
        self.slowest: dict[str, float] = {}
        self.num_workers = 0
        self._every_ns, self._tell = int(every_s * 1e9), tell
        self._told_ns = time.perf_counter_ns()
        self._began_ns = self._ended_ns = 0
        self._waited_ns = self._sampler_ns = 0

    def begin_epoch(self, num_workers: int) -> None:
        """Begin an epoch: what the program did since the last one is no step."""
        self.num_workers = num_workers
        self._ended_ns = 0

    def time_sampler(self, batches: Iterator[Any]) -> Iterator[Any]:
        """An iterator over the same index batches that is timed."""
        return _Timed(batches, self._note_sampler)

    def _note_sampler(self, spent_ns: int) -> None:
        self._sampler_ns += spent_ns

    def begin_next(self, waited_ns: int) -> None:
        """Note that the program asks for a batch."""
        self._began_ns, self._waited_ns = time.perf_counter_ns(), waited_ns
        if not self._ended_ns:
            self._sampler_ns = 0  # drawn by iter()

    def end_next(self, waited_ns: int, held: int) -> None:
        """Note that it gets one."""
        now_ns, began_ns, wait_ns = time.perf_counter_ns(), self._began_ns, waited_ns - self._waited_ns
        sampler_ns, self._sampler_ns = self._sampler_ns, 0
        step_ns = began_ns - self._ended_ns if self._ended_ns else 0
        next_ns = max(0, now_ns - began_ns - wait_ns - sampler_ns)
        self.returned.append(
            Returned(began_ns, step_ns / 1e9, wait_ns / 1e9, sampler_ns / 1e9, next_ns / 1e9, held)
        )
        if self._tell is not None and now_ns - self._told_ns >= self._every_ns:
            self._tell()
            self._told_ns = time.perf_counter_ns()
            self._every_ns = max(self._every_ns, (self._told_ns - now_ns) * _TELLING)
            now_ns = self._told_ns
        self._ended_ns = now_ns

    def note_times(self, worker_id: int, times: BatchTimes, payload: bytes) -> None:
        """Take a worker's times of a batch."""
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
        self.made.append(Made(worker_id, times, excess_s))

    def _name(self, slow_s: float, indices: list[Any], times: BatchTimes) -> None:
        """Keep the sample, or the samples that were fetched together, if they are among the slowest."""
        slow = indices[times.slowest_begin :][: times.slowest_count or None]
        name = f"dataset[{shown(slow[0])}]" if len(slow) == 1 else f"one of the samples {shown(slow)}"
        self.slowest[name] = max(slow_s, self.slowest.get(name, 0.0))
        if len(self.slowest) > _MOST_SLOW:
            del self.slowest[min(self.slowest, key=lambda known: self.slowest[known])]


class _Timed:
    """An iterator whose time is noted."""

    def __init__(self, inner: Iterator[Any], note: Callable[[int], None]) -> None:
        self._inner, self._note = inner, note

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began_ns = time.perf_counter_ns()
        try:
            return next(self._inner)
        finally:
            self._note(time.perf_counter_ns() - began_ns)


def _indices(payload: bytes) -> list[Any]:
    """The indices of a packed index batch, which may be a single one."""
    indices = unpack_index_batch(payload, len(payload))
    return list(indices) if isinstance(indices, (list, tuple, memoryview)) else [indices]
