"""The main process in the protocol's model, driven by a script.

`Scheduler`, `Exchange`, `PlaceTable` and `Progress` are the real ones. The iterator, which uses them, is
written here once more.

The real objects cannot be copied. So a state of the main process is represented by the shortest script that
leads to it, and made again by running that script (`MainStates`). A script may end while the main process
sleeps in the middle of `Exchange.begin_epoch`.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from protocol_fakes import LONG, WORKERS, Device, Event, Segment, Workers

from shmloader.errors import LoaderError
from shmloader.exchange.exchange import Exchange
from shmloader.interrupts import Lifecycle
from shmloader.memory import PAGE_NBYTES
from shmloader.order.auto import Auto
from shmloader.order.scheduler import Scheduler
from shmloader.resume.progress import Progress
from shmloader.slots import Place, PlaceState, PlaceTable
from shmloader.slots.budget import SPARE_SLOTS
from shmloader.wire.records import REPORTED

ONE_HAND = "a slot is in one hand at a time"
LEASE = "a leased slot is never written"
ORDER = "batches come complete, once and, if that is asked for, in order"
COUNT = "a state counts what the program has had, and nothing else"
COUNTED = "the table of places counts what there is"
PROGRESS = "something can always go on until all is done"
ENDS = "all workers end after the main process"
TWICE = "a batch that ended its worker twice raises"
LOST = "no slot is lost, and no more are made than the budget allows"
COPIES = "a batch is copied only if too many are kept"
INDICES = "a worker reads the index batch that it was sent"
DRAWS = "a worker that hands over has made all tasks that are void"
SOUND = "the main process fails only for what a worker did"


class Broken(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class _Paused(BaseException):
    """The main process sleeps: its script has no further step."""


RUNNING = ("run", "resuming", "interrupted")  # phases in which the main process is active

Op = tuple[Any, ...]


@dataclass(frozen=True)
class Setting:
    """The setting that is explored.

    Attributes:
        batches: Batches per epoch.
        epochs: Number of epochs; all but the last may be left early.
        prefetch: Tasks per worker.
        kills: Most workers that may die, or be silent until the timeout, in all.
        restarts: Most workers that the loader replaces.
        full: How often a worker has too much memory after a batch, and is to hand over to another one.
        parts: The batch that is larger than its slot and comes in two parts; -1 for none.
        long: The batch whose index batch is too long for the record and lies in the slot; -1 for none.
        left_out: The batch that has no good sample and is not returned; -1 for none.
        in_order: Whether batches are returned in order.
        grows: How often one more task per worker may be wanted, after any batch.
        interrupts: Whether Ctrl-C may end the wait for a batch, after which the program's loop goes on, or
            for a new epoch, which is then begun once more.
        main_dies: Whether the main process may be killed, at any moment.
        keeps: Most batches that the user keeps at a time.
        device: Whether a device reads each batch that the user drops, for any while.
        dynamic: Whether a free worker takes the next task, and idle ones further tasks.
        inherit: A planted bug: workers hold the writing ends of each other's task pipes.
        exchange, scheduler, progress, table, workers: The classes; subclasses of the real ones are planted
            bugs.
    """

    batches: int = 3
    epochs: int = 1
    prefetch: int = 1
    kills: int = 0
    restarts: int = 0
    full: int = 0
    parts: int = -1
    long: int = -1
    left_out: int = -1
    in_order: bool = True
    grows: int = 0
    interrupts: bool = False
    main_dies: bool = False
    keeps: int = 3
    device: bool = False
    dynamic: bool = False
    inherit: bool = False
    exchange: type[Exchange] = Exchange
    scheduler: type[Scheduler] = Scheduler
    progress: type[Progress] = Progress
    table: type[PlaceTable] = PlaceTable
    workers: type[Workers] = Workers

    @property
    def most_slots(self) -> int:
        return WORKERS * (self.prefetch + self.grows) + 2 + self.ahead

    @property
    def ahead(self) -> int:
        """Slots beyond that, for batches that free workers make ahead."""
        return 1 if self.dynamic else 0


def stamp(epoch: int, seq: int, part: int = 0) -> int:
    """The byte that a batch, or a part of one, is full of."""
    return 1 + epoch * 64 + seq * 4 + part


class _Settings:
    """The settings that the scheduler reads."""

    index_sampler = ()
    num_workers = WORKERS
    timeout = 0
    persistent_workers = True

    def __init__(self, setting: Setting) -> None:
        self.prefetch_factor, self.in_order = setting.prefetch, setting.in_order
        self.dispatch = "dynamic" if setting.dynamic else "static"


class _Grows(Auto):
    """Wants one more task per worker when the script says so, not by the clock.

    Attributes:
        grows: Whether it does after the next batch.
    """

    grows = False

    def note(self, measured: object) -> None:
        self.prefetch_factor += self.grows


class Main:
    """The main process: the real scheduler, exchange and table, used as `SlotIterator` uses them.

    Attributes:
        phase: ``run``, ``resuming`` (asleep in `Exchange.begin_epoch`), ``interrupted`` (out of that, by
            Ctrl-C), ``raised`` or ``closed``.
        held: The anchors of the batches that the user keeps, by slot.
    """

    def __init__(self, setting: Setting, script: list[Op]) -> None:
        self.setting = setting
        self._script = deque(script)
        self.last_events = 0  # index of the first event of the last operation
        self.segment = Segment()
        most_tasks = WORKERS * setting.prefetch
        # The least, where the number of tasks stays; else slots that were granted before have larger limits.
        pages = setting.most_slots * (4 if setting.grows else 1)
        self.table = setting.table(self.segment, most_tasks, pages * PAGE_NBYTES, workers=WORKERS)
        self.device = Device()
        if setting.device:
            self.table.guard_with(self.device)
        self.workers = setting.workers(self)
        self.exchange = setting.exchange(
            self.table, self.workers, Lifecycle(), restarts=setting.restarts, timeout_s=1.0
        )
        self._settings: Any = _Settings(setting)
        self.auto = _Grows(WORKERS, setting.prefetch, [WORKERS, None], WORKERS) if setting.grows else None
        self.scheduler = setting.scheduler(self._settings, self.exchange, self.auto)
        self.phase = "run"
        self.epoch = 0
        self.held: dict[int, np.ndarray] = {}
        self._begin_epoch()

    def run(self) -> None:
        """Run the script; return at its end, even in the middle of `Exchange.begin_epoch`."""
        try:
            while self._script:
                self._do(self._next_op())
        except _Paused:
            pass
        except LoaderError:
            self.phase = "raised"

    def _next_op(self) -> Op:
        self.last_events = len(self.workers.events)
        return self._script.popleft()

    def _do(self, op: Op) -> None:
        kind = op[0]
        if kind == "drop":
            if self.setting.device:
                self.device.reading.add(op[1])
            del self.held[op[1]]
        elif kind == "read":
            self.device.reading.remove(op[1])
        elif kind == "next":
            self._return_batch(*op[1:])
        elif kind == "resume":
            self.phase = "resuming"
            self.epoch += 1
            try:
                self.exchange.begin_epoch(b"settings")
            except KeyboardInterrupt:
                self.phase = "interrupted"
                return
            self.phase = "run"
            self._begin_epoch()
        elif kind == "close":
            self.workers.close()
            self.table.close()
            self.phase = "closed"
        else:
            self._script.appendleft(op)
            try:
                # As in the iterator: the worker that owes the next batch is the one that is silent.
                self.exchange.receive(self.due_from() if kind == "timeout" else None)
            except KeyboardInterrupt:
                self.progress.take_back(self.done_before)  # the loop calls next() again

        if self.phase == "run" and self.arrived() is None and (due := self.table.due()) is not None:
            self.scheduler.note_wait(due)  # as the iterator does before it sleeps

    def wake(self) -> int | None:
        """The main process waits: take the next step of the script; returns the worker that wakes it up."""
        while self._script and self._script[0][0] in ("drop", "read"):
            self._do(self._next_op())
        if not self._script:
            raise _Paused
        kind, *about = self._next_op()
        if kind == "timeout":
            return None
        if kind == "interrupt":
            raise KeyboardInterrupt
        worker_id, *said = about
        worker = self.workers.workers[worker_id]
        if kind == "died late":  # its last record is seen only after its death
            worker.says.append(b"")
        for record, slot, byte in said:
            if byte:
                self.segment.memory[slot].buffer[:] = bytes([byte]) * PAGE_NBYTES
            worker.says.append(record)
        worker.dead = kind != "accept"
        return worker_id

    def _begin_epoch(self) -> None:
        self.had: set[int] = set()
        self.progress = self.setting.progress(0, 0, None, "", None)
        self.done_before = self.progress.done
        positions = range(self.setting.batches)
        self.scheduler.begin_epoch(
            iter([LONG if position == self.setting.long else [position] for position in positions])
        )

    def _return_batch(self, grows: bool) -> None:
        place = self.table.next_arrived(in_order=self.setting.in_order)
        assert place is not None
        position, flags = place.position, place.flags
        if position in self.had or (self.setting.in_order and position != len(self.had)):
            raise Broken(ORDER, f"batch {position} of epoch {self.epoch} comes after {sorted(self.had)}")
        self.had.add(position)
        anchor = self.table.take(place)[0]
        leased = place.state is PlaceState.LEASED
        if self.auto is not None:
            self.auto.grows = grows
        self.scheduler.send_more()
        self.progress.take(position)
        if flags & REPORTED:
            del anchor
            self.done_before = self.progress.done
            return  # next() goes on
        expected = [stamp(self.epoch, position)]
        if position == self.setting.parts:
            expected = [stamp(self.epoch, position, part) for part in (1, 2)]
        shown = [int(anchor[begin]) for begin in range(0, len(expected) * PAGE_NBYTES, PAGE_NBYTES)]
        if shown != expected:
            raise Broken(ORDER, f"batch {position} of epoch {self.epoch} shows {shown} instead of {expected}")
        kept = len(self.held) + len(self.device.reading)
        if leased:
            self.held[place.number] = anchor
        elif kept < SPARE_SLOTS and position != self.setting.parts:
            raise Broken(COPIES, f"batch {position} was copied, but only {sorted(self.held)} are held")
        self.done_before = self.progress.done  # the loop calls next() again

    def due_from(self) -> int | None:
        """The worker that the main process waits for when the timeout ends."""
        if self.phase == "resuming":
            unanswered = self.table.making() or list(self.table.void.values())
            return unanswered[0].worker_id if unanswered else 0
        place = self.table.due()
        return None if place is None else place.worker_id

    def arrived(self) -> int | None:
        """The position of the batch that ``next()`` returns or leaves out now; None if it has to wait."""
        place = self.table.next_arrived(in_order=self.setting.in_order)
        return None if place is None else place.position

    def overwrite_granted(self) -> None:
        """Overwrite the slots of places that are being made: a worker that died may have written to them."""
        for place in self.table.places:
            if place.state is PlaceState.MAKING and place.number in self.segment.memory:
                self.segment.memory[place.number].view[:] = bytes(place.nbytes)

    def has_left(self, worker_id: int) -> None:
        """Check that a new worker goes on where the old one has stopped."""
        void = [place.seq for place in self.table.void.values() if place.worker_id == worker_id]
        if void:
            raise Broken(DRAWS, f"worker {worker_id} leaves tasks {void} undone, which nobody makes")

    def check(self) -> None:
        """The invariants that can be seen in the main process alone."""
        table, allowed = self.table, self.setting.most_slots
        if len(table.places) > allowed:
            raise Broken(LOST, f"{len(table.places)} slots were made, {allowed} are allowed")
        if self.phase in RUNNING:
            try:
                table.check()
            except AssertionError as error:
                raise Broken(COUNTED, str(error)) from error
        counted = {*range(self.progress.taken), *self.progress.behind}
        if counted != self.had:
            raise Broken(COUNT, f"a state counts {sorted(counted)}, and {sorted(self.had)} are done")
        all_are_done = len(self.had) == self.setting.batches
        if self.phase == "run" and not all_are_done and table.due() is None:
            raise Broken(ORDER, f"the epoch ends after {sorted(self.had)}")
        if self.phase == "run" and all_are_done:
            if table.arrived:
                raise Broken(ORDER, f"tasks {sorted(table.arrived)} came again")
            in_use = {place.number for place in table.places if place.state is not PlaceState.FREE}
            ended = {lease.place.number for lease in table._released}
            guarded = {place.number for place in self.device._ended}
            if in_use != set(self.held) | ended | guarded:
                raise Broken(LOST, f"slots {sorted(in_use)} are in use, {sorted(self.held)} are held")

    def key(self) -> tuple[Any, ...]:
        """Everything that decides the next steps of the main process."""
        shown = [
            self.segment.memory[place.number].buffer[0]
            for place in self.table.places
            if place.state in (PlaceState.ARRIVED, PlaceState.LEASED) and place.number in self.segment.memory
        ]
        return (
            self.phase,
            self.epoch,
            tuple(sorted(self.had)),
            tuple(sorted(self.held)),
            tuple(sorted(self.device.reading)),
            _canonical(self.device._ended),
            None if self.auto is None else self.auto.prefetch_factor,
            tuple(map(str, _attributes(self.progress).values())),
            self.scheduler._sent,
            self.scheduler.turns._turn,
            _canonical(_attributes(self.scheduler._growth, *_NO_STATE_OF_GROWTH)) if self.auto else (),
            _canonical(_attributes(self.exchange, *_NO_STATE)),
            self.exchange._recovery.restarts_left,
            tuple(self.table.arrived),
            _canonical(_attributes(self.table, *_NO_STATE_OF_TABLE)),
            _canonical(_attributes(self.table.budget)),
            tuple(_canonical(_state_of(place)) for place in self.table.places),
            tuple(shown),
        )


# Attributes that are noted elsewhere, never change, or depend on the clock.
_NO_STATE = ("table", "workers", "counters", "lifecycle", "_recovery", "_timeout_s", "_wait_ns")
_NO_STATE_OF_TABLE = ("segment", "places", "budget", "counters", "guard", "inspection", "_due")
_NO_STATE_OF_GROWTH = (
    "_auto",
    "_exchange",
    "_workers",
    "_serve",
    "_counters",
    "_last",
    "_unmeasured",
)
_OF_A_TASK = ("seq", "epoch", "position", "worker_id", "payload", "void", "deaths", "pieces_nbytes")
_OF_AN_ANSWER = ("header_begin", "header_end", "made_ns", "flags")


def _state_of(place: Place) -> dict[str, Any]:
    """The attributes of a place that mean something in its state."""
    without = ["extent", "pieces"]
    if place.state not in (PlaceState.MAKING, PlaceState.ARRIVED):
        without += _OF_A_TASK
    if place.state is not PlaceState.ARRIVED:
        without += _OF_AN_ANSWER
    if place.pieces is None:
        without += ["pieces_nbytes"]
        return _attributes(place, *without)
    parts = tuple(place.pieces[: place.pieces_nbytes : PAGE_NBYTES].tolist())
    return _attributes(place, *without) | {"parts": parts}


def _attributes(thing: object, *without: str) -> dict[str, Any]:
    names = getattr(thing, "__slots__", None) or vars(thing)
    return {name: getattr(thing, name) for name in names if name not in without and hasattr(thing, name)}


_PLAIN = {int, bool, str, bytes, type(None), PlaceState}


def _canonical(value: Any) -> Any:
    """A value in a form that can be compared and hashed; a place or a lease of one is its number."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return tuple((_canonical(key), _canonical(item)) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(map(_canonical, value))
    if isinstance(value, set):
        return tuple(sorted(value))
    number = getattr(getattr(value, "place", value), "number", None)
    if number is None:
        raise TypeError(f"a {type(value).__name__} cannot be compared: is it state, or for _NO_STATE?")
    return ("place", number)


class MainState(NamedTuple):
    """The parts of a state of the main process that the model needs."""

    phase: str
    epoch: int
    had: tuple[int, ...]  # batches of this epoch that were returned or left out
    due_from: int | None  # the worker that the main process waits for
    arrived: int | None  # the batch that next() returns or leaves out now
    tasks_per_worker: int
    states: tuple[PlaceState, ...]
    held: tuple[int, ...]
    reading: tuple[int, ...]  # slots that the device reads


class MainStates:
    """The states of the main process, and the effect of each operation on them. Each is computed once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._scripts: list[list[Op]] = []
        self._numbers: dict[Any, int] = {}
        self._after: dict[tuple[int, Op], tuple[int, tuple[Event, ...]]] = {}
        self.states: list[MainState] = []

    def first(self) -> tuple[int, tuple[Event, ...]]:
        """The number of the first state, and its events."""
        return self._run([])

    def after(self, number: int, op: Op) -> tuple[int, tuple[Event, ...]]:
        """The state after an operation, and its effects on the workers."""
        known = self._after.get((number, op))
        if known is None:
            known = self._after[number, op] = self._run([*self._scripts[number], op])
        return known

    def _run(self, script: list[Op]) -> tuple[int, tuple[Event, ...]]:
        try:
            main = Main(self._setting, script)
            main.run()
            main.check()
        except AssertionError as error:  # the table's own checks
            raise Broken(ONE_HAND, str(error)) from error
        except (LookupError, TypeError, ValueError) as error:
            raise Broken(SOUND, repr(error)) from error
        number = self._numbers.setdefault(main.key(), len(self.states))
        if number == len(self.states):
            self._scripts.append(script)
            self.states.append(
                MainState(
                    main.phase,
                    main.epoch,
                    tuple(sorted(main.had)),
                    main.due_from(),
                    main.arrived(),
                    main.setting.prefetch if main.auto is None else main.auto.prefetch_factor,
                    tuple(place.state for place in main.table.places),
                    tuple(sorted(main.held)),
                    tuple(sorted(main.device.reading)),
                )
            )
        return number, tuple(main.workers.events[main.last_events :])
