"""Page-locked slots: which mappings of this process are registered with the driver."""

from __future__ import annotations

import os

from shmloader.device.driver import ALREADY_REGISTERED, NOT_REGISTERED, CudaDriver, DriverError
from shmloader.memory import Extent
from shmloader.memory.limits import locked_memory_limits, memory_headroom

MOST_NBYTES = 32 << 30
"""Most bytes of one slot: much larger registrations were refused, and a copy may not cross two of them."""


class Registration:
    """Page-locked memory of one mapping. It stands between the mapping and its views, and ends before it.

    Where the last view of a batch dies after its loader was closed, that ends it too, in whatever thread;
    then it waits for what the devices may still read. A process that was forked leaves it to its parent.
    """

    __slots__ = ("_driver", "_owner", "_pid", "address")

    def __init__(self, driver: CudaDriver, extent: Extent) -> None:
        self._driver = driver
        self._owner = owner = extent.owner
        self._pid = os.getpid()
        # Before the call, which an interrupt may end after it has registered the memory.
        self.address: int | None = extent.address  # while it is registered
        _registered[extent.address] = extent.nbytes
        extent.give_to(self)
        try:
            driver.register(extent.address, extent.nbytes)
        except DriverError:
            self.address = None
            del _registered[extent.address]
            extent.give_to(owner)
            raise

    def release(self, *, synchronize: bool) -> None:
        """Unlock the memory; with ``synchronize``, wait for all devices first.

        While a graph is captured it is postponed, since waiting would end the capture. If the driver refuses,
        the mapping stays: other memory at the same address would be taken for registered.
        """
        address = self.address
        if address is None or os.getpid() != self._pid:
            return
        _stuck.add(self)
        self.address = None
        if synchronize:
            try:
                with self._driver.captures.lock:  # torch begins none between the two calls
                    postponed = self._driver.captures_open()
                    if not postponed:
                        self._driver.synchronize()
            except DriverError as error:
                postponed = error.is_of_capture  # another package has begun one; else the work has failed
            except RuntimeError:  # of torch, since the work has failed
                return
            if postponed:
                self.address = address
                _postponed.append(self)
                _stuck.discard(self)
                return
        try:
            self._driver.unregister(address)
        except DriverError as error:
            if error.code != NOT_REGISTERED:  # an interrupt came before it was
                return
        _registered.pop(address, None)
        _stuck.discard(self)

    def __del__(self) -> None:
        try:  # noqa: SIM105 - at the interpreter's end contextlib is gone, as other modules are
            self.release(synchronize=True)
        except Exception:  # noqa: BLE001
            pass


_registered: dict[int, int] = {}
_postponed: list[Registration] = []
_stuck: set[Registration] = set()  # could not end, or are about to
_foreign: list[object] = []  # mappings at addresses that others have registered
_told: set[str] = set()


def pin(driver: CudaDriver, extent: Extent) -> str | None:
    """Page-lock a mapping, if that is allowed.

    Returns a warning the first time that it is not; else "". None if the mapping must not be used: other
    memory was registered at its addresses and is gone, so a device would read that. It stays mapped for good.
    """
    release_postponed()
    limit_nbytes = memory_headroom().limit_nbytes // 2  # for all loaders, of the machine's or the cgroup's
    locked_nbytes = pinned_nbytes()
    if extent.nbytes > MOST_NBYTES:
        reason = f"the most for one slot are {MOST_NBYTES:,} bytes: use smaller batches"
    elif locked_nbytes + extent.nbytes > limit_nbytes:
        reason = (
            f"the loaders of a process lock half of its memory at most, {limit_nbytes:,} bytes, and have "
            f"locked {locked_nbytes:,}: use fewer workers, a smaller prefetch_factor or smaller batches"
        )
    else:
        try:
            Registration(driver, extent)
        except DriverError as error:
            if error.code == ALREADY_REGISTERED:
                _foreign.append(extent.owner)
                return None
            soft, hard = locked_memory_limits()
            reason = (
                f"{error}, with {locked_nbytes:,} bytes locked. If the limit of locked memory is the reason "
                f"(ulimit -l: {soft}, hard {hard}), raise it: ulimit -l unlimited, docker run --ulimit "
                "memlock=-1, LimitMEMLOCK=infinity"
            )
        else:
            return ""
    if _told:
        return ""
    _told.add(reason)
    return (
        f"a slot of {extent.nbytes:,} bytes could not be page-locked: {reason}. Batches in such slots are "
        "copied once more, to torch's pinned memory."
    )


def unpin(extent: Extent) -> None:
    """Undo `pin` of a mapping that nothing reads."""
    if isinstance(extent.owner, Registration):
        extent.owner.release(synchronize=False)


def is_pinned(extent: Extent) -> bool:
    """Whether a mapping is page-locked by `pin`."""
    owner = extent.buffer.owner  # as `Extent.owner`, without a call for each batch
    return isinstance(owner, Registration) and owner.address is not None


def pinned_nbytes() -> int:
    """Bytes that this process has locked."""
    return sum(list(_registered.values()))


def release_postponed() -> None:
    """End registrations that could not end while a graph was captured."""
    for _ in range(len(_postponed)):
        try:
            registration = _postponed.pop(0)
        except IndexError:  # another thread does the same
            break
        registration.release(synchronize=True)
