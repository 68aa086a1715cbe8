"""States that a program takes after an interrupt of ``next()``: of the batches that it has had."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from interrupted_lines import alone
from loading import Numbered
from torch.utils.data import IterableDataset

import shmloader
from shmloader import DataLoader
from shmloader.resume import passes

SOURCES = os.path.dirname(shmloader.__file__)
HAD = 6  # batches before the interrupt: so many that all slots are mapped


class Preempted(Exception):
    """Raised by the handler of a signal."""


class Stopped(BaseException):
    """Raised by the handler of a signal, and no ``Exception``."""


@pytest.fixture(params=[Preempted, Stopped])
def kind(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """The exception that the handler of SIGUSR1 raises."""
    raised: type[BaseException] = request.param

    def handle(*_: object) -> None:
        raise raised

    before = signal.signal(signal.SIGUSR1, handle)
    yield raised
    signal.signal(signal.SIGUSR1, before)


def interrupt(iterator: Iterator[Any], at: int) -> bool:
    """Call ``next()``, with a signal before the ``at``-th line of shmloader; whether it has not so many."""
    left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        names = {one.f_code.co_name for one in (frame, frame.f_back) if one is not None}
        if "__del__" in names or not frame.f_code.co_filename.startswith(SOURCES):
            return None  # Python reports what is raised in `__del__`, and goes on
        left -= event == "line"
        if not left:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return trace

    sys.settrace(trace)
    try:
        alone(next, iterator)
    finally:
        sys.settrace(None)
    return left > 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_interrupt_at_any_line_of_next_is_not_counted(num_workers: int, kind: type[BaseException]) -> None:
    """Without workers an `Exception` may be a sample's own, which is counted: docs/robustness.md."""
    if not num_workers and issubclass(kind, Exception):
        pytest.skip("it counts")
    arguments = {"worker_type": "thread"} if num_workers else {}
    at, is_over = 1, False
    while not is_over:
        with DataLoader(Numbered(24), batch_size=2, num_workers=num_workers, **arguments) as loader:
            iterator = iter(loader)
            had = HAD
            for _ in range(HAD):
                next(iterator)
            try:
                is_over = interrupt(iterator, at)
                had += 1
            except kind:
                pass
            state = loader.state_dict()
        assert state["batches"] == had, f"line {at}"
        at += 1
    assert at > 20


class HeldInMain(Numbered):
    """The main thread is interrupted in sample 2 once another thread has had the four after it."""

    def __init__(self) -> None:
        super().__init__(12)
        self.inside, self.had = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            self.inside.set()
            assert self.had.wait(60)
            raise Stopped
        return super().__getitem__(index)


def test_batches_that_another_thread_has_had_meanwhile_stay_counted_without_workers() -> None:
    dataset, had = HeldInMain(), list[int]()

    def others() -> None:
        assert dataset.inside.wait(60)
        had.extend(int(next(batches)[0, 0]) for _ in range(4))
        dataset.had.set()

    with DataLoader(dataset) as loader:
        batches = iter(loader)
        had.extend(int(next(batches)[0, 0]) for _ in range(2))
        thread = threading.Thread(target=others)
        thread.start()
        with pytest.raises(Stopped):
            next(batches)
        thread.join()
        state = loader.state_dict()
    with DataLoader(Numbered(12)) as loader:
        loader.load_state_dict(state)
        rest = [int(batch[0, 0]) for batch in loader]
    assert had == [0, 1, 3, 4, 5, 6]
    assert not set(had) & set(rest)


class Counts(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def test_a_stream_goes_on_after_an_interrupt_before_its_index_batch() -> None:
    """An epoch that was cut short would end there without a word."""
    asking = passes.Pass._asking.__code__
    batches = iter(DataLoader(Counts(), batch_size=2))
    next(batches)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_code is asking:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return trace

    def handle(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, handle)
    sys.settrace(trace)
    try:
        with pytest.raises(Stopped):
            alone(next, batches)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)
    assert [batch.tolist() for batch in batches] == [[n, n + 1] for n in range(2, 12, 2)]
