"""The memory of the slots of one iterator: mapped, given back, and limited by the budget."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shmloader.memory import PAGE_NBYTES, Extent, Segment, whole_pages
from shmloader.memory.limits import memory_headroom
from shmloader.slots.budget import LIMITS_IN_A_SHARE, RECENT, RETAINED_SLOTS, SPARE_SLOTS, Budget
from shmloader.slots.inspection import Inspection
from shmloader.slots.place import GUARDED, LEASED, ByteArray, Guard, Place
from shmloader.statistics import Counters

_LITTLE_NBYTES = 1 << 16  # copying so few takes less time than the rest of `next()`
_COPIED = "are copied to private memory, which is correct but slower"


class AskedFor(NamedTuple):
    """The program's request, in the words of its warnings."""

    owner: str  # what the table belongs to
    items: str  # what its slots hold
    tasks: str  # the arguments that give the number of tasks
    fewer: str  # the arguments that take less memory if they are smaller


OF_LOADERS = AskedFor(
    owner="loader",
    items="batches",
    tasks="prefetch_factor x num_workers",
    fewer="batch_size, prefetch_factor or num_workers",
)


class SlotMemory:
    """The part of `PlaceTable` that knows bytes; see there."""

    def __init__(
        self, segment: Segment, budget: Budget, counters: Counters | None, asked_for: AskedFor
    ) -> None:
        self._asked_for = asked_for
        self.segment = segment
        self.budget = budget
        self.counters = counters or Counters()
        self.places: list[Place] = []  # all that were made, by number
        self.tasks = 0  # number of places that are ``MAKING`` or ``ARRIVED``
        self.kept = 0  # number of places that are ``LEASED`` or ``GUARDED``
        self.committed_nbytes = 0  # sum of all limits
        self.guard, self.is_guarded = Guard(), False  # keeps places back for an accelerator
        wanted = os.environ.get("SHMLOADER_DEBUG", "0") not in ("", "0")
        self.inspection = Inspection() if wanted else None
        self.warning = ""  # for the program, to be given when the next batch is asked for
        self._recent: deque[int] = deque(maxlen=RECENT)  # bytes of the last batches
        self._free: list[Place] = []  # last freed, first granted: its pages are the warmest
        self._empty: list[Place] = []  # free as well, but without memory: granted when no other is free
        self.window = budget.most_tasks  # tasks that may be sent and not returned; more after `widen`

    def reserve(self, place: Place, nbytes: int) -> Extent:
        """Make a granted slot at least ``nbytes`` large, if the host can give that, and map it."""
        if nbytes > place.nbytes:
            nbytes = self.segment.reserve(place.number, place.nbytes, nbytes)
            self.committed_nbytes += place.resize(nbytes, max(nbytes, place.limit_nbytes))
        return self.map(place)

    def map(self, place: Place) -> Extent:
        """The slot's memory in this process; mapped anew if it has grown."""
        extent = place.extent
        if extent is None or extent.nbytes != place.nbytes:
            self._unmap(place)
            extent = self.segment.map(place.number, place.nbytes)
            place.set_extent(extent)
        return extent

    def oldest_leases(self) -> tuple[str, ...]:
        """With ``SHMLOADER_DEBUG=1``, the batches that the program has held for longest; see `Inspection`."""
        return () if self.inspection is None else self.inspection.oldest_leases()

    def _make_ready(self, place: Place) -> Extent:
        """Map a slot that is about to be leased, and show it to the guard.

        Not sooner: while a slot holds only an index batch it is small, and its worker will grow it.
        """
        extent = self.map(place)
        while (warning := self.guard.lock(extent)) is None:
            self._unmap(place)
            extent = self.map(place)  # elsewhere
        self.warning = warning or self.warning
        place.set_extent(extent, ready=True)
        return extent

    def _unmap(self, place: Place) -> None:
        if place.extent is not None and place.state not in (LEASED, GUARDED):
            self.guard.unlock(place.extent)
        place.set_extent(None)

    # --- free slots

    def _discard_cold(self) -> None:
        """Let only as many slots besides leased ones keep memory as tasks and the guard need."""
        most = self.window + SPARE_SLOTS + self.guard.kept_back
        self._discard_while(lambda: len(self._free) + self.tasks > most)

    def _discard_while(self, too_many: Callable[[], bool]) -> None:
        """Take the memory from free slots, the coldest first."""
        while self._free and too_many():
            place = self._free.pop(0)
            self._shrink(place, 0)
            self._empty.append(place)

    def _drop_excess(self, place: Place) -> None:
        """Give back what a free slot has beyond a typical batch, if it has far more."""
        # To unlock a locked slot and lock it again would take longer.
        if place.nbytes > self.budget.excess_nbytes and not (self.is_guarded and place.ready):
            self._shrink(place, whole_pages(self.budget.hint_nbytes))

    def _shrink(self, place: Place, nbytes: int) -> None:
        self._unmap(place)  # first: locked pages that are given back would not be the slot's any more
        self.segment.discard(place.number, place.nbytes, nbytes)
        self.committed_nbytes += place.resize(nbytes, nbytes)

    # --- the budget

    def used_nbytes(self) -> int:
        """Sum of the limits of all places but free ones."""
        return self.committed_nbytes - sum(place.nbytes for place in self._free)

    def _reserved_nbytes(self) -> int:
        return sum(place.nbytes for place in self.places)

    def report(self) -> str:
        """A sentence on the slots' memory, for the error of a worker that was killed."""
        return (
            f"The loader's slots have {self._reserved_nbytes():,} bytes of shared memory (their budget is "
            f"{self.budget.nbytes:,}), its largest batch {self.budget.largest_nbytes:,}."
        )

    def _adapt(self, nbytes: int) -> None:
        before = self.budget.most_tasks
        self.counters.note_size(nbytes)
        self.budget.adapt(nbytes, self._recent, self.tasks, self.used_nbytes(), self._reserved_nbytes())
        self._follow_budget(before)
        for place in self._free:
            self._drop_excess(place)

    def _follow_budget(self, before: int) -> None:
        """Give back memory beyond the budget; warn if the budget holds fewer tasks than ``before``."""
        budget, asked_for = self.budget, self._asked_for
        if budget.most_tasks < before:
            self.window = budget.most_tasks
            slots = budget.wanted_tasks + SPARE_SLOTS
            self._warn_of_budget(
                f"this {asked_for.owner} may have {slots} {asked_for.items} ({asked_for.tasks} + "
                f"{SPARE_SLOTS}) of {budget.typical_nbytes:,} bytes at once",
                slots * whole_pages(budget.typical_nbytes),
            )
        self._discard_while(lambda: self.committed_nbytes > budget.nbytes)

    # --- batches that are copied

    def _note_pieces(self, nbytes: int, limit_nbytes: int) -> None:
        """Note that a batch came in pieces: larger than its slot's limit, or what the host gave."""
        budget = self.budget
        self.counters.add("spills")
        self.counters.add("spilled_nbytes", nbytes)
        self._recent.append(nbytes)
        if nbytes > budget.typical_nbytes:
            self._adapt(nbytes)
        if nbytes > limit_nbytes:
            needed_nbytes = self._needed_nbytes(nbytes)
            if needed_nbytes <= budget.nbytes:
                needed_nbytes *= LIMITS_IN_A_SHARE
            self._warn_of_budget(f"a batch of {nbytes:,} bytes is larger than a slot may be", needed_nbytes)
        else:
            before = budget.most_tasks
            budget.follow_host(self.tasks, self.used_nbytes(), self._reserved_nbytes())
            self._follow_budget(before)
            self._warn(
                f"the host gave a slot less shared memory than its batch of {nbytes:,} bytes needs: batches "
                f"{_COPIED}. Available are {memory_headroom().available_nbytes:,} bytes of memory; address "
                "space (ulimit -v) and the size of files (ulimit -f) may be limited too."
            )

    def _spill(self, place: Place) -> ByteArray:
        """Copy a batch that may not be leased to private memory."""
        nbytes = place.used_nbytes
        private = np.frombuffer(self.map(place).buffer, np.uint8)[:nbytes].copy()
        self.counters.add("spills")
        self.counters.add("spilled_nbytes", nbytes)
        guarded = [place.state for place in self.places].count(GUARDED)
        in_use = self.kept + max(self.budget.most_tasks, self.tasks - 1)
        items = self._asked_for.items
        if self.counters.warned_of_spills or not self.guard.admits_leases():  # while a graph is captured
            return private
        if guarded:
            why = f"the accelerator has yet to read {guarded} {items} that the program has dropped"
            self._warn_of_budget(why, self._needed_nbytes(nbytes) + guarded * whole_pages(nbytes))
        elif nbytes > _LITTLE_NBYTES and in_use >= self.budget.base_slots + RETAINED_SLOTS:
            self._warn(
                f"the program keeps {self.kept} {items}, the most that slots are made for: further ones, "
                f"this one of {nbytes:,} bytes, {_COPIED}. {self._holders()} Keep fewer {items} at a time "
                "(`del` those that you no longer need), or only what is needed of each, copied "
                "(`tensor.clone()`, `.item()`)."
            )
        elif nbytes > _LITTLE_NBYTES:
            why = f"the program keeps {self.kept} {items}"
            self._warn_of_budget(why, self._needed_nbytes(nbytes), f" {self._holders()}")
        return private

    def _holders(self) -> str:
        try:  # only programs that are warned need it; without a descriptor it cannot be read any more
            from shmloader.slots.holders import holders
        except (ImportError, OSError):
            return "What keeps them cannot be told without a free descriptor."
        kept = [place.extent for place in self.places if place.state_now is LEASED]
        return holders(extent for extent in kept if extent is not None)

    def _needed_nbytes(self, nbytes: int) -> int:
        """Bytes for slots that each hold the largest batch."""
        budget = self.budget
        return (budget.wanted_tasks + SPARE_SLOTS) * whole_pages(max(nbytes, budget.largest_nbytes))

    def _warn_of_budget(self, why: str, needed_nbytes: int, holders: str = "") -> None:
        """Warn that the budget has no room for a batch, and name one that has."""
        budget, asked_for, least, fewer = self.budget, self._asked_for, "", ""
        slots = budget.wanted_tasks + SPARE_SLOTS
        if budget.nbytes <= slots * PAGE_NBYTES:  # a smaller budget was raised to this
            least = f" (a page for each of {slots} slots, the least there can be)"
        if self._needed_nbytes(0) > budget.nbytes:
            fewer = f" If most are as large, fewer than {budget.wanted_tasks} are made in advance."
        self._warn(
            f"{why}, and the slots' memory budget is {budget.nbytes:,} bytes{least}: {asked_for.items} "
            f"beyond it {_COPIED}.{fewer}{holders} A budget for this {asked_for.owner}'s slots is at least "
            f"{needed_nbytes:,} bytes (memory_budget_nbytes=...), plus what the program keeps; or use a "
            f"smaller {asked_for.fewer}."
        )

    def _warn(self, message: str) -> None:
        """Have a warning ready for the program; one for each loader."""
        if self.counters.warns_first("warned_of_spills"):
            self.warning = message

    def take_warning(self) -> str:
        """The warning that is to be given to the program now."""
        warning, self.warning = self.warning, ""
        return warning
