"""Processes that are forked beside worker threads, or in them, do not use these or their slots."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import loading
import pytest
import torch
from thread_loaders import threads
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from shmloader import DataLoader, LoaderClosed
from shmloader.codec.slot_allocator import current_allocator
from shmloader.worker.random_state import Generators, worker_seeds

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # Python 3.12
]


def run_in_child(function: Callable[[], str]) -> str:
    """Fork, run a function in the child, and give what it returns."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = function()
        except BaseException as error:
            text = repr(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def test_a_forked_child_has_no_workers_and_the_parent_keeps_its_own() -> None:
    """next() in the child is an error that says so; nothing there waits for missing threads."""
    with threads(loading.Numbered(12), batch_size=1, num_workers=2) as loader:
        iterator = iter(loader)
        seen = [next(iterator)]

        def go_on() -> str:
            try:
                next(iterator)
            except LoaderClosed as error:
                loader.close()
                return str(error)
            return "no error"

        assert "threads of the process that this one was forked from" in run_in_child(go_on)
        seen += iterator
        assert torch.cat(seen)[:, 0].tolist() == list(range(12))


class Forks(loading.Numbered):
    """A sample is the worker info in a process that it forks."""

    def __getitem__(self, index: int) -> Any:
        def ask() -> str:
            outer = get_worker_info().id
            # As torch's worker processes do.
            torch.utils.data._utils.worker._worker_info = "inner"  # type: ignore[attr-defined]
            return f"{outer} {get_worker_info()}"

        return index % 2, run_in_child(ask)


def test_a_process_that_a_sample_forks_has_its_worker_info() -> None:
    """The info stays until the process becomes a worker itself, as after a fork in a worker process."""
    with threads(Forks(4), batch_size=None, num_workers=2) as loader:
        assert list(loader) == [[0, "0 inner"], [1, "1 inner"]] * 2


def refuse_a_writer(worker_id: int) -> None:
    """A ``worker_init_fn`` that must not find a slot of another worker."""
    if current_allocator() is not None:
        raise AssertionError("the slot of the thread that started this process")


class Loads(loading.Numbered):
    """A sample is the output of a loader with a worker process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        inner = DataLoader(
            loading.Numbered(3),
            batch_size=3,
            num_workers=1,
            multiprocessing_context="fork",
            worker_init_fn=refuse_a_writer,
        )
        return next(iter(inner)) + index


def test_a_sample_may_load_with_worker_processes() -> None:
    """Worker processes do not use the thread's slot."""
    with threads(Loads(2), batch_size=2, num_workers=1) as loader:
        (batch,) = loader
    assert batch[:, :, 0].tolist() == [[0, 1, 2], [1, 2, 3]]


class ToldSlowly(type):
    """A class whose second answer on whether it gives whole batches waits until the test lets it go."""

    times = 0
    asked, let_go = threading.Event(), threading.Event()

    def __getattribute__(cls, name: str) -> Any:
        if name == "__getbatch__":
            ToldSlowly.times += 1
            if ToldSlowly.times == 2:  # before the first sample; the first time was when the worker started
                ToldSlowly.asked.set()
                assert ToldSlowly.let_go.wait(60)
        return super().__getattribute__(name)


class Slow(Dataset[Any], metaclass=ToldSlowly):
    """Its worker thread looks for a source while other workers are forked."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError("whole batches are asked for")

    def __getbatch__(self, indices: Any) -> torch.Tensor:
        return torch.as_tensor(indices)

    def __len__(self) -> int:
        return 2


def test_workers_that_are_forked_while_a_thread_looks_at_its_dataset_look_at_theirs() -> None:
    """A lock that the thread held would stay locked in them for ever."""
    with threads(Slow(), batch_size=1, num_workers=1) as slow:
        iterator = iter(slow)
        assert ToldSlowly.asked.wait(60)
        rows = TensorDataset(torch.arange(4))
        with DataLoader(
            rows, batch_size=2, num_workers=1, multiprocessing_context="fork", timeout=30
        ) as forked:
            assert [batch.tolist() for (batch,) in forked] == [[0, 1], [2, 3]]
        ToldSlowly.let_go.set()
        assert [batch.tolist() for batch in iterator] == [[0], [1]]


def test_a_generator_is_made_in_a_process_that_was_forked_while_a_thread_makes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    making, let_go = threading.Event(), threading.Event()
    kind = random.Random

    def slowly(seed: int) -> random.Random:
        if threading.current_thread() is thread:
            making.set()
            assert let_go.wait(60)
        return kind(seed)

    seeds = worker_seeds(0, 0)
    thread = threading.Thread(target=lambda: Generators(seeds).random_generator)
    monkeypatch.setattr("shmloader.worker.random_state.random.Random", slowly)
    thread.start()
    assert making.wait(60)

    def draw() -> str:
        signal.alarm(30)  # ends a process that waits for a lock
        return str(Generators(seeds).random_generator.random())

    try:
        assert run_in_child(draw) == str(kind(seeds.random_seed).random())
    finally:
        let_go.set()
        thread.join()
