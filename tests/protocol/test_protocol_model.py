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

from shmloader.exchange.dispatcher import Dispatcher
from shmloader.order.scheduler import Scheduler
from shmloader.resume.progress import Progress
from shmloader.slots import Slot, SlotPool
from shmloader.slots.task_ledger import Task, TaskState
from shmloader.wire.records import PieceReady, Published

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
    "and a worker dies": Setting(batches=3, grows=1, keeps=1, in_order=False, kills=1, restarts=1),
    "a batch is left out": Setting(batches=3, left_out=0, interrupts=True, kills=1, restarts=1, keeps=1),
    "and without order": Setting(
        batches=3, epochs=2, left_out=0, interrupts=True, in_order=False, grows=1, keeps=1
    ),
}

KINDS = {  # of steps; without one of them, the exploration would prove less than it claims
    "worker writes batch of epoch to slot",
    "worker publishes batch of epoch",
    "worker sends part of batch of epoch",
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
    "the user leaves the epoch",
    "the epoch ends",
    "Ctrl-C",
    "the epoch is begun again",
    "the main process is killed",
}
_seen: dict[str, set[str]] = {}


@pytest.mark.parametrize("case", SETTINGS)
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


class LeasesTooShort(SlotPool):
    """The lease watches something that dies before the user's views do."""

    def lease(self, slot: Slot) -> tuple[Any, memoryview]:
        _, view = super().lease(slot)
        return np.frombuffer(view, np.uint8), view


class TakesStaleBatches(Dispatcher):
    """A batch of the epoch before is taken for one of this epoch."""

    def _accept_batch(self, answer: Published) -> None:
        stale = self.ledger.void_tasks.pop(answer.seq, None)
        if stale is not None:
            stale.state, stale.epoch = TaskState.MAKING, self.ledger.epoch
            self.ledger.tasks[answer.seq] = stale
        super()._accept_batch(answer)


class KeepsPipe(Workers):
    """A worker is replaced, and the last records of the old one are still read."""

    same_pipe = True


class NeverContinues(Dispatcher):
    """A worker with a part of an abandoned batch is not told to go on."""

    def _accept_piece(self, worker: Any, answer: PieceReady) -> None:
        if answer.seq in self.ledger.tasks:
            super()._accept_piece(worker, answer)


class LosesSlots(SlotPool):
    """A slot that is given back does not become free."""

    def give_back(self, slot: Slot) -> None:
        pass


class LosesReleases(SlotPool):
    """The end of a lease is forgotten."""

    def collect(self) -> None:
        self._released.clear()


class CountsLeasesTwice(SlotPool):
    """The bytes of a leased slot are counted once more when its lease ends."""

    def collect(self) -> None:
        self.budget.committed_nbytes += sum(lease.slot.nbytes for lease in self._released)
        super().collect()


class KeepsParts(Dispatcher):
    """The parts that a dead worker sent are still there when its batch is made again."""

    def _hand_over(self, worker: Any, held: list[Task]) -> None:
        all_spilled = [(task, task.spilled) for task in held]
        super()._hand_over(worker, held)
        for task, spilled in all_spilled:
            task.spilled = spilled


class ForgetsDeaths(Dispatcher):
    """Deaths are not counted per batch."""

    def _recover(self, worker: Any, silent_s: float | None) -> None:
        for task in self.ledger.tasks.values():
            task.deaths = 0
        super()._recover(worker, silent_s)


class WritesIndicesOnce(SlotPool):
    """A long index batch is not written again for the worker that makes the batch again."""

    def reserve(self, slot: Slot, nbytes: int) -> Any:
        extent = super().reserve(slot, nbytes)
        if getattr(self, "written", slot) is not slot:
            return extent
        first = not hasattr(self, "written")
        self.written = slot
        return extent if first else np.zeros(extent.nbytes, np.uint8).view(_WithView)


class _WithView(np.ndarray):
    @property
    def view(self) -> Any:  # of no slot
        return memoryview(bytearray(self.nbytes))


class DrawsFirst(Scheduler):
    """An index batch is drawn before it is known that a worker has room; and more tasks give it none."""

    def __init__(self, loader: Any, index_sampler: Any, dispatcher: Dispatcher, auto: Any) -> None:
        super().__init__(loader, index_sampler, dispatcher, auto)
        budget = SimpleNamespace(wanted_tasks=loader.num_workers * loader.prefetch_factor)
        self._turns._pool = SimpleNamespace(budget=budget)  # type: ignore[assignment]

    def _send_task(self) -> bool:
        drawn = next(self._sampler_iter, None)
        if drawn is None or self._turns.choose() is None:
            return False
        self._sampler_iter = itertools.chain([drawn], self._sampler_iter)
        return super()._send_task()


class ForgetsLeftOut(Progress):
    """An interrupt takes back the batches that the same call of next() has left out."""

    def keep(self) -> None:
        if self.done != 1:  # the first batch is the one that is left out
            super().keep()


BUGS: dict[str, tuple[Setting, set[str]]] = {
    "a slot is freed while a view of its batch lives": (
        Setting(batches=3, pool=LeasesTooShort),
        {LEASE},
    ),
    "a batch of an abandoned epoch is returned": (
        Setting(batches=2, epochs=2, dispatcher=TakesStaleBatches),
        {ORDER},
    ),
    "a replaced worker is still heard": (
        Setting(batches=2, kills=1, restarts=1, workers=KeepsPipe),
        {ONE_HAND, LEASE},
    ),
    "the worker of an abandoned part waits for ever": (
        Setting(batches=2, epochs=2, parts=1, dispatcher=NeverContinues),
        {PROGRESS},
    ),
    "slots of abandoned batches are not free again": (
        Setting(batches=2, epochs=2, pool=LosesSlots),
        {LOST},
    ),
    "the end of a lease is forgotten": (
        Setting(batches=2, pool=LosesReleases),
        {LOST},
    ),
    "batches are copied though none are kept": (
        Setting(batches=5, pool=CountsLeasesTwice),
        {COPIES},
    ),
    "the parts of a dead worker stay": (
        Setting(batches=2, kills=1, restarts=1, parts=1, dispatcher=KeepsParts),
        {SOUND, ORDER},
    ),
    "a batch that kills its workers is tried for ever": (
        Setting(batches=2, kills=2, restarts=2, dispatcher=ForgetsDeaths),
        {TWICE},
    ),
    "a long index batch is gone when it is read again": (
        Setting(batches=2, kills=1, restarts=1, long=0, pool=WritesIndicesOnce),
        {INDICES},
    ),
    "an index batch is drawn and not sent": (
        Setting(batches=6, grows=1, keeps=1, in_order=False, scheduler=DrawsFirst),
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
        dispatcher=Dispatcher,
        scheduler=Scheduler,
        progress=Progress,
        pool=SlotPool,
        workers=Workers,
        inherit=False,
    )
    assert explore(sane).invariant == ""  # it is the planted bug that was found
