"""A pool of slots as a state machine: in any order of events, no slot ever has two users."""

import os

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmloader.memory import PAGE_NBYTES, Segment
from shmloader.slots import RETAINED_SLOTS, Slot, SlotPool, SlotState, budget
from shmloader.slots.budget import SPARE_SLOTS

MOST_TASKS = 3
BUDGET_NBYTES = 40 * PAGE_NBYTES
MOST_TASKS_EVER = 6  # of machines that are derived from this one


class PoolMachine(RuleBasedStateMachine):
    """Takes, publishes, holds, drops, spills, abandons and grows, and watches every byte.

    Each batch fills its slot with its own number. A view that the test holds must show that number for
    as long as it is held: a slot given out while a view lives would be overwritten by the next batch.
    """

    pool_class = SlotPool

    most_tasks, budget_nbytes = MOST_TASKS, BUDGET_NBYTES

    def __init__(self) -> None:
        super().__init__()
        # Slots of a few pages, too, give back what they have too much.
        self._little, budget._LITTLE_NBYTES = budget._LITTLE_NBYTES, PAGE_NBYTES
        self.segment = Segment()
        self.pool = self.pool_class(self.segment, self.most_tasks, self.budget_nbytes)
        self.granted: list = []
        self.published: list = []
        self.held: list = []  # (view, number)
        self.number = 0

    @precondition(lambda self: len(self.granted) + len(self.published) < self.pool.most_tasks)
    @rule()
    def grant(self) -> None:
        slot = self.pool.grant()
        assert slot not in self.granted
        assert slot not in [published for published, _, _ in self.published]
        assert slot.limit_nbytes >= PAGE_NBYTES
        self.granted.append(slot)

    @precondition(lambda self: self.granted)
    @rule(nbytes=st.integers(1, 9 * PAGE_NBYTES), which=st.integers(0, 99))
    def publish(self, nbytes: int, which: int) -> None:
        slot = self.granted.pop(which % len(self.granted))
        reserved = self.grow(slot, min(nbytes, slot.limit_nbytes))
        self.number += 1
        extent = self.segment.map(slot.number, reserved)
        np.frombuffer(extent.buffer, np.uint8)[:nbytes] = self.number % 256
        if nbytes > slot.limit_nbytes:
            self.pool.note_pieces(slot, nbytes)
            self.pool.publish(slot, reserved, 0)
            self.pool.give_back(slot)
        else:
            self.pool.publish(slot, reserved, nbytes)
            self.published.append((slot, nbytes, self.number % 256))

    def grow(self, slot: Slot, nbytes: int) -> int:
        """Grow a slot, as its worker does."""
        if nbytes <= slot.nbytes:
            return slot.nbytes
        return self.segment.reserve(slot.number, slot.nbytes, nbytes)

    @precondition(lambda self: self.granted)
    @rule()
    def its_worker_dies_after_it_has_grown_it(self) -> None:
        slot = self.granted.pop()
        self.grow(slot, slot.limit_nbytes)
        self.pool.revoke(slot)

    @precondition(lambda self: self.published)
    @rule(hold=st.sampled_from(["view of a view", "anchor", "nothing"]), which=st.integers(0, 99))
    def take(self, hold: str, which: int) -> None:
        slot, nbytes, number = self.published.pop(which % len(self.published))
        anchor = self.pool.lease(slot)[0] if self.pool.can_lease() else self.pool.spill(slot)
        view = anchor[:nbytes]
        if hold != "nothing":
            self.held.append((view[::1].reshape(-1) if hold == "view of a view" else anchor[:nbytes], number))

    @precondition(lambda self: self.published)
    @rule()
    def give_back(self) -> None:
        self.pool.give_back(self.published.pop()[0])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        del self.held[which % len(self.held)]

    @rule()
    def abandon_epoch(self) -> None:
        for slot in self.granted:
            self.pool.publish(slot, slot.nbytes, 0)
            self.pool.give_back(slot)
        self.granted.clear()
        self.pool.trim()

    @invariant()
    def held_batches_never_change(self) -> None:
        for view, number in self.held:
            assert (view == number).all()

    @invariant()
    def every_slot_is_in_one_hand(self) -> None:
        self.pool.collect()
        free = [slot for slot in self.pool.slots if slot.state is SlotState.FREE]
        kept = (SlotState.LEASED, SlotState.GUARDED)
        leased = [slot for slot in self.pool.slots if slot.state in kept]
        hands = [*free, *leased, *self.granted, *(slot for slot, _, _ in self.published)]
        assert sorted(slot.number for slot in hands) == list(range(len(self.pool.slots)))

    @invariant()
    def the_budget_holds(self) -> None:
        self.pool.collect()
        budget, slots = self.pool.budget, self.pool.slots
        free = [slot for slot in slots if slot.state is SlotState.FREE]
        used = [slot for slot in slots if slot.state is not SlotState.FREE]
        assert budget.committed_nbytes == sum(slot.limit_nbytes for slot in slots)
        assert budget.used_nbytes == sum(slot.limit_nbytes for slot in used)
        assert all(slot.limit_nbytes == slot.nbytes for slot in free)
        assert budget.tasks == len(self.granted) + len(self.published)
        assert budget.committed_nbytes <= budget.nbytes
        assert budget.used_nbytes + budget.promised_tasks() * PAGE_NBYTES <= budget.nbytes
        if budget.committed_nbytes <= budget.ample_nbytes:
            assert budget.next_limit() == budget.limit_nbytes
            assert budget.has_room_for_lease()

    def may_keep_excess(self, slot: Slot) -> bool:
        return False

    @invariant()
    def no_free_slot_has_far_more_than_a_batch_needs(self) -> None:
        self.pool.collect()
        for slot in self.pool.slots:
            if slot.state is SlotState.FREE and not self.may_keep_excess(slot):
                assert slot.nbytes <= self.pool.budget.excess_nbytes

    @invariant()
    def the_kernel_has_given_no_more_than_the_budget(self) -> None:
        assert os.fstat(self.segment._descriptor.fd).st_blocks * 512 <= self.pool.budget.nbytes

    @invariant()
    def there_are_no_more_slots_than_may_be_kept(self) -> None:
        assert len(self.pool.slots) <= MOST_TASKS_EVER + SPARE_SLOTS + RETAINED_SLOTS

    def teardown(self) -> None:
        budget._LITTLE_NBYTES = self._little
        self.pool.close()
        self.held_batches_never_change()
