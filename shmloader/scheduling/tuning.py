"""Measures for `Autotune`, and carries out for one iterator what it chooses; within ``next()``.

A further worker is given tasks when it has said that it is there: until then nobody waits for it. One that is
not wanted any more is given none, and ends when the choice is made.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
import weakref
from dataclasses import dataclass
from typing import Any

import psutil

from shmloader.errors import LoaderClosed
from shmloader.host.limits import cores, memory_headroom
from shmloader.scheduling.autotune import Autotune
from shmloader.scheduling.dispatch import Balance
from shmloader.scheduling.exchange import Exchange
from shmloader.scheduling.trials import AUTO, AutoCount, Bounds, Choice, Sample
from shmloader.shared_memory import MemfdSegment, whole_pages
from shmloader.slots import SlotPool
from shmloader.statistics import Counters

_log = logging.getLogger("shmloader")
_START_NS = 50_000_000  # how long one call of next() goes on starting workers
_NO_ROOM = "no more batches fit in the memory budget"
_PATIENCE = 8  # batches that are returned until it is clear that no room is made for a larger choice


def or_chosen(name: str, argument: Any, start: int) -> Any:
    """An argument; in the place of ``"auto"`` a number that says that it is chosen.

    Args:
        name: The argument's name.
        argument: Its value. Torch checks all but words.
        start: What choosing begins with.

    Raises:
        ValueError: For another word.
    """
    if not isinstance(argument, str):
        return argument
    if argument != AUTO:
        raise ValueError(f"{name} must be a number or {AUTO!r}, not {argument!r}")
    return AutoCount(start)


def chooser_of(loader: Any, before: Autotune | None) -> Autotune | None:
    """What chooses for a loader, or None where nothing is ``"auto"``.

    Args:
        loader: The loader, whose attributes may have been changed.
        before: What chose for it until now.
    """
    workers = isinstance(loader.num_workers, AutoCount)
    prefetch = isinstance(loader.prefetch_factor, AutoCount)
    if not workers and not prefetch:
        return None
    if before is not None and (before.tunes_workers, before.tunes_prefetch) == (workers, prefetch):
        now = before.choice
        if (workers or now.num_workers == loader.num_workers) and (
            prefetch or now.prefetch_factor == loader.prefetch_factor
        ):
            show(loader, now)
            return before
    start = Choice(max(1, int(loader.num_workers)), int(loader.prefetch_factor))
    autotune = Autotune(start, workers=workers, prefetch=prefetch, most_workers=_most_workers())
    show(loader, autotune.choice)
    return autotune


def _most_workers() -> int:
    """One for each usable core, or for each of this rank's where ranks share the machine and its cores."""
    found = cores()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun sets it
    shared = int(ranks) if ranks.isdecimal() and found.affinity == found.machine else 1
    return max(1, found.usable // max(1, shared))


def show(loader: Any, choice: Choice) -> None:
    """Let a loader's attributes say what is chosen, unless the program has set others."""
    for name, count in zip(Choice._fields, choice, strict=True):
        if isinstance(getattr(loader, name), AutoCount):
            setattr(loader, name, AutoCount(count))


def make_pool(loader: Any, autotune: Autotune | None) -> SlotPool:
    """The slots of an iterator, within the memory budget that the loader was given or what the host has."""
    available_nbytes = memory_headroom().available_nbytes
    budget_nbytes = loader.memory_budget_nbytes
    num_workers = int(loader.num_workers)
    most_tasks = num_workers * int(loader.prefetch_factor)
    if budget_nbytes is None and autotune is None:
        return SlotPool(MemfdSegment(), most_tasks, available_nbytes // 2, elastic=True, workers=num_workers)
    if budget_nbytes is None:
        budget_nbytes = available_nbytes // 2
    else:  # a plain number, since sums of NumPy's narrow ones overflow
        budget_nbytes = min(operator.index(budget_nbytes), available_nbytes)
    if autotune is None:
        return SlotPool(MemfdSegment(), most_tasks, budget_nbytes)
    planned = most_tasks if autotune.settled else max(most_tasks, autotune.most_tasks)
    return SlotPool(MemfdSegment(), most_tasks, budget_nbytes, planned_tasks=planned)


@dataclass
class Beginning:
    """With what the workers begin the present epoch.

    Attributes:
        shared_seed: As in `WorkerArguments`.
        epoch: Likewise.
    """

    shared_seed: int | None
    epoch: int = 0


class Tuning:
    """Lets one iterator measure, and gives it the workers and slots that are chosen.

    Args:
        autotune: Chooses for the loader.
        loader: The loader, whose attributes say what is chosen; not kept alive.
        exchange: The iterator's workers and slots.
        balance: Who gives tasks to workers, where their number may change.
        counters: The loader's counters.
        begins: With what the workers begin the present epoch.

    Attributes:
        choice: What the iterator works with.
    """

    def __init__(
        self,
        autotune: Autotune,
        loader: Any,
        exchange: Exchange,
        balance: Balance | None,
        counters: Counters,
        begins: Beginning,
    ) -> None:
        self.choice = autotune.choice
        self._autotune = autotune
        self._loader = weakref.ref(loader)
        self._exchange = exchange
        self._pool = exchange.pool
        self._crew = exchange.crew
        self._balance = balance
        self._counters = counters
        self._begins = begins
        self._begun_with = len(exchange.crew.workers)
        # For workers that are started later; the other half is for slots.
        self._share_nbytes = 0 if autotune.settled else memory_headroom().available_nbytes // 2
        self._largest_nbytes = 0
        self._in_effect = True
        self._told: Choice | None = None
        self._refused = 0  # how often in a row the pool had no room for what was chosen
        self._returned = 0
        autotune.owner = weakref.ref(self)  # of several iterators the newest measures
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """An epoch begins: what is measured before all workers have made a batch in it does not count."""
        self._drop = len(self._crew.workers)
        self._note_now()

    def note_return(self) -> None:
        """A batch was returned: measure, and do what is chosen."""
        if self._autotune.settled and self._in_effect:
            if self._pool.largest_nbytes == self._largest_nbytes:
                return
        else:
            self._measure()
        if self._pool.largest_nbytes != self._largest_nbytes:
            self._follow_size()
        self._in_effect = self._carry_out()
        self._note_now()

    # --- measuring

    def _note_now(self) -> None:
        counters = self._counters
        self._last = (
            time.perf_counter_ns(),
            counters.wait_for_workers_ns,
            counters.workers_wait_for_slots_ns,
            self._returned + len(self._exchange.arrived),
        )

    def _measure(self) -> None:
        self._returned += 1
        began_ns, waited_ns, idle_ns, made = self._last
        self._note_now()
        now_ns, waited_now_ns, idle_now_ns, made_now = self._last
        wait_ns = waited_now_ns - waited_ns
        sample = Sample(
            own_s=max(0, now_ns - began_ns - wait_ns) / 1e9,
            wait_s=wait_ns / 1e9,
            idle_s=(idle_now_ns - idle_ns) / 1e9,
            made=made_now - made,
        )
        counts = self._in_effect and self._drop == 0
        self._drop = max(0, self._drop - 1)
        if self._autotune.owner() in (None, self):
            self._autotune.note(sample if counts else None, self._bounds)

    # --- what may be chosen

    def _bounds(self) -> Bounds:
        """As many workers as there is memory for, and as many tasks as the budget has slots for."""
        most, started, each_nbytes = (
            self._autotune.most_workers,
            len(self._crew.workers),
            self._worker_nbytes(),
        )
        if each_nbytes and started < most:
            now_nbytes = memory_headroom().available_nbytes
            planned = self._begun_with + self._share_nbytes // each_nbytes
            most = max(started, min(most, planned, started + now_nbytes // each_nbytes))
        return Bounds(most, self._pool.tasks_that_fit())

    def _worker_nbytes(self) -> int:
        """Memory that a further worker process would have for itself alone; of the largest."""
        taken = [0]
        for process in self._crew.processes:
            # Not every platform says, and there may be no descriptor to ask with.
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                taken.append(psutil.Process(process.pid).memory_full_info().uss)
        return max(taken) + self._crew.given_nbytes

    def _follow_size(self) -> None:
        """Batches are larger than any before: see that the budget still holds what is chosen."""
        self._largest_nbytes = self._pool.largest_nbytes
        fitting = self._pool.budget_nbytes // whole_pages(self._largest_nbytes) - 2
        if fitting < self._autotune.choice.tasks:
            self._autotune.limit(why=_NO_ROOM, tasks=max(1, fitting))

    # --- doing it

    def _carry_out(self) -> bool:
        """Do what is chosen, or as much of it as can be done now; whether that is all."""
        autotune, pool, balance = self._autotune, self._pool, self._balance
        there = autotune.choice.num_workers if balance is None else self._provide_workers()
        goal = autotune.choice
        choice = Choice(there, goal.prefetch_factor)
        tasks = min(choice.tasks, autotune.limit_tasks)
        resized = pool.most_tasks != tasks and self._resize(tasks)
        if balance is not None and (resized or choice != self.choice):
            balance.serve(*choice)
        self.choice = choice
        self._tell(goal)
        if autotune.settled and pool.most_tasks == tasks and pool.planned_tasks:
            pool.planned_tasks = 0
            pool.resize(pool.most_tasks)  # its slots may be larger now
        return there == goal.num_workers and pool.most_tasks == tasks and self._dismiss_spare(goal)

    def _provide_workers(self) -> int:
        """Start workers that are missing; gives the number that may be given tasks, of those wanted."""
        crew, exchange, autotune = self._crew, self._exchange, self._autotune
        until_ns = time.perf_counter_ns() + _START_NS
        while len(crew.workers) < autotune.choice.num_workers and time.perf_counter_ns() < until_ns:
            try:
                worker = crew.add()
            except Exception as error:  # whatever it is, the workers that are there go on
                if crew.interrupted:
                    raise
                _log.warning("shmloader could not start one more worker: %s", repr(error))
                autotune.limit(why="no more workers could be started", num_workers=len(crew.workers))
                break
            if crew.interrupted:  # closed meanwhile, by another thread, which has not seen this worker
                crew.close()
                raise LoaderClosed("the loader was closed while a worker was being started")
            exchange.welcome(worker, self._begins.shared_seed, self._begins.epoch)
        if exchange.joining:
            exchange.look_for_joining()
        return min(autotune.choice.num_workers, len(crew.workers), *exchange.joining)

    def _dismiss_spare(self, goal: Choice) -> bool:
        """Once the choice is made, end workers that it has no use for; whether none is left."""
        balance, crew = self._balance, self._crew
        if balance is None or not self._autotune.settled:
            return True
        while len(crew.workers) > goal.num_workers and balance.is_done(len(crew.workers) - 1):
            self._exchange.joining.discard(len(crew.workers) - 1)
            crew.dismiss()
        return len(crew.workers) <= goal.num_workers

    def _resize(self, tasks: int) -> bool:
        """Have the pool made for so many tasks; whether it is."""
        if self._pool.resize(tasks):
            self._refused = 0
            return True
        self._refused += 1
        if self._refused > self._pool.most_tasks + _PATIENCE:
            self._autotune.limit(why=_NO_ROOM, tasks=self._pool.most_tasks)
        return False

    def _tell(self, goal: Choice) -> None:
        loader = self._loader()
        if loader is not None and goal != self._told:
            self._told = goal
            show(loader, goal)
