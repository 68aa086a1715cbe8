"""The memory of the slots of one iterator: mapped, given back, and limited by the budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from shmloader.memory import Extent, Segment, whole_pages
from shmloader.slots import inspection, memory_warnings
from shmloader.slots.budget import RECENT, RETAINED_SLOTS, SPARE_SLOTS, Budget
from shmloader.slots.guard import Guard
from shmloader.slots.place import GUARDED, LEASED, ByteArray, Place
from shmloader.statistics import Counters

_LITTLE_NBYTES = 1 << 16  # copying so few takes less time than the rest of `next()`


class SlotMemory:
    """The part of `PlaceTable` that knows bytes; see there."""

    def __init__(self, segment: Segment, budget: Budget, counters: Counters | None) -> None:
        self.segment = segment
        self.budget = budget
        self.counters = counters or Counters()
        self.places: list[Place] = []  # all that were made, by number
        self.tasks = 0  # number of places that are ``MAKING`` or ``ARRIVED``
        self.kept = 0  # number of places that are ``LEASED`` or ``GUARDED``
        self.committed_nbytes = 0  # sum of all limits
        self.guard = Guard()  # keeps places back for an accelerator
        self.inspection = inspection.Inspection() if inspection.wanted() else None  # SHMLOADER_DEBUG=1
        self.warning = ""  # for the program, to be given when the next batch is asked for
        self._recent: deque[int] = deque(maxlen=RECENT)  # bytes of the last batches
        self._free: list[Place] = []  # last freed, first granted: its pages are the warmest
        self._empty: list[Place] = []  # free as well, but without memory: granted when no other is free
        self.window = budget.most_tasks  # tasks that may be sent and not returned; more after `widen`

    def reserve(self, place: Place, nbytes: int) -> Extent:
        """Make a granted slot at least ``nbytes`` large and map it (for a long index batch).

        Raises `SharedMemoryExhausted` if the host cannot give that much.
        """
        if nbytes > place.nbytes:
            place.nbytes = self.segment.reserve(place.number, place.nbytes, nbytes)
            self._set_limit(place, max(place.nbytes, place.limit_nbytes))
        return self.map(place)

    def map(self, place: Place) -> Extent:
        """The slot's memory in this process; mapped anew if it has grown."""
        extent = place.extent
        if extent is None or extent.nbytes != place.nbytes:
            self._unmap(place)
            extent = place.extent = self.segment.map(place.number, place.nbytes)
        return extent

    def _make_ready(self, place: Place) -> Extent:
        """Map a slot that is about to be leased, and show it to the guard.

        Not sooner: while a slot holds only an index batch it is small, and its worker will grow it.
        """
        extent = self.map(place)
        while (warning := self.guard.lock(extent)) is None:
            self._unmap(place)
            extent = self.map(place)  # elsewhere
        self.warning = warning or self.warning
        place.ready = True
        return extent

    def _unmap(self, place: Place) -> None:
        if place.extent is not None and place.state not in (LEASED, GUARDED):
            self.guard.unlock(place.extent)
        place.extent, place.ready = None, False

    # --- free slots

    def _discard_cold(self) -> None:
        """Let only as many slots besides leased ones keep memory as the tasks that may be sent need."""
        self._discard_while(lambda: len(self._free) + self.tasks > self.window + SPARE_SLOTS)

    def _discard_while(self, too_many: Callable[[], bool]) -> None:
        """Take the memory from free slots, the coldest first."""
        while self._free and too_many():
            place = self._free.pop(0)
            self._shrink(place, 0)
            self._empty.append(place)

    def _drop_excess(self, place: Place) -> None:
        """Give back what a free slot has beyond a typical batch."""
        if not (self.guard.active and place.ready):  # to unlock it and lock it again would take longer
            self._shrink(place, whole_pages(self.budget.hint_nbytes))

    def _shrink(self, place: Place, nbytes: int) -> None:
        self._unmap(place)  # first: locked pages that are given back would not be the slot's any more
        self.segment.discard(place.number, place.nbytes, nbytes)
        place.nbytes = nbytes
        self._set_limit(place, nbytes)

    def _set_limit(self, place: Place, nbytes: int) -> None:
        self.committed_nbytes += nbytes - place.limit_nbytes
        place.limit_nbytes = nbytes

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
        """Adapt to the size of a batch: see `Budget.adapt`."""
        before, counters = self.budget.most_tasks, self.counters
        counters.largest_batch_nbytes = max(counters.largest_batch_nbytes, nbytes)
        self.budget.adapt(nbytes, self._recent, self.tasks, self.used_nbytes(), self._reserved_nbytes())
        self._follow_budget(before)
        for place in self._free:
            if place.nbytes > self.budget.excess_nbytes:
                self._drop_excess(place)

    def _follow_budget(self, before: int) -> None:
        """Give back memory beyond the budget; warn if the budget holds fewer tasks than ``before``."""
        if self.budget.most_tasks < before:
            self.window = self.budget.most_tasks
            self._warn(memory_warnings.fewer_ahead, self.budget)
        self._discard_while(lambda: self.committed_nbytes > self.budget.nbytes)

    # --- batches that are copied

    def _note_pieces(self, place: Place, nbytes: int) -> None:
        """Note that a batch came in pieces, because its slot could not be made large enough."""
        self._count_spill(nbytes)
        self._recent.append(nbytes)
        if nbytes > self.budget.typical_nbytes:
            self._adapt(nbytes)
        if nbytes > place.limit_nbytes:
            self._warn(memory_warnings.larger_than_a_slot, self.budget, nbytes)
        else:
            before = self.budget.most_tasks
            self.budget.follow_host(self.tasks, self.used_nbytes(), self._reserved_nbytes())
            self._follow_budget(before)
            self._warn(memory_warnings.refused_by_host, nbytes)

    def _spill(self, place: Place) -> ByteArray:
        """Copy a batch that may not be leased to private memory."""
        nbytes = place.used_nbytes
        private = np.empty(nbytes, np.uint8)
        private[:] = np.frombuffer(self.map(place).buffer, np.uint8)[:nbytes]
        self._count_spill(nbytes)
        guarded = [place.state for place in self.places].count(GUARDED)
        in_use = self.kept + max(self.budget.most_tasks, self.tasks - 1)
        if not self.guard.admits_leases():  # for as long as a graph is captured
            return private
        if guarded:
            self._warn(memory_warnings.kept_by_device, self.budget, nbytes, guarded)
        elif nbytes > _LITTLE_NBYTES and in_use >= self.budget.base_slots + RETAINED_SLOTS:
            self._warn(memory_warnings.kept_beyond_slots, nbytes, self.kept)
        elif nbytes > _LITTLE_NBYTES:
            self._warn(memory_warnings.kept_beyond_budget, self.budget, nbytes, self.kept)
        return private

    def _count_spill(self, nbytes: int) -> None:
        self.counters.spills += 1
        self.counters.spilled_nbytes += nbytes

    def take_warning(self) -> str:
        """The warning that is to be given to the program now."""
        warning, self.warning = self.warning, ""
        return warning

    def _warn(self, message: Callable[..., str], *facts: Any) -> None:
        """Have a warning ready for the program; one for each loader."""
        if not self.counters.warned_of_spills:
            self.counters.warned_of_spills = True
            self.warning = message(*facts)
