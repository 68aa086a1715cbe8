"""The slot protocol, in every interleaving: nothing breaks, and each of several planted bugs is found."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from protocol_explorer import explore
from protocol_fakes import Workers
from protocol_main import (
    COPIES,
    COUNT,
    COUNTED,
    DRAWS,
    ENDS,
    INDICES,
    LEASE,
    LOST,
    ONE_HAND,
    ORDER,
    PROGRESS,
    SOUND,
    TWICE,
    Setting,
)

from shmloader.exchange.exchange import Exchange
from shmloader.order.scheduler import Scheduler
from shmloader.resume.progress import Progress
from shmloader.slots import Guard, Place, PlaceState, PlaceTable
from shmloader.wire.records import PieceReady, unpack_answer

SETTINGS = {
    "batches are kept and dropped": Setting(batches=5),
    "epochs are left": Setting(batches=3, epochs=2, keeps=1),
    "a worker dies in one of two epochs": Setting(batches=3, epochs=2, kills=1, restarts=1, keeps=1),
    "and where batches are kept": Setting(batches=2, epochs=2, kills=1, restarts=1),
    "two die, tasks queue": Setting(batches=4, prefetch=2, kills=2, restarts=2, keeps=1),
    "parts of a large batch": Setting(batches=2, epochs=2, kills=1, restarts=1, parts=1),
    "parts, and two die": Setting(batches=3, kills=2, restarts=2, parts=1),
    "a long index batch": Setting(batches=3, kills=2, restarts=2, long=0),
    "three epochs": Setting(batches=1, epochs=3, kills=1, restarts=1),
    "Ctrl-C between epochs": Setting(batches=1, epochs=3, kills=1, restarts=1, interrupts=True),
    "no restarts": Setting(batches=3, kills=1),
    "one restart for two deaths": Setting(batches=3, kills=2, restarts=1),
    "the main process is killed": Setting(batches=2, epochs=2, kills=1, restarts=1, main_dies=True, keeps=1),
    "more tasks are wanted": Setting(batches=6, grows=2, keeps=1),
    "batches without order, and more tasks": Setting(batches=5, grows=1, keeps=1, in_order=False),
    "a free worker takes the next task": Setting(batches=4, dynamic=True, keeps=1, kills=1, restarts=1),
    "and more tasks are wanted": Setting(batches=4, dynamic=True, keeps=1, grows=1),
    "a device reads what was dropped": Setting(batches=4, keeps=1, device=True),
    "and epochs are left, and a worker dies": Setting(
        batches=2, epochs=2, keeps=1, kills=1, restarts=1, device=True
    ),
    "and more tasks are wanted while a device reads": Setting(batches=4, grows=1, keeps=1, device=True),
    "and a worker dies": Setting(batches=3, grows=1, keeps=1, in_order=False, kills=1, restarts=1),
    "a worker hands over": Setting(batches=4, prefetch=2, full=1, keeps=1),
    "and one dies": Setting(batches=3, full=1, kills=1, restarts=1, keeps=1),
    "and epochs are left": Setting(batches=2, epochs=2, full=1, interrupts=True, keeps=1),
    "a batch is left out": Setting(batches=3, left_out=0, interrupts=True, kills=1, restarts=1, keeps=1),
    "and without order": Setting(
        batches=3, epochs=2, left_out=0, interrupts=True, in_order=False, grows=1, keeps=1
    ),
}

LARGE = {  # hundreds of thousands of states; the others have their steps too
    "a worker dies in one of two epochs",
    "two die, tasks queue",
    "parts of a large batch",
    "more tasks are wanted",
    "batches without order, and more tasks",
    "and epochs are left, and a worker dies",
    "and without order",
}

KINDS = {  # of steps; without one of them, the exploration would prove less than it claims
    "worker writes batch of epoch to slot",
    "worker publishes batch of epoch",
    "worker sends part of batch of epoch",
    "worker publishes batch of epoch and is full",
    "worker hands over",
    "worker takes over",
    "main loses patience with worker; worker publishes batch of epoch and is full too late",
    "worker goes on",
    "worker comes to epoch",
    "worker ends",
    "worker is killed",
    "main hears worker",
    "main finds worker dead",
    "main finds worker dead and hears it",
    "main loses patience with worker",
    "main loses patience with worker; worker publishes batch of epoch too late",
    "main loses patience with worker; worker sends part of batch of epoch too late",
    "next() returns batch",
    "next() returns a copy of batch",  # it is spilled: too many slots are leased
    "next() returns batch and more tasks are wanted",
    "next() leaves out batch",
    "next() leaves out batch and more tasks are wanted",
    "Ctrl-C in next()",
    "the user drops slot",
    "the device has read slot",
    "the user leaves the epoch",
    "the epoch ends",
    "Ctrl-C",
    "the epoch is begun again",
    "the main process is killed",
}
_seen: dict[str, set[str]] = {}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.in_ci] if case in LARGE else []) for case in SETTINGS]
)
def test_no_interleaving_breaks_an_invariant(case: str) -> None:
    setting = SETTINGS[case]
    found = explore(setting)
    print(f"{found.states:,} states, {found.main_states:,} of the main process, {found.ends:,} ends")
    assert found.invariant == "", "\n".join(found.trace)
    assert found.ends > 0
    assert (found.raised > 0) == (setting.kills > 1 or setting.kills > setting.restarts)
    _seen[case] = found.kinds


def test_every_kind_of_step_was_taken() -> None:
    if _seen.keys() != SETTINGS.keys():
        pytest.skip("looks at all the explorations before it")
    assert set().union(*_seen.values()) == KINDS


# --- planted bugs


class LeasesTooShort(PlaceTable):
    """The lease watches something that dies before the user's views do."""

    def take(self, place: Place, *, early: bool = False) -> tuple[Any, bytes]:
        anchor, header = super().take(place, early=early)
        extent = self.map(place) if place.state is PlaceState.LEASED else None
        return (anchor if extent is None else np.frombuffer(extent.view, np.uint8)), header


class TakesStaleBatches(PlaceTable):
    """A batch of the epoch before is taken for one of this epoch."""

    def arrive(self, seq: int, *answer: int) -> None:
        stale = self.void.pop(seq, None)
        if stale is not None:
            stale.void, stale.epoch = False, self.epoch
            self.unreturned[seq] = stale
        super().arrive(seq, *answer)


class FreesVoidPlaces(PlaceTable):
    """The slots of an abandoned epoch are free at once, while workers still write there."""

    def set_void(self, place: Place) -> None:
        del self.unreturned[place.seq]
        self.unanswered[place.worker_id] -= 1
        self._end(place)

    def arrive(self, seq: int, *answer: int) -> None:
        if seq in self.unreturned:
            super().arrive(seq, *answer)


class KeepsPipe(Workers):
    """A worker is replaced, and the last records of the old one are still read."""

    same_pipe = True


class NeverContinues(Exchange):
    """A worker with a part of an abandoned batch is not told to go on."""

    def _accept_other(self, worker: Any, records: bytes, begin: int) -> None:
        answer = unpack_answer(records, begin)
        if not isinstance(answer, PieceReady) or answer.seq in self.table.unreturned:
            super()._accept_other(worker, records, begin)


class LosesPlaces(PlaceTable):
    """A place whose batch is not leased does not become free."""

    def _end(self, place: Place) -> None:
        self.void.pop(place.seq, None)


class LosesReleases(PlaceTable):
    """The end of a lease is forgotten."""

    def collect(self, *, at_once: bool = True) -> None:
        self._released.clear()


class CountsLeasesTwice(PlaceTable):
    """The bytes of a leased slot are counted once more when its lease ends."""

    def collect(self, *, at_once: bool = True) -> None:
        self.committed_nbytes += sum(lease.place.nbytes for lease in self._released)
        super().collect(at_once=at_once)

    def check(self) -> None:
        """It would find that at once."""


class CountsLeasesTwiceAndLooks(CountsLeasesTwice):
    """The bytes that are counted too much are found by the table's own equation."""

    check = PlaceTable.check


class ForgetsTheGuard(PlaceTable):
    """A slot is free when its lease ends, while a device may still read it."""

    def guard_with(self, guard: Guard) -> None:
        pass


class KeepsParts(PlaceTable):
    """The parts that a dead worker sent are still there when its batch is made again."""

    def hand_over(self, worker_id: int) -> list[Place]:
        parts = {place.seq: place.pieces for place in self.unreturned.values()}
        held = super().hand_over(worker_id)
        for place in held:
            place.pieces = parts[place.seq]
        return held


class ForgetsDeaths(PlaceTable):
    """Deaths are not counted per batch."""

    def hand_over(self, worker_id: int) -> list[Place]:
        held = super().hand_over(worker_id)
        for place in held:
            place.deaths = 0
        return held


class WritesIndicesOnce(PlaceTable):
    """A long index batch is not written again for the worker that makes the batch again."""

    def reserve(self, place: Place, nbytes: int) -> Any:
        extent = super().reserve(place, nbytes)
        if getattr(self, "written", place) is not place:
            return extent
        first = not hasattr(self, "written")
        self.written = place
        return extent if first else np.zeros(extent.nbytes, np.uint8).view(_WithView)


class _WithView(np.ndarray):
    @property
    def view(self) -> Any:  # of no slot
        return memoryview(bytearray(self.nbytes))


class LeavesVoidTasks(Exchange):
    """An epoch is left while a worker is asked to hand over: the tasks behind that are not made."""

    def begin_epoch(self, settings: bytes) -> None:
        states, self.handed_over = self.handed_over, {}
        try:
            super().begin_epoch(settings)
        finally:
            self.handed_over = states

    def _accept_other(self, worker: Any, records: bytes, begin: int) -> None:
        if worker.worker_id not in self.handed_over:
            self.handed_over[worker.worker_id] = bytearray()
        super()._accept_other(worker, records, begin)


class DrawsFirst(Scheduler):
    """An index batch is drawn before it is known that a worker has room; and more tasks give it none."""

    def __init__(self, settings: Any, exchange: Exchange, auto: Any) -> None:
        super().__init__(settings, exchange, auto)
        self.turns._table = SimpleNamespace(  # type: ignore[assignment]
            budget=SimpleNamespace(wanted_tasks=settings.num_workers * settings.prefetch_factor),
            unreturned=exchange.table.unreturned,
        )

    def _send_task(self) -> bool:
        drawn = next(self._sampler_iter, None)
        if drawn is None or self.turns.choose() is None:
            return False
        self.turns.undo()
        self._sampler_iter = itertools.chain([drawn], self._sampler_iter)
        return super()._send_task()


class ForgetsLeftOut(Progress):
    """An interrupt takes back the batches that the same call of next() has left out."""

    def take_back(self, done: tuple[int, ...]) -> None:
        super().take_back((0,) if done == (1,) else done)  # the first batch is the one that is left out


BUGS: dict[str, tuple[Setting, set[str]]] = {
    "a slot is freed while a view of its batch lives": (
        Setting(batches=3, table=LeasesTooShort),
        {LEASE},
    ),
    "a batch of an abandoned epoch is returned": (
        Setting(batches=2, epochs=2, table=TakesStaleBatches),
        {ORDER},
    ),
    "a replaced worker is still heard": (
        Setting(batches=2, kills=1, restarts=1, workers=KeepsPipe),
        {ONE_HAND, LEASE},
    ),
    "the worker of an abandoned part waits for ever": (
        Setting(batches=2, epochs=2, parts=1, exchange=NeverContinues),
        {PROGRESS},
    ),
    "slots of abandoned batches are not free again": (
        Setting(batches=2, epochs=2, table=LosesPlaces),
        {COUNTED},
    ),
    "the end of a lease is forgotten": (
        Setting(batches=2, table=LosesReleases),
        {LOST},
    ),
    "batches are copied though none are kept": (
        Setting(batches=5, table=CountsLeasesTwice),
        {COPIES},
    ),
    "bytes are counted twice": (
        Setting(batches=3, table=CountsLeasesTwiceAndLooks),
        {COUNTED},
    ),
    "slots of void batches are given to others": (
        Setting(batches=2, epochs=2, table=FreesVoidPlaces),
        {ONE_HAND, LEASE},
    ),
    "a slot is granted while a device reads it": (
        Setting(batches=4, keeps=1, device=True, table=ForgetsTheGuard),
        {LEASE},
    ),
    "the parts of a dead worker stay": (
        Setting(batches=2, kills=1, restarts=1, parts=1, table=KeepsParts),
        {SOUND, ORDER},
    ),
    "a batch that kills its workers is tried for ever": (
        Setting(batches=2, kills=2, restarts=2, table=ForgetsDeaths),
        {TWICE},
    ),
    "a long index batch is gone when it is read again": (
        Setting(batches=2, kills=1, restarts=1, long=0, table=WritesIndicesOnce),
        {INDICES},
    ),
    "a worker that hands over leaves void tasks undone": (
        Setting(batches=3, epochs=2, full=1, keeps=1, exchange=LeavesVoidTasks),
        {DRAWS},
    ),
    "an index batch is drawn and not sent": (
        Setting(batches=4, grows=1, keeps=1, in_order=False, scheduler=DrawsFirst),
        {ORDER},
    ),
    "an interrupt takes back a batch that was left out": (
        Setting(batches=3, left_out=0, in_order=False, interrupts=True, progress=ForgetsLeftOut),
        {COUNT},
    ),
    "workers hold each other's pipes open": (
        Setting(batches=1, main_dies=True, inherit=True),
        {ENDS},
    ),
}


@pytest.mark.parametrize("case", BUGS)
def test_a_planted_bug_is_found(case: str) -> None:
    setting, invariants = BUGS[case]
    found = explore(setting)
    print("\n".join(found.trace))
    assert found.invariant in invariants
    assert found.trace[-1].startswith(found.invariant)
    sane = replace(
        setting,
        exchange=Exchange,
        scheduler=Scheduler,
        progress=Progress,
        table=PlaceTable,
        workers=Workers,
        inherit=False,
    )
    assert explore(sane).invariant == ""  # it is the planted bug that was found
