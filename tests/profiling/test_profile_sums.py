"""The figures of a profile are of all its batches, however many there are and however short its epochs."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from loading import Numbered
from torch.utils.data import IterableDataset

from shmloader import DataLoader
from shmloader.verdict import Cause

STEP_S = 0.02


class Numbers(IterableDataset[int]):
    """A stream of numbers, each of which takes long enough to be named."""

    def __iter__(self) -> Iterator[int]:
        for number in range(32):
            time.sleep(0.002)
            yield number


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sums_are_of_the_whole_profile_though_its_first_entries_are_forgotten(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmloader.profiling.recorder.MOST_BATCHES", 5)
    with DataLoader(Numbered(160, delay_s=0.005), 8, num_workers=num_workers) as loader:
        with loader.profile() as profile:
            for _ in loader:
                time.sleep(0.005)
        made_s = loader.statistics().in_process_s
    report = profile.report()
    assert (len(report.returned), len(report.made)) == (5, 5)
    assert (report.batches, sum(count for count, _ in report.by_worker.values())) == (20, 20)
    assert report.total_s >= max(20 * 8 * 0.005 / max(1, num_workers), made_s)


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_program_is_told_that_it_could_be_faster_than_its_own_steps(
    num_workers: int, replays: bool
) -> None:
    """Also in epochs of two batches."""
    loader = DataLoader(Numbered(8), 4, num_workers=num_workers, persistent_workers=num_workers > 0)
    with loader, loader.profile(replay=replays) as profile:
        for _ in range(10):
            for _ in loader:
                time.sleep(STEP_S)
    report = profile.report()
    assert report.batches == 20
    assert report.batches / report.total_s <= 1 / STEP_S
    assert 0 < report.bound_batches_per_s <= 1 / STEP_S
    if replays:
        assert f"faster than {report.bound_batches_per_s:,.1f} batches/s" in report.verdict.text


def test_the_bound_does_not_count_batches_at_which_epochs_were_left() -> None:
    with DataLoader(Numbered(40), 4) as loader, loader.profile() as profile:
        for _ in range(5):
            for _ in itertools.islice(loader, 3):
                time.sleep(STEP_S)
    assert 0 < profile.report().bound_batches_per_s <= 1 / STEP_S


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_a_stream_are_not_named(num_workers: int) -> None:
    with DataLoader(Numbers(), 4, num_workers=num_workers) as loader, loader.profile() as profile:
        list(loader)
    assert profile.report().slowest == {}
    assert "slowest" not in str(profile)


class AtOnce(Numbered):
    """One call fetches samples, also none, and takes long enough for them to be named."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(0.006)
        return [self[index] for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_without_samples_is_measured_and_names_none(num_workers: int) -> None:
    loader = DataLoader(
        AtOnce(4), batch_sampler=[[0, 1], [], [2, 3]], collate_fn=len, num_workers=num_workers
    )
    with loader, loader.profile() as profile:
        assert list(loader) == [2, 0, 2]
    assert profile.report().batches == 3
    assert len(profile.report().slowest) == 2


def test_a_worker_that_replaces_another_is_measured() -> None:
    with DataLoader(
        Numbered(160, delay_s=0.002), 4, num_workers=2, persistent_workers=True, worker_restarts=3
    ) as loader:
        list(loader)
        with loader.profile() as profile:
            for number, _ in enumerate(loader):
                if number == 2:
                    os.kill(loader._iterator._workers[1].pid, signal.SIGKILL)
        assert loader.statistics().worker_restarts == 1
    assert sum(count for count, _ in profile.report().by_worker.values()) == 40


def test_times_of_an_epoch_that_began_before_the_profile_do_not_count() -> None:
    with DataLoader(Numbered(80, delay_s=0.002), 4, num_workers=1) as loader, loader.profile():
        batches = iter(loader)
        next(batches)
        with loader.profile() as inner:
            list(batches)
    assert inner.report().made == ()


@pytest.mark.parametrize("batches", [4, 8])
def test_the_verdict_counts_what_workers_made_of_an_epoch_that_was_begun_before_the_profile(
    batches: int,
) -> None:
    """They have not measured it: of four batches none, of eight half."""
    with DataLoader(
        Numbered(batches * 2, delay_s=0.3), 2, num_workers=2, persistent_workers=True, prefetch_epochs=True
    ) as loader:
        list(loader)
        before_s = loader.statistics().workers_made_s
        with loader.profile() as profile:
            list(loader)
        assert loader.statistics().epochs_prefetched == 1
        made_s = loader.statistics().workers_made_s - before_s
    assert len(profile.report().made) <= batches - 4
    assert made_s >= batches * 2 * 0.3
    verdict = profile.report().verdict
    assert verdict.cause not in {Cause.TOO_LITTLE, Cause.FOREIGN, Cause.SLOW_SAMPLE, Cause.UNEVEN}, (
        verdict.text
    )
    assert "0.0 s of 0.0 s" not in verdict.text


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_is_told_apart_that_only_its_dataset_can_divide(num_workers: int) -> None:
    for dataset, shard, expected in (
        (Numbers(), None, True),
        (Numbers(), "auto", False),
        (Numbered(8), None, False),
    ):
        with DataLoader(dataset, 4, num_workers=num_workers, shard=shard) as loader:
            list(loader)
            assert loader.statistics().is_undivided is expected
