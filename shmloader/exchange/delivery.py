"""Batches that are delivered pinned, or on a device to which they are copied before they are due.

Imported only for loaders with ``pin_memory`` or ``device``, and only if there is an accelerator. Main process
only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from shmloader import torch_private
from shmloader.device import DeviceBatches, DeviceGuard, GuardedPool, to_device
from shmloader.device.driver import CudaDriver, is_capturing, open_driver
from shmloader.device.moving import capture_error, is_plain, numbered
from shmloader.device.trial import why_unusable
from shmloader.errors import LoaderError, warn_once
from shmloader.exchange.dispatcher import ByteArray, Dispatcher
from shmloader.slots.task_ledger import ARRIVED, Task
from shmloader.wire.records import REPORTED

_tried: dict[int, str] = {}


class Delivery:
    """Takes the batches of one iterator out of the dispatcher, and delivers them pinned or on a device.

    Slots are page-locked and guarded if possible. Otherwise batches are copied to torch's pinned memory, and
    their slots are free at once; the first such iterator warns why. With a device, the next batch is taken
    early; its task stays in the ledger until it is returned, so that neither the sampler nor the loader's
    state sees a difference.

    Args:
        dispatcher: The iterator's. Its pool gets its guard now. Call this after workers were forked, since it
            initialises CUDA.
        pin_memory: Whether the program has asked for pinned batches.
        pin_device: The kind of device that torch's iterator pins for; None if it leaves that to torch.
        device: The device that batches are copied to, or None.
    """

    def __init__(
        self, dispatcher: Dispatcher, pin_memory: bool, pin_device: str | None, device: torch.device | None
    ) -> None:
        assert isinstance(dispatcher.pool, GuardedPool)
        self._dispatcher = dispatcher
        self._pool = dispatcher.pool
        self._pin_memory = pin_memory
        self._pin_device = pin_device
        self._device = device = None if device is None else numbered(device)
        self._pins = device is None or device.type != "mps"  # which has no pinned memory, says torch
        self._is_capturing = is_capturing
        self._batches: DeviceBatches | None = None  # only if copies are begun ahead
        self._taken: dict[int, tuple[ByteArray, bytes, Any]] = {}  # by the task's `seq`
        driver = _driver_for(device)
        if isinstance(driver, str):
            warn_once(
                f"slots are not page-locked: {driver}. Batches are copied once more, to torch's pinned "
                "memory."
            )
            return
        guard = self._pool.guard = DeviceGuard(driver)
        self._is_capturing = driver.is_capturing
        if device is not None:
            self._batches = DeviceBatches(guard, device.index)

    def is_captured(self) -> bool:
        """Whether the current stream captures a graph: then copies to the device are not possible."""
        return self._device is not None and self._is_capturing()

    def capture_error(self) -> LoaderError:
        """The error for ``next()`` while `is_captured`."""
        return capture_error(self._device)

    def take(self, task: Task) -> tuple[ByteArray, bytes, Any]:
        """The memory of a batch that is due, its header, and its copy to the device if one was begun."""
        return self._taken.pop(task.seq, None) or (*self._dispatcher.take(task), None)

    def begin(self, task: Task, anchor: ByteArray, header: bytes) -> Callable[[], Any] | None:
        """Begin to copy a batch to the device, see `DeviceBatches`; None if it is not copied ahead."""
        if self._batches is None or task.answer.flags & REPORTED:
            return None
        return self._batches.begin(task.slot, anchor, header)

    def begin_next(self, *, in_order: bool) -> None:
        """Begin to copy the batch that will be returned next, if it is here."""
        if self._batches is None:
            return
        ledger = self._dispatcher.ledger
        due = ledger.due()
        if due is not None and due.state is not ARRIVED:
            self._dispatcher.look_at(due.worker_id)
        task = ledger.next_arrived(in_order=in_order)
        if task is None or task.seq in self._taken or task.answer.flags & REPORTED:
            return
        with contextlib.suppress(Exception):  # too little memory, say: it is tried again when due
            if not self._pool.can_lease_at_once():  # the program has its own batch to work on
                return
            anchor, header = self._dispatcher.take(task)
            self._taken[task.seq] = anchor, header, None
            self._taken[task.seq] = anchor, header, self.begin(task, anchor, header)

    def drop(self) -> None:
        """Drop copies that are no longer due, because their epoch was left."""
        ledger = self._dispatcher.ledger
        for seq in self._taken:
            ledger.finish(ledger.tasks[seq])
        self._taken.clear()

    def close(self) -> None:
        """Give up the batch that is copied ahead: it would keep its slot locked."""
        self._taken.clear()

    def deliver(self, batch: Any, task: Task) -> Any:
        """Deliver a batch that was rebuilt over its slot, or over private memory if it was spilled."""
        pinned = self._pool.is_pinned(task.slot) or not self._pins
        if not pinned or (self._pin_memory and not is_plain(batch)):
            # To pin ends a capture of this thread in older torch (pytorch#146924), and one of another thread
            # in the mode "global". While a graph is captured the batch is a private copy, or private memory.
            guard = self._pool.guard
            if not (self._is_capturing() if guard is None else guard.driver.captures_open()):
                self._dispatcher.counters.pin_copies += not pinned
                batch = torch_private.pin_memory(batch, self._pin_device)  # leaves pinned tensors as they are
        return batch if self._device is None else to_device(batch, self._device)


def _driver_for(device: torch.device | None) -> CudaDriver | str:
    """The driver for a device, or the reason why it cannot be used. Each is tried once, while it is idle."""
    driver = open_driver()
    if isinstance(driver, str):
        return driver
    number = driver.home() if device is None else device.index
    if number not in _tried and not driver.captures_open():  # a capture would forbid it
        why = why_unusable(driver, number)
        if why is not None:
            _tried[number] = why
    return _tried.get(number) or driver
