"""Page-locked slots and their guard, against a scripted driver: no late copy ever reads wrong bytes."""

import warnings

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from pool_machine import PoolMachine
from scripted_driver import CAPTURE_UNSUPPORTED, ScriptedDriver

from shmloader.device import guarded_pool, pinned
from shmloader.device.driver import DriverError
from shmloader.device.guard import DeviceGuard
from shmloader.device.guarded_pool import GuardedPool
from shmloader.memory import PAGE_NBYTES, Segment
from shmloader.slots import Slot, SlotState
from shmloader.slots.inspection import POISON, Inspection
from shmloader.statistics import Counters

ALREADY_REGISTERED, NOT_REGISTERED = 712, 713


class GuardedMachine(PoolMachine):
    """The pool machine, with copies that are queued on held batches and read them late, and with captures.

    A free slot is poisoned, as with ``SHMLOADER_DEBUG=1``. So a copy that comes after its slot is free shows,
    even if no worker has written to the slot since.
    """

    guarded = True
    pool_class = GuardedPool

    def __init__(self) -> None:
        super().__init__()
        pinned._registered.clear()  # of an example that failed
        self.driver = ScriptedDriver()
        self.side = self.driver.new_stream()
        if self.guarded:
            self.pool.guard = DeviceGuard(self.driver)
        self._wait_s, guarded_pool.MOST_GUARD_WAIT_S = guarded_pool.MOST_GUARD_WAIT_S, 0.0

    @initialize(poisons=st.booleans())
    def inspect(self, poisons: bool) -> None:
        if poisons:
            Inspection(self.pool)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99), on_side=st.booleans(), drop=st.booleans())
    def copy(self, which: int, on_side: bool, drop: bool) -> None:
        place = which % len(self.held)
        view, number = self.held[place]
        self.driver.read_late(self.side if on_side else 0, view.ctypes.data, view.nbytes, number)
        if drop:
            del self.held[place]

    @precondition(lambda self: any(map(self.driver.can_advance, self.driver.streams)))
    @rule(which=st.integers(0, 99))
    def advance(self, which: int) -> None:
        ready = [number for number in self.driver.streams if self.driver.can_advance(number)]
        self.driver.advance(ready[which % len(ready)])

    @rule(here=st.booleans())
    def begin_or_end_a_capture(self, here: bool) -> None:
        self.driver.captures ^= {0 if here else self.side}

    @rule()
    def look(self) -> None:
        self.pool.can_lease()

    def may_keep_excess(self, slot: Slot) -> bool:
        return slot.number in self.pool._tried

    @invariant()
    def nothing_is_violated(self) -> None:
        assert self.driver.violations == []

    @invariant()
    def leased_slots_are_locked(self) -> None:
        registered = self.driver.registered
        for slot in self.pool.slots:
            if self.guarded and slot.state in (SlotState.LEASED, SlotState.GUARDED):
                assert registered[slot.extent.address] == slot.extent.nbytes
        assert pinned.pinned_nbytes() == sum(registered.values())

    def teardown(self) -> None:
        super().teardown()
        self.nothing_is_violated()
        self.held.clear()
        self.driver.captures.clear()
        pinned.release_postponed()
        assert self.driver.registered == {} or not self.guarded
        self.driver.drain()
        self.nothing_is_violated()
        guarded_pool.MOST_GUARD_WAIT_S = self._wait_s


TestGuarded = GuardedMachine.TestCase
TestGuarded.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)


@pytest.fixture
def driver():
    pinned._registered.clear()  # of a test that failed
    pinned._postponed.clear()
    driver = ScriptedDriver()
    yield driver
    driver.drain()
    assert driver.violations == []
    assert driver.registered == {}
    assert pinned.pinned_nbytes() == 0


def _pool(driver: ScriptedDriver | None, pages: int = 40, counters: Counters | None = None) -> GuardedPool:
    pool = GuardedPool(Segment(), 1, pages * PAGE_NBYTES, counters=counters)
    if driver is not None:
        pool.guard = DeviceGuard(driver)
    return pool


def _batch(pool: GuardedPool, number: int, nbytes: int = PAGE_NBYTES):
    """Publish a slot as a worker does; returns the slot and its batch, leased or spilled."""
    slot = pool.grant()
    pool.reserve(slot, nbytes)
    np.frombuffer(pool.map(slot).buffer, np.uint8)[:nbytes] = number
    pool.publish(slot, slot.nbytes, nbytes)
    return slot, pool.lease(slot)[0] if pool.can_lease() else pool.spill(slot)


def _copy_drop_iterate(pool: GuardedPool, driver: ScriptedDriver, batches: int) -> None:
    """Play a training loop: a copy that does not wait, the batch dropped, and the next one."""
    side = driver.new_stream()
    for number in range(batches):
        _, batch = _batch(pool, number % 200)
        driver.read_late(side, batch.ctypes.data, batch.nbytes, number % 200)
        del batch
        if number % 3 == 0:
            driver.advance(side)
    pool.collect()
    driver.drain()


def test_late_copies_read_what_was_there(driver: ScriptedDriver) -> None:
    pool = _pool(driver, pages=400)
    _copy_drop_iterate(pool, driver, 60)
    assert driver.violations == []
    pool.close()


def test_without_a_guard_they_do_not() -> None:
    """The test above can fail: the same loop, with the guard off."""
    driver = ScriptedDriver()
    driver.all_is_late = True
    pool = _pool(None, pages=400)
    _copy_drop_iterate(pool, driver, 60)
    assert any(text.startswith("read ") for text in driver.violations)
    pool.close()


def test_a_slot_waits_for_all_streams(driver: ScriptedDriver) -> None:
    pool, side = _pool(driver), driver.new_stream()
    slot, batch = _batch(pool, 7)
    driver.launch(0, lambda: None)
    driver.read_late(side, batch.ctypes.data, batch.nbytes, 7)
    del batch
    pool.collect()
    assert slot.state is SlotState.GUARDED
    driver.advance(0)
    pool.collect()
    assert slot.state is SlotState.GUARDED
    driver.advance(side)
    pool.collect()
    assert slot.state is SlotState.FREE
    pool.close()


def test_two_devices_are_both_waited_for() -> None:
    driver = ScriptedDriver(devices=2)
    pool = _pool(driver)
    slot, batch = _batch(pool, 7)
    driver.read_late(1, batch.ctypes.data, batch.nbytes, 7)
    del batch
    pool.collect()
    assert slot.state is SlotState.GUARDED
    driver.advance(1)
    pool.collect()
    assert slot.state is SlotState.FREE
    pool.close()
    assert driver.violations == []


def test_a_batch_that_another_thread_drops_meanwhile_is_guarded(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease ends while other slots are collected: it still needs its guard."""
    pool = _pool(driver)
    held = [_batch(pool, number) for number in (7, 8)]
    for (_, batch), number in zip(held, (7, 8), strict=True):
        driver.read_late(0, batch.ctypes.data, batch.nbytes, number)
    slots = [slot for slot, _ in held]
    monkeypatch.setattr(driver, "captures_open", lambda: held.clear() or bool(driver.captures))
    del held[0], batch
    pool.collect()
    assert not held
    assert slots[0].state is SlotState.GUARDED
    assert slots[1].state is not SlotState.FREE
    _batch(pool, 9)
    driver.drain()
    assert driver.violations == []
    pool.collect()
    assert [slot.state for slot in slots] == [SlotState.FREE] * 2
    pool.close()


def test_leases_that_end_together_share_an_event(driver: ScriptedDriver) -> None:
    pool = _pool(driver)
    batches = [_batch(pool, number)[1] for number in range(5)]
    driver.launch(0, lambda: None)
    batches.clear()
    pool.collect()
    assert driver._events == 1
    driver.drain()
    pool.collect()
    assert driver._events == 0
    pool.close()


def test_what_is_captured_elsewhere_is_left_alone(driver: ScriptedDriver) -> None:
    """Slots wait until the capture is over, and then for the work that was queued before it."""
    pool, side = _pool(driver), driver.new_stream()
    slot, batch = _batch(pool, 7)
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    driver.captures.add(side)
    del batch
    pool.collect()
    driver.captures.clear()
    assert slot.state is SlotState.GUARDED
    pool.collect()
    assert slot.state is SlotState.GUARDED
    driver.drain()
    pool.collect()
    assert slot.state is SlotState.FREE
    pool.close()


def test_while_this_thread_captures_batches_are_copied(driver: ScriptedDriver) -> None:
    counters = Counters()
    pool = _pool(driver, counters=counters)
    driver.captures.add(0)
    slot, _ = _batch(pool, 7)
    assert slot.state is SlotState.FREE
    assert (counters.spills, pool.warning) == (1, "")
    driver.captures.clear()
    assert _batch(pool, 8)[0].state is SlotState.LEASED
    pool.close()


def test_where_no_slot_is_left_it_waits_and_then_copies(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_pool, "MOST_GUARD_WAIT_S", 0.05)
    counters = Counters()
    pool = _pool(driver, pages=3, counters=counters)
    slots = []
    for number in range(6):
        slot, batch = _batch(pool, number)
        driver.read_late(0, batch.ctypes.data, batch.nbytes, number)
        slots.append(slot)
        del batch
    assert counters.spills > 0
    assert counters.wait_for_device_ns >= 0.05e9
    assert "the accelerator has yet to read 2 batches that the program has dropped" in pool.warning
    driver.streams[0].queue.clear()
    driver.streams[0].done = driver.streams[0].queued
    assert pool.can_lease()
    pool.close()


def test_waiting_ends_when_a_slot_is_there(driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_pool, "MOST_GUARD_WAIT_S", 60.0)
    counters = Counters()
    pool = _pool(driver, pages=3, counters=counters)
    monkeypatch.setattr(guarded_pool.time, "sleep", lambda _: driver.drain())
    for number in range(6):
        _, batch = _batch(pool, number)
        driver.read_late(0, batch.ctypes.data, batch.nbytes, number)
        del batch
    assert counters.spills == 0
    pool.close()


def test_failed_work_frees_nothing_and_raises_nothing(driver: ScriptedDriver) -> None:
    pool = _pool(driver)
    slot, batch = _batch(pool, 7)
    driver.launch(0, lambda: None)
    del batch
    driver.failed = True
    pool.collect()
    assert slot.state is SlotState.GUARDED
    assert pool.can_lease()
    pool.close()
    driver.registered.clear()  # the driver has lost them


def test_a_freed_slot_is_poisoned_only_when_the_copy_is_done(driver: ScriptedDriver) -> None:
    pool = _pool(driver)
    Inspection(pool)
    slot, batch = _batch(pool, 7)
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    del batch
    pool.collect()
    assert set(bytes(pool.map(slot).view)) == {7}
    driver.drain()
    pool.collect()
    assert set(bytes(pool.map(slot).view)) == {POISON}
    pool.close()


def test_a_batch_outlives_its_loader(driver: ScriptedDriver) -> None:
    """It stays locked; its last view's death waits for the copy, and unlocks before it unmaps."""
    pool = _pool(driver)
    _, batch = _batch(pool, 7)
    pool.close()
    assert len(driver.registered) == 1
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    assert driver.waits == 0
    del batch
    assert driver.waits == 1
    assert driver.registered == {}


def test_nothing_ends_a_capture_at_the_end_of_a_batch(driver: ScriptedDriver) -> None:
    pool = _pool(driver)
    _, batch = _batch(pool, 7)
    pool.close()
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    driver.captures.add(driver.new_stream())
    del batch
    assert len(driver.registered) == 1
    driver.captures.clear()
    driver.drain()
    pinned.release_postponed()
    assert driver.registered == {}


def test_a_capture_that_begins_meanwhile_postpones_the_end(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool(driver)
    _, batch = _batch(pool, 7)
    pool.close()

    def refuse() -> None:
        raise DriverError("cuCtxSynchronize failed", CAPTURE_UNSUPPORTED)

    with monkeypatch.context() as patched:
        patched.setattr(driver, "synchronize", refuse)
        del batch
    assert len(driver.registered) == 1
    pinned.release_postponed()
    assert driver.registered == {}


@pytest.mark.parametrize("call", ["unregister", "captures_open"])
def test_memory_that_cannot_be_unlocked_stays_mapped(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Another mapping at its address would be taken for registered, and read with the old one's bytes."""
    pool = _pool(driver)
    _, batch = _batch(pool, 7)
    pool.close()
    address, nbytes = next(iter(driver.registered.items()))

    def fail(*_: int) -> None:
        raise (DriverError if call == "unregister" else RuntimeError)("the device's work has failed", 700)

    with monkeypatch.context() as patched:
        patched.setattr(driver, call, fail)
        del batch
    assert pinned.pinned_nbytes() == nbytes
    assert driver._is_mapped(address, address + nbytes)
    pinned._stuck.clear()
    pinned._registered.clear()
    driver.registered.clear()
    assert not driver._is_mapped(address, address + nbytes)


def test_an_interrupt_leaves_nothing_registered_that_is_unmapped(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the call returns, since that takes long: the memory is registered by then."""
    register = driver.register

    def interrupted(address: int, nbytes: int) -> None:
        register(address, nbytes)
        raise KeyboardInterrupt

    pool = _pool(driver)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(driver, "register", interrupted)
        _batch(pool, 7)
    pool.close()
    assert driver.registered == {}


def test_an_interrupt_before_that_leaves_nothing_behind(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(address: int, nbytes: int) -> None:
        raise KeyboardInterrupt

    def refuse(address: int) -> None:
        raise DriverError("cuMemHostUnregister failed", NOT_REGISTERED)

    pool = _pool(driver)
    with monkeypatch.context() as patched:
        patched.setattr(driver, "register", interrupted)
        patched.setattr(driver, "unregister", refuse)
        with pytest.raises(KeyboardInterrupt):
            _batch(pool, 7)
        pool.close()
    assert not pinned._stuck


def test_a_slot_at_addresses_that_others_have_registered_goes_elsewhere(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch says that such memory is pinned, and a device would read what was there before."""
    register, taken = driver.register, []

    def refuse_twice(address: int, nbytes: int) -> None:
        if len(taken) < 2:
            taken.append(address)
            raise DriverError("cuMemHostRegister_v2 failed", ALREADY_REGISTERED)
        register(address, nbytes)

    monkeypatch.setattr(driver, "register", refuse_twice)
    pool = _pool(driver)
    slot, batch = _batch(pool, 7)
    assert len({*taken, slot.extent.address}) == 3
    assert pool.is_pinned(slot)
    assert all(driver._is_mapped(address, address + PAGE_NBYTES) for address in taken)
    assert set(batch.tolist()) == {7}
    del batch
    pool.close()
    pinned._foreign.clear()


def test_one_registration_that_cannot_end_does_not_take_others_along(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool(driver)
    held = [_batch(pool, number)[1] for number in (7, 8)]
    pool.close()
    driver.captures.add(driver.new_stream())
    held.clear()
    assert len(pinned._postponed) == 2
    driver.captures.clear()
    errors = [RuntimeError("CUDA error: device-side assert triggered")]

    def fail_once() -> bool:
        if errors:
            raise errors.pop()
        return False

    monkeypatch.setattr(driver, "captures_open", fail_once)
    pinned.release_postponed()
    assert (len(pinned._stuck), len(driver.registered)) == (1, 1)
    ((address, nbytes),) = driver.registered.items()
    assert driver._is_mapped(address, address + nbytes)
    pinned._stuck.clear()
    pinned._registered.clear()
    driver.registered.clear()


def test_threads_that_lock_slots_at_once_share_what_was_postponed(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Emptied(list):
        def pop(self, *place: int) -> object:
            self.clear()  # by another thread
            return super().pop(*place)

    monkeypatch.setattr(pinned, "_postponed", Emptied([object()]))
    pinned.release_postponed()
    assert pinned._postponed == []


def test_a_pool_closes_though_torch_cannot_be_asked(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's own exception would be replaced by that of ``with loader``."""
    pool = _pool(driver)
    _, batch = _batch(pool, 7)
    del batch

    def fail() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "captures_open", fail)
        pool.close()
    assert pool._closed
    pinned._stuck.clear()
    pinned._registered.clear()
    driver.registered.clear()


def test_slots_stay_locked_though_the_device_is_less_behind(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that waits for the device now and then would lock them anew each time."""
    pool = _pool(driver, pages=400)
    locked = []
    register = driver.register
    monkeypatch.setattr(driver, "register", lambda *extent: locked.append(extent) or register(*extent))
    for _ in range(3):
        for number in range(pool.base_slots + 4):
            _, batch = _batch(pool, number)
            driver.read_late(0, batch.ctypes.data, batch.nbytes, number)
            del batch
        driver.drain()
        pool.collect()
    assert len(locked) == len(driver.registered) >= pool.base_slots + 4
    pool.close()


def test_what_is_guarded_when_the_loader_is_closed_is_not_given_back(driver: ScriptedDriver) -> None:
    pool = _pool(driver)
    _, batch = _batch(pool, 7)
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    driver.captures.add(driver.new_stream())  # so that nothing can wait for the copy now
    del batch
    pool.close()
    driver.drain()
    driver.captures.clear()
    pinned.release_postponed()


def test_a_refused_registration_warns_once_and_batches_are_not_pinned(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_told", set())
    driver.refuse = 2
    pool = _pool(driver)
    slot, batch = _batch(pool, 7)
    assert not pool.is_pinned(slot)
    assert "could not be page-locked: cuMemHostRegister_v2 failed" in pool.warning
    assert "ulimit -l" in pool.warning
    assert "memlock=-1" in pool.warning
    pool.warning = ""
    other, second = _batch(pool, 8)
    assert not pool.is_pinned(other)
    assert pool.warning == ""
    third, kept = _batch(pool, 9)
    assert pool.is_pinned(third)
    del batch, second, kept
    pool.close()


def test_a_process_locks_half_of_its_memory_at_most(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_told", set())
    room = pinned.memory_headroom()._replace(limit_nbytes=6 * PAGE_NBYTES)
    monkeypatch.setattr(pinned, "memory_headroom", lambda: room)
    pools_of_two = _pool(driver), _pool(driver)
    batches = [_batch(pool, 1) for _ in range(2) for pool in pools_of_two]
    assert pinned.pinned_nbytes() == 3 * PAGE_NBYTES
    assert "half of its memory at most, 12,288 bytes, and have locked 12,288" in pools_of_two[1].warning
    batches.clear()
    for pool in pools_of_two:
        pool.close()


def test_a_slot_is_locked_when_its_batch_is_leased(driver: ScriptedDriver) -> None:
    pool = _pool(driver)
    slot = pool.grant()
    pool.reserve(slot, 1000)  # an index batch
    assert driver.registered == {}  # a locked page cannot become a part of a huge one
    pool.publish(slot, pool.segment.reserve(slot.number, slot.nbytes, 3 * PAGE_NBYTES), 3 * PAGE_NBYTES)
    batch, _ = pool.lease(slot)
    assert list(driver.registered.values()) == [3 * PAGE_NBYTES]
    del batch
    pool.close()


def test_a_slot_that_is_refused_is_not_tried_for_each_batch(driver: ScriptedDriver) -> None:
    pool = _pool(driver)
    driver.refuse = 1
    for number in range(3):
        slot, batch = _batch(pool, number)
        assert slot.number == 0
        assert not pool.is_pinned(slot)
        del batch
        pool.collect()
    slot, _ = _batch(pool, 3, 2 * PAGE_NBYTES)  # it grows
    assert driver.registered == {pool.map(slot).address: 2 * PAGE_NBYTES}
    pool.close()


def test_a_slot_that_is_published_smaller_is_mapped_anew(driver: ScriptedDriver) -> None:
    """The pages behind may be given back, and be other ones when the slot has grown again."""
    pool = _pool(driver)
    slot, batch = _batch(pool, 7, 3 * PAGE_NBYTES)
    del batch
    pool.collect()
    assert pool.grant() is slot
    pool.publish(slot, PAGE_NBYTES, 0)
    pool.give_back(slot)
    assert (slot.extent, driver.registered) == (None, {})
    pool.close()


def test_a_slot_that_grows_is_locked_anew(driver: ScriptedDriver) -> None:
    pool = _pool(driver)
    slot, batch = _batch(pool, 7)
    del batch
    pool.collect()
    again, batch = _batch(pool, 8, 5 * PAGE_NBYTES)
    assert again is slot
    assert list(driver.registered.values()) == [5 * PAGE_NBYTES]
    assert driver.waits == 0  # its guard was done
    del batch
    pool.close()


def test_memory_that_is_given_back_is_unlocked_first(driver: ScriptedDriver) -> None:
    pool = _pool(driver, pages=400)
    kept = [_batch(pool, 1)[1] for _ in range(pool.base_slots + 4)]
    kept.clear()
    pool.trim()
    assert len(driver.registered) == pool.base_slots
    assert driver.waits == 0  # nothing reads it
    pool.close()


def test_a_hundred_loaders_leave_nothing(driver: ScriptedDriver) -> None:
    for _ in range(100):
        pool = _pool(driver)
        driver.launch(0, lambda: None)  # so that they are guarded when the loader is closed
        for number in range(10):
            _batch(pool, number)
        pool.close()
        assert driver.registered == {}
    assert pinned._postponed == []
    assert driver._events == 0


def test_a_forked_process_unlocks_nothing(driver: ScriptedDriver) -> None:
    import os

    pool = _pool(driver)
    _, batch = _batch(pool, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        pool.close()
        del batch
        os._exit(len(driver.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    del batch
    pool.close()
