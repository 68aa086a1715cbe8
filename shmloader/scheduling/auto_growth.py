"""Measures for `Auto`, and adds the workers and slots that it wants, for one iterator. Main process.

All of it happens inside ``next()``. An added worker is given tasks when it has said that it is there, so
nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from typing import Any

import psutil

from shmloader.arguments import AutoCount
from shmloader.errors import LoaderClosed
from shmloader.host.limits import cores, memory_headroom
from shmloader.scheduling.auto import Auto, Measured
from shmloader.scheduling.dispatcher import Dispatcher
from shmloader.scheduling.free_workers import FreeWorkers
from shmloader.statistics import Counters

_log = logging.getLogger("shmloader")
_START_NS = 50_000_000  # how long one call of next() goes on starting workers
_MOST_REFUSALS = 8  # batches returned, beyond those on their way, until it is clear that no room is made


def auto_for(loader: Any, before: Auto | None) -> Auto | None:
    """The `Auto` that decides for a loader; None where nothing is ``"auto"``.

    Args:
        loader: The loader, whose attributes may have been changed.
        before: The one that has decided for it until now.
    """
    workers = isinstance(loader.num_workers, AutoCount)
    prefetch = isinstance(loader.prefetch_factor, AutoCount)
    if not workers and not prefetch:
        return None
    if before is not None and (before.tunes_workers, before.tunes_prefetch) == (workers, prefetch):
        same_workers = workers or before.num_workers == loader.num_workers
        if same_workers and (prefetch or before.prefetch_factor == loader.prefetch_factor):
            _show(loader, before)
            return before
    auto = Auto(
        max(1, int(loader.num_workers)),
        int(loader.prefetch_factor),
        tunes_workers=workers,
        tunes_prefetch=prefetch,
        most_workers=_most_workers(),
    )
    _show(loader, auto)
    return auto


def _most_workers() -> int:
    """One for each usable core, or for each of this rank's where ranks share the machine and its cores."""
    found = cores()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    shared = int(ranks) if ranks.isdecimal() and found.affinity == found.machine else 1
    return max(1, found.usable // max(1, shared))


def _show(loader: Any, auto: Auto) -> None:
    """Let a loader's attributes tell the choice, unless the program has set plain numbers."""
    for name in ("num_workers", "prefetch_factor"):
        if isinstance(getattr(loader, name), AutoCount):
            setattr(loader, name, AutoCount(getattr(auto, name)))


class Growth:
    """Lets one iterator measure, and gives it the workers and slots that `Auto` wants.

    Args:
        auto: Decides for the loader.
        loader: The loader, whose attributes tell the choice; not kept alive.
        dispatcher: The iterator's workers and slots.
        free_workers: Its policy of dispatch, where workers may be added.
        counters: The loader's counters.
    """

    def __init__(
        self,
        auto: Auto,
        loader: Any,
        dispatcher: Dispatcher,
        free_workers: FreeWorkers | None,
        counters: Counters,
    ) -> None:
        self._auto = auto
        self._loader = weakref.ref(loader)
        self._dispatcher = dispatcher
        self._workers = dispatcher.workers
        self._free_workers = free_workers
        self._counters = counters
        self._told = self._serving = (int(loader.num_workers), auto.prefetch_factor)
        self._refusals = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin an epoch: until all workers have made a batch in it, nothing is measured."""
        self._drop = len(self._workers.workers)
        self._last = self._clocks()

    def note_return(self) -> None:
        """Measure the batch that was returned, and add what is wanted."""
        wanted = (self._auto.num_workers, self._auto.prefetch_factor)
        in_effect = wanted == self._serving
        if self._auto.settled and in_effect:
            return
        before, self._last = self._last, self._clocks()
        elapsed_ns, wait_ns, idle_ns = (now - then for now, then in zip(self._last, before, strict=True))
        measured = None
        if in_effect and self._drop == 0:
            measured = Measured(max(0, elapsed_ns - wait_ns) / 1e9, wait_ns / 1e9, idle_ns / 1e9)
        self._drop = max(0, self._drop - 1)
        self._auto.note(measured)
        self._add()
        self._last = self._clocks()

    def _clocks(self) -> tuple[int, int, int]:
        counters = self._counters
        return time.perf_counter_ns(), counters.wait_for_workers_ns, counters.workers_wait_for_slots_ns

    def _add(self) -> None:
        """Add as much as can be added now of what is wanted."""
        auto = self._auto
        there = auto.num_workers if self._free_workers is None else self._add_workers()
        serving = (there, auto.prefetch_factor)
        if serving != self._serving and self._add_slots(serving):
            self._serving = serving
            if self._free_workers is not None:
                self._free_workers.serve(*serving)
        wanted = (auto.num_workers, auto.prefetch_factor)
        loader = self._loader()
        if loader is not None and wanted != self._told:
            self._told = wanted
            _show(loader, auto)

    def _add_workers(self) -> int:
        """Start workers that are missing; gives the number of those that may be given tasks."""
        dispatcher, auto = self._dispatcher, self._auto
        until_ns = time.perf_counter_ns() + _START_NS
        while len(self._workers.workers) < auto.num_workers and time.perf_counter_ns() < until_ns:
            there = len(self._workers.workers)
            try:
                if not self._has_memory_for_one_more():
                    auto.refuse_workers(there, "no more workers fit in the memory")
                    break
                worker = self._workers.add()
            except Exception as error:  # whatever it is, the workers that are there go on
                if self._workers.interrupted:
                    raise
                _log.warning("shmloader could not start one more worker: %s", repr(error))
                auto.refuse_workers(there, "no more workers could be started")
                break
            if self._workers.interrupted:  # closed meanwhile, by a thread that has not seen this worker
                self._workers.close()
                raise LoaderClosed("the loader was closed while a worker was being started")
            dispatcher.welcome(worker)
        if dispatcher.joining:
            dispatcher.look_for_joining()
        return min(auto.num_workers, len(self._workers.workers), *dispatcher.joining)

    def _has_memory_for_one_more(self) -> bool:
        """Whether the host has memory for one more worker process, if it takes as much as the largest."""
        taken = [0]
        for process in self._workers.processes:
            # Not every platform says, and there may be no descriptor to ask with.
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                taken.append(psutil.Process(process.pid).memory_full_info().uss)
        return max(taken) + self._workers.given_nbytes <= memory_headroom().available_nbytes // 2

    def _add_slots(self, serving: tuple[int, int]) -> bool:
        """Have the pool hold as many tasks as are wanted; whether it does."""
        pool = self._dispatcher.pool
        if pool.resize(serving[0] * serving[1]):
            self._refusals = 0
            return True
        self._refusals += 1
        if self._refusals > pool.most_tasks + _MOST_REFUSALS:
            self._auto.refuse_tasks(*self._serving, "no more batches fit in the memory budget")
        return False
