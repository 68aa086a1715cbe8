"""The slots of one iterator, and which of them are free."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shmloader.memory import Extent, Segment, whole_pages
from shmloader.memory.limits import memory_headroom
from shmloader.settings import Settings
from shmloader.slots import memory_warnings
from shmloader.slots.budget import SPARE_SLOTS, Budget
from shmloader.slots.slot import Lease, Slot, SlotState
from shmloader.statistics import Counters

RETAINED_SLOTS = 64
"""Slots that a pool may make beyond its base for batches that the program keeps. A slot costs a mapping and
whole pages; beyond this number, private memory is cheaper for kept batches."""

_LITTLE_NBYTES = 1 << 16  # copying so few takes less time than the rest of `next()`
_FREE, _GRANTED, _PUBLISHED, _LEASED, _GUARDED = SlotState
_UINT8 = np.dtype(np.uint8)  # quicker to use than the type


class SlotPool:
    """Slots and their free set; not a ring, since leases end in any order.

    Args:
        segment: Where the slots' memory comes from; the pool owns it.
        most_tasks, budget_nbytes, workers, follows_host: See `Budget`.
        counters: The loader's counters; the pool counts spills.

    Attributes:
        budget: The memory of the slots, and the number of tasks.
        counters: As above.
        slots: All slots that were made, by number.
        warm_slots: How many slots keep their memory, besides leased ones.
        warning: A warning for the program, given when the next batch is asked for, or "".
        keeps_granted: Whether workers may outlive the pool: then `close` leaves them their slots.
        on_freed: Called with each slot that has become free (see `inspection`).
        on_granted: Called with each free slot before it is granted.
    """

    def __init__(
        self,
        segment: Segment,
        most_tasks: int,
        budget_nbytes: int,
        *,
        workers: int = 1,
        follows_host: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self.segment = segment
        self.budget = Budget(budget_nbytes, most_tasks, workers=workers, follows_host=follows_host)
        self.warm_slots = self.base_slots
        self.slots: list[Slot] = []
        self.keeps_granted = False
        self.on_freed: Callable[[Slot], None] | None = None
        self.on_granted: Callable[[Slot], None] | None = None
        self._free = self.budget.free  # last freed, first granted: its pages are the warmest
        self._empty: list[Slot] = []  # free as well, but without memory: granted when no other is free
        self._released: deque[Lease] = deque()
        self._leased = 0  # or guarded
        self.counters = counters or Counters()
        self.warning = ""
        self._closed = False

    @classmethod
    def for_loader(cls, settings: Settings, counters: Counters) -> Self:
        """The slots for a loader's settings.

        Without a budget from the program it gets half of the memory that the host has available now. A budget
        larger than the available memory is cut to that.
        """
        available_nbytes, wanted_nbytes = memory_headroom().available_nbytes, settings.memory_budget_nbytes
        if wanted_nbytes is None:
            budget_nbytes = available_nbytes // 2
        else:  # a plain number, since sums of NumPy's narrow ones overflow
            budget_nbytes = min(operator.index(wanted_nbytes), available_nbytes)
        workers = settings.num_workers
        return cls(
            Segment(),
            workers * settings.prefetch_factor,
            budget_nbytes,
            workers=workers,
            follows_host=wanted_nbytes is None,
            counters=counters,
        )

    # --- sizes

    @property
    def most_tasks(self) -> int:
        """See `Budget`."""
        return self.budget.most_tasks

    @property
    def base_slots(self) -> int:
        """See `Budget`."""
        return self.budget.base_slots

    def reserved_nbytes(self) -> int:
        """Bytes that the slots have, as far as workers have reported."""
        return sum(slot.nbytes for slot in self.slots)

    def resize(self, most_tasks: int) -> bool:
        """Change the number of tasks that may be outstanding, if there is room: see `Budget.resize`."""
        self.collect()
        if not self.budget.resize(most_tasks):
            return False
        self.warm_slots = self.base_slots
        self._discard_beyond(self.warm_slots)
        return True

    def can_lease(self) -> bool:
        """Whether one more batch may be leased and ``most_tasks`` tasks still find slots."""
        if self._released:
            self.collect()
        budget, leased = self.budget, self._leased
        if budget.tasks > budget.most_tasks:
            leased += budget.tasks - 1 - budget.most_tasks  # slots of batches made beyond `most_tasks`
        if leased >= SPARE_SLOTS + RETAINED_SLOTS:
            return False
        return budget.committed_nbytes <= budget.ample_nbytes or budget.has_room_for_lease()

    def has_room_for_more(self) -> bool:
        """Whether a task beyond ``most_tasks`` can have a slot for the largest batch."""
        if self._released:
            self.collect()
        in_use, most = self._leased + self.budget.tasks, self.base_slots + RETAINED_SLOTS
        return in_use < most and self.budget.has_room_for_task()

    # --- the way of a slot

    def grant(self) -> Slot:
        """Take a free slot for a task.

        There is always one for each of ``most_tasks`` tasks, because a batch is leased only if `can_lease`
        allows it. The worker may grow the slot to its ``limit_nbytes``.
        """
        if self._released:
            self.collect()
        budget = self.budget
        ample = budget.committed_nbytes <= budget.ample_nbytes
        limit_nbytes = budget.limit_nbytes if ample else budget.next_limit()
        slot = self._free.pop() if self._free else self._empty_slot()
        if self.on_granted is not None:
            self.on_granted(slot)
        if slot.nbytes > limit_nbytes:
            self._shrink(slot, limit_nbytes)
        slot.state = _GRANTED
        budget.committed_nbytes += limit_nbytes - slot.limit_nbytes
        slot.limit_nbytes = limit_nbytes
        budget.tasks += 1
        if not ample:
            self._discard_excess()
        return slot

    def _empty_slot(self) -> Slot:
        if self._empty:
            return self._empty.pop()
        slot = Slot(len(self.slots))
        self.slots.append(slot)
        return slot

    def reserve(self, slot: Slot, nbytes: int) -> Extent:
        """Make a granted slot at least ``nbytes`` large and map it (for a long index batch).

        Raises:
            SharedMemoryExhausted: If the host cannot give that much.
        """
        if nbytes > slot.nbytes:
            slot.nbytes = self.segment.reserve(slot.number, slot.nbytes, nbytes)
            if slot.nbytes > slot.limit_nbytes:
                self._set_limit(slot, slot.nbytes)
        return self.map(slot)

    def publish(self, slot: Slot, slot_nbytes: int, used_nbytes: int) -> None:
        """Mark a granted slot as published by its worker, which has reserved ``slot_nbytes`` for it.

        The batch takes ``used_nbytes``, header included; 0 for an answer without one, or in parts.
        """
        assert slot.state is _GRANTED, f"slot {slot.number} published while {slot.state}"
        if slot.extent is not None and slot.extent.nbytes > slot_nbytes:
            self._unmap(slot)  # the pages behind may be given back, and the slot may grow over others later
        budget = self.budget
        budget.committed_nbytes += slot_nbytes - slot.limit_nbytes
        slot.nbytes = slot.limit_nbytes = slot_nbytes
        slot.used_nbytes = used_nbytes
        slot.state = _PUBLISHED
        if used_nbytes:
            budget.recent.append(used_nbytes)
            if not budget.small_nbytes <= used_nbytes <= budget.typical_nbytes:
                self._note_size(used_nbytes)

    def lease(self, slot: Slot) -> tuple[npt.NDArray[np.uint8], memoryview]:
        """Begin a lease on a published slot.

        Returns:
            The anchor, an array of uint8 over the slot; and the slot's bytes, which hold no lease.

        The slot is free again when the anchor and all arrays and tensors made over it are gone.

        Raises:
            SharedMemoryExhausted: If this process has no address space for it.
        """
        assert slot.state is _PUBLISHED, f"slot {slot.number} leased while {slot.state}"
        extent = slot.extent
        if extent is None or extent.nbytes != slot.nbytes:
            extent = self.map(slot)
        anchor = np.ndarray(extent.nbytes, _UINT8, extent.buffer)
        lease = Lease(anchor, self._released.append)
        lease.slot = slot
        slot.lease = lease
        slot.state = _LEASED
        self._leased += 1
        self.budget.tasks -= 1
        return anchor, extent.view

    def spill(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """Copy a published batch, which may not be leased, to private memory and free its slot at once."""
        assert slot.state is _PUBLISHED, f"slot {slot.number} spilled while {slot.state}"
        private = np.empty(slot.used_nbytes, np.uint8)
        private[:] = np.frombuffer(self.map(slot).buffer, np.uint8)[: slot.used_nbytes]
        self._count_spill(len(private))
        self._warn_of_kept(len(private))
        self.give_back(slot)
        return private

    def _warn_of_kept(self, nbytes: int) -> None:
        """Warn of the reason why a batch cannot stay in its slot."""
        if nbytes <= _LITTLE_NBYTES:
            return
        in_use = self._leased + max(self.most_tasks, self.budget.tasks - 1)
        if in_use >= self.base_slots + RETAINED_SLOTS:
            self._warn(memory_warnings.kept_beyond_slots, nbytes, self._leased)
        else:
            self._warn(memory_warnings.kept_beyond_budget, self.budget, nbytes, self._leased)

    def read_piece(self, slot: Slot, slot_nbytes: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy a piece of a batch larger than its slot out of the slot's start, ``into`` private memory.

        Its worker waits, and writes the next piece afterwards, so the slot stays granted.
        """
        slot.nbytes = slot_nbytes
        into[:] = np.frombuffer(self.map(slot).buffer, np.uint8)[: len(into)]

    def note_pieces(self, slot: Slot, nbytes: int) -> None:
        """Note that a batch came in pieces, because its slot could not be made large enough."""
        assert slot.state is _GRANTED, f"slot {slot.number} read in pieces while {slot.state}"
        self._count_spill(nbytes)
        self.budget.recent.append(nbytes)
        if nbytes > self.budget.typical_nbytes:
            self._note_size(nbytes)
        if nbytes > slot.limit_nbytes:
            self._warn(memory_warnings.larger_than_a_slot, self.budget, nbytes)
        else:
            before = self.most_tasks
            self.budget.follow_host(self.reserved_nbytes())
            self._follow_budget(before)
            self._warn(memory_warnings.refused_by_host, nbytes)

    def give_back(self, slot: Slot) -> None:
        """Free a published slot at once, because its batch will not be leased."""
        assert slot.state is _PUBLISHED, f"slot {slot.number} freed while {slot.state}"
        self.budget.tasks -= 1
        self._make_free(slot)

    def revoke(self, slot: Slot) -> None:
        """Free a granted slot whose worker has ended, because it will not be published."""
        assert slot.state is _GRANTED, f"slot {slot.number} revoked while {slot.state}"
        self.budget.tasks -= 1
        # The worker may have grown it without reporting it.
        self.segment.discard(slot.number, slot.limit_nbytes, slot.nbytes)
        self._set_limit(slot, slot.nbytes)
        self._make_free(slot)

    def collect(self) -> None:
        """Free the slots whose leases have ended."""
        while self._released:
            try:
                slot = self._released.popleft().slot
            except AttributeError:  # an interrupt ended `lease` before it was done
                continue
            slot.lease = None
            self._leased -= 1
            self._make_free(slot)
        self._discard_beyond_warm()

    def trim(self) -> None:
        """Give back the memory of free slots beyond the base: the program no longer keeps that many."""
        self.collect()
        self._discard_beyond(self.base_slots)

    def close(self) -> None:
        """Drop the segment; what is leased lives on until its last view dies.

        The workers must have ended, but for ``keeps_granted``. Memory that is not leased is returned to the
        host at once, even if a process that the user's program forked still maps it.
        """
        if self._closed:
            return
        self._closed = True
        self.collect()
        for slot in self.slots:
            self._unmap(slot)
            if slot.state not in (_LEASED, _GUARDED):
                if slot.limit_nbytes and not (slot.state is _GRANTED and self.keeps_granted):
                    # A worker that has ended may have grown its slot up to the limit without reporting it.
                    self.segment.discard(slot.number, slot.limit_nbytes)
                slot.state, slot.nbytes, slot.used_nbytes = _FREE, 0, 0
        self.segment.close()

    def map(self, slot: Slot) -> Extent:
        """The slot's memory in this process; mapped anew if it has grown."""
        extent = slot.extent
        if extent is None or extent.nbytes != slot.nbytes:
            self._unmap(slot)
            extent = slot.extent = self.segment.map(slot.number, slot.nbytes)
        return extent

    def _unmap(self, slot: Slot) -> None:
        slot.extent = None

    def _make_free(self, slot: Slot) -> None:
        slot.state = _FREE
        slot.used_nbytes = 0
        if slot.nbytes > self.budget.excess_nbytes:
            self._drop_excess(slot)
        if self.on_freed is not None:
            self.on_freed(slot)
        (self._free if slot.nbytes else self._empty).append(slot)

    def _discard_beyond_warm(self) -> None:
        if len(self._free) > self.warm_slots:
            self._discard_beyond(self.warm_slots)

    def _discard_beyond(self, slots: int) -> None:
        """Take memory from the coldest free slots until only ``slots`` besides leased ones have some."""
        while self._free and len(self._free) + self.budget.tasks > slots:
            self._discard(self._free.pop(0))

    def _discard_excess(self) -> None:
        """Take the memory from free slots until all slots fit in the budget."""
        while self._free and self.budget.committed_nbytes > self.budget.nbytes:
            self._discard(self._free.pop(0))

    def _discard(self, slot: Slot) -> None:
        self._shrink(slot, 0)
        self._empty.append(slot)

    def _drop_excess(self, slot: Slot) -> None:
        """Give back what a free slot has beyond a typical batch."""
        self._shrink(slot, whole_pages(self.budget.hint_nbytes))

    def _shrink(self, slot: Slot, nbytes: int) -> None:
        """Take memory from a free slot."""
        self._unmap(slot)  # first: locked pages that are given back would not be the slot's any more
        self.segment.discard(slot.number, slot.nbytes, nbytes)
        slot.nbytes = nbytes
        self._set_limit(slot, nbytes)

    def _set_limit(self, slot: Slot, nbytes: int) -> None:
        self.budget.committed_nbytes += nbytes - slot.limit_nbytes
        slot.limit_nbytes = nbytes

    # --- too little memory

    def _note_size(self, nbytes: int) -> None:
        before = self.most_tasks
        counters = self.counters
        counters.largest_batch_nbytes = max(counters.largest_batch_nbytes, nbytes)
        self.budget.note_size(nbytes, self.reserved_nbytes())
        self._follow_budget(before)
        for slot in self._free:
            if slot.nbytes > self.budget.excess_nbytes:
                self._drop_excess(slot)

    def _follow_budget(self, before: int) -> None:
        """Give back memory beyond the budget; warn if the budget holds fewer tasks than ``before``."""
        if self.most_tasks < before:
            self.warm_slots = self.base_slots
            self._warn(memory_warnings.fewer_ahead, self.budget)
        self._discard_excess()

    def figures(self) -> str:
        """A sentence on the slots' memory, for the error of a worker that was killed."""
        return (
            f"The loader's slots have {self.reserved_nbytes():,} bytes of shared memory (their budget is "
            f"{self.budget.nbytes:,}), its largest batch {self.budget.largest_nbytes:,}."
        )

    def _count_spill(self, nbytes: int) -> None:
        self.counters.spills += 1
        self.counters.spilled_nbytes += nbytes

    def _warn(self, message: Callable[..., str], *facts: Any) -> None:
        """Have a warning ready for the program; one for each loader."""
        if not self.counters.warned_of_spills:
            self.counters.warned_of_spills = True
            self.warning = message(*facts)
