"""A scripted CUDA driver: streams whose work is done one piece at a time, when the test says so.

Copies read and write their bytes only when their stream comes to them, so memory that is used again too early
shows as wrong bytes. `violations` notes misuse that a real driver would answer with an error, with an invalid
graph or not at all.
"""

import contextlib
import ctypes
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from shmloader.device.captures import Captures
from shmloader.device.driver import DriverError, Event

CAPTURE_UNSUPPORTED = 900
OUT_OF_MEMORY = 2


@dataclass
class Work:
    """A piece of work of a stream.

    Attributes:
        run: Does it.
        after: Number of pieces of each stream that have to be done before.
        host: The host memory that it reads: begin and end.
    """

    run: Callable[[], None] = lambda: None
    after: dict[int, int] = field(default_factory=dict)
    host: tuple[int, int] = (0, 0)


@dataclass
class Stream:
    device: int
    queue: deque[Work] = field(default_factory=deque)
    queued: int = 0
    done: int = 0


class ScriptedDriver:
    """See `shmloader.device.driver.CudaDriver`.

    Attributes:
        streams: All streams by number; those below 100 are devices' default streams.
        current: The number of the current stream of each device.
        captured: Streams that capture a graph.
        registered: Registered memory: address and length.
        refuse: Registrations that are refused from now on.
        failed: Whether the devices' work has failed: every call is an error from now on.
        violations: Forbidden things that happened.
    """

    def __init__(self, devices: int = 1) -> None:
        self.devices = list(range(devices))
        self.streams = {device: Stream(device) for device in self.devices}
        self.current = {device: device for device in self.devices}
        self.captured: set[int] = set()
        self.registered: dict[int, int] = {}
        self.refuse = 0
        self.failed = False
        self.violations: list[str] = []
        self.all_is_late = False  # else memory that is not registered is read before the copy's call returns
        self.copied: list[int] = []  # lengths of all copies
        self.waits = 0
        self._free: dict[tuple[int, int], list[Any]] = {}  # device memory, by stream and length
        self._events = 0
        self.captures = Captures()  # for its lock
        self._on: int | None = None

    # --- the test's side

    def new_stream(self, device: int = 0) -> int:
        number = 100 + len(self.streams)
        self.streams[number] = Stream(device)
        return number

    def launch(self, stream: int, run: Callable[[], None], host: tuple[int, int] = (0, 0)) -> None:
        """Queue work."""
        self.streams[stream].queue.append(Work(run, host=host))
        self.streams[stream].queued += 1

    def read_late(self, stream: int, address: int, nbytes: int, number: int) -> None:
        """Queue a read of host memory; all its bytes must be ``number`` when it runs."""

        def read() -> None:
            found = set(ctypes.string_at(address, nbytes))
            if found != {number}:
                self.violations.append(f"read {sorted(found)[:3]} instead of {number}")

        if self.all_is_late or self.is_registered(address):
            self.launch(stream, read, (address, address + nbytes))
        else:
            read()

    def is_registered(self, address: int) -> bool:
        return any(begin <= address < begin + nbytes for begin, nbytes in self.registered.items())

    def can_advance(self, number: int) -> bool:
        queue = self.streams[number].queue
        return bool(queue) and self._is_behind(queue[0].after)

    def _is_behind(self, after: dict[int, int]) -> bool:
        return all(self.streams[number].done >= count for number, count in after.items())

    def advance(self, number: int) -> None:
        """Do the next piece of work of a stream."""
        stream = self.streams[number]
        assert self.can_advance(number)
        work = stream.queue.popleft()
        begin, end = work.host
        if begin and not self._is_mapped(begin, end):
            self.violations.append("memory was read that is mapped no more")
        else:
            work.run()
        stream.done += 1

    def drain(self) -> None:
        """Do all work."""
        while any(stream.queue for stream in self.streams.values()):
            ready = [number for number in self.streams if self.can_advance(number)]
            assert ready, "streams wait for each other"
            for number in ready:
                self.advance(number)

    @staticmethod
    def _is_mapped(begin: int, end: int) -> bool:
        with open("/proc/self/maps") as maps:
            for line in maps:
                first, last = (int(word, 16) for word in line.split()[0].split("-"))
                if first <= begin < last:
                    begin = last
                if begin >= end:
                    return True
        return False

    # --- the loader's side

    def _check(self) -> None:
        if self.failed:
            raise DriverError("the devices' work has failed", 700)

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        self._check()
        before, self._on = self._on, device
        try:
            yield
        finally:
            self._on = before

    def _check_on(self, device: int) -> None:
        self._check()
        if self._on != device:
            self.violations.append(f"a call for device {device} was made on {self._on}")

    def active_devices(self) -> list[int]:
        self._check()
        return self.devices

    def home(self) -> int:
        return 0

    def register(self, address: int, nbytes: int) -> None:
        self._check()
        if self.refuse:
            self.refuse -= 1
            raise DriverError("cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)", OUT_OF_MEMORY)
        if any(
            address < begin + held and begin < address + nbytes for begin, held in self.registered.items()
        ):
            self.violations.append("memory was registered twice")
        if not nbytes:
            self.violations.append("no memory was registered")
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        nbytes = self.registered.pop(address, 0)
        if not nbytes:
            self.violations.append("memory was unregistered that was not registered")
        elif not self._is_mapped(address, address + nbytes):
            self.violations.append("memory was unregistered after it was unmapped")
        for stream in self.streams.values():
            for work in stream.queue:
                if work.host[0] < address + nbytes and address < work.host[1]:
                    self.violations.append("memory was unregistered that is still to be read")

    def synchronize(self) -> None:
        self._check()
        if self.captured:
            self.violations.append("a capture was invalidated by synchronize")
        self.waits += 1
        self.drain()

    def record_all(self, device: int) -> Event | None:
        self._check_on(device)
        if self.captures_open():
            return None
        if self.captured:
            self.violations.append("a capture was invalidated by record_all")
            raise DriverError("cuCtxRecordEvent", CAPTURE_UNSUPPORTED)
        self._events += 1
        streams = {
            number: stream.queued for number, stream in self.streams.items() if stream.device == device
        }
        return Event(streams, device)

    def is_done(self, event: Event) -> bool:
        self._check_on(event.device)
        return self._is_behind(event.handle)

    def recycle(self, event: Event) -> None:
        event.handle = dict.fromkeys(self.streams, 1 << 60)  # later calls wait for ever
        self._events -= 1

    def is_capturing(self) -> bool:
        return self.current[0] in self.captured

    def captures_open(self) -> bool:
        return bool(self.captured)

    def current_stream(self, device: int) -> int:
        return self.current[device]

    def create_stream(self, device: int) -> int:
        return self.new_stream(device)

    def destroy_stream(self, stream: int, device: int) -> None:
        while self.streams[stream].queue:
            ready = [number for number in self.streams if self.can_advance(number)]
            self.advance(stream if stream in ready else ready[0])

    def record(self, stream: int, device: int) -> Event:
        self._check_on(device)
        if stream in self.captured:
            self.violations.append("an event was recorded on a stream that captures")
        assert self.streams[stream].device == device
        self._events += 1
        return Event({stream: self.streams[stream].queued}, device)

    def wait(self, stream: int, event: Event) -> None:
        self._check_on(event.device)
        if stream in self.captured:
            self.violations.append("a stream that captures waits for work outside of the graph")
        self.streams[stream].queue.append(Work(after=dict(event.handle)))
        self.streams[stream].queued += 1

    def copy(self, address: int, source: int, nbytes: int, stream: int) -> None:
        self._check_on(self.streams[stream].device)
        self.copied.append(nbytes)
        self.launch(
            stream, lambda: ctypes.memmove(address, source, nbytes) and None, (source, source + nbytes)
        )

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        """Memory that was freed for the same stream is used again at once, as torch's allocator does."""
        self._check()
        nbytes = math.prod(shape) * dtype.itemsize
        pool = self._free.setdefault((self.current[device], nbytes), [])
        memory = pool.pop() if pool else np.zeros(max(nbytes, 1), np.uint8)
        view = memory[:nbytes]
        weakref.finalize(view, pool.append, memory)
        return torch.from_numpy(view).view(dtype).view(shape)

    def use_on_current_stream(self, tensor: torch.Tensor) -> None:
        """Memory that another stream uses is not used again in these tests."""
        self._kept = [*getattr(self, "_kept", []), tensor]


def claim_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's loader and ours see CUDA device 0; torch before 2.8 asks CUDA itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
