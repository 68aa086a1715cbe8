"""The guard of one table: holds places back until the accelerator has finished what may read them."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shmloader.device import pinned
from shmloader.device.driver import CudaDriver, DriverError, Event
from shmloader.memory import Extent
from shmloader.slots import Guard, Place

MOST_WAIT_S = 1.0
"""Time that one batch waits for slots that an accelerator reads, before it is copied to private memory."""

GROUP = 3
"""Batches for which devices are asked once: more would cost fewer calls, and as many more slots."""

_POLL_S = 0.0002


@dataclass(slots=True)
class Held:
    """Owners of memory that copies read and write, and the event after these; both None once it is done."""

    event: Event | None
    kept: object

    def end(self) -> None:
        """Let go of both."""
        self.event = self.kept = None


class Group(NamedTuple):
    """Places whose leases ended about the same time, and the events that are not done, by device."""

    events: dict[int, Event]
    places: list[Place]


class DeviceGuard(Guard):
    """Keeps places back that CUDA devices may still read. Main process only, one thread at a time.

    A program may drop a batch while a copy of it is queued on an accelerator. So when some leases have ended,
    one event for each device in use is recorded after all work that is queued on any stream; the places wait
    for it. Events are done in the order in which they are recorded, since each comes after all before it.
    While any graph is captured no event can be recorded, so places wait until the capture is over: a later
    event comes after the same work.

    Devices are asked once for `GROUP` batches, and when places are needed at once.

    If the driver reports an error, the devices' work has failed, and the program's next call of torch raises
    it. No place is granted again then, and batches are copied.
    """

    active = True
    kept_back = 2 * GROUP

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._pid = os.getpid()
        self._ended: list[Place] = []  # no event is recorded yet
        self._let_go: set[Place] = set()
        self._waiting: deque[Group] = deque()
        self._copies: deque[Held] = deque()
        self._streams: list[tuple[int, int]] = []
        self._failed = False

    def admits_leases(self) -> bool:
        """See `Guard`: not while this thread captures a graph."""
        return not self.driver.is_capturing()

    def wait(self, is_enough: Callable[[], bool]) -> int:
        """See `Guard`; waits `MOST_WAIT_S` at most, and not at all while this thread captures a graph."""
        began_s = time.monotonic()
        while self.admits_leases() and self.is_busy() and time.monotonic() - began_s < MOST_WAIT_S:
            time.sleep(_POLL_S)
            if is_enough():
                break
        return int((time.monotonic() - began_s) * 1e9)

    def lock(self, extent: Extent) -> str | None:
        """See `Guard`: page-locks it if that can be had."""
        return pinned.pin(self.driver, extent)

    def unlock(self, extent: Extent) -> None:
        """See `Guard`."""
        pinned.unpin(extent)

    def create_stream(self, device: int) -> int:
        """A stream for copies; destroyed by `close`."""
        stream = self.driver.create_stream(device)
        self._streams.append((stream, device))
        return stream

    def hold(self, kept: object) -> Held:
        """Keep something for copies until `record_end`; all copies of a guard are in one stream's order."""
        held = Held(None, kept)
        self._copies.append(held)
        return held

    def record_end(self, held: Held, stream: int, device: int) -> None:
        """Let go of it when the copies queued on a stream now are done; a `DriverError` keeps it all."""
        try:
            held.event = self.driver.record(stream, device)
        except DriverError:
            self._failed = True
            raise

    def drop_copied(self, *, at_once: bool) -> None:
        """See `Guard`: those of batches that have been copied to a device."""
        count = 1 if at_once else GROUP
        while (
            len(self._copies) >= count
            and not self._failed
            and (last := self._copies[count - 1].event) is not None
        ):
            try:
                with self.driver.captures.lock, self.driver.on(last.device):
                    if not self.driver.is_done(last):
                        break
            except DriverError:
                self._failed = True
                break
            for held in [self._copies.popleft() for _ in range(count)]:
                if held.event is not None:
                    self.driver.recycle(held.event)
                held.end()

    def let_go(self, place: Place) -> None:
        """Have a place free once its lease ends, since that outlives all reads by the device."""
        self._let_go.add(place)

    def pass_on(self, ended: Sequence[Place], *, at_once: bool) -> Sequence[Place]:
        """See `Guard`: free is what all work queued before the lease's end is done with. Does not wait."""
        if not (ended or at_once):
            return ended
        free: list[Place] = []
        for place in ended:
            (free if place in self._let_go else self._ended).append(place)
        self._let_go.difference_update(free)
        if not self._failed and (len(self._ended) >= GROUP or (at_once and (self._ended or self._waiting))):
            try:
                self._ask()
            except RuntimeError:  # of the driver or of torch
                self._failed = True
        while self._waiting and not self._waiting[0].events and not self._failed:
            free += self._waiting.popleft().places
        return free

    def _ask(self) -> None:
        """Have what has ended wait for all that is queued now, and ask which events are done."""
        group, recorded = Group({}, self._ended), 0
        devices = self.driver.active_devices()
        for device in devices:
            with self.driver.captures.lock, self.driver.on(device):
                event = self.driver.record_all(device) if self._ended else None
                if event is not None:
                    group.events[device] = event
                    recorded += 1
                for waiting in (*self._waiting, group):
                    if device in waiting.events:
                        if not self.driver.is_done(waiting.events[device]):
                            break
                        self.driver.recycle(waiting.events.pop(device))
        if recorded == len(devices):
            self._ended = []
            self._waiting.append(group)
        else:  # nothing has ended, or a graph is captured
            for event in group.events.values():
                self.driver.recycle(event)

    def is_busy(self) -> bool:
        """Whether places will become free without the program dropping a batch."""
        return not self._failed and bool(self._ended or self._waiting or self._copies)

    def close(self) -> None:
        """Wait for copies that are under way, and give everything back but what extents hold.

        The registrations of slots that wait for an event wait for it when they end.
        """
        if os.getpid() == self._pid:
            for stream, device in self._streams:
                with contextlib.suppress(DriverError):
                    self.driver.destroy_stream(stream, device)
            self.drop_copied(at_once=True)
            for event in [event for group in self._waiting for event in group.events.values()]:
                self.driver.recycle(event)
        self._streams.clear()
        self._waiting.clear()
        self._copies.clear()
