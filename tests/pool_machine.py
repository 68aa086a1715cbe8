"""A pool of slots as a state machine: whatever happens to slots, in any order, none is ever in two hands."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmloader.shared_memory import PAGE_NBYTES, MemfdSegment
from shmloader.slots import RETAINED_SLOTS, SlotPool, SlotState

MOST_TASKS = 3
BUDGET_NBYTES = 40 * PAGE_NBYTES


class PoolMachine(RuleBasedStateMachine):
    """Takes, publishes, holds, drops, spills, abandons and grows, and watches every byte.

    Each batch fills its slot with its own number. A view that the test holds must show that number for
    as long as it is held: a slot given out while a view lives would be overwritten by the next batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segment = MemfdSegment()
        self.pool = SlotPool(self.segment, MOST_TASKS, BUDGET_NBYTES)
        self.granted: list = []
        self.published: list = []
        self.held: list = []  # (view, number)
        self.number = 0

    @precondition(lambda self: len(self.granted) + len(self.published) < MOST_TASKS)
    @rule()
    def grant(self) -> None:
        slot = self.pool.grant()
        assert slot not in self.granted
        assert slot not in self.published
        self.granted.append(slot)

    @precondition(lambda self: self.granted)
    @rule(nbytes=st.integers(1, 9 * PAGE_NBYTES), which=st.integers(0, 99))
    def publish(self, nbytes: int, which: int) -> None:
        slot = self.granted.pop(which % len(self.granted))
        nbytes = min(nbytes, slot.limit_nbytes)
        reserved = slot.nbytes
        if nbytes > reserved:
            reserved = self.segment.reserve(slot.number, reserved, nbytes)
        self.number += 1
        extent = self.segment.map(slot.number, reserved)
        np.frombuffer(extent.buffer, np.uint8)[:nbytes] = self.number % 256
        self.pool.publish(slot, reserved, nbytes)
        self.published.append((slot, nbytes, self.number % 256))

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
        leased = [slot for slot in self.pool.slots if slot.state is SlotState.LEASED]
        hands = [*free, *leased, *self.granted, *(slot for slot, _, _ in self.published)]
        assert sorted(slot.number for slot in hands) == list(range(len(self.pool.slots)))

    @invariant()
    def the_budget_holds(self) -> None:
        pool = self.pool
        extra = sum(slot.limit_nbytes for slot in pool.slots[pool.base_slots :])
        assert pool.base_slots * pool.quota_nbytes + extra <= pool.budget_nbytes
        for slot in pool.slots:
            assert slot.nbytes <= max(slot.limit_nbytes, pool.quota_nbytes)
        assert sum(slot.nbytes for slot in pool.slots) <= pool.budget_nbytes
        assert len(pool.slots) <= pool.base_slots + RETAINED_SLOTS

    def teardown(self) -> None:
        self.pool.close()
        self.held_batches_never_change()
