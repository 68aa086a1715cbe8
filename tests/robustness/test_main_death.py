"""Nothing outlives a main process that was killed, at whatever stage."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from loading import Numbered

from robustness.datasets import first_indices
from robustness.main_kills import STAGES, kill_once, most_gone_s
from robustness.processes import start_python, wait_gone, workers_of
from shmloader import DataLoader

LOADED_S = 3.0  # time that a loaded machine may add to 2 s; `main_kills` as a program allows 2 s


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_outlives_a_killed_main_process(stage: str) -> None:
    rng = random.Random(stage)
    kill = kill_once(stage, "fork", rng)
    assert kill.workers == 2 or stage == "starting"
    assert kill.gone_s < 2 + LOADED_S


@pytest.mark.parametrize(("stage", "method"), [("starting", "spawn"), ("holding", "forkserver")])
def test_so_it_is_where_workers_are_not_forked(stage: str, method: str) -> None:
    kill = kill_once(stage, method, random.Random(method))
    assert kill.gone_s < most_gone_s(stage, method) + LOADED_S


BUSY = """
    import sys
    from robustness.datasets import HoldsTheLock
    from shmloader import DataLoader

    if __name__ == "__main__":
        path, method = sys.argv[1:]
        next(iter(DataLoader(HoldsTheLock(8, 0, path), num_workers=1, multiprocessing_context=method)))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_whose_c_code_holds_the_interpreter_lock_ends_too(method: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with start_python(BUSY, str(begun), method) as main:
        while not begun.exists():
            assert main.poll() is None, main.stdout and main.stdout.read()
            time.sleep(0.02)
        workers = workers_of(main.pid)
        assert len(workers) == 1
        os.kill(main.pid, signal.SIGKILL)
        main.wait()
    _, left = wait_gone(workers, 2 + LOADED_S)
    assert not left


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_outlive_the_thread_that_started_them(method: str) -> None:
    loader = DataLoader(
        Numbered(40), batch_size=4, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    thread = threading.Thread(target=lambda: first_indices(loader))
    thread.start()
    thread.join()
    with loader:
        assert first_indices(loader) == list(range(0, 40, 4))
