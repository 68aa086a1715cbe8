"""The program's signal handlers wait while workers start and end, and then run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from interrupted_lines import alone
from torch.utils.data import Dataset

from shmloader import DataLoader
from shmloader.interrupts import HeldInterrupts
from shmloader.workers import processes

SIGNALS = [signal.SIGUSR1, signal.SIGTERM]
came: list[tuple[int, str]] = []


class Late(Exception):
    """Raised by the handler."""


def handle(number: int, frame: FrameType | None) -> None:
    came.append((number, "" if frame is None else frame.f_code.co_name))
    raise Late(number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    came.clear()
    before = [signal.signal(number, handle) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def raise_all() -> None:
    for number in SIGNALS:
        signal.raise_signal(number)


def test_each_handler_runs_once_at_the_end_with_its_frame() -> None:
    with pytest.raises(Late), HeldInterrupts() as held:
        raise_all()
        raise_all()
        assert not came
    assert sorted(came) == sorted((number, "raise_all") for number in SIGNALS)
    assert not held.came  # no SIGINT
    assert [signal.getsignal(number) for number in SIGNALS] == [handle, handle]


def test_programs_without_handlers_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `nohup`: each fork would look through all that was ever held."""
    holding: list[HeldInterrupts] = []
    monkeypatch.setattr("shmloader.interrupts._holding", holding)
    monkeypatch.setattr("shmloader.interrupts._HELD", [signal.SIGVTALRM])
    with HeldInterrupts():
        assert not holding
    assert not holding
    monkeypatch.setattr("shmloader.interrupts._HELD", SIGNALS)
    with HeldInterrupts():
        assert len(holding) == 1
    assert not holding


def test_ctrl_c_that_came_in_a_block_around_another_one_has_come_there() -> None:
    """As one loader after the other is closed at the program's end: the wait for none is long."""
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        with HeldInterrupts() as before:
            assert not before.came
        signal.raise_signal(signal.SIGINT)
        with HeldInterrupts() as after:
            assert after.came


def test_a_handler_that_is_installed_meanwhile_stays() -> None:
    with HeldInterrupts():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is handle


class Handler(Dataset[bool]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        return signal.getsignal(signal.SIGUSR1) is handle


def test_forked_workers_have_the_programs_handlers() -> None:
    with DataLoader(Handler(), num_workers=1) as loader:
        assert [bool(batch) for batch in loader] == [True, True]


def test_a_handler_that_raises_while_a_worker_starts_leaves_nothing() -> None:
    """At each line; the leak guard looks for processes and descriptors."""
    codes = [processes.ProcessWorkers._start.__code__, processes.open_pipes.__code__]
    pid, at, is_over = os.getpid(), 1, False
    while not is_over:
        left = at

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code not in codes or os.getpid() != pid:
                return None
            left -= event == "line"
            if not left:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
            return trace

        loader = DataLoader(Handler(), num_workers=2)
        sys.settrace(trace)
        try:
            alone(iter, loader)
        except Late:
            pass
        finally:
            sys.settrace(None)
        loader.close()
        is_over, at = left > 0, at + 3
    assert at > 20
