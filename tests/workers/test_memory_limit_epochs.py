"""``worker_max_nbytes`` between epochs: a worker hands over while the next one begins."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import leaking_datasets as leaking
import psutil
import pytest
from leaking_datasets import LEAK_NBYTES, LIMIT_NBYTES, SMALL, Batches, loader_of, values
from robustness.processes import LONG, wait_gone

import shmloader
from shmloader.workers.processes import ProcessWorker

ROUNDS = 40 if LONG else 4


@pytest.mark.parametrize("first", [0, None])
@pytest.mark.parametrize(("leaks_at", "batches"), [(12, 7), (38, None)])
def test_an_epoch_begins_while_a_worker_hands_over(
    leaks_at: int, batches: int | None, first: int | None
) -> None:
    """After its last batch or in the middle; with tasks left, which a new worker makes as of their epoch."""
    runs = []
    for nbytes, limit in ((0, None), (2 * LIMIT_NBYTES, LIMIT_NBYTES)):
        dataset, options = leaking.LeakingAt(40, nbytes, leaks_at), SMALL | {"num_workers": 1}
        with loader_of(dataset, limit, shuffle=False, persistent_workers=True, **options) as loader:
            if first is not None:
                loader.set_epoch(first)
            found = [values(itertools.islice(loader, batches))]
            loader.set_epoch(1)
            runs.append([*found, values(loader)])
            renewed = loader.statistics().workers_renewed
    assert renewed
    assert runs[0] == runs[1]


def test_a_worker_that_hands_over_in_mid_epoch_waits_for_an_epoch_that_the_dataset_has_heard_of() -> None:
    dataset = leaking.LeakingAt(40, 2 * LIMIT_NBYTES, 12)
    expected = values(loader_of(leaking.LeakingAt(40, 0, 0), None, shuffle=False, num_workers=1))
    with loader_of(dataset, shuffle=False, num_workers=1, persistent_workers=True, **SMALL) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(1)
        assert values(iterator) == expected[1:]
        assert not loader.statistics().workers_renewed
        for _ in range(10):  # the worker looks at its memory from time to time
            assert {epoch for batch in loader for epoch in batch["epoch"].tolist()} == {1}
            if loader.statistics().workers_renewed:
                break
        assert loader.statistics().workers_renewed


def test_an_epoch_begins_after_a_worker_could_not_hand_over() -> None:
    """The main process does not wait for it, and the reason comes with the next batch."""
    dataset = leaking.Unable(40, 2 * LIMIT_NBYTES, 38)
    with loader_of(dataset, shuffle=False, num_workers=1, persistent_workers=True, **SMALL) as loader:
        loader.set_epoch(0)
        assert len(list(loader)) == 20
        for _ in range(2):
            with pytest.raises(ValueError, match="no state today"):
                list(loader)


def test_an_epoch_begins_after_a_worker_could_not_take_over() -> None:
    """Without the states of the one before it would draw other numbers: each batch is the error."""
    dataset = leaking.Around(leaking.LeakingAt(40, 2 * LIMIT_NBYTES, 38), 1)
    with loader_of(dataset, shuffle=False, num_workers=1, persistent_workers=True, **SMALL) as loader:
        loader.set_epoch(0)
        assert len(list(loader)) == 20
        dataset.extra = 2
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(shmloader.LoaderError, match=r"Around\.extra is 2 in a worker"):
                next(iterator)


def test_an_epoch_begins_after_the_beginning_of_a_new_worker_failed(tmp_path: Path) -> None:
    def fail_in_the_second(_: int) -> None:
        if (tmp_path / "first").exists():
            raise ValueError("not twice")
        (tmp_path / "first").touch()

    dataset = leaking.LeakingAt(40, 3 * LIMIT_NBYTES, 38)
    options = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": fail_in_the_second}
    with loader_of(dataset, 2 * LIMIT_NBYTES, shuffle=False, **options) as loader:
        loader.set_epoch(0)
        assert len(list(loader)) == 20
        with pytest.raises(ValueError, match="not twice"):
            list(loader)


def test_a_worker_that_has_handed_over_and_ended_is_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its records are found only as the next epoch looks for dead workers."""
    is_dead = ProcessWorker.is_dead

    def later(worker: ProcessWorker) -> bool:
        if not worker.released and asked:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
                wait_gone([psutil.Process(worker.pid)], 10)
        return is_dead(worker)

    asked = False
    undrained = leaking.LeakingAt(40, 0, 0)
    undrained.set_epoch(0)
    expected = values(loader_of(undrained, None, shuffle=False, num_workers=1))
    monkeypatch.setattr(ProcessWorker, "is_dead", later)
    dataset, options = leaking.LeakingAt(40, 2 * LIMIT_NBYTES, 14), {"num_workers": 1, "prefetch_factor": 1}
    with loader_of(dataset, shuffle=False, persistent_workers=True, **SMALL, **options) as loader:
        loader.set_epoch(0)
        assert values(itertools.islice(loader, 7)) == expected[:7]  # the eighth is made
        asked = True
        iterator = iter(loader)
        asked = False
        assert len(list(iterator)) == 20
        assert loader.statistics().workers_renewed >= 1
        assert loader.statistics().worker_restarts == 0


def told(loader: Any, chance: random.Random, epochs: int) -> list[Batches]:
    """Epochs that are left early or told of the next one at random; the same for the same ``chance``."""
    found: list[Batches] = []
    for epoch in range(epochs):
        if epoch == 1 or chance.random() < 0.8:
            loader.set_epoch(epoch)
        ends, tells = chance.choice([None, chance.randrange(1, 60)]), chance.choice([-1, -1, 5, 30])
        found.append([])
        for number, batch in enumerate(itertools.islice(loader, ends)):
            found[-1] += values([batch])
            if number == tells:
                loader.set_epoch(epoch + 1)
    return found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_epochs_that_begin_at_any_moment_of_a_handover_draw_what_an_undrained_run_draws() -> None:
    """While workers are stopped and go on at random; with SHMLOADER_LONG=1 some hundreds of epochs."""
    renewed = 0
    for seed in range(ROUNDS):
        runs, over = [], threading.Event()
        for nbytes, limit in ((0, None), (LEAK_NBYTES, LIMIT_NBYTES)):
            dataset = leaking.Told(160, nbytes)
            with loader_of(dataset, limit, persistent_workers=True, **SMALL) as loader:
                stopper = threading.Thread(target=stop_at_random, args=(random.Random(seed), over))
                stopper.start()
                try:
                    runs.append(told(loader, random.Random(seed), 4))
                finally:
                    over.set()
                    stopper.join()
                renewed += loader.statistics().workers_renewed
            over.clear()
        assert runs[0] == runs[1], f"seed {seed}"
    assert renewed > ROUNDS


def stop_at_random(chance: random.Random, over: threading.Event) -> None:
    """Stop workers, which are the fork server's children, for moments, until it is over."""
    while not over.wait(chance.random() * 0.05):
        for worker in psutil.Process().children(recursive=True):
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if worker.ppid() != os.getpid() and chance.random() < 0.5:
                    os.kill(worker.pid, signal.SIGSTOP)
                    over.wait(chance.random() * 0.02)
                    os.kill(worker.pid, signal.SIGCONT)
