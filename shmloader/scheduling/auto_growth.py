"""Measures for `Auto`, and adds the workers and slots that it wants, for one iterator. Main process.

All of it happens inside ``next()``, which starts one worker at most. It is given tasks when it has said that
it is there, so nobody waits for it.
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
from shmloader.scheduling.auto import Auto
from shmloader.scheduling.dispatcher import Dispatcher
from shmloader.scheduling.free_workers import FreeWorkers
from shmloader.statistics import Counters

_log = logging.getLogger("shmloader")
_MOST_REFUSALS = 8  # batches returned, beyond those on their way, until it is clear that no room is made


def auto_for(loader: Any, before: Auto | None) -> Auto | None:
    """The `Auto` that decides for a loader; None where nothing is ``"auto"``.

    Args:
        loader: The loader, whose attributes may have been changed.
        before: The one that has decided for it until now.
    """
    workers, prefetch = loader.num_workers, loader.prefetch_factor
    given = _given(workers), _given(prefetch)
    if None not in given:
        return None
    auto = before
    if auto is None or auto.given != given:
        auto = Auto(max(1, int(workers)), int(prefetch), given, _most_workers())
    _show(loader, auto)
    return auto


def _given(number: int) -> int | None:
    return None if isinstance(number, AutoCount) else number


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
        self._serving = (int(loader.num_workers), auto.prefetch_factor)
        self._refusals = 0
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Begin an epoch, or begin anew with another choice: the first batches were made otherwise."""
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
        """Add as much as can be added now of what is wanted."""
        auto, free_workers = self._auto, self._free_workers
        there = auto.num_workers
        if free_workers is not None:
            self._add_worker()
            self._dispatcher.look_for_joining()
            there = min(auto.num_workers, len(self._workers.workers), *self._dispatcher.joining)
        serving, pool = (there, auto.prefetch_factor), self._dispatcher.pool
        if serving != self._serving:
            if pool.resize(serving[0] * serving[1]):
                self._serving, self._refusals = serving, 0
                if free_workers is not None:
                    free_workers.serve(*serving)
                self.begin_epoch()
            elif self._refusals < pool.most_tasks + _MOST_REFUSALS:
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
        except Exception as error:  # whatever it is, the workers that are there go on
            if workers.interrupted:
                raise
            _log.warning("shmloader could not start one more worker: %s", repr(error))
            auto.settle(there, auto.prefetch_factor, "no more workers could be started")
            return
        if workers.interrupted:  # closed meanwhile, by a thread that has not seen this worker
            workers.close()
            raise LoaderClosed("the loader was closed while a worker was being started")
        self._dispatcher.welcome(worker)

    def _has_memory_for_one_more(self) -> bool:
        """Whether the host has memory for one more worker process, if it takes as much as the largest."""
        taken = [0]
        for process in self._workers.processes:
            # Not every platform says, and there may be no descriptor to ask with.
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                taken.append(psutil.Process(process.pid).memory_full_info().uss)
        return max(taken) + self._workers.given_nbytes <= memory_headroom().available_nbytes // 2
