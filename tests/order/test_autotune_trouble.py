"""``num_workers="auto"``: deaths, failing starts, bad samples and early ends while a number is chosen."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from autotune_datasets import Draws, WaitForFile, epochs, processes
from forced_growth import grow_at
from robustness.processes import assert_dies_with_its_last_reference

from shmloader import DataLoader, WorkerDied

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


# --- trouble


class Ends(Draws):
    """The worker that is asked for a sample of ``deadly`` for the first time is killed."""

    def __init__(self, length: int, folder: Path, deadly: tuple[int, ...]) -> None:
        super().__init__(length, 0.003)
        self.folder, self.deadly = folder, deadly

    def __getitem__(self, index: int) -> Any:
        if index in self.deadly and not (self.folder / str(index)).exists():
            (self.folder / str(index)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_dies_while_this_is_chosen_is_an_error(tmp_path: Path, three_cores: None) -> None:
    with DataLoader(Ends(80, tmp_path, (33,)), num_workers="auto") as loader:
        with pytest.raises(WorkerDied, match=r"signal 9.*33"):
            list(loader)
        assert [int(batch[0]) for batch in loader] == list(range(80))


def test_dead_workers_are_replaced_meanwhile(tmp_path: Path, three_cores: None) -> None:
    expected = epochs(DataLoader(Draws(90), num_workers=1, dispatch="dynamic"))
    with DataLoader(
        Ends(90, tmp_path, (3, 27, 28, 60)), num_workers="auto", worker_restarts=4, persistent_workers=True
    ) as loader:
        assert epochs(loader) == expected
        assert loader.statistics().worker_restarts == 4
        assert processes(loader) >= loader.num_workers


class Told(Draws):
    """Sample ``i`` is the epoch that its worker's dataset has heard of."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        return self.epoch


def test_none_is_added_whose_dataset_has_heard_of_the_next_epoch(three_cores: None) -> None:
    with DataLoader(Told(90, 0.003), num_workers="auto", persistent_workers=True) as loader:
        iterator = iter(loader)
        assert int(next(iterator)) == 0
        loader.set_epoch(1)
        assert {int(batch) for batch in iterator} == {0}
        assert processes(loader) == 1
        assert {int(batch) for batch in loader} == {1}
        assert processes(loader) > 1


def end_the_second(worker_id: int) -> None:
    if worker_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_before_it_is_there_is_an_error(three_cores: None) -> None:
    with (
        DataLoader(Draws(90, 0.003), num_workers="auto", worker_init_fn=end_the_second) as loader,
        pytest.raises(WorkerDied, match=r"worker 1 .*signal 9"),
    ):
        list(loader)


def fail_in_the_second(worker_id: int) -> None:
    if worker_id == 1:
        raise ArithmeticError("worker 1 does not want to")


def test_an_error_of_worker_init_fn_is_raised(three_cores: None) -> None:
    with (
        DataLoader(Draws(90, 0.003), num_workers="auto", worker_init_fn=fail_in_the_second) as loader,
        pytest.raises(ArithmeticError, match="worker 1 does not"),
    ):
        list(loader)


def test_where_no_further_worker_can_be_started_those_that_are_there_go_on(
    three_cores: None, caplog: pytest.LogCaptureFixture
) -> None:
    """There are no descriptors left for a further worker."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with DataLoader(Draws(190, 0.003), num_workers="auto", persistent_workers=True) as loader:
        iterator = iter(loader)
        found = [int(next(iterator)[0])]
        filled = [os.open(os.devnull, os.O_RDONLY) for _ in range(30)]  # no gap below the last
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1, limits[1]))
        try:
            found += [int(batch[0]) for batch in iterator]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in filled:
                os.close(fd)
        assert found == list(range(190))
        assert processes(loader) == loader.num_workers == 1
        assert "no more workers could be started" in loader.statistics().autotune.why
    assert "could not start one more worker" in caplog.text


class OpensSomething(Draws):
    """A dataset that cannot be pickled after a call in the main process."""

    lock: Any = None

    def open(self) -> None:
        self.lock = threading.Lock()


def test_a_dataset_that_cannot_be_pickled_any_more_ends_no_epoch(
    three_cores: None, warm_helpers: None, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = OpensSomething(190, 0.003)  # on a busy machine not every period of them leads to a decision
    with DataLoader(dataset, num_workers="auto", multiprocessing_context="forkserver") as loader:
        found = []
        for batch in loader:
            dataset.open()
            found.append(int(batch[0]))
        assert found == list(range(190))
        assert "no more workers could be started" in loader.statistics().autotune.why
    assert "cannot pickle" in caplog.text


def test_an_epoch_ends_without_waiting_for_a_worker_that_is_still_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a worker has nothing to finish; others get the time for it."""
    grow_at(monkeypatch, {10, 12})
    wait = WaitForFile(tmp_path / "never")
    loader = DataLoader(Draws(40, 0.003), num_workers="auto", worker_init_fn=wait, timeout=30)
    iterator = iter(loader)
    assert len([next(iterator) for _ in range(40)]) == 40
    assert iterator._exchange.joining == {1, 2}
    began_s = time.monotonic()
    iterator._all_workers.close(grace_s=100.0)
    assert time.monotonic() - began_s < 60
    loader.close()


class SomeBad(Draws):
    def __getitem__(self, index: int) -> Any:
        if index % 9 == 4:
            raise ValueError(index)
        return super().__getitem__(index)


def test_bad_samples_are_left_out_as_always(three_cores: None) -> None:
    found = []
    for workers in (1, "auto"):
        loader = DataLoader(
            SomeBad(180, 0.002), batch_size=2, num_workers=workers, dispatch="dynamic", on_error="skip"
        )
        with loader, pytest.warns(RuntimeWarning, match="20 bad sample"):
            found.append(epochs(loader))
    assert found[0] == found[1]


def test_a_loader_may_be_closed_or_forgotten_at_any_moment(three_cores: None) -> None:
    """Nothing is left behind (the leak guard looks), and nothing keeps the iterator alive."""
    for batches in (1, 22, 24, 26, 60):
        loader = DataLoader(Draws(100, 0.005), num_workers="auto")
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        loader.close()
    assert_dies_with_its_last_reference(DataLoader(Draws(100, 0.005), num_workers="auto"), batches=80)


def test_two_iterators_at_once_have_what_is_chosen(three_cores: None) -> None:
    loader = DataLoader(Draws(80, 0.002), num_workers="auto")
    found = [(int(one[0]), int(other[0])) for one, other in zip(loader, loader, strict=True)]
    assert found == [(i, i) for i in range(80)]
    loader.close()
