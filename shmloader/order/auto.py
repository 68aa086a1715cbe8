"""``num_workers="auto"`` and ``prefetch_factor="auto"``: the rule, and its execution. Main process.

The loader measures some 20 batches, decides, measures what that gave, and may decide once more. Nothing is
ever taken back. All of it happens inside ``next()``, which starts one worker at most. A new worker gets tasks
once it has reported that it is ready, so no batch waits for its start.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil

from shmloader.errors import LoaderClosed
from shmloader.exchange.exchange import Exchange
from shmloader.memory.limits import cores, memory_headroom
from shmloader.settings import AutoCount
from shmloader.statistics import AutotuneReport

_log = logging.getLogger("shmloader")
MOST_BATCHES = 200
"""Batches after which the choice is settled."""
MOST_PREFETCH = 16
"""Most batches in advance per worker."""
_PERIOD, _PERIOD_S = 20, 0.1  # batches and seconds of a decision: quicker ones show the system's switching
_KEEPS_UP = 0.03  # a program that waits for a smaller share of its time has enough workers
_BUSY = 0.25  # workers that wait for a smaller share of their time are busy
_SPARE = 1.1  # workers are planned for a program that is so much faster than measured
_CROWDED = 1.5  # workers that need so many times as long for a batch as fewer did hinder each other


class Auto:
    """Decides for one loader, over all its epochs. Arithmetic only."""

    def __init__(
        self, num_workers: int, prefetch_factor: int, given: list[int | None], most_workers: int
    ) -> None:
        # The program's numbers of both, which are not changed; None for a number that is chosen.
        self.given = given
        self.most_workers = most_workers if given[0] is None else num_workers  # most workers there may be
        self.num_workers = min(num_workers, self.most_workers)  # workers that are wanted
        self.prefetch_factor = prefetch_factor  # batches in advance per worker that are wanted
        self.batches = 0  # batches returned until the choice was in effect
        self.settled = False  # whether no more will be wanted
        self._most_prefetch = prefetch_factor if given[1] is not None else max(prefetch_factor, MOST_PREFETCH)
        self._why = "batches were too quick, or epochs too short, to measure"
        self._loader: Callable[[], Any] = lambda: None
        self._first = 0, math.inf  # workers at the first decision, and seconds that a batch took one
        self._period: list[tuple[float, float, float]] = []

    def show_in(self, loader: Any) -> None:
        """Show the choice, from now on, in a loader's attributes; the loader is not kept alive."""
        self._loader = weakref.ref(loader)
        self.show()

    def show(self) -> None:
        """Write the choice to the loader's attributes, unless the program has set plain numbers."""
        for name in ("num_workers", "prefetch_factor"):
            if isinstance(getattr(loader := self._loader(), name, None), AutoCount):
                setattr(loader, name, AutoCount(getattr(self, name)))

    def report(self) -> AutotuneReport:
        """The choice and its reasons, for `LoaderStatistics`."""
        why = self._why if self.settled else f"still measuring; {self._why}"
        numbers = self.num_workers, self.prefetch_factor
        return AutotuneReport(*numbers, self.settled, self.batches, why, self.given[0] is None)

    def note(self, measured: tuple[float, float, float] | None) -> None:
        """Note that a batch was returned; may change what is wanted."""
        # Seconds since the batch before: of the program, and of `next()` without waiting; of waiting in it;
        # of waiting for tasks, summed over the workers. None if they are not of the present choice.
        self.batches = min(self.batches + 1, MOST_BATCHES)
        if measured is not None and not self.settled:
            self._period.append(measured)
            if len(self._period) >= _PERIOD and sum(own + wait for own, wait, _ in self._period) >= _PERIOD_S:
                self._decide()
        self.settled |= self.batches == MOST_BATCHES

    def settle(self, num_workers: int, prefetch_factor: int, why: str) -> None:
        """Settle on a choice, because more is not possible."""
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.settled, self._why = True, f"{why}; {self._why}"

    def _decide(self) -> None:
        workers, (fewer, before_s) = self.num_workers, self._first
        owns, waits, idles = zip(*self._period, strict=True)
        own_s, wait_s, idle_s = (max(sum(each) / len(each), 1e-9) for each in (owns, waits, idles))
        self._period.clear()
        total_s = own_s + wait_s
        worker_s = max(workers * total_s - idle_s, 1e-9)
        self._first = workers, worker_s
        if wait_s <= _KEEPS_UP * total_s:
            why = "the workers keep up with the program"
        elif idle_s > _BUSY * workers * total_s:
            why = "the program waited although workers had time"
            in_longest_wait = math.ceil(max(waits) / total_s / workers)
            self.prefetch_factor = min(self.prefetch_factor + in_longest_wait, self._most_prefetch)
        elif workers > fewer and worker_s > _CROWDED * before_s:
            why = f"with {workers} workers each takes longer for a batch"
        else:
            why = f"the program waited for {workers} busy worker(s)"
            needed = math.ceil(min(_SPARE * worker_s / own_s, self.most_workers))
            self.num_workers = min(max(workers + 1, needed), self.most_workers)
        if self.given[0] is None and self.num_workers == self.most_workers:
            why = f"one worker for each of {self.most_workers} usable cores"
        figures = f"a batch takes a worker {1e3 * worker_s:.3g} ms and the program {1e3 * own_s:.3g} ms"
        self._why = f"{why}; {figures}"
        at_bounds = (self.num_workers, self.prefetch_factor) == (self.most_workers, self._most_prefetch)
        self.settled = fewer > 0 or at_bounds


def auto_for(loader: Any, before: Auto | None) -> Auto:
    """The `Auto` that decides for a loader with an `AutoCount`: perhaps the one ``before``."""
    workers, prefetch = loader.num_workers, loader.prefetch_factor
    given = [None if isinstance(number, AutoCount) else number for number in (workers, prefetch)]
    if before is None or before.given != given:
        before = Auto(max(1, int(workers)), int(prefetch), given, most_workers=cores().usable)
    before.show_in(loader)
    return before


class Growth:
    """Measures one iterator, and gives it the workers and slots that `Auto` wants.

    ``serve`` has workers given tasks, so many of so many; it is None if none are added.
    """

    def __init__(
        self, auto: Auto, num_workers: int, exchange: Exchange, serve: Callable[[int, int], None] | None
    ) -> None:
        self._auto = auto
        self._exchange = exchange
        self._workers = exchange.workers
        self._serve = serve
        self._serving = num_workers, auto.prefetch_factor
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin to measure anew, in a new epoch or after a choice: the batches before were made otherwise."""
        self._unmeasured = len(self._workers.workers) + 2
        self._last = self._clocks()

    def note_return(self) -> None:
        """Measure the batch that was returned, and add what is wanted."""
        auto, serving = self._auto, self._serving
        in_effect = serving == (auto.num_workers, auto.prefetch_factor)
        if auto.settled and in_effect:
            return
        before, self._last = self._last, self._clocks()
        elapsed_s, wait_s, idle_s = ((now - then) / 1e9 for now, then in zip(self._last, before, strict=True))
        measured = in_effect and not self._unmeasured
        self._unmeasured = max(0, self._unmeasured - 1)
        auto.note((max(0.0, elapsed_s - wait_s), wait_s, idle_s) if measured else None)
        if serving != (auto.num_workers, auto.prefetch_factor):
            self._add()
            self._last = self._clocks()

    def _clocks(self) -> tuple[int, int, int]:
        counters = self._exchange.counters
        return time.perf_counter_ns(), counters.wait_for_workers_ns, counters.workers_wait_for_slots_ns

    def _add(self) -> None:
        """Start a wanted worker, and give tasks to one more that is ready, if that is possible now."""
        auto, serve, (workers, prefetch) = self._auto, self._serve, self._serving
        ready = workers
        if serve is not None:
            # Not while it would get a dataset that has heard of the next epoch.
            if len(self._workers.workers) < auto.num_workers and not self._exchange.told_ahead:
                self._start_worker()
            self._exchange.look_for_joining()
            ready = min(auto.num_workers, len(self._workers.workers), *self._exchange.joining)
        # One more at a time: then as many are had as the memory has room for.
        serving = min(ready, workers + 1), min(auto.prefetch_factor, prefetch + 1)
        if serving != self._serving:
            if self._exchange.table.resize(serving[0] * serving[1]):
                self._serving = serving
                if serve is not None:
                    serve(*serving)
                self.begin_epoch()
            elif auto.batches >= MOST_BATCHES:
                auto.settle(workers, prefetch, "no more batches fit in the memory budget")
        auto.show()

    def _start_worker(self) -> None:
        """Start one more worker, if the host has room for it."""
        workers, worker, why_not = self._workers, None, "no more workers fit in the memory"
        there = len(workers.workers)
        try:
            if self._has_memory_for_one_more():
                worker = workers.add()
        except Exception as error:  # whatever it is, the other workers continue
            if workers.interrupted:
                raise
            _log.warning("shmloader could not start one more worker: %s", repr(error))
            why_not = "no more workers could be started"
        if worker is None:
            self._auto.settle(there, self._auto.prefetch_factor, why_not)
        elif workers.interrupted:  # closed meanwhile, by a thread that has not seen this worker
            workers.close()
            raise LoaderClosed("the loader was closed while a worker was being started")
        else:
            self._exchange.welcome(worker)

    def _has_memory_for_one_more(self) -> bool:
        """Whether the host has memory for one more worker process, if it takes as much as the largest."""
        taken = [0]
        for process in self._workers.processes:
            # Not every platform says, and there may be no descriptor to ask with.
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                taken.append(psutil.Process(process.pid).memory_full_info().uss)
        return max(taken) + self._workers.given_nbytes <= memory_headroom().available_nbytes // 2
