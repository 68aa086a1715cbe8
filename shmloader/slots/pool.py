"""The slots of one iterator: which is in whose hand, and how much memory each may have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shmloader.errors import SharedMemoryExhausted
from shmloader.host.limits import SURE_NBYTES, memory_headroom
from shmloader.shared_memory import PAGE_NBYTES, SLOT_STRIDE, Extent, Segment, whole_pages
from shmloader.slots.shortage import fewer_are_made, host_is_too_small
from shmloader.slots.slot import Lease, Slot, SlotState

RETAINED_SLOTS = 64
"""Slots that a pool may make beyond its base for batches that the user keeps. A slot costs a mapping and
whole pages; past this many, kept batches are cheaper in private memory."""

_LEAST_GROWTH_NBYTES = 1 << 20  # batches of a few bytes may become this large at once

_FREE, _GRANTED, _PUBLISHED, _LEASED = SlotState


class SlotPool:
    """Slots and their free set; not a ring, since leases end in any order.

    Args:
        segment: Where the slots' memory comes from; the pool owns it.
        most_tasks: Tasks outstanding at once. The pool's base is two slots more: one for the batch that
            is being returned, one for the batch before it, which the user's loop still holds.
        budget_nbytes: Most bytes that all slots may take together.
        workers: How many processes make batches.
        elastic: The base's slots may take what the host can give, and the budget is for slots beyond it.
        planned_tasks: What `resize` may be asked for later: slots are kept small enough for it. No ``notice``
            is given then.

    Attributes:
        most_tasks: As above, or fewer, if the budget turns out to be too small for the batches.
        base_slots: Two more.
        warm_slots: How many slots keep their memory, besides leased ones.
        largest_nbytes: Bytes of the largest batch so far.
        typical_nbytes: Bytes of the second largest: one batch that is larger than all others should not make
            every slot as large as itself.
        quota_nbytes: What each slot of the base is reckoned with.
        shortage: The error, once it is known that the host's memory is too small for the base.
        keeps_granted: Whether workers may outlive the pool: `close` leaves them the slots that they have.
        on_freed: Called with each slot that has become free (see `inspection`).
        on_granted: Called with each free slot before it is granted.
        notice: What the user is to be told once, after ``most_tasks`` was lowered.
    """

    def __init__(
        self,
        segment: Segment,
        most_tasks: int,
        budget_nbytes: int,
        *,
        elastic: bool = False,
        workers: int = 1,
        planned_tasks: int = 0,
    ) -> None:
        self.segment = segment
        self.most_tasks = most_tasks
        self.base_slots = self.warm_slots = most_tasks + 2
        self.budget_nbytes = max(budget_nbytes, self.base_slots * PAGE_NBYTES)
        self.elastic = elastic
        self.workers = workers
        self.planned_tasks = planned_tasks
        self.largest_nbytes = 0
        self.typical_nbytes = 0
        self.quota_nbytes = 0
        self.shortage: SharedMemoryExhausted | None = None
        self.notice = ""
        self._made_fewer = False
        self._tells_of_fewer = planned_tasks == 0
        self.slots: list[Slot] = []
        self._extra_nbytes = 0  # sum of the limits of slots beyond the base
        self._free: list[Slot] = []  # last freed, first granted: its pages are the warmest
        self._empty: list[Slot] = []  # free as well, but without memory: granted when no other is free
        self._spare: list[Slot] = []  # without memory, since the base was made smaller
        self._released: deque[Lease] = deque()
        self._leased = 0
        self._surely_nbytes = SURE_NBYTES  # the base may need this much without the host being asked
        self._closed = False
        self.keeps_granted = False
        self.on_freed: Callable[[Slot], None] | None = None
        self.on_granted: Callable[[Slot], None] | None = None
        self._set_quota()

    def note_size(self, nbytes: int) -> None:
        """Learn from a batch larger than the typical one how much the base needs, and if it is there."""
        if nbytes <= self.typical_nbytes:
            return
        if nbytes > self.largest_nbytes:
            self.typical_nbytes, self.largest_nbytes = self.largest_nbytes, nbytes
        else:
            self.typical_nbytes = nbytes
        needed_nbytes = self.base_slots * whole_pages(self.typical_nbytes)
        if self.elastic:
            self._ask_host(needed_nbytes)
        elif needed_nbytes > self.budget_nbytes:
            self._make_fewer()
        self._set_quota()

    def _set_quota(self) -> None:
        if self.elastic:
            self.quota_nbytes = whole_pages(self.largest_nbytes)
            return
        fair_nbytes = (self.budget_nbytes - self._extra_nbytes - self._owed_nbytes()) // self.base_slots
        base_slots = self.base_slots
        if self.planned_tasks > self.most_tasks and self.largest_nbytes:
            base_slots = max(base_slots, min(self.planned_tasks, self.tasks_that_fit()) + 2)
            fair_nbytes = min(fair_nbytes, self.budget_nbytes // base_slots)
        # A quarter of the budget lets batches grow at once; the rest is for batches that are kept.
        wanted_nbytes = max(4 * self.largest_nbytes, self.budget_nbytes // (4 * base_slots), PAGE_NBYTES)
        if self.largest_nbytes == 0:
            wanted_nbytes = fair_nbytes  # the first batches may be of any size, and none is kept yet
        self.quota_nbytes = min(fair_nbytes, wanted_nbytes) // PAGE_NBYTES * PAGE_NBYTES

    def _ask_host(self, needed_nbytes: int) -> None:
        """Set ``shortage`` if the base needs more than the host can give, before slots are grown to that."""
        if needed_nbytes <= self._surely_nbytes:
            return
        room = memory_headroom()
        reserved_nbytes = sum(slot.nbytes for slot in self.slots)
        # Each worker holds the samples of a batch besides: as much again, somewhere.
        besides_nbytes = self.workers * self.typical_nbytes
        if needed_nbytes + besides_nbytes - reserved_nbytes > room.available_nbytes:
            self.shortage = host_is_too_small(
                room, reserved_nbytes, self.base_slots, self.typical_nbytes, self.workers
            )
        self._surely_nbytes = needed_nbytes + needed_nbytes // 4 + SURE_NBYTES

    def _make_fewer(self) -> None:
        """Have fewer batches made in advance, if the budget then holds all that are on their way."""
        tasks = max(1, self.budget_nbytes // whole_pages(self.typical_nbytes) - 2)
        if tasks >= self.most_tasks:
            return
        if self._tells_of_fewer:
            self.notice = fewer_are_made(tasks, self.most_tasks, self.typical_nbytes, self.budget_nbytes)
        self._made_fewer = True
        self._set_base(tasks)

    def tasks_that_fit(self) -> int:
        """Tasks that the budget has slots for if batches become a quarter larger; 1 at least."""
        return max(1, self.budget_nbytes // whole_pages(self.largest_nbytes * 5 // 4) - 2)

    def resize(self, most_tasks: int) -> bool:
        """Have another number of tasks outstanding at once. Not for an elastic pool.

        Returns:
            Whether it is so now. If the budget has no room for more, nothing was changed; it may have some
            when batches that are kept or on their way are done.
        """
        self.collect()
        if most_tasks > self.most_tasks and not self._has_room_for_base(most_tasks + 2):
            return False
        self._set_base(most_tasks)
        self._discard_extra()
        self._set_quota()
        return True

    def _has_room_for_base(self, base_slots: int) -> bool:
        quota_nbytes = max(self.quota_nbytes, whole_pages(self.largest_nbytes))
        base, extra = self.slots[:base_slots], self.slots[base_slots:]
        may_take = [slot.limit_nbytes if slot.state is _GRANTED else slot.nbytes for slot in base]
        more = sum(max(0, nbytes - quota_nbytes) for nbytes in may_take)
        # As in `_owed_nbytes`, or a little more.
        owed_slots = max(0, self._leased - 2) + sum(slot.limit_nbytes == 0 for slot in extra)
        extra_nbytes = sum(slot.limit_nbytes for slot in extra) + owed_slots * PAGE_NBYTES
        return base_slots * quota_nbytes + more + extra_nbytes <= self.budget_nbytes

    def _set_base(self, most_tasks: int) -> None:
        before = self.base_slots
        self.most_tasks = most_tasks
        self.base_slots = self.warm_slots = most_tasks + 2
        for slot in self.slots[self.base_slots : before]:
            if slot.state is not _GRANTED:
                slot.limit_nbytes = slot.nbytes  # what it did not take is for others
            self._extra_nbytes += slot.limit_nbytes
        for slot in self.slots[before : self.base_slots]:
            self._extra_nbytes -= slot.limit_nbytes
        free = self._spare + self._empty + self._free
        self._free, self._empty, self._spare = [], [], []
        for slot in free:
            self._put_back(slot)

    def grant(self) -> Slot:
        """Take a free slot for a task.

        There always is one for each of ``most_tasks`` tasks, because a batch is leased only if
        `can_lease` says so.
        """
        if self._released:
            self.collect()
        if self._free:
            slot = self._free.pop()
        elif self._empty:
            slot = self._empty.pop()
        elif self._spare:
            slot = self._spare.pop()
        else:
            slot = Slot(len(self.slots))
            self.slots.append(slot)
        if self.on_granted is not None:
            self.on_granted(slot)
        slot.state = _GRANTED
        if slot.number < self.base_slots:
            slot.limit_nbytes = SLOT_STRIDE if self.elastic else self.quota_nbytes
        else:
            self._widen(slot)
        return slot

    def _widen(self, slot: Slot) -> None:
        """Let a slot beyond the base hold what the base's slots may, or what the budget has room for."""
        room_nbytes = self._room_nbytes() // PAGE_NBYTES * PAGE_NBYTES
        wanted_nbytes = whole_pages(max(4 * self.largest_nbytes, _LEAST_GROWTH_NBYTES))
        if not self.elastic:
            wanted_nbytes = min(wanted_nbytes, self.quota_nbytes)
        more = min(wanted_nbytes - slot.limit_nbytes, room_nbytes)
        more = max(more, PAGE_NBYTES - slot.limit_nbytes, 0)  # what is larger comes through it in parts
        slot.limit_nbytes += more
        self._extra_nbytes += more

    def _room_nbytes(self) -> int:
        base = self.slots[: self.base_slots]
        # What was granted when the quota was larger may still be taken.
        more = sum(max(0, slot.limit_nbytes - self.quota_nbytes) for slot in base if slot.state is _GRANTED)
        base_nbytes = self.base_slots * self.quota_nbytes + (0 if self.elastic else more)
        return self.budget_nbytes - base_nbytes - self._extra_nbytes - self._owed_nbytes()

    def _owed_nbytes(self) -> int:
        """A page for each slot beyond the base that `can_lease` has counted on and that has none yet."""
        made = len(self.slots) - len(self._spare)
        unmade = max(0, self._leased + self.most_tasks - max(made, self.base_slots))
        empty = sum(slot.limit_nbytes == 0 for slot in self.slots[self.base_slots :]) - len(self._spare)
        return (unmade + max(0, empty)) * PAGE_NBYTES

    def can_lease(self) -> bool:
        """Whether one more batch may be leased and ``most_tasks`` slots still be found for tasks."""
        if self._released:
            self.collect()
        left = len(self.slots) - len(self._spare) - self._leased - 1
        return left >= self.most_tasks or left + self._slots_to_make() >= self.most_tasks

    def has_room_for_more(self) -> bool:
        """Whether a task beyond ``most_tasks`` can have a slot for the largest batch, within the budget."""
        if self._released:
            self.collect()
        needed_nbytes = whole_pages(self.largest_nbytes)
        if self._free:
            slot = self._free[-1]
            if slot.number < self.base_slots or slot.limit_nbytes >= needed_nbytes:
                return True
            return self._room_nbytes() + slot.limit_nbytes >= needed_nbytes
        if self._empty:
            return self._room_nbytes() >= needed_nbytes
        return self._slots_to_make() > 0

    def _slots_to_make(self) -> int:
        made = len(self.slots) - len(self._spare)
        to_base = max(0, self.base_slots - made)
        fit = self._room_nbytes() // whole_pages(self.largest_nbytes)
        return to_base + max(0, min(fit, self.base_slots + RETAINED_SLOTS - made - to_base))

    @property
    def out_of_budget(self) -> bool:
        """Whether it is for the budget, and not for the number of slots, that no slot can be made."""
        return len(self.slots) < self.base_slots + RETAINED_SLOTS

    def reserve(self, slot: Slot, nbytes: int) -> Extent:
        """Make a granted slot at least ``nbytes`` large and map it (for a long index batch)."""
        if nbytes > slot.nbytes:
            slot.nbytes = self.segment.reserve(slot.number, slot.nbytes, nbytes)
        return self.map(slot)

    def publish(self, slot: Slot, nbytes: int, used_nbytes: int) -> None:
        """A worker has finished the slot; take over its size.

        Args:
            slot: The slot, granted until now.
            nbytes: Bytes reserved for it.
            used_nbytes: Bytes of the batch, header included; 0 for an answer without one.
        """
        assert slot.state is _GRANTED, f"slot {slot.number} published while {slot.state}"
        slot.nbytes, slot.used_nbytes = nbytes, used_nbytes
        slot.state = _PUBLISHED
        if slot.number >= self.base_slots and nbytes < slot.limit_nbytes:
            self._extra_nbytes -= slot.limit_nbytes - nbytes  # what it did not take is for others
            slot.limit_nbytes = nbytes
        if used_nbytes > self.typical_nbytes:
            self.note_size(used_nbytes)

    def lease(self, slot: Slot) -> tuple[npt.NDArray[np.uint8], memoryview]:
        """Begin a lease on a published slot.

        Returns:
            The anchor: uint8, one item per byte of the slot. The slot is free again when the anchor and
            all arrays and tensors made over it are gone. And the slot's bytes, to be read at once: the
            view holds no lease.
        """
        assert slot.state is _PUBLISHED, f"slot {slot.number} leased while {slot.state}"
        extent = self.map(slot)
        anchor = np.ndarray(extent.nbytes, np.uint8, extent.buffer)
        lease = Lease(anchor, self._released.append)
        lease.slot = slot
        slot.lease = lease
        slot.state = _LEASED
        self._leased += 1
        return anchor, extent.view

    def spill(self, slot: Slot) -> npt.NDArray[np.uint8]:
        """Copy a published batch to private memory and free its slot at once."""
        assert slot.state is _PUBLISHED, f"slot {slot.number} spilled while {slot.state}"
        image = np.empty(slot.used_nbytes, np.uint8)
        image[:] = np.frombuffer(self.map(slot).buffer, np.uint8)[: slot.used_nbytes]
        self._make_free(slot)
        return image

    def read_part(self, slot: Slot, nbytes: int, into: npt.NDArray[np.uint8]) -> None:
        """Copy a part of a batch larger than its slot out of the slot's start.

        Args:
            slot: The slot; its worker waits and goes on writing it afterwards, so it stays granted.
            nbytes: Bytes reserved for it.
            into: Where the part belongs in the batch's private memory.
        """
        slot.nbytes = nbytes
        into[:] = np.frombuffer(self.map(slot).buffer, np.uint8)[: len(into)]

    def give_back(self, slot: Slot) -> None:
        """Free a published slot at once: there is nothing in it to lease."""
        assert slot.state is _PUBLISHED, f"slot {slot.number} freed while {slot.state}"
        self._make_free(slot)

    def revoke(self, slot: Slot) -> None:
        """Free a granted slot whose worker has ended; nobody will publish it."""
        assert slot.state is _GRANTED, f"slot {slot.number} revoked while {slot.state}"
        self._make_free(slot)

    def collect(self) -> None:
        """Free the slots whose leases have ended."""
        while self._released:
            try:
                slot = self._released.popleft().slot
            except AttributeError:  # an interrupt ended `lease` before it was done
                continue
            slot.lease = None
            slot.state = _FREE
            slot.used_nbytes = 0
            self._leased -= 1
            self._put_back(slot)
        if len(self._free) > self.warm_slots or (self._empty and self._too_many_warm()):
            self._discard_extra()

    def _too_many_warm(self) -> bool:
        without = len(self._spare) + len(self._empty) + self._leased
        return len(self.slots) - without > self.warm_slots

    def trim(self) -> None:
        """Give back the memory of free slots beyond the base: the user no longer keeps that many."""
        self.collect()
        self._discard_extra()

    def _discard_extra(self) -> None:
        free, self._free = self._free, []
        for slot in free:
            if slot.number >= self.base_slots:
                self._discard(slot)
                self._empty.append(slot)
            else:
                self._free.append(slot)

    def _discard(self, slot: Slot) -> None:
        """Give back the memory of a free slot beyond the base."""
        if slot.nbytes:
            self.segment.discard(slot.number, slot.nbytes)
            slot.nbytes, slot.extent = 0, None
        self._extra_nbytes -= slot.limit_nbytes
        slot.limit_nbytes = 0
        if self._made_fewer:
            self._set_quota()  # the base has more, now that this slot is no longer used

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
            slot.extent = None
            if slot.state is not _LEASED:
                # A worker that has ended may have grown its slot and not have said so.
                granted_nbytes = slot.limit_nbytes if slot.state is _GRANTED else 0
                nbytes = max(slot.nbytes, granted_nbytes)
                if nbytes and not (granted_nbytes and self.keeps_granted):
                    self.segment.discard(slot.number, nbytes)
                slot.state, slot.nbytes, slot.used_nbytes = _FREE, 0, 0
        self.segment.close()

    def count(self, state: SlotState) -> int:
        """Number of slots in a state."""
        return sum(slot.state is state for slot in self.slots)

    def _make_free(self, slot: Slot) -> None:
        slot.state = _FREE
        slot.used_nbytes = 0
        self._put_back(slot)

    def _put_back(self, slot: Slot) -> None:
        if self.on_freed is not None:
            self.on_freed(slot)
        if self._made_fewer and slot.number >= self.base_slots:
            self._discard(slot)
            self._spare.append(slot)
        else:
            self._free.append(slot)

    def map(self, slot: Slot) -> Extent:
        """The slot's memory in this process; mapped anew if it has grown."""
        extent = slot.extent
        if extent is None or extent.nbytes != slot.nbytes:
            extent = slot.extent = self.segment.map(slot.number, slot.nbytes)
        return extent
