"""A worker that dies at any moment is an error in time that names it, and nothing else is lost."""

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
from loading import Ends, Numbered, Sleeps

import shmloader
from robustness.datasets import first_indices
from robustness.worker_kills import (
    BATCH,
    METHODS,
    MOMENTS,
    MOST_ERROR_S,
    SIGNALS,
    kill_once,
    kill_while_being_started,
)
from shmloader import DataLoader

LOADED_S = 8.0  # time that a loaded machine may add; `worker_kills` as a program allows 2 s

quietly = pytest.mark.filterwarnings(
    "ignore::shmloader.SpillWarning", "ignore:This DataLoader will create:UserWarning"
)


@pytest.fixture
def signals_that_end() -> Iterator[None]:
    """Workers inherit ignored signals: a run that nohup has started ignores SIGHUP."""
    ignored = [how for how in SIGNALS if signal.getsignal(how) is signal.SIG_IGN]
    for how in ignored:
        signal.signal(how, signal.SIG_DFL)
    yield
    for how in ignored:
        signal.signal(how, signal.SIG_IGN)


@quietly
@pytest.mark.usefixtures("signals_that_end")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_worker_is_named_in_time_and_all_are_gone(moment: str) -> None:
    rng = random.Random(moment)
    # Not signals for which pytest's faulthandler, inherited by forked workers, prints all stacks.
    for how in set(SIGNALS) - {signal.SIGSEGV, signal.SIGBUS}:
        assert kill_once("fork", moment, how, rng).error_s < MOST_ERROR_S + LOADED_S


@quietly
@pytest.mark.usefixtures("late_exit_codes")
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_so_it_is_under_every_start_method(method: str, warm_helpers: None) -> None:
    rng = random.Random(method)
    for moment in MOMENTS if method == "forkserver" else (rng.choice(MOMENTS),):
        assert kill_once(method, moment, signal.SIGKILL, rng).error_s < MOST_ERROR_S + LOADED_S


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_a_worker_that_exits_is_named_with_its_code(code: int) -> None:
    with pytest.raises(shmloader.WorkerDied, match=f"worker 1 .*code {code}.*{[20, 21, 22, 23]}") as caught:
        first_indices(DataLoader(Ends(1000, at=21, how=code), batch_size=BATCH, num_workers=2))
    assert (caught.value.exit_code, caught.value.worker_id) == (code, 1)


def test_a_busy_sibling_does_not_delay_the_error() -> None:
    iterator = iter(DataLoader(Sleeps(100, 30.0, at=5), batch_size=1, num_workers=2))
    first_indices(next(iterator) for _ in range(4))
    time.sleep(0.2)
    began = time.monotonic()
    iterator._workers[0].kill()
    with pytest.raises(shmloader.WorkerDied):
        first_indices(iterator)
    assert time.monotonic() - began < MOST_ERROR_S + LOADED_S


@pytest.mark.parametrize("persistent", [False, True])
def test_the_loader_is_usable_after_a_kill(persistent: bool) -> None:
    loader = DataLoader(Numbered(80), batch_size=BATCH, num_workers=2, persistent_workers=persistent)
    for _ in range(5):
        iterator = iter(loader)
        next(iterator)
        os.kill(iterator._workers[1].pid, signal.SIGKILL)
        with pytest.raises(shmloader.WorkerDied):
            first_indices(iterator)
        del iterator
        assert first_indices(loader) == list(range(0, 80, BATCH))
    loader.close()


def test_batches_held_over_a_death_stay_as_they_are() -> None:
    iterator = iter(DataLoader(Numbered(400), batch_size=BATCH, num_workers=2))
    held = [next(iterator) for _ in range(10)]
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    with pytest.raises(shmloader.WorkerDied):
        first_indices(iterator)
    assert first_indices(held) == list(range(0, 40, BATCH))


@pytest.mark.usefixtures("late_exit_codes")
@pytest.mark.parametrize("ballast_nbytes", [0, 1 << 20])
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_killed_while_it_is_being_started_is_named(
    method: str, ballast_nbytes: int, warm_helpers: None
) -> None:
    error, _ = kill_while_being_started(method, ballast_nbytes)
    assert isinstance(error, shmloader.WorkerDied), repr(error)
    assert error.worker_id in (0, 1)
    if (
        error.pid is None and method != "fork"
    ):  # it was gone before it had its pickle: the fork server alone knows its pid
        assert f"start method {method!r}), before it had read its dataset" in str(error)
        return
    assert error.exit_code == -signal.SIGKILL
    assert f"pid {error.pid}" in str(error)


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_death_between_epochs_is_no_fault_of_the_next_ones_batches(restarts: int) -> None:
    """It is found when the epoch begins, as in torch, before the worker gets a batch."""
    given = {"batch_size": 2, "num_workers": 2, "persistent_workers": True, "worker_restarts": restarts}
    with DataLoader(Numbered(12), **given) as loader:
        first = first_indices(loader)
        worker = loader._iterator._workers[1]
        os.kill(worker.pid, signal.SIGKILL)
        worker.join(60)
        if not restarts:
            with pytest.raises(shmloader.WorkerDied) as caught:
                iter(loader)
            assert caught.value.indices == ()
        else:
            assert first_indices(loader) == first
            assert loader.statistics().worker_restarts == 1
