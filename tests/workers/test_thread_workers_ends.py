"""Ends of worker threads: at any time, promptly, and without leaving a thread, a descriptor or memory."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import loading
import pytest
import torch
from thread_datasets import Gated
from thread_loaders import join_workers, threads, workers_alive
from torch.utils.data import default_collate
from warm_python import warm_python
from when_waiting import when_waiting

from shmloader import DataLoader, LoaderClosed, WorkerDied
from shmloader.workers.threads import ThreadLink

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # Python 3.12
]


def finish(loader: DataLoader[Any]) -> None:
    list(loader)


def leave(loader: DataLoader[Any]) -> None:
    for _ in loader:
        break


def forget_in_a_cycle(loader: DataLoader[Any]) -> None:
    iterator = iter(loader)
    next(iterator)
    iterator.itself = iterator  # type: ignore[attr-defined]
    del iterator
    gc.collect()


def close(loader: DataLoader[Any]) -> None:
    next(iter(loader))
    loader.close()


def shut_down(loader: DataLoader[Any]) -> None:
    iterator = iter(loader)
    next(iterator)
    assert iterator._workers == []  # type: ignore[attr-defined]
    iterator._shutdown_workers()  # type: ignore[attr-defined]


def fail_to_begin(loader: DataLoader[Any]) -> None:
    loader.batch_sampler.sampler = None  # type: ignore[union-attr]
    with pytest.raises(TypeError):
        iter(loader)


@pytest.mark.parametrize("end", [finish, leave, forget_in_a_cycle, close, shut_down, fail_to_begin])
def test_no_thread_is_left(end: Callable[[DataLoader[Any]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The iterator may end in any way, and another one can be begun. Each end waits for idle threads."""
    for name in ("_CLOSE_S", "_LEAST_CLOSE_S"):
        monkeypatch.setattr(f"shmloader.workers.threads.{name}", 60.0)
    before = threading.active_count()
    loader = threads(loading.Numbered(40), batch_size=2, num_workers=3)
    sampler = loader.batch_sampler.sampler  # type: ignore[union-attr]
    end(loader)
    assert threading.active_count() == before
    loader.batch_sampler.sampler = sampler  # type: ignore[union-attr]
    assert torch.cat(list(loader))[:, 0].tolist() == list(range(40))
    assert threading.active_count() == before


def test_a_closed_link_gives_no_task_and_takes_no_answer() -> None:
    """A task that was sent before is not given either."""
    link = ThreadLink(SimpleQueue())
    link.requests.put(b"a task")
    link.close()
    with pytest.raises(BrokenPipeError):
        link.receive()
    with pytest.raises(BrokenPipeError):
        link.send(b"an answer")
    assert not link.answers


def test_persistent_threads_stay_until_the_loader_is_closed() -> None:
    """They are the same threads in each epoch."""
    with threads(loading.Numbered(8), num_workers=2, persistent_workers=True) as loader:
        epochs = []
        for _ in range(3):
            assert len(list(loader)) == 8
            epochs.append(set(workers_alive()))
        assert epochs[0] == epochs[1] == epochs[2]
        assert len(epochs[0]) == 2
    join_workers()
    assert not workers_alive()


@pytest.mark.parametrize("items", [8, 1 << 20])
def test_close_does_not_wait_for_a_slow_sample(items: int) -> None:
    """Its thread ends when the sample is done, also if the batch would need a larger slot."""
    dataset = Gated(8, at=1, items=items)
    loader = threads(dataset, batch_size=1, num_workers=2)
    iterator = iter(loader)
    kept = next(iterator)
    assert dataset.inside.wait(60)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 30  # the sample would take for ever
    deadline = time.monotonic() + 30
    while len(alive := workers_alive()) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    (slow,) = alive
    with pytest.raises(LoaderClosed, match=r"loader\.close\(\) was called"):
        next(iterator)
    del iterator
    dataset.gate.set()
    slow.join(60)
    assert not slow.is_alive()
    assert dataset.left.is_set()
    assert 3 not in dataset.begun, "a task that nobody waits for any more"
    assert kept.tolist() == [[0] * 8]


def test_a_thread_that_ends_late_has_its_memory_to_itself() -> None:
    """Its bytes from before close() are still there, and other batches do not touch them."""
    seen: list[torch.Tensor] = []
    entered, go = threading.Event(), threading.Event()

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        batch = default_collate(samples)
        entered.set()
        assert go.wait(60)
        batch[:, 1] = 77
        seen.append(batch)
        return batch

    loader = threads(loading.Numbered(4), batch_size=2, num_workers=1, collate_fn=collate)
    iterator = iter(loader)
    assert entered.wait(60)
    loader.close()
    with threads(loading.Numbered(4), batch_size=2, num_workers=1) as other:
        batches = list(other)
        go.set()
        join_workers()
        assert torch.cat(batches)[:, 0].tolist() == [0, 1, 2, 3]
    assert seen[0][:, :3].tolist() == [[0, 77, 0], [1, 77, 1]]
    del iterator


def test_close_by_another_thread_wakes_the_one_that_waits() -> None:
    """The waiting thread leaves next() with LoaderClosed."""
    dataset = Gated(4, at=0)
    loader = threads(dataset, num_workers=1)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            next(iter(loader))
        except LoaderClosed as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert dataset.inside.wait(60)
    loader.close()
    waiter.join(60)
    assert not waiter.is_alive()
    assert len(caught) == 1
    dataset.gate.set()
    join_workers()


def test_an_interrupt_while_waiting_loses_nothing() -> None:
    """next() raises KeyboardInterrupt, and the next call goes on."""
    dataset = Gated(6, at=2)
    with threads(dataset, batch_size=1, num_workers=1) as loader:  # no other's batch ends the wait
        iterator = iter(loader)
        seen = [next(iterator), next(iterator)]
        assert dataset.inside.wait(60)
        main = threading.get_ident()
        interrupting = when_waiting(iterator, lambda: signal.pthread_kill(main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        interrupting.join()
        dataset.gate.set()
        seen += iterator
        assert torch.cat(seen)[:, 0].tolist() == list(range(6))


def test_a_thread_that_ends_is_an_error_with_its_reason() -> None:
    """Only an exception from outside can end a thread. next() does not hang then."""
    with threads(loading.Numbered(10_000), batch_size=1, num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        victim = next(thread for thread in workers_alive() if thread.name.endswith("1"))
        with pytest.raises(WorkerDied, match=r"thread 'shmloader-worker-1'.*_Stop") as caught:
            due = 0  # a second one, while the thread ends by the first, would be in nobody's hands
            for number in range(10_000):
                if number == due:
                    due += 500
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(victim.ident or 0), ctypes.py_object(_Stop)
                    )
                try:
                    next(iterator)
                except _Stop:  # it came while a batch was made
                    due = number + 1
        assert caught.value.worker_id == 1
        assert isinstance(caught.value.__cause__, _Stop)
    join_workers()
    assert not workers_alive()


class _Stop(BaseException):
    """Ends a thread."""


def test_the_main_thread_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spinning would hold the interpreter lock that the worker needs."""
    calls: list[int] = []
    monkeypatch.setattr(os, "sched_yield", lambda: calls.append(1))
    with threads(loading.Numbered(400), batch_size=1, num_workers=2) as loader:
        assert len(list(loader)) == 400
    assert not calls


EXITS = """
import threading, time, sys
import torch
from shmloader import DataLoader

inside = threading.Event()

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        if index == 1: print("inside", flush=True); inside.set(); time.sleep(600)
        return index

loader = DataLoader(Slow(), num_workers=2, worker_type="thread")
iterator = iter(loader)
next(iterator)
inside.wait()
print("the end", flush=True)
"""


def test_the_program_ends_though_a_sample_takes_for_ever() -> None:
    """The program has its own exit status, and writes nothing to stderr."""
    began = time.monotonic()
    done = subprocess.run(
        [*warm_python(), "-c", EXITS], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout.split("\n")[-2], done.stderr) == (0, "the end", "")
    assert time.monotonic() - began < 60


class Collects(loading.Numbered):
    """One sample collects garbage when it is told to."""

    def __init__(self) -> None:
        super().__init__(8)
        self.go, self.done = threading.Event(), threading.Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            assert self.go.wait(60)
            gc.collect()
            self.done.set()
        return super().__getitem__(index)


def test_an_iterator_may_die_in_its_own_worker() -> None:
    """The collector runs in any thread; the worker does not wait for itself."""
    dataset = Collects()
    loader = threads(dataset, batch_size=1, num_workers=1)
    gc.disable()
    try:
        iterator = iter(loader)
        next(iterator)
        iterator.itself = iterator  # type: ignore[attr-defined]
        (worker,) = workers_alive()
        del iterator
        dataset.go.set()
        assert dataset.done.wait(60)
    finally:
        gc.enable()
    worker.join(60)
    assert not worker.is_alive()


def test_restarting_is_refused_when_it_is_set_late() -> None:
    """Frameworks set arguments late."""
    loader = threads(Gated(4), num_workers=1, timeout=0.2)
    loader.worker_restarts = 1
    with pytest.raises(ValueError, match="worker_restarts"):
        iter(loader)
    join_workers()
    assert not workers_alive()


def test_a_thread_ends_between_two_samples_when_nobody_waits_for_its_batch() -> None:
    """Its batch alone would take ten minutes."""
    loader = threads(Naps(100_000), batch_size=100_000, num_workers=2)
    iterator = iter(loader)
    (one, other) = workers_alive()
    loader.close()
    one.join(60)
    other.join(60)
    assert not workers_alive()
    with pytest.raises(LoaderClosed):
        next(iterator)


class Naps(loading.Numbered):
    """Samples of six milliseconds each."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.006)
        return super().__getitem__(index)
