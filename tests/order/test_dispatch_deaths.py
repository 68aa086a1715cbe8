"""``dispatch="dynamic"``: an epoch continues, with the same draws, although workers die or hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_datasets import Draws, Gate, plain, play
from torch.utils.data import get_worker_info

from shmloader import DataLoader, WorkerDied, WorkerTimeout

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class DrawsAndDies(Draws):
    """The first worker that comes to each of ``deadly`` is killed, after it has drawn."""

    def __init__(self, length: int, folder: Path, deadly: tuple[int, ...]) -> None:
        super().__init__(length)
        self.folder, self.deadly = folder, deadly

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        mark = self.folder / str(index)
        if index in self.deadly and get_worker_info() is not None and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


# --- workers that die or hang


def test_an_epoch_is_the_same_though_workers_die(tmp_path: Path) -> None:
    """Samples that are made again draw the same numbers again."""
    expected = play(Draws(40), 2, batch_size=4, num_workers=1)
    torch.manual_seed(5)
    with DataLoader(
        DrawsAndDies(40, tmp_path, (1, 18, 33)),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        worker_restarts=3,
        dispatch="dynamic",
    ) as loader:
        assert [[plain(batch) for batch in loader] for _ in range(2)] == expected
        assert loader.statistics().worker_restarts == 3


def test_a_worker_that_starts_in_a_later_epoch_draws_that_epochs_numbers(tmp_path: Path) -> None:
    expected = play(Draws(40), 3, batch_size=4, num_workers=1)
    torch.manual_seed(5)
    with DataLoader(
        DrawsAndDies(40, tmp_path, ()),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        worker_restarts=2,
        dispatch="dynamic",
    ) as loader:
        assert [plain(batch) for batch in loader] == expected[0]
        for epoch in (1, 2):
            os.kill(loader._iterator._workers[epoch % 2].pid, signal.SIGKILL)
            assert [plain(batch) for batch in loader] == expected[epoch]
        assert loader.statistics().worker_restarts == 2


def test_a_worker_may_die_while_the_other_runs_ahead() -> None:
    """The worker that runs ahead is killed: its many tasks are made again, and none is lost."""
    dataset = Gate(80, {7}, 40)
    with DataLoader(dataset, num_workers=2, dispatch="dynamic", worker_restarts=2, timeout=60) as loader:
        iterator = iter(loader)
        victim = None
        samples = []
        for batch in iterator:
            samples.append(batch)
            if len(samples) == 3:
                victim = iterator._workers[1 - int(samples[0][0, 1])].pid
                with dataset.made.get_lock():  # else it might die with the lock, for which all others wait
                    os.kill(victim, signal.SIGKILL)
                    os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)
        assert torch.cat(samples)[:, 0].tolist() == list(range(80))
        assert loader.statistics().worker_restarts == 1


def test_without_restarts_a_death_is_an_error_that_names_what_it_held(tmp_path: Path) -> None:
    dataset = DrawsAndDies(40, tmp_path, (20,))
    with DataLoader(dataset, batch_size=4, num_workers=2, dispatch="dynamic") as loader:
        with pytest.raises(WorkerDied, match=r"20, 21, 22, 23") as caught:
            list(loader)
        assert caught.value.indices[0] == [20, 21, 22, 23]
        assert [int(batch["index"][0]) for batch in loader] == list(range(0, 40, 4))


class Hangs(Draws):
    def __init__(self, length: int, folder: Path) -> None:
        super().__init__(length)
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        mark = self.folder / "hung"
        if index == 6 and not mark.exists():
            mark.touch()
            time.sleep(60)
        time.sleep(0.02)
        return super().__getitem__(index)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_hangs_is_found_though_the_other_runs_ahead(tmp_path: Path, restarts: int) -> None:
    """Once the wait is as long as the timeout, no worker gets further tasks."""
    with DataLoader(
        Hangs(200, tmp_path), num_workers=2, dispatch="dynamic", timeout=0.4, worker_restarts=restarts
    ) as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        if restarts:
            assert [int(batch["index"]) for batch in iterator] == list(range(6, 200))
            assert loader.statistics().worker_restarts == 1
        else:
            with pytest.raises(WorkerTimeout, match=r"timed out after 0\.4.*\[6\]"):
                next(iterator)
            assert len(iterator._exchange.table.unreturned) < 50  # of 70 that the slots would have allowed
            for worker in iterator._workers:  # closing would wait for the one that hangs
                worker.kill()
