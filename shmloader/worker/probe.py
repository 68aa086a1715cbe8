"""`BatchProbe`: measures a worker's batches. Runs in the worker; without workers, in the main process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from shmloader.memory.segment import OwnDescriptor
from shmloader.wire.records import pack_batch_times

_BLOCK_NS = 20_000  # samples that are quicker are timed in blocks of about so many nanoseconds
_MOST_IN_BLOCK = 1 << 15
_OUTLIER = 8  # times as long as the others
_CLOCK_NS = 300  # that it takes to time a block
_EVERY_NS = 4_000_000  # how often a batch is measured: all slower ones are
_MOST_NBYTES = (1 << 32) - 1

_Fetch = Callable[[Any, Any], list[Any]]
_Collate = Callable[[Any], Any]


class BatchProbe:
    """Measures one worker, from the receipt of a task to its answer, while its loader is profiled.

    A clock is read for each sample only if samples take longer than 20 µs. Quicker ones are timed in blocks:
    then a slow one is known by its block. Of batches that take less than 4 ms one is measured every 4 ms, and
    stands for the others.
    """

    def __init__(self) -> None:
        self._measures = False  # whether this batch is measured
        self._unmeasured = 0  # batches since the last one that was, with this one
        self._measured_ns = 0  # when that one began
        self._received_ns = self._made_ns = self._collate_ns = self._copied_nbytes = 0
        self._slowest = 0, 0, 0  # nanoseconds, place in the index batch, number of samples
        self._usual_ns, self._block = 1, 1  # of the others; so many samples are timed together
        self._spare_ns = 0  # to be spent on timing quick samples one by one
        self._schedstat: OwnDescriptor | None = None
        self._schedule_ns = 0, 0

    def around_fetch(self, fetch: _Fetch) -> _Fetch:
        """A function like ``fetch(dataset, indices)`` in blocks, which notes the slowest samples."""

        def timed(dataset: Any, indices: Any) -> list[Any]:
            # Also in batches that are not measured: a slow sample may be in any. Others may not be cut.
            if type(indices) is not list or (len(indices) < 2 and not self._measures):
                return fetch(dataset, indices)
            size, slowest = self._block_of(len(indices)), self._slowest
            began_ns = then_ns = time.perf_counter_ns()
            samples = [] if size < len(indices) else fetch(dataset, indices)
            for begin in range(0, len(indices), size):
                if size < len(indices):
                    samples += fetch(dataset, indices[begin : begin + size])
                now_ns = time.perf_counter_ns()
                if now_ns - then_ns > slowest[0]:
                    slowest = now_ns - then_ns, begin, min(size, len(indices) - begin)
                then_ns = now_ns
            self._slowest = slowest
            if slowest[2] < len(indices):
                self._usual_ns = (then_ns - began_ns - slowest[0]) // (len(indices) - slowest[2]) or 1
                self._block = max(1, min(_MOST_IN_BLOCK, _BLOCK_NS // self._usual_ns))
            if size > 1 and slowest[0] > _OUTLIER * self._usual_ns * slowest[2]:
                self._spare_ns += slowest[0] // 32  # of what it took, to find the next one exactly
            return samples

        return timed

    def _block_of(self, samples: int) -> int:
        """The samples of a block, of a batch of so many: four blocks at least, so that outliers show.

        A batch that would have no more, and is not measured, is compared with the others as a whole.
        """
        if self._spare_ns >= samples * _CLOCK_NS:
            self._spare_ns -= samples * _CLOCK_NS
            return 1
        if not self._measures and self._block > samples // 4 > 0:
            return samples
        return max(1, min(self._block, samples // 4))

    def around_collate(self, collate_fn: _Collate) -> _Collate:
        """A function like ``collate_fn`` that is timed."""

        def timed(samples: Any) -> Any:
            if not self._measures:
                return collate_fn(samples)
            began_ns = time.perf_counter_ns()
            try:
                return collate_fn(samples)
            finally:
                self._collate_ns += time.perf_counter_ns() - began_ns

        return timed

    def begin(self, received_ns: int, copied_nbytes: int) -> None:
        """Begin a batch whose task was received at a time of ``perf_counter_ns``.

        ``copied_nbytes`` and that of `end` count the bytes copied in all batches so far.
        """
        self._received_ns = received_ns
        self._slowest = 0, 0, 0
        self._unmeasured += 1
        self._measures = received_ns - self._measured_ns >= _EVERY_NS
        if self._measures:
            self._measured_ns, self._copied_nbytes = received_ns, copied_nbytes
            self._made_ns = self._collate_ns = 0
            self._scheduled_ns()  # what it did since the last one does not count

    def note_made(self) -> None:
        """Note that the samples are fetched and collated."""
        if self._measures:
            self._made_ns = time.perf_counter_ns()

    def end(self, seq: int, wait_ns: int, copied_nbytes: int, header_nbytes: int) -> bytes:
        """End the batch; returns its packed `BatchTimes`, or nothing if another one stands for it."""
        now_ns = time.perf_counter_ns()
        if not self._measures:
            if now_ns - self._received_ns < _EVERY_NS:
                return b""
            self._made_ns, self._collate_ns = now_ns, 0  # it had a slow sample, most likely
            self._copied_nbytes = copied_nbytes
        batches = self._unmeasured if self._measures else 1
        self._unmeasured -= batches
        made_ns = self._made_ns or now_ns  # if making it raised
        cpu_ns, delay_ns = self._scheduled_ns()
        slowest_ns, begin, count = self._slowest
        return pack_batch_times(
            seq,
            self._received_ns,
            wait_ns / 1e9,
            (made_ns - self._received_ns - self._collate_ns) / 1e9,
            self._collate_ns / 1e9,
            (now_ns - made_ns) / 1e9,
            cpu_ns / 1e9,
            delay_ns / 1e9,
            slowest_ns / 1e9,
            begin,
            count,
            min(copied_nbytes - self._copied_nbytes, _MOST_NBYTES),
            min(header_nbytes, _MOST_NBYTES),
            batches,
        )

    def _scheduled_ns(self) -> tuple[int, int]:
        """Processor time of this thread since the last call, and time that it was ready without a core."""
        before, self._schedule_ns = self._schedule_ns, (time.thread_time_ns(), 0)
        with contextlib.suppress(OSError, ValueError):  # Linux tells more
            if self._schedstat is None:  # in the worker itself, whose thread it is
                fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                self._schedstat = OwnDescriptor(fd)
            cpu, delay, _ = os.pread(self._schedstat.fd, 64, 0).split()
            self._schedule_ns = int(cpu), int(delay)
        return self._schedule_ns[0] - before[0], self._schedule_ns[1] - before[1]
