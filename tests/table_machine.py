"""The table of places as a state machine: in any order of events, no slot ever has two users."""

import os

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmloader.memory import PAGE_NBYTES, Segment
from shmloader.slots import RETAINED_SLOTS, Place, PlaceState, PlaceTable, budget
from shmloader.slots.budget import SPARE_SLOTS
from shmloader.wire.records import SPILLED

MOST_TASKS = 3
BUDGET_NBYTES = 40 * PAGE_NBYTES
MOST_TASKS_EVER = 6  # of machines that are derived from this one


def grant(table: PlaceTable) -> Place:
    """A place as the exchange takes it for worker 0; the order of its task does not matter here."""
    return table.grant(0, table.epoch, 0, b"")


def publish(table: PlaceTable, place: Place, slot_nbytes: int, nbytes: int, flags: int = 0) -> None:
    """Answer a task as its worker does: a batch of so many bytes, without a header."""
    table.arrive(place.seq, slot_nbytes, nbytes, nbytes, 0, flags)


def make_in_vain(table: PlaceTable, place: Place, slot_nbytes: int, nbytes: int) -> None:
    """Answer a task whose batch is no longer wanted: its place is free at once."""
    table.set_void(place)
    publish(table, place, slot_nbytes, nbytes)


class TableMachine(RuleBasedStateMachine):
    """Takes, publishes, holds, drops, spills, abandons and grows, and watches every byte.

    Each batch fills its slot with its own number. A view that the test holds must show that number for
    as long as it is held: a slot given out while a view lives would be overwritten by the next batch.
    """

    most_tasks, budget_nbytes = MOST_TASKS, BUDGET_NBYTES

    def __init__(self) -> None:
        super().__init__()
        # Slots of a few pages, too, give back what they have too much.
        self._little, budget._LITTLE_NBYTES = budget._LITTLE_NBYTES, PAGE_NBYTES
        self.segment = Segment()
        self.table = PlaceTable(self.segment, self.most_tasks, self.budget_nbytes)
        self.granted: list = []
        self.published: list = []
        self.held: list = []  # (view, number)
        self.number = 0

    def in_use(self) -> int:
        return len(self.granted) + len(self.published)

    @precondition(lambda self: self.in_use() < self.table.budget.most_tasks)
    @rule()
    def grant(self) -> None:
        self._grant()

    @rule()
    def grant_one_beyond(self) -> None:
        """As for a worker that is idle while the program waits."""
        if self.in_use() >= self.table.budget.most_tasks and self.table.widen():
            assert self.table.has_room()
            self._grant()

    def _grant(self) -> None:
        place = grant(self.table)
        assert place not in self.granted
        assert place not in [published for published, _, _ in self.published]
        assert place.limit_nbytes >= PAGE_NBYTES
        self.granted.append(place)

    @precondition(lambda self: self.granted)
    @rule(nbytes=st.integers(1, 9 * PAGE_NBYTES), which=st.integers(0, 99))
    def publish(self, nbytes: int, which: int) -> None:
        place = self.granted.pop(which % len(self.granted))
        reserved = self.grow(place, min(nbytes, place.limit_nbytes))
        self.number += 1
        number = self.number % 256
        extent = self.segment.map(place.number, reserved)
        whole = np.frombuffer(extent.buffer, np.uint8)
        whole[:] = number
        in_pieces = nbytes > place.limit_nbytes
        for begin in range(0, nbytes if in_pieces else 0, reserved):
            self.table.add_piece(place.seq, reserved, nbytes, min(reserved, nbytes - begin))
        was_void = place.void
        publish(self.table, place, reserved, nbytes, SPILLED * in_pieces)
        if not was_void:
            self.published.append((place, nbytes, number))

    def grow(self, place: Place, nbytes: int) -> int:
        """Grow a slot, as its worker does."""
        if nbytes <= place.nbytes:
            return place.nbytes
        return self.segment.reserve(place.number, place.nbytes, nbytes)

    @precondition(lambda self: self.granted)
    @rule()
    def its_worker_dies_after_it_has_grown_it(self) -> None:
        """The worker that replaces it makes what is wanted in the same slots."""
        for place in self.granted:
            self.grow(place, place.limit_nbytes)
        wanted = [place for place in self.granted if not place.void]
        self.granted = self.table.hand_over(0)
        assert self.granted == sorted(wanted, key=lambda place: place.seq)

    @precondition(lambda self: self.published)
    @rule(hold=st.sampled_from(["view of a view", "anchor", "nothing"]), which=st.integers(0, 99))
    def take(self, hold: str, which: int) -> None:
        place, nbytes, number = self.published.pop(which % len(self.published))
        anchor, _ = self.table.take(place)
        if hold != "nothing":
            view = anchor[:nbytes]
            self.held.append((view[::1].reshape(-1) if hold == "view of a view" else anchor[:nbytes], number))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        del self.held[which % len(self.held)]

    @rule()
    def abandon_epoch(self) -> None:
        self.table.abandon()
        self.table.begin_epoch()
        self.published.clear()
        assert all(place.void for place in self.granted)

    @precondition(lambda self: self.granted)
    @rule(which=st.integers(0, 99))
    def its_stream_ends(self, which: int) -> None:
        place = self.granted.pop(which % len(self.granted))
        was_void = place.void
        assert self.table.drop(place.seq, place.nbytes) is not was_void

    @invariant()
    def held_batches_never_change(self) -> None:
        for view, number in self.held:
            assert (view == number).all()

    @invariant()
    def every_place_is_in_one_hand(self) -> None:
        self.table.collect()
        self.table.check()
        kept = (PlaceState.LEASED, PlaceState.GUARDED)
        busy = [place for place in self.table.places if place.state in kept]
        free = [place for place in self.table.places if place.state is PlaceState.FREE]
        hands = [*free, *busy, *self.granted, *(place for place, _, _ in self.published)]
        assert sorted(place.number for place in hands) == list(range(len(self.table.places)))
        assert self.table.tasks == self.in_use()

    @invariant()
    def the_budget_holds(self) -> None:
        table, limits = self.table, self.table.budget
        free = [place for place in table.places if place.state is PlaceState.FREE]
        used_nbytes = sum(place.limit_nbytes for place in table.places if place not in free)
        assert all(place.limit_nbytes == place.nbytes for place in free)
        assert table.committed_nbytes <= limits.nbytes
        assert used_nbytes + max(0, limits.most_tasks - table.tasks) * PAGE_NBYTES <= limits.nbytes
        if table.committed_nbytes <= limits.ample_nbytes:
            assert limits.next_limit(table.tasks, used_nbytes) == limits.limit_nbytes
            assert limits.has_room_for_lease(table.tasks, used_nbytes)

    @invariant()
    def no_free_slot_has_far_more_than_a_batch_needs(self) -> None:
        for place in self.table.places:
            if place.state is PlaceState.FREE and not (self.table.is_guarded and place.ready):
                assert place.nbytes <= self.table.budget.excess_nbytes

    @invariant()
    def the_kernel_has_given_no_more_than_the_budget(self) -> None:
        assert os.fstat(self.segment._descriptor.fd).st_blocks * 512 <= self.table.budget.nbytes

    @invariant()
    def there_are_no_more_slots_than_may_be_kept(self) -> None:
        assert len(self.table.places) <= MOST_TASKS_EVER + SPARE_SLOTS + RETAINED_SLOTS

    def teardown(self) -> None:
        budget._LITTLE_NBYTES = self._little
        self.table.close()
        self.held_batches_never_change()
