"""The last step of a batch: pinned where it lies, or sent to a device."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shmloader import torch_private
from shmloader.device.batches import Copy, DeviceBatches
from shmloader.device.driver import Driver, open_driver
from shmloader.device.guard import DeviceGuard
from shmloader.device.moving import is_plain, to_device
from shmloader.device.trial import why_unusable
from shmloader.diagnostics.stack_level import level_of_the_program
from shmloader.errors import LoaderError
from shmloader.slots import GuardedPool, Slot
from shmloader.statistics import Counters

_told: set[str] = set()
_tried: dict[int, str] = {}


class Delivery:
    """Delivers the batches of one iterator, pinned or on a device.

    Slots are page-locked, and guarded, where that is possible; elsewhere batches are copied to pinned memory
    of torch's, and their slots are free at once. The first such iterator says why.

    Args:
        pool: The iterator's slots. They get their guard now: to be made after workers were forked, since it
            initialises CUDA.
        counters: The loader's counters.
        pin_device: The kind of device that the program has asked pinned batches for, or None.
        device: Where batches go, or None.
    """

    def __init__(
        self, pool: GuardedPool, counters: Counters, pin_device: str | None, device: torch.device | None
    ) -> None:
        self._pool = pool
        self._counters = counters
        self._pin_device = pin_device
        self._device = device
        self._pins = device is None or device.type != "mps"  # which has no pinned memory, says torch
        self._ahead: DeviceBatches | None = None
        driver = open_driver()
        why = driver if isinstance(driver, str) else _try_once(driver, device)
        if isinstance(driver, str) or why:
            _tell(why)
            return
        guard = pool.guard = DeviceGuard(driver)
        if device is not None:
            self._ahead = DeviceBatches(guard, device.index)

    @property
    def copies_ahead(self) -> bool:
        """Whether `begin` has any use."""
        return self._ahead is not None

    def is_captured(self) -> bool:
        """Whether copies to the device are not possible now: the current stream captures a graph."""
        return self._ahead is not None and not self._ahead.guard.admits_leases()

    def capture_error(self) -> LoaderError:
        """The error for ``next()`` while `is_captured`."""
        return LoaderError(
            f"next() of a loader with device='{self._device}' was called while a CUDA graph is captured: "
            "its copies would become a part of the graph. Take the batch before the capture begins, and copy "
            "it into the graph's input between replays. No batch was lost."
        )

    def begin(self, slot: Slot, anchor: npt.NDArray[np.uint8], header: bytes) -> Copy | None:
        """Begin to copy a batch to the device; see `DeviceBatches.begin`."""
        return None if self._ahead is None else self._ahead.begin(slot, anchor, header)

    def deliver(self, batch: Any, slot: Slot) -> Any:
        """Deliver a batch that was rebuilt over its slot, or over what it was spilled to."""
        pinned = self._pool.is_pinned(slot) or not self._pins
        if not pinned or (self._pin_device is not None and not is_plain(batch)):
            self._counters.pin_copies += not pinned
            batch = torch_private.pin_memory(batch, self._pin_device)  # leaves pinned tensors as they are
        return batch if self._device is None else to_device(batch, self._device)


def _try_once(driver: Driver, device: torch.device | None) -> str:
    """The reason not to rely on a driver for a device, or "". Each device is tried once."""
    number = torch.accelerator.current_device_index() if device is None else device.index
    if number not in _tried and not driver.captures_open():  # a capture would forbid it
        _tried[number] = why_unusable(driver, number)
    return _tried.get(number, "")


def _tell(reason: str) -> None:
    if reason not in _told:
        _told.add(reason)
        warnings.warn(
            f"slots are not page-locked: {reason}. Batches are copied once more, to torch's pinned memory.",
            RuntimeWarning,
            stacklevel=level_of_the_program(),
        )
