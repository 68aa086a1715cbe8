"""The CUDA driver, as far as slots need it: thin calls of libcuda by ctypes, and of torch for its streams.

The driver's own interface is used where torch has none, and where torch's runtime calls would leave a pending
error behind that surfaces later, in another call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from shmloader.device.captures import counted

_NOT_READY = 600
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
_CAPTURE_ERRORS = range(900, 909)  # CUDA_ERROR_STREAM_CAPTURE_*
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for all devices
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_STREAMS_OF_TORCH = 32  # of each priority, handed out in turn (c10/cuda/CUDAStream.cpp, kStreamsPerPool)
_PRIORITIES = (0, -1)

_handle = POINTER(c_void_p)
_QUICK: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(ctypes.c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxGetState": (c_int, POINTER(c_uint), POINTER(c_int)),
    "cuCtxGetCurrent": (_handle,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_handle,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuEventCreate": (_handle, c_uint),
    "cuEventQuery": (c_void_p,),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
}
"""Functions that take a microsecond: giving up the interpreter lock for each would mean waiting for it."""

_WAITING: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDevicePrimaryCtxRetain": (_handle, c_int),
    "cuCtxSynchronize": (),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreate": (_handle, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    # A stream takes about 1,000 pieces of work; then these wait, perhaps for what another thread has to do.
    "cuCtxRecordEvent": (c_void_p, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
}
"""Functions during which other threads must be able to run."""

SIGNATURES = _QUICK | _WAITING
"""The functions of libcuda that are called, by symbol; each returns a ``CUresult``."""


class DriverError(RuntimeError):
    """A call of the driver failed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_of_capture(self) -> bool:
        """Whether the call is not possible while a graph is being captured."""
        return self.code in _CAPTURE_ERRORS


@dataclass(eq=False, slots=True)
class Event:
    """A CUDA event, which marks a place in a device's queued work: its handle, and the device's number."""

    handle: Any
    device: int


class CudaDriver:
    """The calls that slots make of this process's CUDA devices.

    Devices are numbered as torch numbers them; a stream is the number that torch calls ``cuda_stream``.
    May be called by any thread of the process that first called it, never by one that was forked from it.
    Each call raises `DriverError` if it fails; making one raises `OSError` if there is no such library, and
    `AttributeError` if it lacks a function. What is called for each batch has to be called inside of
    ``with driver.captures.lock, driver.on(device)``.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        library = ctypes.CDLL(path)
        self._calls: dict[str, Any] = {}
        for name, arguments in SIGNATURES.items():
            kind = ctypes.CFUNCTYPE if name in _WAITING else ctypes.PYFUNCTYPE
            self._calls[name] = kind(c_int, *arguments)((name, library))
        self._record, self._wait = self._calls["cuEventRecord"], self._calls["cuStreamWaitEvent"]
        self._query, self._copy = self._calls["cuEventQuery"], self._calls["cuMemcpyHtoDAsync_v2"]
        self._current = self._calls["cuCtxGetCurrent"]
        self.captures = counted()
        self._asked_all = False  # for captures that were begun before those were counted
        self._home: int | None = None
        self._contexts: dict[int, c_void_p] = {}
        self._events: defaultdict[int, list[Event]] = defaultdict(list)  # to be used again, by device
        self._streams: dict[int, list[int]] = {}
        self._call("cuInit", 0)
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        self._ordinals: list[int] = []
        for device in range(count.value):
            ordinal = c_int()
            self._call("cuDeviceGet", byref(ordinal), device)
            self._ordinals.append(ordinal.value)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := self._calls[name](*arguments):
            self._fail(name, code)

    def _fail(self, name: str, code: int) -> NoReturn:
        text = ctypes.c_char_p()
        self._calls["cuGetErrorName"](code, byref(text))
        raise DriverError(f"{name} failed: {(text.value or b'unknown').decode()} ({code})", code)

    def on(self, device: int) -> AbstractContextManager[object]:
        """Have a device's primary context current. Inside of ``captures.lock``: torch begins none meanwhile.

        While one is open anyway, calls are allowed that it would forbid to other threads.
        """
        context, found = self._contexts.get(device) or self._context(device), c_void_p()
        self._current(byref(found))
        if found.value == context.value and not self.captures.may_be_open():
            return self.captures.lock  # once more: nothing else is to be done
        return self._relaxed(context)

    @contextlib.contextmanager
    def _relaxed(self, context: c_void_p) -> Iterator[None]:
        """Make a context current, and allow calls that a capture elsewhere would forbid."""
        mode = c_int(_RELAXED)
        self._call("cuCtxPushCurrent_v2", context)
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _context(self, device: int) -> c_void_p:
        """The context that the runtime, and so torch, uses for a device; kept until the process ends."""
        if device not in self._contexts:
            context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(context), self._ordinals[device])
            self._contexts[device] = context
        return self._contexts[device]

    def version(self) -> int:
        """The newest version of CUDA that the driver supports: 12060 is 12.6."""
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return version.value

    def active_devices(self) -> list[int]:
        """Devices that this process has used so far."""
        found = []
        for device, ordinal in enumerate(self._ordinals):
            flags, active = c_uint(), c_int(1)
            if device not in self._contexts:
                self._call("cuDevicePrimaryCtxGetState", ordinal, byref(flags), byref(active))
            if active.value:
                found.append(device)
        return found

    def home(self) -> int:
        """The device in whose context memory is registered: one in use, since a context takes its memory."""
        if self._home is None:
            current, active = torch.cuda.current_device(), self.active_devices()
            self._home = current if current in active or not active else active[0]
        return self._home

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory for all devices."""
        with self._relaxed(self._context(self.home())):
            self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        """Undo `register`; nothing may be reading the memory."""
        with self._relaxed(self._context(self.home())):
            self._call("cuMemHostUnregister", address)

    def synchronize(self) -> None:
        """Wait until all active devices have done everything that is queued."""
        for device in self.active_devices():
            with self._relaxed(self._context(device)):
                self._call("cuCtxSynchronize")

    def create_stream(self, device: int) -> int:
        """A new stream that does not wait for others by itself."""
        stream = c_void_p()
        with self._relaxed(self._context(device)):
            self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int, device: int) -> None:
        """Wait for a stream's work and destroy it."""
        with self._relaxed(self._context(device)):
            self._call("cuStreamSynchronize", stream)
            self._call("cuStreamDestroy_v2", stream)

    # --- captures

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream captures a graph: see `is_capturing`."""
        try:
            captured = torch.cuda.is_current_stream_capturing()
        except RuntimeError as error:
            if not _is_of_capture(error):
                raise
            captured = True
        if captured and not self.captures.is_begun():
            self.captures.note_other()
        return captured

    def captures_open(self) -> bool:
        """Whether torch captures a graph, or a stream that can be asked does."""
        if self.is_capturing():
            return True
        for device in self.active_devices():
            with self.captures.lock, self.on(device):
                if self._is_captured(device):
                    return True
        self._asked_all = True
        return False

    def _is_captured(self, device: int) -> bool:
        """Whether a graph is captured, by torch or on a stream of a device that can be asked. Inside `on`.

        There is no call for a whole context. The default stream answers for all blocking streams, whoever
        made them. If others than torch may capture, the streams of torch's own pools are asked as well.
        """
        if self.captures.is_begun():
            return True
        status, streams = c_int(), [0]
        if self.captures.may_be_others() or not self._asked_all:
            streams = self._streams.get(device) or self._streams.setdefault(device, _streams_of(device))
        for stream in streams:
            if self._calls["cuStreamIsCapturing"](stream, byref(status)) or status.value:
                self.captures.note_other()
                return True
        return False

    # --- for each batch, inside `on`

    def _new_event(self, device: int) -> Event:
        handle = c_void_p()
        self._call("cuEventCreate", byref(handle), _DISABLE_TIMING)
        return Event(handle, device)

    def record_all(self, device: int) -> Event | None:
        """An event after everything that is queued on a device now, on any stream.

        None while a graph is captured, since the event would end that.
        """
        if self._is_captured(device):
            return None
        spare = self._events[device]
        event = spare.pop() if spare else self._new_event(device)
        try:
            self._call("cuCtxRecordEvent", self._context(device), event.handle)
        except DriverError as error:
            self.recycle(event)
            if not error.is_of_capture:
                raise
            self.captures.note_other()
            return None
        return event

    def record(self, stream: int, device: int) -> Event:
        """An event after everything that is queued on a stream now."""
        spare = self._events[device]
        event = spare.pop() if spare else self._new_event(device)
        if code := self._record(event.handle, stream):
            self._fail("cuEventRecord", code)
        return event

    def is_done(self, event: Event) -> bool:
        """Whether the work before an event is done, as far as it may be asked now. Does not wait."""
        code = self._query(event.handle)
        if code in _CAPTURE_ERRORS:  # another thread's, of a package that nobody knew of
            self.captures.note_other()
        elif code not in (0, _NOT_READY):
            self._fail("cuEventQuery", code)
        return bool(code == 0)

    def recycle(self, event: Event) -> None:
        """Give an event back; streams that wait for it keep waiting. Also outside of `on`."""
        self._events[event.device].append(event)

    def wait(self, stream: int, event: Event) -> None:
        """Make all work that is queued on a stream from now on wait for an event."""
        if code := self._wait(stream, event.handle, 0):
            self._fail("cuStreamWaitEvent", code)

    def copy(self, address: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy to a device's memory; ``source`` is read when the stream comes to it."""
        if code := self._copy(address, source, nbytes, stream):
            self._fail("cuMemcpyHtoDAsync_v2", code)

    def current_stream(self, device: int) -> int:
        """The calling thread's current stream."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        """An uninitialised tensor on a device, of the caching allocator's memory for the current stream.

        It is for a batch that may be used outside of the ``inference_mode`` in which it is copied ahead.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.allocate(shape, dtype, device)
        return torch.empty(shape, dtype=dtype, device=torch.device("cuda", device))

    def use_on_current_stream(self, tensor: torch.Tensor) -> None:
        """Tell the caching allocator that the current stream uses memory that another one has allocated."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _streams_of(device: int) -> list[int]:
    """The default stream, and those of torch's own pools, on which torch captures."""
    pools = {
        torch.cuda.Stream(device, priority=priority).cuda_stream  # type: ignore[no-untyped-call]
        for priority in _PRIORITIES
        for _ in range(_STREAMS_OF_TORCH)
    }
    return [0, *pools]


def is_capturing() -> bool:
    """Whether the calling thread's current stream captures a graph, or stands still for one that does."""
    try:
        begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return begun and torch.cuda.is_current_stream_capturing()
    except RuntimeError as error:
        if not _is_of_capture(error):
            raise
        return True


def _is_of_capture(error: RuntimeError) -> bool:
    """Whether torch could not ask the default stream since a blocking stream captures."""
    return "captur" in str(error)


@functools.cache
def open_driver() -> CudaDriver | str:
    """The driver of this process, or the reason why slots cannot be page-locked here."""
    if torch.version.cuda is None:
        kind: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return f"slots are page-locked for CUDA only, and torch's accelerator is {kind}"
    torch.cuda.init()  # type: ignore[no-untyped-call]
    try:
        return CudaDriver()
    except OSError as error:
        return f"the CUDA driver's library cannot be loaded ({error})"
    except AttributeError as error:
        return f"the CUDA driver is older than CUDA 12.5 ({error})"


os.register_at_fork(after_in_child=open_driver.cache_clear)  # CUDA cannot be used there
