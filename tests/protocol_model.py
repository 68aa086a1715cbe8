"""The slot protocol as a model: every step that main process, workers, kernel and user can take.

The main process runs the real code: `Scheduler` and its policies, `Growth`, `Exchange` and its recovery,
`PlaceTable`, `Progress`, the records. The rest is a model: pipes are tuples of records; workers take a task,
write and publish; a kernel kills them at any moment; a user takes batches, keeps them, drops them late and in
any order, and leaves an epoch; a device reads what was dropped, for any while. Each step says whether it
breaks an invariant of the design.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from protocol_fakes import WORKERS, Event
from protocol_main import (
    INDICES,
    LEASE,
    ONE_HAND,
    ORDER,
    RUNNING,
    TWICE,
    Broken,
    MainState,
    MainStates,
    Op,
    Setting,
    stamp,
)

from shmloader.memory import PAGE_NBYTES
from shmloader.slots import PlaceState
from shmloader.wire.records import (
    FULL,
    INLINE_NBYTES,
    REPORTED,
    SPILLED,
    BeginEpoch,
    HandOver,
    MakeBatch,
    SendNextPiece,
    TakeOver,
    handed_over,
    pack_piece_ready,
    pack_published,
    unpack_request,
)


class Process(NamedTuple):
    """A worker's process and its pipes.

    Attributes:
        doing: ``idle``, ``write``, ``wait`` (for the main process to copy a part), ``dead`` or ``ended``.
        task: The present task, or the one that it died with.
        part: Number of its parts that were sent.
        tasks: Records on their way to it.
        dones: Records on their way from it, each with its slot and the slot's content at that time.
    """

    doing: str = "idle"
    task: bytes = b""
    part: int = 0
    tasks: tuple[bytes, ...] = ()
    dones: tuple[tuple[bytes, int, int], ...] = ()

    @property
    def lives(self) -> bool:
        return self.doing not in ("dead", "ended")


class World(NamedTuple):
    """The state of everything.

    Attributes:
        main: Number of the main process's state; -1 when it was killed.
        processes: The workers.
        contents: Content of each slot: a batch's stamp, 0 for half a batch, or minus the stamp of the index
            batch that lies there.
        kills: Number of kills that are left.
        full: Number of times that are left at which a worker has too much memory.
        deaths: Deaths of workers in this epoch that the main process knows of, by the batch of their task.
    """

    main: int
    processes: tuple[Process, ...]
    contents: tuple[int, ...]
    kills: int
    full: int
    deaths: tuple[int, ...]


Step = tuple[str, World, bool]  # its name, the world after it, and whether the program takes it by itself


class Model:
    """The steps that can be taken in each state of the world.

    Args:
        setting: The setting that is explored.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.mains = MainStates(setting)

    def first(self) -> World:
        """The world after the loader was made."""
        number, events = self.mains.first()
        world = World(
            number,
            (Process(),) * WORKERS,
            (0,) * self._setting.most_slots,
            self._setting.kills,
            self._setting.full,
            (0,) * self._setting.batches,
        )
        return self._apply(world, events)

    def steps(self, world: World) -> Iterator[Step]:
        """All steps from a world."""
        for worker_id, process in enumerate(world.processes):
            if process.lives:
                yield from self._worker_steps(world, worker_id, process)
                if world.kills and self.main_runs(world):
                    dead = process._replace(doing="dead", tasks=())
                    name = f"worker {worker_id} is killed"
                    yield name, _with(world, worker_id, dead)._replace(kills=world.kills - 1), False
        if self.main_runs(world):
            yield from self._main_steps(world, self.mains.states[world.main])
            if self._setting.main_dies:
                yield "the main process is killed", world._replace(main=-1, kills=0), False

    def main_runs(self, world: World) -> bool:
        return world.main >= 0 and self.mains.states[world.main].phase in RUNNING

    def is_end(self, world: World) -> bool:
        """Whether all is done."""
        return not self.main_runs(world) and not any(process.lives for process in world.processes)

    # --- workers

    def _worker_steps(self, world: World, worker_id: int, process: Process) -> Iterator[Step]:
        name = f"worker {worker_id}"
        if process.doing == "write":
            if not self.main_runs(world):  # the pipe to main is broken
                yield f"{name} ends", _with(world, worker_id, Process("ended")), True
                return
            yield from self._publish(world, worker_id, process)
            return
        wanted = 0
        if process.doing == "wait":  # other records wait until the part was copied
            kinds = [type(unpack_request(record)) for record in process.tasks]
            wanted = kinds.index(SendNextPiece) if SendNextPiece in kinds else len(kinds)
        if wanted < len(process.tasks):
            rest = process.tasks[:wanted] + process.tasks[wanted + 1 :]
            yield self._take(world, worker_id, process._replace(tasks=rest), process.tasks[wanted])
        elif not self.main_runs(world) and not self._sibling_holds_pipe(world, worker_id):
            yield f"{name} ends", _with(world, worker_id, Process("ended")), True

    def _sibling_holds_pipe(self, world: World, worker_id: int) -> bool:
        siblings = world.processes[:worker_id] + world.processes[worker_id + 1 :]
        return self._setting.inherit and any(process.lives for process in siblings)

    def _take(self, world: World, worker_id: int, process: Process, record: bytes) -> Step:
        task = unpack_request(record)
        name = f"worker {worker_id}"
        if type(task) is BeginEpoch:
            return f"{name} comes to epoch {task.epoch}", _with(world, worker_id, process), True
        if type(task) is HandOver:  # what comes later in the pipe is not read
            (record,) = handed_over(b"state", 1)
            left = Process("ended", dones=(*process.dones, (record, -1, 0)))
            return f"{name} hands over", _with(world, worker_id, left), True
        if type(task) is TakeOver:
            return f"{name} takes over", _with(world, worker_id, process), True
        if type(task) is SendNextPiece:
            return f"{name} goes on", _with(world, worker_id, process._replace(doing="write")), True
        self._check_hands(world, worker_id, task)
        written = stamp(task.epoch, task.position)
        if task.payload_nbytes > INLINE_NBYTES and world.contents[task.slot] != -written:
            raise Broken(INDICES, f"{name} finds {world.contents[task.slot]} in slot {task.slot}")
        writing = process._replace(doing="write", task=record, part=0)
        world = _fill(_with(world, worker_id, writing), task.slot, 0)
        return f"{name} writes {_batch(task)} to slot {task.slot}", world, True

    def _check_hands(self, world: World, worker_id: int, task: MakeBatch) -> None:
        """Check that a worker that writes a slot is the only one that may."""
        who = f"worker {worker_id} writes slot {task.slot}"
        if not self.main_runs(world):
            return
        main = self.mains.states[world.main]
        if task.slot in main.held:
            raise Broken(LEASE, f"{who}, whose batch the user still holds")
        if task.slot in main.reading:
            raise Broken(LEASE, f"{who}, whose batch the device still reads")
        if main.states[task.slot] is not PlaceState.MAKING:
            raise Broken(ONE_HAND, f"{who}, which is {main.states[task.slot].value}")
        for other, process in enumerate(world.processes):
            busy = process.doing in ("write", "wait") and _task(process.task).slot == task.slot
            if busy and other != worker_id:
                raise Broken(ONE_HAND, f"{who}, and so does worker {other}")

    def _publish(self, world: World, worker_id: int, process: Process) -> Iterator[Step]:
        task = _task(process.task)
        self._check_hands(world, worker_id, task)
        in_pieces = task.position == self._setting.parts
        reserved = max(task.slot_nbytes, PAGE_NBYTES)
        if in_pieces and process.part < 2:
            part = process.part + 1
            full_of = stamp(task.epoch, task.position, part)
            record = pack_piece_ready(task.seq, reserved, 2 * PAGE_NBYTES, PAGE_NBYTES)
            after = process._replace(doing="wait", part=part)
            what = f"sends part {part} of"
        else:
            full_of = stamp(task.epoch, task.position)
            nbytes = 2 * PAGE_NBYTES if in_pieces else 100
            flags = SPILLED * in_pieces + REPORTED * (task.position == self._setting.left_out)
            published = functools.partial(pack_published, task.seq, reserved, 0, nbytes, 0, 0)
            record = published(flags)
            after = process._replace(doing="idle", task=b"", part=0)
            what = "publishes"
        done = after._replace(dones=(*process.dones, (record, task.slot, full_of)))
        name, filled = f"worker {worker_id} {what} {_batch(task)}", _fill(world, task.slot, full_of)
        yield name, _with(filled, worker_id, done), True
        if world.full and after.doing == "idle":
            done = after._replace(dones=(*process.dones, (published(flags | FULL), task.slot, full_of)))
            filled = filled._replace(full=world.full - 1)
            yield f"{name} and is full", _with(filled, worker_id, done), False

    # --- the main process

    def _main_steps(self, world: World, main: MainState) -> Iterator[Step]:
        for slot in main.held:
            yield f"the user drops slot {slot}", self._do(world, ("drop", slot)), False
        for slot in main.reading:
            yield f"the device has read slot {slot}", self._do(world, ("read", slot)), False
        if main.phase == "interrupted":
            yield "the epoch is begun again", self._do(world, ("resume",)), True
            return
        if main.phase == "resuming" and self._setting.interrupts and main.epoch < self._setting.epochs - 1:
            yield "Ctrl-C", self._do(world, ("interrupt",)), False
        if main.phase == "run":
            if len(main.had) == self._setting.batches:
                last = main.epoch == self._setting.epochs - 1
                yield "the epoch ends", self._do(world, ("close" if last else "resume",)), True
                return
            if main.epoch < self._setting.epochs - 1:
                yield "the user leaves the epoch", self._do(world, ("resume",)), False
            if main.arrived is not None:
                yield from self._next(world, main, main.arrived)
                return
            if self._setting.interrupts:
                yield "Ctrl-C in next()", self._do(world, ("interrupt",)), False
        yield from self._wake_steps(world, main)

    def _next(self, world: World, main: MainState, position: int) -> Iterator[Step]:
        may_grow = main.tasks_per_worker < self._setting.prefetch + self._setting.grows
        for grows in (False, True)[: 1 + may_grow]:
            after = self._do(world, ("next", grows))
            kept = self.mains.states[after.main].held
            for slot in set(kept) - set(main.held):
                if after.contents[slot] != stamp(main.epoch, position):
                    raise Broken(ORDER, f"slot {slot} is full of {after.contents[slot]}")
            if len(kept) > self._setting.keeps:  # drop the oldest that is not this one at once
                after = self._do(after, ("drop", min(set(kept) & set(main.held))))
            copied = len(kept) == len(main.held) and position != self._setting.parts
            what = "leaves out" if position == self._setting.left_out else f"returns{' a copy of' * copied}"
            yield f"next() {what} batch {position}{' and more tasks are wanted' * grows}", after, not grows

    def _wake_steps(self, world: World, main: MainState) -> Iterator[Step]:
        """All events that may wake up the sleeping main process."""
        quiet = True
        for worker_id, process in enumerate(world.processes):
            rest = process._replace(dones=process.dones[1:])
            if process.dones:
                op = ("accept", worker_id, process.dones[0])
                yield f"main hears worker {worker_id}", self._do(_with(world, worker_id, rest), op), True
            if process.doing == "dead":
                late = bool(process.dones)
                op = ("died late" if late else "died", worker_id, *process.dones)
                name = f"main finds worker {worker_id} dead{' and hears it' * late}"
                yield name, self._bury(world, worker_id, op), True
            quiet = quiet and not process.dones and process.doing != "dead"
        if quiet and world.kills:
            worker_id = main.due_from
            name = f"main loses patience with worker {worker_id}"
            fewer = world._replace(kills=world.kills - 1)
            yield name, self._bury(fewer, worker_id, ("timeout", worker_id)), False
            yield from self._too_late(fewer, worker_id, name)

    def _too_late(self, world: World, worker_id: int, name: str) -> Iterator[Step]:
        """The worker publishes at the moment at which it is killed for its silence."""
        process = world.processes[worker_id]
        if process.doing == "write":
            for what, late, _ in self._publish(world, worker_id, process):
                op = ("timeout", worker_id)
                yield f"{name}; {what} too late", self._bury(late, worker_id, op, process), False

    def _bury(self, world: World, worker_id: int, op: Op, died: Process | None = None) -> World:
        """Let the main process find a death, and check that it counts."""
        died = died or world.processes[worker_id]
        before = self.mains.states[world.main]
        task = _task(died.task) if died.task else None
        world = self._do(world, op)
        after = self.mains.states[world.main]
        if task is None or task.epoch != before.epoch or before.phase != "run":
            return world
        deaths = list(world.deaths)
        deaths[task.position] += 1
        if deaths[task.position] == 2 and after.phase != "raised":
            raise Broken(TWICE, f"{_batch(task)} is tried a third time")
        return world._replace(deaths=tuple(deaths))

    def _do(self, world: World, op: Op) -> World:
        number, events = self.mains.after(world.main, op)
        if self.mains.states[number].epoch != self.mains.states[world.main].epoch:
            world = world._replace(deaths=(0,) * len(world.deaths))
        return self._apply(world._replace(main=number), events)

    def _apply(self, world: World, events: tuple[Event, ...]) -> World:
        """Apply an action of the main process to its workers."""
        for event in events:
            if event[0] == "restart":
                _, worker_id, same_pipe = event
                said = world.processes[worker_id].dones if same_pipe else ()
                world = _with(world, worker_id, Process(dones=said))
            elif event[0] == "send":
                _, worker_id, record, there = event
                process = world.processes[worker_id]
                if process.lives:
                    world = _with(world, worker_id, process._replace(tasks=(*process.tasks, record)))
                task = unpack_request(record)
                if type(task) is MakeBatch and task.payload_nbytes > INLINE_NBYTES:
                    main = self.mains.states[world.main]
                    if task.slot in main.held or task.slot in main.reading:
                        raise Broken(LEASE, f"main writes an index batch to slot {task.slot}")
                    world = _fill(world, task.slot, -stamp(task.epoch, task.position) if there else 0)
        return world


def _task(record: bytes) -> MakeBatch:
    task = unpack_request(record)
    assert type(task) is MakeBatch
    return task


def _batch(task: MakeBatch) -> str:
    return f"batch {task.position} of epoch {task.epoch}"


def _with(world: World, worker_id: int, process: Process) -> World:
    processes = list(world.processes)
    processes[worker_id] = process
    return world._replace(processes=tuple(processes))


def _fill(world: World, slot: int, full_of: int) -> World:
    contents = list(world.contents)
    contents[slot] = full_of
    return world._replace(contents=tuple(contents))
