"""The trial of the driver, before batches rely on it."""

from typing import Any

import pytest
import torch
from scripted_driver import CAPTURE_UNSUPPORTED, ScriptedDriver, claim_an_accelerator

from shmloader import DataLoader, errors
from shmloader.device import trial
from shmloader.device.driver import DriverError, Event
from shmloader.exchange import delivery as device_delivery

NOT_SUPPORTED = 801


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ScriptedDriver:
    """A driver whose devices work while the trial sleeps."""
    driver = ScriptedDriver()
    monkeypatch.setattr(trial.time, "sleep", lambda _: driver.drain())
    monkeypatch.setattr(trial, "MOST_S", 0.2)
    return driver


def test_a_driver_that_works_is_used(driver: ScriptedDriver) -> None:
    assert trial.why_unusable(driver, 0) == ""
    assert driver.copied == [trial._NBYTES] * 2
    assert driver.registered == {}
    assert driver.violations == []


def test_memory_that_cannot_be_locked_is_left_to_the_slots(driver: ScriptedDriver) -> None:
    driver.refuse = 1
    assert trial.why_unusable(driver, 0) == ""
    assert driver.copied == []


@pytest.mark.parametrize(
    "call", ["create_stream", "allocate", "record", "wait", "copy", "record_all", "is_done"]
)
def test_a_call_that_fails_is_named(
    driver: ScriptedDriver, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise DriverError(f"{call} failed: CUDA_ERROR_NOT_SUPPORTED (801)", NOT_SUPPORTED)

    monkeypatch.setattr(driver, call, fail)
    assert f"{call} failed: CUDA_ERROR_NOT_SUPPORTED" in trial.why_unusable(driver, 0)
    driver.drain()
    assert driver.registered == {}


@pytest.mark.parametrize("call", ["record", "record_all"])
def test_events_that_cannot_be_used_again_are_found(
    driver: ScriptedDriver, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = driver.recycle

    def refuse(*_: Any) -> Any:
        raise DriverError(f"{call} failed: CUDA_ERROR_INVALID_HANDLE (400)", 400)

    def recycle(event: Event) -> None:
        again(event)
        monkeypatch.setattr(driver, call, refuse)

    monkeypatch.setattr(driver, "recycle", recycle)
    assert f"{call} failed: CUDA_ERROR_INVALID_HANDLE" in trial.why_unusable(driver, 0)
    driver.drain()
    assert driver.registered == {}


def test_a_device_without_memory_is_told_and_not_raised(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches can still be pinned as torch does it."""

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(driver, "allocate", fail)
    assert trial.why_unusable(driver, 0) == "a trial copy to device 0 failed: CUDA out of memory"
    assert driver.registered == {}


def test_bytes_that_arrive_changed_are_found(driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "copy", lambda *_: None)
    assert "arrived changed" in trial.why_unusable(driver, 0)
    assert driver.registered == {}


def test_a_copy_that_never_ends_keeps_its_memory(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial.time, "sleep", lambda _: None)
    monkeypatch.setattr(trial, "_kept", [])
    assert "not done after 0.2 s" in trial.why_unusable(driver, 0)
    assert len(trial._kept) == len(driver.registered) == 1
    driver.drain()
    assert driver.violations == []


def test_a_device_that_is_busy_is_tried_another_time(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective that waits for another rank, say: the driver is not to blame."""
    monkeypatch.setattr(trial.time, "sleep", lambda _: None)
    monkeypatch.setattr(trial, "MOST_BUSY_S", 0.05)
    monkeypatch.setattr(device_delivery, "open_driver", lambda: driver)
    monkeypatch.setattr(device_delivery, "_tried", {})
    driver.launch(0, lambda: None)
    assert device_delivery._driver_for(torch.device("cuda:0")) is driver
    assert (driver.copied, device_delivery._tried, driver._events) == ([], {}, 0)
    driver.drain()
    monkeypatch.setattr(trial.time, "sleep", lambda _: driver.drain())
    assert device_delivery._driver_for(torch.device("cuda:0")) is driver
    assert device_delivery._tried == {0: ""}


@pytest.mark.parametrize("calls", [0, 1])
def test_a_capture_that_begins_meanwhile_is_not_blamed_on_the_driver(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    record_all = driver.record_all

    def refuse(device: int) -> Event:
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise DriverError("cuCtxRecordEvent failed", CAPTURE_UNSUPPORTED)
        return record_all(device)

    monkeypatch.setattr(driver, "record_all", refuse)
    assert trial.why_unusable(driver, 0) is None


@pytest.mark.parametrize(("device", "tried"), [(None, 1), ("cuda:0", 0)])
def test_pinned_batches_are_tried_where_memory_is_registered(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, device: str | None, tried: int
) -> None:
    """Not on torch's current device, which the program may not use: a context takes memory there."""
    monkeypatch.setattr(driver, "home", lambda: 1)
    monkeypatch.setattr(device_delivery, "open_driver", lambda: driver)
    monkeypatch.setattr(device_delivery, "why_unusable", lambda _, number: f"no copy to {number}")
    monkeypatch.setattr(device_delivery, "_tried", {})
    claim_an_accelerator(monkeypatch)
    found = device_delivery._driver_for(None if device is None else torch.device(device))
    assert found == f"no copy to {tried}"


def test_a_loader_whose_trial_fails_copies_and_says_why(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> Any:
        raise DriverError("cuCtxRecordEvent failed", NOT_SUPPORTED)

    monkeypatch.setattr(driver, "record_all", fail)
    monkeypatch.setattr(device_delivery, "_tried", {})
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(device_delivery, "open_driver", lambda: driver)
    claim_an_accelerator(monkeypatch)
    monkeypatch.setattr(device_delivery.torch_private, "pin_memory", lambda batch, _: batch)
    with DataLoader(torch.arange(8), batch_size=2, num_workers=1, pin_memory=True) as loader:
        with pytest.warns(RuntimeWarning, match="trial copy to device 0 failed: cuCtxRecordEvent"):
            batches = list(loader)
        assert torch.cat(batches).tolist() == list(range(8))
        assert loader.statistics().pin_copies == 4
