"""Batches that are delivered pinned, or on a device to which they are copied before they are due.

Imported only for loaders with ``pin_memory`` or ``device``, and only if there is an accelerator. Main process
only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shmloader import torch_private
from shmloader.device import DeviceBatches, DeviceGuard, pinned, to_device
from shmloader.device.driver import CudaDriver, DriverError, is_capturing, open_driver
from shmloader.device.moving import capture_error, is_plain, numbered
from shmloader.errors import LoaderError, warn_once
from shmloader.exchange.exchange import Exchange
from shmloader.slots import ByteArray, Place, PlaceState
from shmloader.wire.records import REPORTED, SPILLED


class Delivery:
    """Takes the batches of one iterator out of their places, and delivers them pinned or on a device.

    Slots are page-locked and guarded if possible. Otherwise batches are copied to torch's pinned memory, and
    their slots are free at once; the first such iterator warns why. With a device, the next batch is taken
    early; its task counts as unreturned until it is returned, so that neither the sampler nor the loader's
    state sees a difference.

    Made after workers were forked, since it initialises CUDA.
    """

    def __init__(
        self,
        exchange: Exchange,
        pin_memory: bool,
        pin_device: str | None,
        device: torch.device | None,
        in_order: bool,
    ) -> None:
        self._exchange, self._in_order = exchange, in_order
        self._table = exchange.table
        self._driver: CudaDriver | None = None
        self._pin_memory = pin_memory  # whether the program has asked for pinned batches
        self._pin_device = pin_device  # that torch's iterator pins for; None if it leaves that to torch
        self._device = device = None if device is None else numbered(device)
        self.moves = device is not None  # to a device, which is not possible while `is_captured`
        self._pins = device is None or device.type != "mps"  # which has no pinned memory, says torch
        self._is_capturing = is_capturing
        self._batches: DeviceBatches | None = None
        self.copies_ahead = False  # else `take` and `begin` need not be called
        self._taken: dict[int, tuple[ByteArray, bytes, Callable[[], Any] | None]] = {}  # early, by `seq`
        driver = _driver_for(device)
        if isinstance(driver, str):
            warn_once(
                f"slots are not page-locked: {driver}. Batches are copied once more, to torch's pinned "
                "memory."
            )
            return
        self._driver = driver
        guard = DeviceGuard(driver)
        self._table.guard_with(guard)
        self._is_capturing = driver.is_capturing
        if device is not None:
            self._batches, self.copies_ahead = DeviceBatches(guard, device.index), True

    def is_captured(self) -> bool:
        """Whether the current stream captures a graph."""
        return self._is_capturing()

    def capture_error(self) -> LoaderError:
        """The error for ``next()`` while `is_captured`."""
        return capture_error(self._device)

    def take(self, place: Place) -> tuple[ByteArray, bytes, Callable[[], Any] | None]:
        """The memory of a batch that is due, its header, and as of `begin` if its copy was begun."""
        taken = self._taken.pop(place.seq, None)
        if taken is None:
            return (*self._table.take(place), None)
        self._table.finish(place.seq)
        anchor, header, copy = taken
        return anchor, header, copy and functools.partial(self._finish, copy)

    def begin(self, place: Place, flags: int, anchor: ByteArray, header: bytes) -> Callable[[], Any] | None:
        """Begin to copy a batch to the device, see `DeviceBatches`; None if it is not copied ahead.

        Returns a function that returns the batch there, and begins to copy the next one.
        """
        batches = self._batches
        if batches is None or flags & REPORTED:
            return None
        with batches.driver.captures.lock, batches.driver.on(batches.device):
            copy = batches.begin(place, anchor, header)
        return copy and functools.partial(self._finish, copy)

    def _finish(self, copy: Callable[[], Any]) -> Any:
        batches = self._batches
        assert batches is not None
        with batches.driver.captures.lock, batches.driver.on(batches.device):
            batch = copy()
            self._begin_next(batches)
        return batch

    def _begin_next(self, batches: DeviceBatches) -> None:
        """Begin to copy the batch that will be returned next, if it is here. Inside `on`."""
        table = self._table
        place = table.due()
        if place is None or place.state is PlaceState.MAKING:
            if place is not None:
                self._exchange.look_at(place.worker_id)
            place = table.next_arrived(in_order=self._in_order)
        if place is None or place.seq in self._taken or place.flags & (REPORTED | SPILLED):
            return
        try:
            anchor, header = table.take(place, early=True)
            self._taken[place.seq] = anchor, header, None
            self._taken[place.seq] = anchor, header, batches.begin(place, anchor, header)
        except Exception:  # noqa: BLE001 - too little memory, say: it is tried again when due
            pass

    def drop(self) -> None:
        """Drop copies that are no longer due, because their epoch was left."""
        for seq in self._taken:
            self._table.finish(seq)
        self._taken.clear()

    def close(self) -> None:
        """Give up the batch that is copied ahead: it would keep its slot locked."""
        self._taken.clear()

    def deliver(self, batch: Any, place: Place) -> Any:
        """Deliver a batch that was rebuilt over its slot, or over private memory if it was spilled."""
        leased, extent = place.state is PlaceState.LEASED, place.extent
        is_pinned = not self._pins or (leased and extent is not None and pinned.is_pinned(extent))
        # To pin ends a capture of this thread in older torch (pytorch#146924), and one of another thread in
        # the mode "global". While a graph is captured the batch is a private copy, or private memory.
        is_captured = self._is_capturing if self._driver is None else self._driver.captures_open
        if (not is_pinned or (self._pin_memory and not is_plain(batch))) and not is_captured():
            self._exchange.counters.add("pin_copies", not is_pinned)
            batch = torch_private.pin_memory(batch, self._pin_device)  # leaves pinned tensors as they are
        if self._device is not None:
            batch = to_device(batch, self._device)
        batches = self._batches
        if batches is not None:
            with batches.driver.captures.lock, batches.driver.on(batches.device):
                self._begin_next(batches)
        return batch


def _driver_for(device: torch.device | None) -> CudaDriver | str:
    """The driver for a device, or the reason why it cannot be used."""
    driver = open_driver()
    if isinstance(driver, str) or driver.captures_open():  # which an event would end
        return driver
    number = driver.home() if device is None else device.index
    try:
        with driver.captures.lock, driver.on(number):
            event = driver.record_all(number)
    except DriverError as error:
        return f"no event can be recorded on device {number} ({error})"
    if event is not None:
        driver.recycle(event)
    return driver
