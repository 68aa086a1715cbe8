"""A stack is requested only if the worker can answer, and a caught timeout has no effect."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loading import Numbered, Sleeps

from shmloader import DataLoader, WorkerTimeout
from shmloader.failures.stacks import StackFile, answers


def test_a_spawned_worker_outlives_timeouts_while_it_starts() -> None:
    """Such a worker has no handler yet: the request for its stack would end it."""
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
    with DataLoader(Sleeps(4, 1.5, at=1), batch_size=1, num_workers=1, timeout=0.3) as loader:
        iterator = iter(loader)
        batches, timeouts = [], []
        while len(batches) < 4:
            try:
                batches.append(int(next(iterator)[0, 0]))
            except WorkerTimeout as error:
                if len(batches) == 1:  # a busy machine may let others come late, too
                    timeouts.append(str(error))
    assert batches == [0, 1, 2, 3]
    assert len(timeouts) >= 2
    assert not [text for text in timeouts if "have ended" in text]
    assert all("__getitem__" in text for text in timeouts)


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
