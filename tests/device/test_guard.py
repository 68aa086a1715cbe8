"""Page-locked slots and their guard, against a scripted driver: no late copy ever reads wrong bytes."""

import threading
import warnings

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from robustness.processes import LONG
from scripted_driver import CAPTURE_UNSUPPORTED, ScriptedDriver
from table_machine import TableMachine, grant, make_in_vain, publish

from shmloader.device import captures, guard, pinned
from shmloader.device.driver import DriverError
from shmloader.device.guard import DeviceGuard
from shmloader.memory import PAGE_NBYTES, Segment
from shmloader.slots import Place, PlaceState, PlaceTable
from shmloader.slots.inspection import POISON, Inspection
from shmloader.statistics import Counters

ALREADY_REGISTERED, NOT_REGISTERED = 712, 713


class GuardedMachine(TableMachine):
    """The table machine, with copies that are queued on held batches and read them late, and with captures.

    A free slot is poisoned, as with ``SHMLOADER_DEBUG=1``. So a copy that comes after its slot is free shows,
    even if no worker has written to the place since.
    """

    guarded = True

    def __init__(self) -> None:
        super().__init__()
        pinned._registered.clear()  # of an example that failed
        self.driver = ScriptedDriver()
        self.side = self.driver.new_stream()
        if self.guarded:
            self.table.guard_with(DeviceGuard(self.driver))
        self._wait_s, guard.MOST_WAIT_S = guard.MOST_WAIT_S, 0.0

    @initialize(poisons=st.booleans())
    def inspect(self, poisons: bool) -> None:
        if poisons:
            self.table.inspection = Inspection()

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
        self.driver.captured ^= {0 if here else self.side}

    @rule()
    def look(self) -> None:
        self.table.can_lease()

    @invariant()
    def nothing_is_violated(self) -> None:
        assert self.driver.violations == []

    @invariant()
    def leased_slots_are_locked(self) -> None:
        registered = self.driver.registered
        for place in self.table.places:
            if self.guarded and place.state in (PlaceState.LEASED, PlaceState.GUARDED):
                assert registered[place.extent.address] == place.extent.nbytes
        assert pinned.pinned_nbytes() == sum(registered.values())

    def teardown(self) -> None:
        super().teardown()
        self.nothing_is_violated()
        self.held.clear()
        self.driver.captured.clear()
        pinned.release_postponed()
        assert self.driver.registered == {} or not self.guarded
        self.driver.drain()
        self.nothing_is_violated()
        guard.MOST_WAIT_S = self._wait_s


TestGuarded = GuardedMachine.TestCase
TestGuarded.settings = settings(max_examples=80 if LONG else 20, stateful_step_count=60, deadline=None)


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


def _table(driver: ScriptedDriver | None, pages: int = 40, counters: Counters | None = None) -> PlaceTable:
    table = PlaceTable(Segment(), 1, pages * PAGE_NBYTES, counters=counters)
    if driver is not None:
        table.guard_with(DeviceGuard(driver))
    return table


def _batch(table: PlaceTable, number: int, nbytes: int = PAGE_NBYTES):
    """Publish a place as a worker does; returns the place and its batch, leased or spilled."""
    place = grant(table)
    table.reserve(place, nbytes)
    np.frombuffer(table.map(place).buffer, np.uint8)[:nbytes] = number
    publish(table, place, place.nbytes, nbytes)
    return place, table.take(place)[0]


def _is_pinned(place: Place) -> bool:
    return place.state is PlaceState.LEASED and pinned.is_pinned(place.extent)


def _copy_drop_iterate(table: PlaceTable, driver: ScriptedDriver, batches: int) -> None:
    """Play a training loop: a copy that does not wait, the batch dropped, and the next one."""
    side = driver.new_stream()
    for number in range(batches):
        _, batch = _batch(table, number % 200)
        driver.read_late(side, batch.ctypes.data, batch.nbytes, number % 200)
        del batch
        if number % 3 == 0:
            driver.advance(side)
    table.collect()
    driver.drain()


def test_late_copies_read_what_was_there(driver: ScriptedDriver) -> None:
    table = _table(driver, pages=400)
    _copy_drop_iterate(table, driver, 60)
    assert driver.violations == []
    table.close()


def test_without_a_guard_they_do_not() -> None:
    """The test above can fail: the same loop, with the guard off."""
    driver = ScriptedDriver()
    driver.all_is_late = True
    table = _table(None, pages=400)
    _copy_drop_iterate(table, driver, 60)
    assert any(text.startswith("read ") for text in driver.violations)
    table.close()


def test_a_slot_waits_for_all_streams(driver: ScriptedDriver) -> None:
    table, side = _table(driver), driver.new_stream()
    place, batch = _batch(table, 7)
    driver.launch(0, lambda: None)
    driver.read_late(side, batch.ctypes.data, batch.nbytes, 7)
    del batch
    table.collect()
    assert place.state is PlaceState.GUARDED
    driver.advance(0)
    table.collect()
    assert place.state is PlaceState.GUARDED
    driver.advance(side)
    table.collect()
    assert place.state is PlaceState.FREE
    table.close()


def test_two_devices_are_both_waited_for() -> None:
    driver = ScriptedDriver(devices=2)
    table = _table(driver)
    place, batch = _batch(table, 7)
    driver.read_late(1, batch.ctypes.data, batch.nbytes, 7)
    del batch
    table.collect()
    assert place.state is PlaceState.GUARDED
    driver.advance(1)
    table.collect()
    assert place.state is PlaceState.FREE
    table.close()
    assert driver.violations == []


def test_a_batch_that_another_thread_drops_meanwhile_is_guarded(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease ends while other slots are collected: it still needs its guard."""
    table = _table(driver)
    held = [_batch(table, number) for number in (7, 8)]
    for (_, batch), number in zip(held, (7, 8), strict=True):
        driver.read_late(0, batch.ctypes.data, batch.nbytes, number)
    slots = [place for place, _ in held]
    monkeypatch.setattr(driver, "captures_open", lambda: held.clear() or bool(driver.captured))
    del held[0], batch
    table.collect()
    assert not held
    assert slots[0].state is PlaceState.GUARDED
    assert slots[1].state is not PlaceState.FREE
    _batch(table, 9)
    driver.drain()
    assert driver.violations == []
    table.collect()
    assert [place.state for place in slots] == [PlaceState.FREE] * 2
    table.close()


def test_leases_that_end_together_share_an_event(driver: ScriptedDriver) -> None:
    table = _table(driver)
    batches = [_batch(table, number)[1] for number in range(5)]
    driver.launch(0, lambda: None)
    batches.clear()
    table.collect()
    assert driver._events == 1
    driver.drain()
    table.collect()
    assert driver._events == 0
    table.close()


def test_what_is_captured_elsewhere_is_left_alone(driver: ScriptedDriver) -> None:
    """Slots wait until the capture is over, and then for the work that was queued before it."""
    table, side = _table(driver), driver.new_stream()
    place, batch = _batch(table, 7)
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    driver.captured.add(side)
    del batch
    table.collect()
    driver.captured.clear()
    assert place.state is PlaceState.GUARDED
    table.collect()
    assert place.state is PlaceState.GUARDED
    driver.drain()
    table.collect()
    assert place.state is PlaceState.FREE
    table.close()


def test_while_this_thread_captures_batches_are_copied(driver: ScriptedDriver) -> None:
    counters = Counters()
    table = _table(driver, counters=counters)
    driver.captured.add(0)
    place, _ = _batch(table, 7)
    assert place.state is PlaceState.FREE
    assert (counters.rare["spills"], table.warning) == (1, "")
    driver.captured.clear()
    assert _batch(table, 8)[0].state is PlaceState.LEASED
    table.close()


def test_where_no_slot_is_left_it_waits_and_then_copies(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MOST_WAIT_S", 0.05)
    counters = Counters()
    table = _table(driver, pages=3, counters=counters)
    slots = []
    for number in range(6):
        place, batch = _batch(table, number)
        driver.read_late(0, batch.ctypes.data, batch.nbytes, number)
        slots.append(place)
        del batch
    assert counters.rare["spills"] > 0
    assert counters.rare["wait_for_device_ns"] >= 0.05e9
    assert "the accelerator has yet to read 2 batches that the program has dropped" in table.warning
    driver.streams[0].queue.clear()
    driver.streams[0].done = driver.streams[0].queued
    assert table.can_lease()
    table.close()


def test_waiting_ends_when_a_slot_is_there(driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_WAIT_S", 60.0)
    counters = Counters()
    table = _table(driver, pages=3, counters=counters)
    monkeypatch.setattr(guard.time, "sleep", lambda _: driver.drain())
    for number in range(6):
        _, batch = _batch(table, number)
        driver.read_late(0, batch.ctypes.data, batch.nbytes, number)
        del batch
    assert counters.rare["spills"] == 0
    table.close()


def test_failed_work_frees_nothing_and_raises_nothing(driver: ScriptedDriver) -> None:
    table = _table(driver)
    place, batch = _batch(table, 7)
    driver.launch(0, lambda: None)
    del batch
    driver.failed = True
    table.collect()
    assert place.state is PlaceState.GUARDED
    assert table.can_lease()
    table.close()
    driver.registered.clear()  # the driver has lost them


def test_a_freed_slot_is_poisoned_only_when_the_copy_is_done(driver: ScriptedDriver) -> None:
    table = _table(driver)
    table.inspection = Inspection()
    place, batch = _batch(table, 7)
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    del batch
    table.collect()
    assert set(bytes(table.map(place).view)) == {7}
    driver.drain()
    table.collect()
    assert set(bytes(table.map(place).view)) == {POISON}
    table.close()


def test_a_batch_outlives_its_loader(driver: ScriptedDriver) -> None:
    """It stays locked; its last view's death waits for the copy, and unlocks before it unmaps."""
    table = _table(driver)
    _, batch = _batch(table, 7)
    table.close()
    assert len(driver.registered) == 1
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    assert driver.waits == 0
    del batch
    assert driver.waits == 1
    assert driver.registered == {}


def test_nothing_ends_a_capture_at_the_end_of_a_batch(driver: ScriptedDriver) -> None:
    table = _table(driver)
    _, batch = _batch(table, 7)
    table.close()
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    driver.captured.add(driver.new_stream())
    del batch
    assert len(driver.registered) == 1
    driver.captured.clear()
    driver.drain()
    pinned.release_postponed()
    assert driver.registered == {}


def test_a_capture_that_begins_meanwhile_postpones_the_end(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _table(driver)
    _, batch = _batch(table, 7)
    table.close()

    def refuse() -> None:
        raise DriverError("cuCtxSynchronize failed", CAPTURE_UNSUPPORTED)

    with monkeypatch.context() as patched:
        patched.setattr(driver, "synchronize", refuse)
        del batch
    assert len(driver.registered) == 1
    pinned.release_postponed()
    assert driver.registered == {}


def test_a_capture_of_torchs_begins_when_the_wait_for_devices_is_over(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wait for a device ends a capture."""
    monkeypatch.setattr(captures, "_MOST_WAIT_S", 60.0)

    class Graph:
        def capture_begin(self) -> None:
            order.append("begun")

        def capture_end(self) -> None: ...

    def synchronize() -> None:
        thread.start()
        thread.join(0.05)
        order.append("waited")

    order: list[str] = []
    driver.captures.count(Graph)
    thread = threading.Thread(target=Graph().capture_begin)
    table = _table(driver)
    _, batch = _batch(table, 7)
    table.close()
    monkeypatch.setattr(driver, "synchronize", synchronize)
    del batch
    thread.join()
    assert (order, driver.registered) == (["waited", "begun"], {})


@pytest.mark.parametrize("call", ["unregister", "captures_open"])
def test_memory_that_cannot_be_unlocked_stays_mapped(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Another mapping at its address would be taken for registered, and read with the old one's bytes."""
    table = _table(driver)
    _, batch = _batch(table, 7)
    table.close()
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

    table = _table(driver)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(driver, "register", interrupted)
        _batch(table, 7)
    table.close()
    assert driver.registered == {}


def test_an_interrupt_before_that_leaves_nothing_behind(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(address: int, nbytes: int) -> None:
        raise KeyboardInterrupt

    def refuse(address: int) -> None:
        raise DriverError("cuMemHostUnregister failed", NOT_REGISTERED)

    table = _table(driver)
    with monkeypatch.context() as patched:
        patched.setattr(driver, "register", interrupted)
        patched.setattr(driver, "unregister", refuse)
        with pytest.raises(KeyboardInterrupt):
            _batch(table, 7)
        table.close()
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
    table = _table(driver)
    place, batch = _batch(table, 7)
    assert len({*taken, place.extent.address}) == 3
    assert _is_pinned(place)
    assert all(driver._is_mapped(address, address + PAGE_NBYTES) for address in taken)
    assert set(batch.tolist()) == {7}
    del batch
    table.close()
    pinned._foreign.clear()


def test_one_registration_that_cannot_end_does_not_take_others_along(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = _table(driver)
    held = [_batch(table, number)[1] for number in (7, 8)]
    table.close()
    driver.captured.add(driver.new_stream())
    held.clear()
    assert len(pinned._postponed) == 2
    driver.captured.clear()
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
    table = _table(driver)
    _, batch = _batch(table, 7)
    del batch

    def fail() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as patched:
        patched.setattr(driver, "captures_open", fail)
        table.close()
    assert table._closed
    pinned._stuck.clear()
    pinned._registered.clear()
    driver.registered.clear()


def test_slots_stay_locked_though_the_device_is_less_behind(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that waits for the device now and then would lock them anew each time."""
    table = _table(driver, pages=400)
    locked = []
    register = driver.register
    monkeypatch.setattr(driver, "register", lambda *extent: locked.append(extent) or register(*extent))
    for _ in range(3):
        for number in range(table.budget.base_slots + 4):
            _, batch = _batch(table, number)
            driver.read_late(0, batch.ctypes.data, batch.nbytes, number)
            del batch
        driver.drain()
        table.collect()
    assert len(locked) == len(driver.registered) >= table.budget.base_slots + 4
    table.close()


def test_what_is_guarded_when_the_loader_is_closed_is_not_given_back(driver: ScriptedDriver) -> None:
    table = _table(driver)
    _, batch = _batch(table, 7)
    driver.read_late(0, batch.ctypes.data, batch.nbytes, 7)
    driver.captured.add(driver.new_stream())  # so that nothing can wait for the copy now
    del batch
    table.close()
    driver.drain()
    driver.captured.clear()
    pinned.release_postponed()


def test_a_refused_registration_warns_once_and_batches_are_not_pinned(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_told", set())
    driver.refuse = 2
    table = _table(driver)
    place, batch = _batch(table, 7)
    assert not _is_pinned(place)
    assert "could not be page-locked: cuMemHostRegister_v2 failed" in table.warning
    assert "ulimit -l" in table.warning
    assert "memlock=-1" in table.warning
    table.warning = ""
    other, second = _batch(table, 8)
    assert not _is_pinned(other)
    assert table.warning == ""
    third, kept = _batch(table, 9)
    assert _is_pinned(third)
    del batch, second, kept
    table.close()


def test_a_process_locks_half_of_its_memory_at_most(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_told", set())
    room = pinned.memory_headroom()._replace(limit_nbytes=6 * PAGE_NBYTES)
    monkeypatch.setattr(pinned, "memory_headroom", lambda: room)
    tables = _table(driver), _table(driver)
    batches = [_batch(table, 1) for _ in range(2) for table in tables]
    assert pinned.pinned_nbytes() == 3 * PAGE_NBYTES
    assert "half of its memory at most, 12,288 bytes, and have locked 12,288" in tables[1].warning
    batches.clear()
    for table in tables:
        table.close()


def test_a_slot_is_locked_when_its_batch_is_leased(driver: ScriptedDriver) -> None:
    table = _table(driver)
    place = grant(table)
    table.reserve(place, 1000)  # an index batch
    assert driver.registered == {}  # a locked page cannot become a part of a huge one
    publish(table, place, table.segment.reserve(place.number, place.nbytes, 3 * PAGE_NBYTES), 3 * PAGE_NBYTES)
    batch, _ = table.take(place)
    assert list(driver.registered.values()) == [3 * PAGE_NBYTES]
    del batch
    table.close()


def test_a_slot_that_is_refused_is_not_tried_for_each_batch(driver: ScriptedDriver) -> None:
    table = _table(driver)
    driver.refuse = 1
    for number in range(3):
        place, batch = _batch(table, number)
        assert place.number == 0
        assert not _is_pinned(place)
        del batch
        table.collect()
    place, _ = _batch(table, 3, 2 * PAGE_NBYTES)  # it grows
    assert driver.registered == {table.map(place).address: 2 * PAGE_NBYTES}
    table.close()


def test_a_slot_that_is_published_smaller_is_mapped_anew(driver: ScriptedDriver) -> None:
    """The pages behind may be given back, and be other ones when the place has grown again."""
    table = _table(driver)
    place, batch = _batch(table, 7, 3 * PAGE_NBYTES)
    del batch
    table.collect()
    assert grant(table) is place
    make_in_vain(table, place, PAGE_NBYTES, 0)
    assert (place.extent, driver.registered) == (None, {})
    table.close()


def test_a_slot_that_grows_is_locked_anew(driver: ScriptedDriver) -> None:
    table = _table(driver)
    place, batch = _batch(table, 7)
    del batch
    table.collect()
    again, batch = _batch(table, 8, 5 * PAGE_NBYTES)
    assert again is place
    assert list(driver.registered.values()) == [5 * PAGE_NBYTES]
    assert driver.waits == 0  # its guard was done
    del batch
    table.close()


def test_memory_that_is_given_back_is_unlocked_first(driver: ScriptedDriver) -> None:
    table = _table(driver, pages=400)
    kept = [_batch(table, 1)[1] for _ in range(table.budget.base_slots + 10)]
    kept.clear()
    table.begin_epoch()
    assert len(driver.registered) == table.budget.base_slots + table.guard.kept_back
    assert driver.waits == 0  # nothing reads it
    table.close()


def test_a_hundred_loaders_leave_nothing(driver: ScriptedDriver) -> None:
    for _ in range(100):
        table = _table(driver)
        driver.launch(0, lambda: None)  # so that they are guarded when the loader is closed
        for number in range(10):
            _batch(table, number)
        table.close()
        assert driver.registered == {}
    assert pinned._postponed == []
    assert driver._events == 0


def test_a_forked_process_unlocks_nothing(driver: ScriptedDriver) -> None:
    import os

    table = _table(driver)
    _, batch = _batch(table, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        table.close()
        del batch
        os._exit(len(driver.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    del batch
    table.close()
