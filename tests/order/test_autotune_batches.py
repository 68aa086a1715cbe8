"""``num_workers="auto"``: any choice gives the same batches, and none waits for a starting worker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from autotune_datasets import Draws, WaitForFile, epochs, plain, processes
from forced_growth import grow_at
from loading import Numbered

from shmloader import DataLoader
from shmloader.settings import AutoCount

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


# --- the same batches


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_and_draws_do_not_depend_on_what_was_chosen(three_cores: None, in_order: bool) -> None:
    """One, two and three workers from the start, and a number that grows meanwhile."""

    def play(**given: Any) -> list[Any]:
        with DataLoader(
            Draws(90, 0.002), batch_size=1, shuffle=True, persistent_workers=True, in_order=in_order, **given
        ) as loader:
            torch.manual_seed(7)
            found, seen = [], set()
            for _ in range(2):
                found.append([])
                for batch in loader:
                    found[-1].append(plain(batch))
                    seen.add(int(loader.num_workers))
            tried.append(seen)
        return found if in_order else [sorted(epoch) for epoch in found]

    tried: list[set[int]] = []
    expected = play(num_workers=1, dispatch="dynamic")
    for start in (1, 2, 3):
        assert play(num_workers=AutoCount(start)) == expected
    assert play(num_workers="auto", prefetch_factor="auto") == expected
    assert tried[0] == {1}
    assert len(tried[-1]) > 1


def test_workers_that_are_not_forked_join_too(three_cores: None, warm_helpers: None) -> None:
    with DataLoader(
        Numbered(150, delay_s=0.015),
        num_workers="auto",
        multiprocessing_context="forkserver",
        persistent_workers=True,
    ) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(150))
        assert loader.num_workers == processes(loader) == 3


def test_nobody_waits_for_a_worker_that_is_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker gets no task until it has started: the file that it waits for comes after 70 batches."""
    grow_at(monkeypatch, {20, 22})
    wait = WaitForFile(tmp_path / "now")
    with DataLoader(
        Draws(150, 0.003), num_workers="auto", worker_init_fn=wait, timeout=30, persistent_workers=True
    ) as loader:
        most = 0
        for number, batch in enumerate(loader):
            most = max(most, loader._iterator._scheduler.free_workers.num_workers)
            assert int(batch[0]) == number
            if number == 70:
                assert loader._iterator._exchange.joining == {1, 2}
                assert loader._iterator._scheduler.free_workers.num_workers == 1
                wait.path.touch()
        assert not loader._iterator._exchange.joining
        assert most == 3


def test_an_epoch_may_be_left_while_workers_are_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further epochs begin without them, and use them when they have started."""
    length = 60
    with DataLoader(
        Draws(length, 0.003), num_workers=1, dispatch="dynamic", persistent_workers=True
    ) as fixed:
        expected = epochs(fixed, 4)
    wait = WaitForFile(tmp_path / "now")
    grow_at(monkeypatch, {20, 22})
    with DataLoader(
        Draws(length, 0.003), num_workers="auto", worker_init_fn=wait, timeout=30, persistent_workers=True
    ) as loader:
        torch.manual_seed(7)
        for epoch, leave in enumerate((50, 2, length, length)):
            iterator = iter(loader)
            assert [plain(next(iterator)) for _ in range(leave)] == expected[epoch][:leave]
            if epoch == 1:
                assert loader._iterator._exchange.joining == {1, 2}
                wait.path.touch()
        assert not loader._iterator._exchange.joining


def test_workers_may_come_in_an_epoch_that_was_begun_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were started in the epoch before, and report then."""
    grow_at(monkeypatch, {20, 22})
    wait = WaitForFile(tmp_path / "now")
    given: dict[str, Any] = {"persistent_workers": True, "prefetch_epochs": True}
    with DataLoader(Draws(60, 0.003), num_workers="auto", worker_init_fn=wait, timeout=30, **given) as loader:
        for epoch in range(6):
            assert [int(batch[0]) for batch in loader] == list(range(60))
            if epoch == 0:
                assert loader._iterator._exchange.joining == {1, 2}
            elif epoch == 1:
                wait.path.touch()
        assert not loader._iterator._exchange.joining
        assert loader.statistics().epochs_prefetched == 5


def test_worker_threads_are_chosen_too(three_cores: None) -> None:
    with DataLoader(
        Numbered(120, delay_s=0.012), num_workers="auto", worker_type="thread", persistent_workers=True
    ) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(120))
        assert loader.num_workers == 3
        assert sum(thread.name.startswith("shmloader") for thread in threading.enumerate()) == 3


def test_no_thread_is_started_in_the_program(three_cores: None) -> None:
    threads = threading.active_count()
    with DataLoader(Draws(80, 0.008), num_workers="auto", persistent_workers=True) as loader:
        most = 0
        for _ in loader:
            assert threading.active_count() == threads
            most = max(most, processes(loader))
        assert most == 3
