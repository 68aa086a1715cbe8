"""The ledger of one iterator: every task that was sent to a worker and is not finished. Main process only.

A task goes ``MAKING -> ARRIVED`` and is finished when ``next()`` returns its batch. If its batch is no longer
wanted, it goes ``MAKING -> VOID`` and is finished when the worker's answer comes. Any module that holds the
ledger may read it. Only the methods below change it, except for the attribute ``epoch``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shmloader.slots import Slot
from shmloader.wire.records import Published


class TaskState(enum.Enum):
    """Progress of a task."""

    MAKING = "making"
    ARRIVED = "arrived"
    VOID = "void"


MAKING, ARRIVED, VOID = TaskState  # quicker to look up than attributes of the class


@dataclass(eq=False, slots=True)
class Task:
    """One task.

    Attributes:
        seq: Its number over the iterator's life, in the order in which tasks are sent.
        epoch: Number of the epoch that its batch belongs to.
        position: Number of the batch in that epoch.
        worker_id: The worker that has it.
        payload: The packed index batch. Packed, because a sampler may fill the same list again for the next.
        slot: The slot granted with it.
        state: See the module.
        answer: The worker's; unset before it came.
        deaths: Number of workers that have died at it.
        spilled: Private memory for a batch that comes in parts.
        spilled_nbytes: Bytes of it that have come.
    """

    seq: int
    epoch: int
    position: int
    worker_id: int
    payload: bytes
    slot: Slot
    state: TaskState = MAKING
    deaths: int = 0
    spilled: npt.NDArray[np.uint8] | None = None
    spilled_nbytes: int = field(init=False)
    answer: Published = field(init=False)


class Ledger:
    """All tasks of one iterator.

    Attributes:
        tasks: Tasks whose batch is wanted and was not returned yet, by ``seq``, in the order in which they
            were sent.
        arrived: The tasks among them whose batch is here, by ``seq``, in order of arrival.
        void_tasks: Tasks that were not answered yet and whose batch is not wanted, by ``seq``.
        epoch: Number of the present epoch, over the iterator's life.
        unanswered: By worker: tasks that it has not answered, void ones included.
    """

    def __init__(self, num_workers: int) -> None:
        self.tasks: dict[int, Task] = {}
        self.arrived: dict[int, Task] = {}
        self.void_tasks: dict[int, Task] = {}
        self.epoch = 0
        self.unanswered = [0] * num_workers
        self._sent = 0  # the next task's number
        self._due = 0  # no task before this number is wanted; looking it up is quicker than iterating

    def add_worker(self) -> None:
        """Make room for one more worker."""
        self.unanswered.append(0)

    # --- writing

    def send(self, worker_id: int, epoch: int, position: int, payload: bytes, slot: Slot) -> Task:
        """Enter a task that is about to be sent."""
        seq = self._sent
        task = self.tasks[seq] = Task(seq, epoch, position, worker_id, payload, slot)
        self._sent = seq + 1
        self.unanswered[worker_id] += 1
        return task

    def arrive(self, task: Task) -> None:
        """Note that a wanted task's batch, or the exception in its place, is here."""
        task.state = ARRIVED
        self.arrived[task.seq] = task
        self.unanswered[task.worker_id] -= 1

    def finish(self, task: Task) -> None:
        """Forget a task that has arrived: its batch is being returned, or dropped."""
        seq = task.seq
        del self.tasks[seq], self.arrived[seq]
        if seq == self._due:
            self._due = seq + 1

    def void(self, task: Task) -> None:
        """Note that the batch that a worker is making is no longer wanted."""
        self.void_tasks[task.seq] = self.tasks.pop(task.seq)
        task.state = VOID
        task.spilled = None

    def end(self, task: Task) -> None:
        """Forget a task that its worker has ended without a wanted batch."""
        del (self.void_tasks if task.state is VOID else self.tasks)[task.seq]
        self.unanswered[task.worker_id] -= 1

    # --- reading

    def due(self) -> Task | None:
        """The task whose batch is next in order; None if none of this epoch is outstanding."""
        task = self.tasks.get(self._due)
        while task is None:
            if self._due >= self._sent:
                return None
            self._due += 1
            task = self.tasks.get(self._due)
        return task if task.epoch == self.epoch else None

    def next_arrived(self, *, in_order: bool) -> Task | None:
        """The task whose batch is returned next, if that batch is here; out of order, any that is here."""
        task = self.due()
        if task is not None and task.state is ARRIVED:
            return task
        return None if in_order else next(iter(self.arrived.values()), None)

    def unreturned_of(self, worker_id: int) -> int:
        """Number of a worker's tasks whose batch is wanted and was not returned yet."""
        return sum(task.worker_id == worker_id for task in self.tasks.values())

    def held_by(self, worker_id: int | None) -> list[Task]:
        """Tasks that a worker (or any, for None) has not answered and whose batch is wanted, oldest first."""
        return [
            task
            for task in self.tasks.values()
            if task.state is MAKING and worker_id in (None, task.worker_id)
        ]

    def void_of(self, worker_id: int | None) -> list[Task]:
        """Tasks that a worker (or any, for None) has not answered and whose batch is not wanted."""
        return [task for task in self.void_tasks.values() if worker_id in (None, task.worker_id)]
