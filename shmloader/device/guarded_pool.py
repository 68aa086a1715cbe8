"""A pool whose slots an accelerator reads: page-locked, and kept back for as long as it may read them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from shmloader.device import pinned
from shmloader.device.guard import DeviceGuard
from shmloader.slots import Slot, SlotPool, SlotState, memory_warnings

MOST_GUARD_WAIT_S = 1.0
"""Time that one batch waits for slots that an accelerator reads, before it is copied to private memory."""

_GUARD_POLL_S = 0.0002
_LEASED, _GUARDED = SlotState.LEASED, SlotState.GUARDED


class GuardedPool(SlotPool):
    """A `SlotPool` with a guard. Behind ``LEASED`` its slots are ``GUARDED`` until the guard has them free.

    A program may drop a batch while a copy of it is queued on an accelerator. So each slot whose lease has
    ended goes to the guard, and is granted again after the guard has said that it is done.

    Attributes:
        guard: The guard. There is none before workers were started, since it initialises the accelerator,
            nor where slots cannot be page-locked.
    """

    guard: DeviceGuard | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tried: set[int] = set()  # slots whose mappings were page-locked, or could not be
        self._guarded = 0

    def can_lease(self) -> bool:
        """See `SlotPool`; waits `MOST_GUARD_WAIT_S` at most for guarded slots, if there is no room else."""
        if self.can_lease_at_once():
            return True
        if self.guard is not None and self.guard.admits_leases():
            self._await(self.guard)
        return self.can_lease_at_once()

    def can_lease_at_once(self) -> bool:
        """Like `can_lease`, without waiting."""
        self.collect()
        return (self.guard is None or self.guard.admits_leases()) and super().can_lease()

    def _await(self, guard: DeviceGuard) -> None:
        began_s = time.monotonic()
        while guard.is_busy() and time.monotonic() - began_s < MOST_GUARD_WAIT_S:
            time.sleep(_GUARD_POLL_S)
            self.collect()
            if super().can_lease():
                break
        self.counters.wait_for_device_ns += int((time.monotonic() - began_s) * 1e9)

    def has_room_for_more(self) -> bool:
        """See `SlotPool`."""
        self.collect()
        return super().has_room_for_more()

    def grant(self) -> Slot:
        """See `SlotPool`."""
        self.collect()
        slot = super().grant()
        slot.unguarded = False
        return slot

    def collect(self) -> None:
        """Free the slots whose leases have ended and that no accelerator may read."""
        guard = self.guard
        if guard is None:
            super().collect()
            return
        guard.drop_copied()
        free, ended = [], []
        for _ in range(len(self._released)):  # a lease that another thread ends from here on waits its turn
            slot = getattr(self._released.popleft(), "slot", None)
            if slot is None:  # an interrupt ended `lease` before it was done
                continue
            slot.lease = None
            if slot.unguarded:
                free.append(slot)
            else:
                slot.state = _GUARDED
                ended.append(slot)
        guard.end(ended)
        done = guard.done()
        # How far the device is behind varies. To unlock slots and lock them again would take time, and the
        # driver may wait for the device.
        self._guarded += len(ended) - len(done)
        self.warm_slots = max(self.warm_slots, self.base_slots + self._guarded)
        for slot in (*free, *done):
            self._leased -= 1
            self._make_free(slot)
        self._discard_beyond_warm()

    def lease(self, slot: Slot) -> tuple[npt.NDArray[np.uint8], memoryview]:
        """See `SlotPool`; page-locks the slot if that can be had.

        Not sooner: while a slot holds only an index batch it is small, and its worker will grow it.
        """
        extent, guard = self.map(slot), self.guard
        if guard is not None and slot.number not in self._tried:
            while (warning := pinned.pin(guard.driver, extent)) is None:
                self._unmap(slot)
                extent = self.map(slot)  # elsewhere
            self._tried.add(slot.number)
            self.warning = warning or self.warning
        return super().lease(slot)

    def _unmap(self, slot: Slot) -> None:
        if slot.extent is not None and slot.state not in (_LEASED, _GUARDED):
            pinned.unpin(slot.extent)
        self._tried.discard(slot.number)
        super()._unmap(slot)

    def _drop_excess(self, slot: Slot) -> None:
        if slot.number not in self._tried:  # to unlock it and lock it again would take longer
            super()._drop_excess(slot)

    def is_pinned(self, slot: Slot) -> bool:
        """Whether a slot is page-locked and leased, so that its batch needs no copy to be pinned."""
        return slot.state is _LEASED and slot.extent is not None and pinned.is_pinned(slot.extent)

    def _warn_of_kept(self, nbytes: int) -> None:
        guarded = [slot.state for slot in self.slots].count(_GUARDED)
        if self.guard is not None and not self.guard.admits_leases():
            return  # for as long as a graph is captured
        if guarded:
            self._warn(memory_warnings.kept_by_device, self.budget, nbytes, guarded)
        else:
            super()._warn_of_kept(nbytes)

    def close(self) -> None:
        """See `SlotPool`; what is guarded lives on until the accelerator is done."""
        if self.guard is not None and not self._closed:
            self.collect()  # before it: an event that is recorded afterwards would never be given back
            self.guard.close()
        super().close()
