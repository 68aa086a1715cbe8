"""The slot pool of one iterator, in the main process: slot states, the memory budget, leases.

A slot goes round ``FREE -> GRANTED -> PUBLISHED -> LEASED -> FREE``, and from ``GRANTED`` or ``PUBLISHED``
straight back to ``FREE`` when there is nothing to lease. It is in one hand at a time: a worker writes it
while granted; while published or leased nobody does.

Invariants:
    * ``committed_nbytes`` is the sum over all slots of what each may take: its limit while granted, else
      what is reserved for it. It never exceeds the budget, which is at least one page per base slot.
    * A slot is free only if no view of its last batch is alive in this process.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from shmloader.segment import PAGE_NBYTES, Extent, Segment, whole_pages

RETAINED_SLOTS = 64
"""Slots that a pool may make beyond its base for batches that the user keeps. A slot costs a mapping and
whole pages; past this many, kept batches are cheaper in private memory."""

FREE_GROWTH_NBYTES = 256 << 20
"""Bytes by which a task may grow its slot whatever came before, within the budget; beyond, four times the
largest batch so far. What is promised to tasks cannot be used to keep batches, hence a bound."""


class SlotState(enum.Enum):
    """Whose hand a slot is in."""

    FREE = "free"
    GRANTED = "granted"
    PUBLISHED = "published"
    LEASED = "leased"


class Lease(weakref.ref[npt.NDArray[np.uint8]]):
    """The main process's right to read a slot until the last view of it dies.

    It watches the anchor: the array that every view of this batch leads to through ``.base``. When the
    anchor dies, the callback appends the lease to a deque and does nothing else, because it may run in
    any thread and inside any allocation.
    """

    __slots__ = ("slot",)

    slot: Slot


class Slot:
    """One slot as the main process sees it.

    Attributes:
        number: Position in the segment.
        state: Whose hand it is in.
        version: Version of its memory.
        nbytes: Bytes reserved for it.
        limit_nbytes: Bytes up to which the worker may grow it, while granted.
        used_nbytes: Bytes of the batch in it, 0 while free.
    """

    __slots__ = (
        "extent",
        "lease",
        "limit_nbytes",
        "nbytes",
        "number",
        "state",
        "used_nbytes",
        "version",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = SlotState.FREE
        self.version = 0
        self.nbytes = 0
        self.limit_nbytes = 0
        self.used_nbytes = 0
        self.extent: Extent | None = None
        self.lease: Lease | None = None


class SlotPool:
    """Slots and their free set; not a ring, since leases end in any order.

    Args:
        segment: Where the slots' memory comes from; the pool owns it.
        most_tasks: Tasks outstanding at once. The pool's base is two slots more: one for the batch that
            is being returned, one for the batch before it, which the user's loop still holds.
        budget_nbytes: Most bytes that all slots may take together.
    """

    def __init__(self, segment: Segment, most_tasks: int, budget_nbytes: int) -> None:
        base_slots = most_tasks + 2
        self.segment = segment
        self.most_tasks = most_tasks
        self.base_slots = base_slots
        self.budget_nbytes = max(budget_nbytes, base_slots * PAGE_NBYTES)
        self.largest_nbytes = 0
        self.committed_nbytes = 0
        self.slots: list[Slot] = []
        self._free: list[Slot] = []  # last freed, first granted: its pages are the warmest
        self._released: deque[Lease] = deque()
        self._granted = 0
        self._leased = 0
        self._closed = False

    def grant(self) -> Slot:
        """Take a free slot for a task.

        There always is one for each of ``most_tasks`` tasks, because a batch is leased only if
        `can_lease` says so.
        """
        self.collect()
        if self._free:
            slot = self._free.pop()
        else:
            slot = Slot(len(self.slots))
            self.slots.append(slot)
        slot.state = SlotState.GRANTED
        # What is left of the budget is shared evenly among the base's slots that are not yet granted, so
        # the limits of all slots granted at once sum to the budget at most.
        spare = max(0, self.budget_nbytes - self.committed_nbytes)
        share = spare // max(1, self.base_slots - self._granted)
        share = min(share, max(FREE_GROWTH_NBYTES, 4 * self.largest_nbytes))
        limit = max(PAGE_NBYTES, (slot.nbytes + share) // PAGE_NBYTES * PAGE_NBYTES)
        self.committed_nbytes += limit - slot.nbytes
        slot.limit_nbytes = limit
        self._granted += 1
        return slot

    def can_lease(self) -> bool:
        """Whether one more batch may be leased and ``most_tasks`` slots still be found for tasks."""
        self.collect()
        made = len(self.slots)
        if made < self.base_slots:
            return True
        room_nbytes = self.budget_nbytes - self.committed_nbytes
        fit = max(0, room_nbytes) // whole_pages(self.largest_nbytes)
        to_make = min(fit, self.base_slots + RETAINED_SLOTS - made)
        return made - (self._leased + 1) + to_make >= self.most_tasks

    def reserve(self, slot: Slot, nbytes: int) -> Extent:
        """Make a granted slot at least ``nbytes`` large and map it (for a long index batch)."""
        if nbytes > slot.nbytes:
            slot.version, slot.nbytes = self.segment.reserve(slot.number, slot.version, slot.nbytes, nbytes)
            grown = max(slot.limit_nbytes, slot.nbytes)
            self.committed_nbytes += grown - slot.limit_nbytes
            slot.limit_nbytes = grown
        return self._map(slot)

    def publish(self, slot: Slot, version: int, nbytes: int, used_nbytes: int) -> None:
        """A worker has finished the slot; take over its size.

        Args:
            slot: The slot, granted until now.
            version: Version of its memory.
            nbytes: Bytes reserved for it.
            used_nbytes: Bytes of the batch, header included; 0 for an answer without one.
        """
        assert slot.state is SlotState.GRANTED, f"slot {slot.number} published while {slot.state}"
        self.committed_nbytes += nbytes - slot.limit_nbytes
        slot.version, slot.nbytes, slot.used_nbytes = version, nbytes, used_nbytes
        slot.state = SlotState.PUBLISHED
        self._granted -= 1
        self.largest_nbytes = max(self.largest_nbytes, used_nbytes)

    def lease(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """Begin a lease on a published slot.

        Returns:
            The anchor: uint8, one item per byte of the slot. The slot is free again when the anchor and
            all arrays and tensors made over it are gone.
        """
        assert slot.state is SlotState.PUBLISHED, f"slot {slot.number} leased while {slot.state}"
        extent = self._map(slot)
        anchor = np.ndarray(extent.nbytes, np.uint8, extent.buffer)
        lease = Lease(anchor, self._released.append)
        lease.slot = slot
        slot.lease = lease
        slot.state = SlotState.LEASED
        self._leased += 1
        return anchor

    def spill(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """Copy a published batch to private memory and free its slot at once."""
        assert slot.state is SlotState.PUBLISHED, f"slot {slot.number} spilled while {slot.state}"
        image = np.empty(slot.used_nbytes, np.uint8)
        image[:] = np.frombuffer(self._map(slot).buffer, np.uint8)[: slot.used_nbytes]
        self._make_free(slot)
        return image

    def read_part(self, slot: Slot, version: int, nbytes: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy a part of a batch larger than its slot out of the slot's start.

        Args:
            slot: The slot; its worker waits and goes on writing it afterwards, so it stays granted.
            version: Version of its memory.
            nbytes: Bytes reserved for it.
            into: Where the part belongs in the batch's private memory.
        """
        self.committed_nbytes += max(0, nbytes - slot.limit_nbytes)
        slot.limit_nbytes = max(nbytes, slot.limit_nbytes)
        slot.version, slot.nbytes = version, nbytes
        into[:] = np.frombuffer(self._map(slot).buffer, np.uint8)[: len(into)]

    def give_back(self, slot: Slot) -> None:
        """Free a published slot at once: there is nothing in it to lease."""
        assert slot.state is SlotState.PUBLISHED, f"slot {slot.number} freed while {slot.state}"
        self._make_free(slot)

    def collect(self) -> None:
        """Free the slots whose leases have ended."""
        while self._released:
            slot = self._released.popleft().slot
            slot.lease = None
            self._leased -= 1
            self._make_free(slot)

    def trim(self) -> None:
        """Give back the memory of free slots beyond the base: the user no longer keeps that many."""
        self.collect()
        surplus = len(self.slots) - self.base_slots
        for slot in sorted(self._free, key=lambda slot: -slot.number)[: max(0, surplus)]:
            if slot.nbytes:
                self.segment.discard(slot.number, slot.version, slot.nbytes)
                self.committed_nbytes -= slot.nbytes
                slot.nbytes, slot.extent = 0, None

    def close(self) -> None:
        """Drop the segment; what is leased lives on until its last view dies.

        The workers must have ended. Memory that is not leased is returned to the host at once, even if
        a process that the user's program forked still maps it.
        """
        if self._closed:
            return
        self._closed = True
        self.collect()
        for slot in self.slots:
            slot.extent = None
            if slot.state is not SlotState.LEASED and slot.nbytes:
                self.segment.discard(slot.number, slot.version, slot.nbytes)
        self.segment.close(len(self.slots))

    def count(self, state: SlotState) -> int:
        """Number of slots in a state."""
        return sum(slot.state is state for slot in self.slots)

    def _make_free(self, slot: Slot) -> None:
        slot.state = SlotState.FREE
        slot.used_nbytes = 0
        self._free.append(slot)

    def _map(self, slot: Slot) -> Extent:
        extent = slot.extent
        if extent is None or extent.nbytes != slot.nbytes or extent.version != slot.version:
            extent = slot.extent = self.segment.map(slot.number, slot.version, slot.nbytes)
        return extent
