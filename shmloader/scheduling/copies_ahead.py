"""Batches that are on their way to a device before they are due. Main process only."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from shmloader.scheduling.dispatcher import ByteArray, Dispatcher
from shmloader.scheduling.ledger import ARRIVED, Task
from shmloader.slots import GuardedPool
from shmloader.statistics import Counters
from shmloader.wire.records import FAILED, REPORTED

if TYPE_CHECKING:
    from shmloader.device import Delivery


class CopiesAhead:
    """Takes the batches of one iterator out of the dispatcher: the one that is due, or the next one early.

    Their tasks stay in the ledger until they are returned, so that neither the sampler nor the loader's state
    sees a difference.

    Args:
        dispatcher: The iterator's.
        delivery: Sends batches to a device.

    Attributes:
        delivery: As above.
    """

    def __init__(self, dispatcher: Dispatcher, delivery: Delivery) -> None:
        self._dispatcher = dispatcher
        self.delivery = delivery
        self._taken: dict[int, tuple[ByteArray, bytes, Any]] = {}  # by the task's `seq`

    def take(self, task: Task) -> tuple[ByteArray, bytes, Any]:
        """The memory of a batch that is due, its header, and its copy to a device if one was begun."""
        return self._taken.pop(task.seq, None) or (*self._dispatcher.take(task), None)

    def begin(self, task: Task, anchor: ByteArray, header: bytes) -> Any:
        """Begin to copy a batch to the device; None where it is not to be, or moves itself."""
        if task.flags & (FAILED | REPORTED):
            return None
        return self.delivery.begin(task.slot, anchor, header)

    def begin_next(self, *, in_order: bool) -> None:
        """Begin to copy the batch that will be returned next, if it is here.

        Args:
            in_order: Whether batches are returned in order.
        """
        if not self.delivery.copies_ahead:
            return
        ledger = self._dispatcher.ledger
        due = ledger.due()
        if due is not None and due.state is not ARRIVED:
            self._dispatcher.look_at(due.worker_id)
        task = ledger.next_arrived(in_order=in_order)
        if task is None or task.seq in self._taken or task.flags & FAILED:
            return
        with contextlib.suppress(RuntimeError):  # too little memory, say: it is tried again when due
            anchor, header = self._dispatcher.take(task)
            self._taken[task.seq] = anchor, header, None
            self._taken[task.seq] = anchor, header, self.begin(task, anchor, header)

    def drop(self) -> None:
        """Forget what is not due any more: its epoch was left."""
        ledger = self._dispatcher.ledger
        for seq in self._taken:
            ledger.finish(ledger.tasks[seq])
        self._taken.clear()


def copies_ahead_of(
    dispatcher: Dispatcher, counters: Counters, pin_device: str | None, device: torch.device | None
) -> CopiesAhead | None:
    """The `CopiesAhead` of an iterator; None where no accelerator reads its slots.

    Initialises CUDA, so it is called after workers were forked.

    Args:
        dispatcher: The iterator's.
        counters: The loader's counters.
        pin_device: The kind of device that pinned batches are for, or None.
        device: The device that batches go to, or None.
    """
    if not isinstance(dispatcher.pool, GuardedPool):
        return None
    from shmloader.device import Delivery

    return CopiesAhead(dispatcher, Delivery(dispatcher.pool, counters, pin_device, device))
