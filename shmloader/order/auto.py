"""``num_workers="auto"`` and ``prefetch_factor="auto"``: the rule, and its execution. Main process.

Workers are added while the program waits for them and they are busy; batches in advance are added while the
program waits although workers have time. Nothing is ever taken back, and after `MOST_BATCHES` batches nothing
is added any more. All of it happens inside ``next()``, which starts one worker at most. A new worker gets
tasks once it has reported that it is ready, so no batch waits for its start.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import weakref
from typing import Any

import psutil

from shmloader.errors import LoaderClosed
from shmloader.exchange.exchange import Exchange
from shmloader.memory.limits import cores, memory_headroom
from shmloader.order.policies import FreeWorkers
from shmloader.settings import AutoCount
from shmloader.statistics import AutotuneReport

_log = logging.getLogger("shmloader")
MOST_BATCHES = 200
"""Batches after which the choice is settled."""
MOST_PREFETCH = 16
"""Most batches in advance per worker."""

# A decision needs so many batches, and so many seconds: the times of quicker batches show how the system
# switches between processes. With batches under half a millisecond no decision comes within `MOST_BATCHES`.
_PERIOD = 20
_PERIOD_S = 0.1
_KEEPS_UP = 0.03  # a program that waits for a smaller share of its time has enough workers
_BUSY = 0.25  # workers that wait for a smaller share of their time are busy
_SPARE = 1.1  # workers are planned for a program that is so much faster than measured
_HELPS = 0.5  # workers that bring a smaller share of the expected gain are the last step
_MOST_REFUSALS = 8  # batches returned, beyond those on their way, until it is clear that no room is made


class Auto:
    """Decides for one loader, over all its epochs, until it has settled. Arithmetic only.

    Attributes:
        num_workers: Workers that are wanted.
        prefetch_factor: Batches in advance per worker that are wanted.
        given: The program's numbers of both, which are not changed; None for a number that is chosen.
        most_workers: Most workers there may be.
        batches: Batches returned until it settled.
        settled: Whether nothing is added any more.
    """

    def __init__(
        self, num_workers: int, prefetch_factor: int, given: list[int | None], most_workers: int
    ) -> None:
        self.given = given
        self.most_workers = most_workers if given[0] is None else num_workers
        self.num_workers = min(num_workers, self.most_workers)
        self.prefetch_factor = prefetch_factor
        self.batches = 0
        self._most_prefetch = prefetch_factor if given[1] is not None else max(prefetch_factor, MOST_PREFETCH)
        self._why = self._figures = ""
        self._rate_wanted = 0.0  # batches per second expected of the last step
        self._period: list[tuple[float, float, float]] = []
        self._look_at_bounds()

    def _look_at_bounds(self) -> None:
        self.settled = (self.num_workers, self.prefetch_factor) == (self.most_workers, self._most_prefetch)
        if self.given[0] is None and self.num_workers == self.most_workers:
            self._why = f"one worker for each of {self.most_workers} usable cores"

    def report(self) -> AutotuneReport:
        """The choice and its reasons, for `LoaderStatistics`."""
        figures = self._figures or "batches were too quick, or epochs too short, to measure"
        why = "; ".join(filter(None, ["" if self.settled else "still measuring", self._why, figures]))
        return AutotuneReport(self.num_workers, self.prefetch_factor, self.settled, self.batches, why)

    def note(self, measured: tuple[float, float, float] | None) -> None:
        """Note that a batch was returned; may change what is wanted.

        Args:
            measured: Seconds since the batch before: of the program, and of ``next()`` without waiting; of
                waiting in ``next()``; of waiting for tasks, summed over the workers. None if they do not
                belong to the present choice.
        """
        if self.settled:
            return
        self.batches += 1
        if measured is not None:
            self._period.append(measured)
            if len(self._period) >= _PERIOD:
                self._decide(*map(sum, zip(*self._period, strict=True)))
        self.settled |= self.batches >= MOST_BATCHES

    def settle(self, num_workers: int, prefetch_factor: int, why: str) -> None:
        """Settle on a choice, because more is not possible or does not help."""
        self.num_workers, self.prefetch_factor = num_workers, prefetch_factor
        self.settled, self._why = True, why

    def _decide(self, own_s: float, wait_s: float, idle_s: float) -> None:
        batches, workers, own_s = len(self._period), self.num_workers, max(own_s, 1e-9)
        total_s = own_s + wait_s
        if total_s < _PERIOD_S:
            return
        self._period.clear()
        busy_s = max(workers * total_s - idle_s, 0.0)
        self._figures = (
            f"a batch takes a worker {1e3 * busy_s / batches:.3g} ms and the program "
            f"{1e3 * own_s / batches:.3g} ms"
        )
        rate, rate_wanted, self._rate_wanted = batches / total_s, self._rate_wanted, 0.0
        if rate < rate_wanted:
            self.settle(workers, self.prefetch_factor, f"no faster with {workers} workers than with fewer")
        elif wait_s <= _KEEPS_UP * total_s:
            self._why = "the workers keep up with the program"
        elif idle_s > _BUSY * workers * total_s:
            self._why = "the program waited although workers had time"
            self.prefetch_factor = min(2 * self.prefetch_factor, self._most_prefetch)
        elif workers < self.most_workers:
            self._why = f"the program waited for {workers} busy worker(s)"
            needed = math.ceil(min(_SPARE * busy_s / own_s, self.most_workers))
            self.num_workers = max(workers + 1, needed)
            expected = min(self.num_workers / workers, total_s / own_s)
            self._rate_wanted = rate * (1 + _HELPS * (expected - 1))
        if not self.settled:
            self._look_at_bounds()


def auto_for(loader: Any, before: Auto | None) -> Auto | None:
    """The `Auto` that decides for a loader, perhaps the one ``before``; None if nothing is ``"auto"``."""
    workers, prefetch = loader.num_workers, loader.prefetch_factor
    given = [None if isinstance(number, AutoCount) else number for number in (workers, prefetch)]
    if None not in given:
        return None
    auto = before
    if auto is None or auto.given != given:
        auto = Auto(max(1, int(workers)), int(prefetch), given, _most_workers())
    _show(loader, auto)
    return auto


def _most_workers() -> int:
    """One for each usable core, or for this rank's share of the cores if ranks share the machine."""
    found = cores()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    shared = int(ranks) if ranks.isdecimal() and found.affinity == found.machine else 1
    return max(1, found.usable // max(1, shared))


def _show(loader: Any, auto: Auto) -> None:
    """Write the choice to the loader's attributes, unless the program has set plain numbers."""
    for name in ("num_workers", "prefetch_factor"):
        if isinstance(getattr(loader, name), AutoCount):
            setattr(loader, name, AutoCount(getattr(auto, name)))


class Growth:
    """Measures one iterator, and gives it the workers and slots that `Auto` wants.

    The choice is written to the loader's attributes; the loader is not kept alive. ``free_workers`` is None
    if no workers are added.
    """

    def __init__(self, auto: Auto, loader: Any, exchange: Exchange, free_workers: FreeWorkers | None) -> None:
        self._auto = auto
        self._loader = weakref.ref(loader)
        self._exchange = exchange
        self._workers = exchange.workers
        self._free_workers = free_workers
        self._counters = exchange.counters
        self._serving = (int(loader.num_workers), auto.prefetch_factor)
        self._refusals = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin to measure anew, in a new epoch or after a choice: the batches before were made otherwise."""
        self._unmeasured = len(self._workers.workers) + 2
        self._last = self._clocks()

    def note_return(self) -> None:
        """Measure the batch that was returned, and add what is wanted."""
        auto = self._auto
        in_effect = (auto.num_workers, auto.prefetch_factor) == self._serving
        if auto.settled and in_effect:
            return
        before, self._last = self._last, self._clocks()
        elapsed_s, wait_s, idle_s = ((now - then) / 1e9 for now, then in zip(self._last, before, strict=True))
        measured = in_effect and not self._unmeasured
        auto.note((max(0.0, elapsed_s - wait_s), wait_s, idle_s) if measured else None)
        self._unmeasured = max(0, self._unmeasured - 1)
        self._add()
        self._last = self._clocks()

    def _clocks(self) -> tuple[int, int, int]:
        counters = self._counters
        return time.perf_counter_ns(), counters.wait_for_workers_ns, counters.workers_wait_for_slots_ns

    def _add(self) -> None:
        """Add as many wanted workers and slots as possible now."""
        auto, free_workers = self._auto, self._free_workers
        there = auto.num_workers
        if free_workers is not None:
            self._add_worker()
            self._exchange.look_for_joining()
            there = min(auto.num_workers, len(self._workers.workers), *self._exchange.joining)
        serving, table = (there, auto.prefetch_factor), self._exchange.table
        if serving != self._serving:
            if table.resize(serving[0] * serving[1]):
                self._serving, self._refusals = serving, 0
                if free_workers is not None:
                    free_workers.serve(*serving)
                self.begin_epoch()
            elif self._refusals < table.budget.most_tasks + _MOST_REFUSALS:
                self._refusals += 1
            else:
                auto.settle(*self._serving, "no more batches fit in the memory budget")
        loader = self._loader()
        if loader is not None:
            _show(loader, auto)

    def _add_worker(self) -> None:
        """Start a worker, if one is missing and the host has room for it."""
        auto, workers = self._auto, self._workers
        there = len(workers.workers)
        if there >= auto.num_workers:
            return
        try:
            if not self._has_memory_for_one_more():
                auto.settle(there, auto.prefetch_factor, "no more workers fit in the memory")
                return
            worker = workers.add()
        except Exception as error:  # whatever it is, the other workers continue
            if workers.interrupted:
                raise
            _log.warning("shmloader could not start one more worker: %s", repr(error))
            auto.settle(there, auto.prefetch_factor, "no more workers could be started")
            return
        if workers.interrupted:  # closed meanwhile, by a thread that has not seen this worker
            workers.close()
            raise LoaderClosed("the loader was closed while a worker was being started")
        self._exchange.welcome(worker)

    def _has_memory_for_one_more(self) -> bool:
        """Whether the host has memory for one more worker process, if it takes as much as the largest."""
        taken = [0]
        for process in self._workers.processes:
            # Not every platform says, and there may be no descriptor to ask with.
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                taken.append(psutil.Process(process.pid).memory_full_info().uss)
        return max(taken) + self._workers.given_nbytes <= memory_headroom().available_nbytes // 2
