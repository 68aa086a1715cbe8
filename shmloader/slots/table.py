"""The table of places: the one owner of slots, tasks, and the bytes that they take."""

from __future__ import annotations

import operator
from collections import Counter, deque
from typing import Self

import numpy as np

from shmloader.memory import Segment, whole_pages
from shmloader.memory.limits import exhausted, memory_headroom
from shmloader.settings import THREAD, Settings
from shmloader.slots.budget import RETAINED_SLOTS, SPARE_SLOTS, Budget
from shmloader.slots.memory import OF_LOADERS, AskedFor, SlotMemory
from shmloader.slots.place import ARRIVED, FREE, GUARDED, LEASED, MAKING, ByteArray, Guard, Lease, Place
from shmloader.statistics import Counters
from shmloader.wire.records import SPILLED


class PlaceTable(SlotMemory):
    """The places of one iterator; not a ring, since leases end in any order.

    Whoever holds the table may read all of it; only its methods change it. In between, `check` holds.
    It owns the segment.
    """

    def __init__(
        self,
        segment: Segment,
        most_tasks: int,
        budget_nbytes: int,
        *,
        workers: int = 1,
        follows_host: bool = False,
        epoch: int = 0,
        workers_outlive: bool = False,
        counters: Counters | None = None,
        even_limits: bool = False,
        asked_for: AskedFor = OF_LOADERS,
    ) -> None:
        budget = Budget(
            budget_nbytes, most_tasks, workers=workers, follows_host=follows_host, even_limits=even_limits
        )
        super().__init__(segment, budget, counters, asked_for)
        # All by ``seq``. Places whose batch is wanted and was not returned yet, in the order of their tasks:
        self.unreturned: dict[int, Place] = {}
        self.arrived: dict[int, Place] = {}  # those among them whose batch is here, in order of arrival
        self.void: dict[int, Place] = {}  # places that are being made and whose batch is not wanted
        self.taken: Place | None = None  # the one whose batch `take` took out last
        self.unanswered = [0] * workers  # by worker: tasks that it has not answered, void ones included
        self.epoch = epoch  # the present one; tasks may be of the next one already
        self._sent = 0  # number of the next task
        self._due = 0  # no task before this number is wanted; looking it up is quicker than iterating
        self._released: deque[Lease] = deque()
        self._workers_outlive = workers_outlive  # then `close` leaves them their slots
        self._closed = False

    @classmethod
    def for_loader(cls, settings: Settings, counters: Counters, epoch: int) -> Self:
        """The table for a loader's settings, with a budget of at most what the host has; by default half."""
        available_nbytes, wanted_nbytes = memory_headroom().available_nbytes, settings.memory_budget_nbytes
        if wanted_nbytes is None:
            budget_nbytes = available_nbytes // 2
        else:  # a plain number, since sums of NumPy's narrow ones overflow
            budget_nbytes = min(operator.index(wanted_nbytes), available_nbytes)
        return cls(
            Segment(),
            settings.num_workers * settings.prefetch_factor,
            budget_nbytes,
            workers=settings.num_workers,
            follows_host=wanted_nbytes is None,
            epoch=epoch,
            workers_outlive=settings.worker_type == THREAD,
            counters=counters,
        )

    # --- who has room

    def can_lease(self, *, asks: bool = True, waits: bool = True) -> bool:
        """Whether one more batch may be leased and ``most_tasks`` tasks still find slots.

        If there is no room else, it ``asks`` an accelerator for places, and ``waits`` a while for them: not
        for a batch that is taken early, when it is known that no graph is captured.
        """
        if self._released or self.is_guarded:
            self.collect(at_once=False)
        if self.is_guarded and waits and not self.guard.admits_leases():
            return False
        budget, kept = self.budget, self.kept
        if self.tasks > budget.most_tasks:
            kept += self.tasks - 1 - budget.most_tasks  # places of batches made beyond `most_tasks`
        if kept < SPARE_SLOTS + RETAINED_SLOTS and (
            self.committed_nbytes <= budget.ample_nbytes
            or budget.has_room_for_lease(self.tasks, self.used_nbytes())
        ):
            return True
        return asks and self.is_guarded and self._makes_room(waits)

    def _makes_room(self, waits: bool) -> bool:
        """Whether an accelerator gives back places enough for one more lease."""

        def is_enough() -> bool:
            self.collect()
            return self.can_lease(asks=False)

        if not is_enough() and waits:
            self.counters.add("wait_for_device_ns", self.guard.wait(is_enough))
        return self.can_lease(asks=False)

    def has_room(self) -> bool:
        """Whether one more task may be sent: one of ``most_tasks``, or of a wider window."""
        out = len(self.unreturned)
        return out < self.budget.most_tasks or (out < self.window and self._has_room_beyond())

    def widen(self) -> bool:
        """Let one more task be sent than are out, if there is a slot for it; returns whether there is."""
        if not self._has_room_beyond():
            return False
        self.window = max(self.window, len(self.unreturned) + 1)
        return True

    def _has_room_beyond(self) -> bool:
        self.collect()
        budget = self.budget
        if self.kept + self.tasks >= budget.base_slots + RETAINED_SLOTS:
            return False
        return self.used_nbytes() + whole_pages(budget.largest_nbytes) <= budget.nbytes

    def resize(self, most_tasks: int) -> bool:
        """Change the number of tasks that may be outstanding, if there is room: see `Budget.resize`."""
        self.collect()
        if not self.budget.resize(most_tasks, self.tasks, self.used_nbytes()):
            return False
        self.trim()
        return True

    # --- which batch is next

    def due(self) -> Place | None:
        """The place whose batch is next in order; None if none of this epoch is outstanding."""
        while (place := self.unreturned.get(self._due)) is None:
            if self._due >= self._sent:
                return None
            self._due += 1
        return place if place.epoch == self.epoch else None

    def next_arrived(self, *, in_order: bool) -> Place | None:
        """The place whose batch is returned next, if that is here; out of order, any that is here."""
        place = self.due()
        if place is not None and place.state is not MAKING:
            return place
        return None if in_order else next(iter(self.arrived.values()), None)

    def making(self, worker_id: int | None = None) -> list[Place]:
        """Places whose batch is wanted and that a worker, or any, has not answered yet, oldest first."""
        return [
            place
            for place in self.unreturned.values()
            if place.state is MAKING and worker_id in (None, place.worker_id)
        ]

    # --- the way of a place

    def grant(self, worker_id: int, epoch: int, position: int, payload: bytes) -> Place:
        """Take a free place for a task that is about to be sent.

        There is always one for each of ``most_tasks`` tasks: a batch is leased only if `can_lease` allows it.
        """
        budget = self.budget
        ample = self.committed_nbytes <= budget.ample_nbytes
        if self._released or (self.is_guarded and not ample):
            self.collect(at_once=not ample)  # else free slots would give back their memory
        limit_nbytes = budget.limit_nbytes if ample else budget.next_limit(self.tasks, self.used_nbytes())
        if not self._free and not self._empty:
            place = Place(len(self.places))
            self.places.append(place)
            self._empty.append(place)
        if self.inspection is not None and self._free:
            self.inspection.granted(self._free[-1], self.map(self._free[-1]))
        place = (self._free or self._empty).pop()
        if place.nbytes > limit_nbytes:
            self._shrink(place, limit_nbytes)
        self.committed_nbytes += limit_nbytes - place.limit_nbytes
        seq = self._sent
        place.begin(seq, epoch, position, worker_id, payload, limit_nbytes)
        if not ample:
            self._discard_while(lambda: self.committed_nbytes > budget.nbytes)
        self._sent = seq + 1
        self.unreturned[seq] = place
        self.unanswered[worker_id] += 1
        self.tasks += 1
        if self.inspection is not None:
            self.check()
        return place

    def arrive(
        self, seq: int, slot_nbytes: int, header_begin: int, header_end: int, made_ns: int, flags: int
    ) -> None:
        """Note the answer of a worker: a batch, or the exception in its place, is here.

        Its slot has ``slot_nbytes`` now. The batch takes the first ``header_end``, unless it came in pieces.
        """
        place = self.unreturned.get(seq) or self.void[seq]
        assert place.state is MAKING, f"slot {place.number} published while {place.state}"
        if slot_nbytes != place.nbytes:
            self._unmap(place)  # the pages behind may be given back, and the slot may grow over others later
        limit_nbytes = place.limit_nbytes
        place.arrive(slot_nbytes, header_begin, header_end, made_ns, flags)
        self.committed_nbytes += slot_nbytes - limit_nbytes
        self.unanswered[place.worker_id] -= 1
        if flags & SPILLED:
            if not place.void:
                self._note_pieces(header_end, limit_nbytes)
        elif header_end:  # there is a batch: see `drop`
            self._recent.append(header_end)
            if not self.budget.small_nbytes <= header_end <= self.budget.typical_nbytes:
                self._adapt(header_end)
        if place.void:
            self._end(place)
        else:
            self.arrived[seq] = place
        if self.inspection is not None:
            self.check()

    def add_piece(self, seq: int, slot_nbytes: int, total_nbytes: int, piece_nbytes: int) -> None:
        """Copy a piece of a batch larger than its slot into private memory; its worker waits meanwhile.

        If there is none, the batch is lost, and `take` says so in its place.
        """
        place = self.unreturned.get(seq) or self.void[seq]
        if not (place.void or place.has_lost_pieces):
            place.resize(slot_nbytes, place.limit_nbytes)
            try:
                place.add_piece(total_nbytes, np.frombuffer(self.map(place).buffer, np.uint8)[:piece_nbytes])
            except MemoryError:
                place.lose_pieces()

    def take(self, place: Place, *, early: bool = False) -> tuple[ByteArray, bytes]:
        """Take out a batch that has arrived, to return it; ``early``, without a wait: `finish` comes later.

        Returns the anchor of all its leaves, and the header. The anchor is a lease on the slot, an array over
        it: the place is free again when all arrays and tensors made over the anchor are gone too. If the
        batch was spilled it is a private copy, and the place is free at once. Raises `MemoryError` (without
        address space, `SharedMemoryExhausted`) if this process has no room for it; nothing was changed. But
        one that came in pieces is lost then, and its place free.
        """
        assert place.state is ARRIVED, f"slot {place.number} taken while {place.state}"
        seq, begin, end = place.seq, place.header_begin, place.header_end
        self.taken = place
        if place.pieces is None and self.can_lease(waits=not early):
            extent = place.extent if place.ready else self._make_ready(place)
            assert extent is not None
            header = bytes(extent.view[begin:end])
            anchor = place.lease_to(extent, self._released.append)
            self.kept += 1
            self.tasks -= 1
        elif early:
            raise MemoryError("a batch is not copied to be taken early")
        elif place.has_lost_pieces:
            self.finish(seq)
            self._end(place)
            why = "no memory for them, or no address space (ulimit -v)"
            raise exhausted(f"a batch of {end:,} bytes came in pieces, and the main process had {why}", end)
        else:
            anchor = self._spill(place) if place.pieces is None else place.pieces
            header = anchor[begin:end].tobytes()
            self._end(place)
        if not early:
            del self.unreturned[seq], self.arrived[seq]
            if seq == self._due:
                self._due += 1
        if self.inspection is not None:
            if place.state is LEASED:
                self.inspection.leased(place, header)
            self.check()
        return anchor, header

    def finish(self, seq: int) -> None:
        """Forget a task whose batch is here: it is being returned, or dropped."""
        del self.unreturned[seq], self.arrived[seq]

    def _end(self, place: Place) -> None:
        """Free a place whose batch is not leased."""
        if place.void:
            del self.void[place.seq]
        self.tasks -= 1
        self._make_free(place)

    def drop(self, seq: int, slot_nbytes: int) -> bool:
        """Free a place whose task its worker has ended without a batch; returns whether one was wanted."""
        wanted = self.unreturned.get(seq)
        if wanted is not None:
            self.set_void(wanted)
        self.arrive(seq, slot_nbytes, 0, 0, 0, 0)
        return wanted is not None

    def set_void(self, place: Place) -> None:
        """Note that the batch that a worker is making is no longer wanted."""
        self.void[place.seq] = self.unreturned.pop(place.seq)
        place.drop_pieces(void=True)

    def hand_over(self, worker_id: int) -> list[Place]:
        """The places that a new worker has to make in another's place; those of void tasks become free."""
        void = [place for place in self.void.values() if place.worker_id == worker_id]
        held = self.making(worker_id)
        for place in (*void, *held):
            # The worker may have grown it without reporting it.
            self.segment.discard(place.number, place.limit_nbytes, place.nbytes)
            place.drop_pieces()
        for place in void:
            self.drop(place.seq, place.nbytes)
        return held

    def abandon(self) -> None:
        """Leave the epoch: batches that are here are dropped, and those being made are void."""
        for seq, place in list(self.arrived.items()):
            self.finish(seq)
            if place.state is ARRIVED:
                self._end(place)
        for place in self.making():
            self.set_void(place)

    def begin_epoch(self) -> None:
        """Begin the next epoch, of which tasks may have been sent already."""
        self.epoch += 1
        self.trim()

    def add_worker(self) -> None:
        """Make room for one more worker."""
        self.unanswered.append(0)

    def _make_free(self, place: Place) -> None:
        place.free()
        if place.nbytes > self.budget.excess_nbytes:
            self._drop_excess(place)
        if self.inspection is not None and place.nbytes:
            self.inspection.freed(place, self.map(place))
        (self._free if place.nbytes else self._empty).append(place)

    def collect(self, *, at_once: bool = True) -> None:
        """Free the places whose leases have ended and that no accelerator may read; see `Guard.pass_on`."""
        if self.is_guarded:
            self.guard.drop_copied(at_once=at_once)
        ended = []
        while self._released:
            try:
                place = self._released.popleft().place
            except AttributeError:  # an interrupt ended `take` before it was done
                continue
            if self.is_guarded:
                place.end_lease()
                ended.append(place)
            else:
                self.kept -= 1
                self._make_free(place)
        if self.is_guarded:
            for place in self.guard.pass_on(ended, at_once=at_once):
                self.kept -= 1
                self._make_free(place)
        # Locked slots stay warm: to unlock and lock them again may take until the device is done.
        elif len(self._free) > self.window + SPARE_SLOTS:
            self._discard_cold()

    def guard_with(self, guard: Guard) -> None:
        """Have a guard for an accelerator, from now on."""
        self.guard, self.is_guarded = guard, guard.active

    def trim(self) -> None:
        """Give back the memory of free slots beyond the base: the program no longer keeps that many."""
        self.collect()
        self.window = self.budget.most_tasks
        self._discard_cold()

    def close(self, open_slot: int = -1) -> None:
        """Drop the segment; what is leased lives on until its last view dies.

        The workers must have ended, but for ``workers_outlive``, or for one that still has ``open_slot``.
        Memory that is not leased is returned to the host at once, even if a process that the user's program
        forked still maps it.
        """
        if self._closed:
            return
        self._closed = True
        self.collect()  # before the guard's end: later events would never be given back
        self.guard.close()
        for place in self.places:
            self._unmap(place)
            if place.state not in (LEASED, GUARDED):
                is_left = self._workers_outlive or place.number == open_slot
                if place.limit_nbytes and not (place.state is MAKING and is_left):
                    # A worker that has ended may have grown its slot up to the limit without reporting it.
                    self.segment.discard(place.number, place.limit_nbytes)
                place.resize(0, place.limit_nbytes)
                place.free()
        self.segment.close()

    def check(self) -> None:
        """Assert that every place is in one hand, and that tasks and bytes are counted as they are."""
        states = Counter(place.state for place in self.places)
        wanted = Counter(place.state for place in self.unreturned.values())
        busy = Counter(place.worker_id for place in self.places if place.state is MAKING)
        said = [len(self._free) + len(self._empty), self.tasks, self.kept, self.committed_nbytes]
        said += [len(self.void) + wanted[MAKING], len(self.arrived), *self.unanswered]
        found = [states[FREE], states[MAKING] + states[ARRIVED], states[LEASED] + states[GUARDED]]
        found += [sum(place.limit_nbytes for place in self.places), states[MAKING]]
        found += [states[ARRIVED] + wanted[LEASED], *(busy[number] for number in range(len(self.unanswered)))]
        assert said == found, f"the table of places says {said}, and there are {found}"
