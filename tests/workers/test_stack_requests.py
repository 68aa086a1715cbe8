"""A stack is requested only if the worker can answer, and a caught timeout has no effect."""

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import HeldAt, Numbered

from shmloader import DataLoader, WorkerTimeout
from shmloader.failures.stacks import _SIGNAL, StackFile, answers


def test_a_spawned_worker_outlives_timeouts_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a worker has no handler yet: the request for its stack would end it."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(2)")  # of the worker
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with DataLoader(
        Numbered(4), num_workers=1, multiprocessing_context="spawn", timeout=0.3, batch_size=2
    ) as loader:
        iterator = iter(loader)
        pids = [process.pid for process in iterator._workers]
        timeouts, batches = [], []
        while len(batches) < 2:
            try:
                batches.append(next(iterator)[:, 0].tolist())
            except WorkerTimeout as error:
                timeouts.append(str(error))
        assert batches == [[0, 1], [2, 3]]
        assert [process.pid for process in iterator._workers] == pids
    assert len(timeouts) >= 2, "the worker was there too soon for this test"
    assert "still starting" in timeouts[0]
    assert not [text for text in timeouts if "have ended" in text]


def test_timeouts_of_a_worker_that_lives_are_no_deaths() -> None:
    """A worker with its handler reports its stack each time."""
    dataset = HeldAt(4, at=1)
    with DataLoader(dataset, batch_size=1, num_workers=1, timeout=0.3) as loader:
        iterator = iter(loader)
        batches, timeouts = [_next_in_time(iterator)], []
        assert dataset.inside.wait(60)
        for _ in range(2):
            with pytest.raises(WorkerTimeout) as caught:
                next(iterator)
            timeouts.append(str(caught.value))
        dataset.released.set()
        batches += [_next_in_time(iterator) for _ in range(3)]
    assert batches == [0, 1, 2, 3]
    assert not [text for text in timeouts if "have ended" in text]
    assert all("__getitem__" in text for text in timeouts)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_batch_that_comes_while_the_stack_is_asked_for_is_returned(
    restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack would be that of a worker that waits for a task."""
    dataset = HeldAt(2, at=0)
    options = {"batch_size": 1, "num_workers": 1, "timeout": 0.3, "worker_restarts": restarts}
    with DataLoader(dataset, **options) as loader:
        iterator = iter(loader)

        def answer_meanwhile(_: int) -> str:
            dataset.released.set()
            assert select.select([iterator._all_workers.workers[0].answers_fd], [], [], 60)[0]
            return "a stack"

        monkeypatch.setattr(iterator._all_workers, "stack_of", answer_meanwhile)
        assert [int(batch[0, 0]) for batch in iterator] == [0, 1]
        assert loader.statistics().worker_restarts == 0


class EachHeld(Numbered):
    """Each of two samples comes once it is released."""

    def __init__(self) -> None:
        super().__init__(2)
        self.released = [multiprocessing.Event(), multiprocessing.Event()]

    def __getitem__(self, index: int) -> torch.Tensor:
        self.released[index].wait()
        return super().__getitem__(index)


@pytest.mark.parametrize("restarts", [0, 1])
def test_any_workers_batch_that_comes_while_the_stack_is_asked_for_is_returned(
    restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With in_order=False it is the next one, of whichever worker."""
    dataset = EachHeld()
    options = {"batch_size": 1, "num_workers": 2, "timeout": 0.3, "worker_restarts": restarts}
    with DataLoader(dataset, **options, in_order=False) as loader:
        iterator = iter(loader)
        asked: list[int] = []

        def answer_meanwhile(number: int) -> str:
            asked.append(number)
            dataset.released[1 - number].set()
            assert select.select([iterator._all_workers.workers[1 - number].answers_fd], [], [], 60)[0]
            return "a stack"

        with monkeypatch.context() as patches:
            patches.setattr(iterator._all_workers, "stack_of", answer_meanwhile)
            try:
                first = int(next(iterator)[0, 0])
            finally:
                for event in dataset.released:
                    event.set()
        assert asked == [1 - first]
        assert loader.statistics().worker_restarts == 0
        assert _next_in_time(iterator) == asked[0]


def _next_in_time(iterator: Any) -> int:
    """The sample of the next batch, however long a busy machine takes for it."""
    while True:
        with contextlib.suppress(WorkerTimeout):
            return int(next(iterator)[0, 0])


def test_a_process_without_a_handler_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        stacks = StackFile()
        try:
            assert not answers(process.pid)
            assert "still starting" in stacks.ask(process.pid)
            time.sleep(0.2)
            assert process.poll() is None
        finally:
            stacks.close()
            process.kill()


def test_a_stack_that_is_written_slowly_is_read_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmloader.failures.stacks._ANSWER_S", 60.0)
    file, (ready, said) = StackFile(), os.pipe()
    pid = os.fork()
    if not pid:  # as faulthandler's, the handler ends before Python goes on
        libc = ctypes.CDLL(None)

        @ctypes.CFUNCTYPE(None, ctypes.c_int)
        def handler(number: int) -> None:
            os.write(file.descriptor.fd, b"Thread 1:\n")
            time.sleep(0.5)
            os.write(file.descriptor.fd, b"  File 2\n")

        libc.signal(_SIGNAL, handler)
        os.write(said, b"x")
        time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        assert file.ask(pid) == "Thread 1:\n  File 2"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        file.close()
        os.close(ready)
        os.close(said)


def test_a_worker_says_that_it_answers(start_method: str) -> None:
    with DataLoader(Numbered(8), num_workers=1, multiprocessing_context=start_method) as loader:
        iterator = iter(loader)
        next(iterator)
        assert answers(iterator._workers[0].pid)
    assert not answers(os.getpid())


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_closing_does_not_wait_for_workers_that_still_import(
    method: str, warm_helpers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others get the time to finish their sample."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(60)")  # of spawned workers
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loader = DataLoader(Numbered(8), num_workers=2, multiprocessing_context=method)
    iterator = iter(loader)
    processes = iterator._workers
    began = time.monotonic()
    iterator._all_workers.close(grace_s=100.0)
    assert time.monotonic() - began < 60
    loader.close()
    assert {process.exitcode for process in processes} <= {-signal.SIGTERM, 0}


def test_a_process_whose_name_is_no_text_can_be_looked_at() -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes(b"\xff\xfe")
    try:
        assert not answers(os.getpid())
    finally:
        comm.write_bytes(before.rstrip())
