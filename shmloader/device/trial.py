"""A trial of the driver, once in a process, before any batch relies on it."""

from __future__ import annotations

import contextlib
import mmap
import time
from typing import Any

import numpy as np

from shmloader.device.driver import CudaDriver, DriverError, Event

MOST_S = 10.0
"""Time that the device may take for each of the trial's two copies."""

MOST_BUSY_S = 0.1
"""Time that the trial waits for work that the program has queued."""

_NBYTES = 1 << 16
_POLL_S = 0.0002
_kept: list[object] = []  # the device may still read it, or it is still registered


def why_unusable(driver: CudaDriver, device: int) -> str | None:
    """Copy page-locked bytes to a device on a stream of their own, twice, and read them back.

    Returns the reason why batches must not rely on the driver; "" if the bytes have arrived, or if memory
    cannot be locked, of which `pinned.pin` tells. None if the device is busy with the program's work, or if a
    graph was captured meanwhile.
    """
    try:
        if not _waited(driver, [driver.record_all(device)], MOST_BUSY_S):
            return None
    except DriverError as error:
        return None if error.is_of_capture else f"a trial copy to device {device} failed: {error}"
    memory = mmap.mmap(-1, _NBYTES)
    source = np.frombuffer(memory, np.uint8)
    source[:] = np.arange(_NBYTES) % 251
    _kept.append(memory)  # before it is registered: an interrupt may end the trial
    try:
        driver.register(source.ctypes.data, _NBYTES)
    except DriverError:
        _kept.remove(memory)
        return ""
    why: str | None = ""
    try:
        for _ in range(2):  # each event is used again, some in another way
            arrived = _copy(driver, source, device)
            if arrived is None:
                return f"a trial copy to device {device} was not done after {MOST_S:g} s"
            if not np.array_equal(arrived, source):
                why = f"a trial copy to device {device} arrived changed"
        driver.unregister(source.ctypes.data)
        _kept.remove(memory)
    except RuntimeError as error:  # of the driver; of torch, where the device has no memory left
        with contextlib.suppress(DriverError):
            driver.unregister(source.ctypes.data)
        of_capture = isinstance(error, DriverError) and error.is_of_capture
        return None if of_capture else f"a trial copy to device {device} failed: {error}"
    return why


def _copy(
    driver: CudaDriver, source: np.ndarray[Any, np.dtype[np.uint8]], device: int
) -> np.ndarray[Any, Any] | None:
    """Copy bytes to a device as batches are copied, and read them back; None if that is not done in time."""
    stream = driver.create_stream(device)
    target = driver.allocate(source.nbytes, device)
    events = [driver.record(driver.current_stream(device), device)]
    driver.wait(stream, events[0])
    driver.copy(target.data_ptr(), source.ctypes.data, source.nbytes, stream, device)
    events += [driver.record(stream, device), driver.record_all(device)]
    if not _waited(driver, events, MOST_S):
        return None
    driver.destroy_stream(stream, device)
    return target.cpu().numpy()


def _waited(driver: CudaDriver, events: list[Event], most_s: float) -> bool:
    """Wait for events, for some time at most, and give them back; whether all are done."""
    deadline_s = time.monotonic() + most_s
    while not (done := all(map(driver.is_done, events))) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    for event in events:
        driver.recycle(event)
    return done
