"""States that do not fit a loader, and loaders that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resume_datasets import Plain
from resume_loaders import build, flat, started, values
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from shmloader import DataLoader, ResumeError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 41}, "dataset_len is 40 in the state and 41 in this loader"),
        ({"batch_size": 5}, "batch_size is 4 in the state and 5 in this loader"),
        ({"drop_last": True}, "drop_last is False in the state and True in this loader"),
        ({"shuffle": False}, "sampler is 'BatchSampler of RandomSampler' in the state and 'BatchSampler of"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ResumeError, match=message) as error:
        build(0, **options).load_state_dict(started(build(0)))
    assert "num_workers" in str(error.value)
    assert isinstance(error.value, ValueError)


def test_between_epochs_batch_size_and_length_may_change() -> None:
    loader = build(0)
    values(loader)
    state = loader.state_dict()
    other = build(0, batch_size=5, length=50)
    other.load_state_dict(state)
    assert sorted(flat(values(other))) == list(range(50))


@pytest.mark.parametrize("seed", [1, None])
def test_the_seed_of_a_distributed_sampler_counts(seed: int | None) -> None:
    dataset = Plain(40)
    state = started(DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, 0, seed=0)))
    other = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, 0, seed=seed or 0))
    if seed is None:
        other.load_state_dict(state)
    else:
        with pytest.raises(ResumeError, match="sampler's seed is 0 in the state and 1 in this loader"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_num_yielded": 3}, "no state of a shmloader.DataLoader"),
        ({"version": 99}, "version 99"),
        (None, "a state is a dict, not None"),
        ([], r"a state is a dict, not \[\]"),
    ],
)
def test_what_is_no_state_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ResumeError, match=message):
        build(0).load_state_dict(state)


def test_two_iterators_in_use_at_once_are_refused() -> None:
    loader = build(0)
    with pytest.raises(ResumeError, match="two iterators"):
        for _ in zip(loader, loader, strict=True):
            loader.state_dict()
    older = iter(loader)
    next(older)
    newer = iter(loader)  # the older one still exists, unchanged
    next(newer)
    assert loader.state_dict()["batches"] == 1


def test_an_iterator_that_was_in_use_once_does_not_refuse_later_states() -> None:
    loader = build(0)
    older = iter(loader)
    newer = iter(loader)
    assert len(list(older)) == len(list(newer)) == len(loader)
    assert loader.state_dict()["finished"]
    next(iter(loader))
    assert loader.state_dict()["batches"] == 1


def test_an_older_iterator_that_outlives_a_newer_one_is_refused() -> None:
    loader = build(0)
    older = iter(loader)
    list(loader)
    next(older)
    with pytest.raises(ResumeError, match="two iterators"):
        loader.state_dict()


def test_samplers_of_one_batch_sampler_are_known_through_it() -> None:
    dataset = Plain(40)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(
        dataset, batch_sampler=BatchSampler(RandomSampler(dataset, generator=generator), 4, False)
    )
    state = started(loader)
    assert (state["batch_size"], state["sampler"]) == (4, "BatchSampler of RandomSampler")
    assert state["sampler_generator"].startswith("drawn 1 ")
