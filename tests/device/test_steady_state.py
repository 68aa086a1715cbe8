"""The steady state on a device: nothing is registered, given back or mapped."""

import ctypes
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from scripted_driver import ScriptedDriver, claim_an_accelerator

from shmloader import DataLoader, torch_private
from shmloader.device import guard, pinned
from shmloader.device.driver import DriverError
from shmloader.exchange import delivery
from shmloader.memory import Segment

WARM, COUNTED = 120, 60
WINDOWS = 4
LATE = 9  # pieces of work


def behind(number: int) -> int:
    """How late the device is: later at first, so that all slots are made by then, whatever workers do."""
    return LATE + 4 if number < WARM - 20 else LATE


def collate(samples: list[int]) -> torch.Tensor:
    """A batch of 20,000 to 38,000 bytes, full of its number."""
    return torch.full((20_000 + samples[0] % 7 * 3_000,), samples[0] % 251, dtype=torch.uint8)


def back_late(driver: ScriptedDriver, streams: list[int], number: int) -> None:
    """The device is always behind by as much."""
    for stream in driver.streams:
        while len(driver.streams[stream].queue) > behind(number) and driver.can_advance(stream):
            driver.advance(stream)


def in_bursts(driver: ScriptedDriver, streams: list[int], number: int) -> None:
    """The device does nothing for a while, and then all of it."""
    if number % behind(number) == 0:
        driver.drain()


def out_of_step(driver: ScriptedDriver, streams: list[int], number: int) -> None:
    """One stream is done at once, and another one is behind, by more or less."""
    chance = random.Random(number)
    for stream in driver.streams:
        most = chance.randrange(behind(number)) if stream == streams[0] else 0
        while len(driver.streams[stream].queue) > most and driver.can_advance(stream):
            driver.advance(stream)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedDriver]:
    scripted = ScriptedDriver()
    claim_an_accelerator(monkeypatch)
    monkeypatch.setattr(delivery, "open_driver", lambda: scripted)
    monkeypatch.setattr(guard, "MOST_WAIT_S", 0.01)
    monkeypatch.setattr(torch_private, "pin_memory", lambda batch, _: batch)
    monkeypatch.setattr(delivery, "to_device", lambda batch, _: batch)
    yield scripted
    scripted.drain()
    assert scripted.violations == []
    assert scripted.registered == {}
    assert pinned.pinned_nbytes() == 0


@pytest.mark.parametrize("late", [back_late, in_bursts, out_of_step])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_nothing_is_registered_given_back_or_mapped(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, device: str | None, late: Callable[..., None]
) -> None:
    """The program copies or reads each batch on one of two streams, drops it, and takes the next one.

    When so many slots are in use as never before is up to the workers: one may come late. None goes.
    """
    streams, calls = [driver.new_stream(), driver.new_stream()], Counter[str]()
    windows: list[Counter[str]] = []

    def count(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def counted(*arguments: object, **options: object) -> object:
            calls[name] += 1
            return call(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (driver, "register"),
        (driver, "unregister"),
        (driver, "create_stream"),
        (Segment, "map"),
        (Segment, "reserve"),
        (Segment, "discard"),
    ):
        count(owner, name)
    options = {"collate_fn": collate, "num_workers": 2, "pin_memory": device is None, "device": device}
    with DataLoader(range(WARM + WINDOWS * COUNTED + 1), batch_size=1, **options) as loader:
        for number, batch in enumerate(loader):
            if number >= WARM and (number - WARM) % COUNTED == 0:
                windows.append(calls.copy())
                calls.clear()
            address, nbytes = batch.data_ptr(), batch.nbytes
            if device is None:
                driver.read_late(streams[number % 2], address, nbytes, number % 251)
            else:
                expected = number % 251

                def kernel(address=address, nbytes=nbytes, expected=expected, batch=batch) -> None:
                    assert set(ctypes.string_at(address, nbytes)) == {expected}

                driver.launch(0, kernel)
                del kernel
            del batch
            late(driver, streams, number)
        assert loader.statistics().spills == 0
        assert loader.statistics().wait_for_device_s == 0
        driver.drain()
    assert windows[0]["register"] > 0
    assert {} in windows[1:], windows
    assert not any(window["unregister"] or window["discard"] for window in windows[1:]), windows


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_slot_of_a_small_budget_is_locked_once(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    """The device is asked before a free slot gives its memory back for one that is granted."""
    slots, locked = 14, list[int]()
    register = driver.register
    monkeypatch.setattr(driver, "register", lambda *memory: locked.append(memory[0]) or register(*memory))
    options = {"num_workers": 2, "pin_memory": device is None, "device": device}
    options |= {"collate_fn": lambda _: torch.zeros(40_000), "memory_budget_nbytes": slots * 163_840}
    with DataLoader(range(WARM), batch_size=1, **options) as loader:
        for batch in loader:
            driver.read_late(0, batch.data_ptr(), batch.nbytes, 0)
            del batch
            while len(driver.streams[0].queue) > 1 and driver.can_advance(0):
                driver.advance(0)
            for stream in driver.streams:
                while stream and driver.can_advance(stream):
                    driver.advance(stream)
        driver.drain()
    assert 0 < len(locked) <= slots


@pytest.mark.parametrize("device", [None, "cuda"])
def test_locked_memory_keeps_to_the_budget_of_slots(driver: ScriptedDriver, device: str | None) -> None:
    """However late the device is; what there is no room for waits for it, or is copied."""
    budget_nbytes, locked_nbytes = 800_000, 0
    options = {"collate_fn": collate, "num_workers": 2, "pin_memory": device is None, "device": device}
    with (
        DataLoader(range(200), batch_size=1, memory_budget_nbytes=budget_nbytes, **options) as loader,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for number, batch in enumerate(loader):
            locked_nbytes = max(locked_nbytes, sum(driver.registered.values()))
            if device is None:
                driver.read_late(0, batch.data_ptr(), batch.nbytes, number % 251)
            else:
                driver.launch(0, lambda: None)
            del batch
            if number % 40 == 39:
                driver.drain()
        driver.drain()
    assert budget_nbytes / 2 < locked_nbytes <= budget_nbytes


def test_a_lost_device_changes_no_pinned_batch(driver: ScriptedDriver) -> None:
    """No slot that it may have read is written again; to lock and to copy others is torch's error."""
    with (
        DataLoader(range(100), batch_size=1, collate_fn=collate, num_workers=2, pin_memory=True) as loader,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # that a slot could not be locked
        for number, batch in enumerate(loader):
            assert batch[0] == number
            driver.read_late(0, batch.data_ptr(), batch.nbytes, number)
            driver.failed = number >= 10
            del batch
            if number == 99:
                assert driver.violations == []
                driver.streams[0].queue.clear()  # it reads no more
    driver.failed = False


def test_a_lost_device_is_an_error_of_next(driver: ScriptedDriver) -> None:
    with DataLoader(range(40), batch_size=1, collate_fn=collate, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
        driver.failed = True
        with pytest.raises(DriverError, match="the devices' work has failed"):
            for _ in range(3):
                next(iterator)
        driver.failed = False
