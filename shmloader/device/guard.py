"""The guard of one table: holds places back until the accelerator has finished what may read them."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shmloader.device import pinned
from shmloader.device.driver import CudaDriver, DriverError, Event
from shmloader.memory import Extent
from shmloader.slots import Guard, Place

MOST_WAIT_S = 1.0
"""Time that one batch waits for slots that an accelerator reads, before it is copied to private memory."""

_POLL_S = 0.0002


@dataclass(slots=True)
class Held:
    """Owners of memory that copies read and write, and the event after these; both None once it is done."""

    event: Event | None
    kept: object

    def record(self, driver: CudaDriver, stream: int, device: int) -> None:
        """Have the event after the copies that are queued on a stream now."""
        self.event = driver.record(stream, device)

    def end(self) -> None:
        """Let go of both."""
        self.event = self.kept = None


class DeviceGuard(Guard):
    """Keeps places back that CUDA devices may still read. Main process only, one thread at a time.

    A program may drop a batch while a copy of it is queued on an accelerator. So when leases have ended, one
    event for each device in use is recorded after all work that is queued on any stream; the places wait for
    it. Events are done in the order in which they are recorded, since each comes after all before it. While
    any graph is captured no event can be recorded, so places wait until the capture is over: a later event
    comes after the same work.

    If the driver reports an error, the devices' work has failed, and the program's next call of torch raises
    it. No place is granted again then, and batches are copied.
    """

    active = True

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._pid = os.getpid()
        self._ended: list[Place] = []  # no event is recorded yet
        self._let_go: set[Place] = set()
        self._waiting: deque[tuple[list[Event], list[Place]]] = deque()
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
        """Keep something for copies until `record_end`; copies of one stream, in their order."""
        held = Held(None, kept)
        self._copies.append(held)
        return held

    def record_end(self, held: Held, stream: int, device: int) -> None:
        """Let go of it when the copies queued on a stream now are done; a `DriverError` keeps it all."""
        try:
            held.record(self.driver, stream, device)
        except DriverError:
            self._failed = True
            raise

    def drop_copied(self) -> None:
        """See `Guard`: those of batches that have been copied to a device."""
        while self._copies and (event := self._copies[0].event) is not None and self._is_done(event):
            held = self._copies.popleft()
            held.end()
            self.driver.recycle(event)

    def let_go(self, place: Place) -> None:
        """Have a place free once its lease ends, since that outlives all reads by the device."""
        self._let_go.add(place)

    def pass_on(self, ended: Sequence[Place]) -> Sequence[Place]:
        """See `Guard`: free is what all work queued before the lease's end is done with. Does not wait."""
        free = [place for place in ended if place in self._let_go]
        self._let_go.difference_update(free)
        self._ended += [place for place in ended if place not in free]
        if self._ended and not self._failed:
            self._record()
        while self._waiting and all(map(self._is_done, self._waiting[0][0])):
            events, places = self._waiting.popleft()
            free += places
            for event in events:
                self.driver.recycle(event)
        return free

    def _record(self) -> None:
        """Have the places whose leases have ended wait for all that is queued now."""
        events: list[Event] = []
        try:
            if self.driver.captures_open():
                return
            for device in self.driver.active_devices():
                events.append(self.driver.record_all(device))  # noqa: PERF401 - those before an error are kept
        except RuntimeError as error:  # of the driver or of torch
            for event in events:
                self.driver.recycle(event)
            begun = isinstance(error, DriverError) and error.is_of_capture  # a capture, in this moment
            self._failed = not begun
            return
        self._waiting.append((events, self._ended))
        self._ended = []

    def is_busy(self) -> bool:
        """Whether places will become free without the program dropping a batch."""
        return not self._failed and bool(self._ended or self._waiting or self._copies)

    def _is_done(self, event: Event) -> bool:
        try:
            return not self._failed and self.driver.is_done(event)
        except DriverError:
            self._failed = True
            return False

    def close(self) -> None:
        """Wait for copies that are under way, and give everything back but what extents hold.

        The registrations of slots that wait for an event wait for it when they end.
        """
        if os.getpid() == self._pid:
            for stream, device in self._streams:
                with contextlib.suppress(DriverError):
                    self.driver.destroy_stream(stream, device)
            self.drop_copied()
            for events, _ in self._waiting:
                for event in events:
                    self.driver.recycle(event)
        self._streams.clear()
        self._waiting.clear()
        self._copies.clear()
