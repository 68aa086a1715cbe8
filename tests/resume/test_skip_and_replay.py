"""Batches left out of an epoch by `skip_batches`, and single ones made again by ``loader.batch()``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from resume_settings import by_json
from stream_datasets import identity
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset

from shmloader import (
    DataLoader,
    Mixture,
    MixtureSampler,
    NoGoodSample,
    ResumeError,
    ShardedSampler,
    TokenBatchSampler,
    skip_batches,
)

LENGTH = 130
MIXTURE = Mixture({"a": range(90), "b": range(40)})
LENGTHS = np.random.default_rng(3).integers(1, 60, LENGTH)


class Drawing(Dataset[Any]):
    """Samples that depend on their index, on random draws, and on the epoch that the dataset was told."""

    def __init__(self, draws: bool = True) -> None:
        self.draws, self.epoch = draws, -1

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        drawn = (random.random(), float(np.random.random()), float(torch.rand(()))) if self.draws else ()
        return index, self.epoch, drawn

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


SAMPLERS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "sharded": lambda ranks, rank: {
        "sampler": ShardedSampler(range(LENGTH), ranks, rank, seed=3),
        "batch_size": 6,
    },
    "distributed": lambda ranks, rank: {
        "sampler": DistributedSampler(range(LENGTH), ranks, rank, seed=3),  # type: ignore[arg-type]
        "batch_size": 6,
    },
    "mixture": lambda ranks, rank: {
        "sampler": MixtureSampler(MIXTURE, {"a": 1, "b": 2}, num_replicas=ranks, rank=rank),
        "batch_size": 4,
    },
    "mixture as batch sampler": lambda ranks, rank: {
        "batch_sampler": BatchSampler(
            MixtureSampler(MIXTURE, num_replicas=ranks, rank=rank), 4, drop_last=True
        )
    },
    "tokens": lambda ranks, rank: {
        "batch_sampler": TokenBatchSampler(LENGTHS, 100, num_replicas=ranks, rank=rank)
    },
    "sequential": lambda *_: {"batch_size": 6},
    "single samples": lambda ranks, rank: {
        "sampler": ShardedSampler(range(LENGTH), ranks, rank),
        "batch_size": None,
    },
}


def loader_of(kind: str, ranks: int = 2, rank: int = 1, *, draws: bool = True, **arguments: Any) -> Any:
    given = {"seed_per_sample": draws, "collate_fn": identity, **SAMPLERS[kind](ranks, rank), **arguments}
    return DataLoader(Drawing(draws), **given)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_left_out_and_the_others_are_the_same(kind: str, workers: int) -> None:
    loader = loader_of(kind)
    loader.set_epoch(2)
    iterator = iter(loader)
    had = list(itertools.islice(iterator, 3))
    state = by_json(loader.state_dict())
    rest = list(iterator)
    again = loader_of(kind, num_workers=workers)
    again.load_state_dict(skip_batches(skip_batches(state, range(4)), range(6, 9)))
    iterator = iter(again)
    wanted = [batch for number, batch in enumerate(rest, 3) if number not in (3, 6, 7, 8)]
    first = list(itertools.islice(iterator, 2))
    assert again.state_dict()["batches_behind"] == ""
    assert again.state_dict()["batches"] == 9
    later = by_json(again.state_dict())
    assert [*first, *iterator] == wanted
    once_more = loader_of(kind)
    once_more.load_state_dict(skip_batches(later, range(9)))
    assert list(once_more) == wanted[2:]
    again.close()
    assert len(had) == 3


def test_a_state_lists_what_is_to_be_left_out_shortly() -> None:
    loader = loader_of("sharded")
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    state = skip_batches(loader.state_dict(), range(4, 5000))
    assert state["batches_behind"] == "4-4999"
    again = loader_of("sharded")
    again.load_state_dict(state)
    drawing = iter(again)
    next(drawing)
    assert again.state_dict()["batches_behind"] == "4-4999"
    assert len(list(drawing)) == 2  # the rest of the epoch is left out
    assert again.state_dict()["finished"]


@pytest.mark.timeout(60)
def test_the_end_of_an_epoch_is_left_out_at_once() -> None:
    """However long the range is: it took the square of its length."""
    loader = loader_of("sequential")
    next(iter(loader))
    loader.load_state_dict(skip_batches(loader.state_dict(), range(3, 1_000_000)))
    assert len(list(loader)) == 2
    assert loader.state_dict()["finished"]


def test_what_cannot_be_left_out_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(9))

    loader = loader_of("sharded")
    with pytest.raises(ResumeError, match="lies between two epochs"):
        skip_batches(loader.state_dict(), range(3))
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"in steps of 1, and not range\(0, 4, 2\)"):
        skip_batches(state, range(0, 4, 2))
    with pytest.raises(ValueError, match="has 9,999,999,999 batches, and 10,000,000 can be left out"):
        skip_batches(state, range(1, 10**10))
    with pytest.raises(ValueError, match="from 0 on"):
        skip_batches(state, range(-1, 4))
    with pytest.raises(ResumeError, match="damaged"):
        skip_batches(state | {"batches": 7}, range(4))
    stream = DataLoader(Stream())
    next(iter(stream))
    with pytest.raises(ResumeError, match="iterable-style"):
        skip_batches(stream.state_dict(), range(4))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_is_what_this_rank_had_in_that_step(kind: str, workers: int, rank: int) -> None:
    loader = loader_of(kind, rank=rank, num_workers=workers, persistent_workers=workers > 0)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append(list(loader))
    state = torch.get_rng_state(), random.getstate()
    known = range(2) if workers else [1]
    for epoch in known:
        for number in (0, 3, len(epochs[epoch]) - 1):
            assert loader.batch(epoch, number) == epochs[epoch][number]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert loader.dataset.epoch == 1
    for number in (len(epochs[1]), -1):
        with pytest.raises(IndexError, match=f"epoch 1 has no batch {number}"):
            loader.batch(1, number)
    loader.close()


def test_a_batch_needs_no_training_but_a_state_for_its_seeds() -> None:
    loader = loader_of("sharded", num_workers=2)
    loader.set_epoch(3)
    iterator = iter(loader)
    batches = list(itertools.islice(iterator, 8))
    state = by_json(loader.state_dict())
    loader.close()
    fresh = loader_of("sharded")
    with pytest.raises(ResumeError, match=r"call set_epoch.* load a state of epoch 3"):
        fresh.batch(3, 5)
    fresh.load_state_dict(state)
    assert fresh.batch(3, 5) == batches[5]
    with pytest.raises(ResumeError, match="epoch 2"):
        fresh.batch(2, 5)
    assert next(iter(fresh)) == fresh.batch(3, 8)
    plain = loader_of("sharded", draws=False)
    assert [sample[0] for sample in plain.batch(3, 5)] == [sample[0] for sample in batches[5]]


def test_epochs_whose_numbers_have_gaps_keep_their_seeds() -> None:
    loader = loader_of("sharded", num_workers=1, persistent_workers=True)
    epochs = {}
    for epoch in (0, 2, 4):
        loader.set_epoch(epoch)
        epochs[epoch] = list(loader)
    for epoch, batches in epochs.items():
        assert loader.batch(epoch, 3) == batches[3]
    with pytest.raises(ResumeError, match="does not know that of epoch 3"):
        loader.batch(3, 3)
    loader.close()


def test_a_batch_of_changed_weights_is_that_of_the_state() -> None:
    loader = loader_of("mixture", draws=False)
    iterator = iter(loader)
    next(iterator)
    loader.sampler.set_weights({"a": 0, "b": 1}, position=128)
    loader.sampler.set_epoch(0)
    state, batches = by_json(loader.state_dict()), [[], *iterator]
    fresh = loader_of("mixture", draws=False)
    fresh.load_state_dict(state)
    for number in (2, len(batches) - 1):
        assert loader.batch(0, number) == fresh.batch(0, number) == batches[number]
    assert list(fresh) == batches[1:]


def test_in_a_resumed_epoch_batches_are_those_of_the_ranks_that_continue() -> None:
    for kind in ("sharded", "mixture", "tokens"):
        before = loader_of(kind, 3, 0, draws=False)
        before.set_epoch(1)
        iterator = iter(before)
        list(itertools.islice(iterator, 2))
        after = loader_of(kind, 2, 1, draws=False)
        after.load_state_dict(before.state_dict())
        rest = list(after)
        assert [after.batch(1, number) for number in range(2, 2 + len(rest))] == rest


@pytest.mark.parametrize("kind", ["sharded", "mixture", "tokens"])
def test_batches_of_other_epochs_do_not_depend_on_a_state_of_other_ranks(kind: str) -> None:
    """Before the state's epoch goes on, and after it; those of its rest are known before it goes on."""
    whole = loader_of(kind, 2, 1, draws=False)
    whole.set_epoch(2)
    of_two = [[sample[0] for sample in batch] for batch in whole]
    before = loader_of(kind, 3, 0, draws=False)
    before.set_epoch(1)
    list(itertools.islice(before, 3))
    after = loader_of(kind, 2, 1, draws=False)
    after.load_state_dict(before.state_dict())
    numbers = (2, 5, len(of_two) - 1)

    def made() -> list[list[int]]:
        return [[sample[0] for sample in after.batch(2, number)] for number in numbers]

    assert made() == [of_two[number] for number in numbers]
    found = [after.batch(1, number) for number in (3, 4)]
    rest = list(after)
    assert found == rest[:2]
    after.set_epoch(2)
    assert made() == [of_two[number] for number in numbers]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_batch_has_the_weights_that_the_next_iteration_begins_with(resumed: bool) -> None:
    loader = loader_of("mixture", draws=False)
    first = list(itertools.islice(loader, 3)) if resumed else list(loader)
    if resumed:
        state = loader.state_dict()
        loader = loader_of("mixture", draws=False)
        loader.load_state_dict(state)
    loader.sampler.set_weights({"a": 30, "b": 1})
    if not resumed:
        assert loader.batch(0, 2) == first[2]  # of the epoch that is over
        loader.sampler.set_epoch(1)
    found = [loader.batch(int(not resumed), number) for number in (3, 6)]
    later = list(loader)
    assert found == [later[number - 3 * resumed] for number in (3, 6)]


@pytest.mark.parametrize("kind", ["sharded", "mixture", "tokens"])
def test_a_state_stays_that_of_its_epoch_when_the_next_one_is_set(kind: str) -> None:
    """The next epoch may be shorter than what was consumed of this one."""
    for epoch in range(6):
        loader = loader_of(kind, draws=False)
        loader.set_epoch(epoch)
        list(itertools.islice(loader, len(loader) - 1))
        state = loader.state_dict()
        loader.set_epoch(epoch + 1)
        assert loader.state_dict() == state


class Shared:
    """No dataset of torch's: worker threads share it."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_worker_threads_do_not_read_another_epoch_while_a_batch_is_made() -> None:
    loader: Any = DataLoader(
        Shared(),  # type: ignore[arg-type]
        batch_size=4,
        num_workers=1,
        worker_type="thread",
        collate_fn=identity,
    )
    with loader:
        loader.set_epoch(3)
        batches = list(loader)
        assert loader.batch(3, 2) == batches[2]
        with pytest.raises(ResumeError, match="threads share Shared, which was told of epoch 3, and would"):
            loader.batch(1, 2)
        assert loader.dataset.epoch == 3


class Bad(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index % 4 < 3:
            raise ValueError(f"sample {index} is bad")
        return index


def test_bad_samples_are_treated_as_in_training() -> None:
    assert DataLoader(Bad(), batch_size=4, on_error="skip", collate_fn=identity).batch(0, 1) == [7]
    with pytest.raises(ValueError, match="sample 4 is bad"):
        DataLoader(Bad(), batch_size=4).batch(0, 1)
    with pytest.raises(NoGoodSample, match="batch 2 of epoch 0 was left out"):
        DataLoader(Bad(), batch_size=2, on_error="skip").batch(0, 2)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


def test_orders_that_do_not_follow_from_seed_and_epoch_are_named() -> None:
    with pytest.raises(ResumeError, match="order of a RandomSampler does not follow"):
        DataLoader(range(9), shuffle=True).batch(0, 0)  # type: ignore[arg-type]
    with pytest.raises(ResumeError, match="iterable-style"):
        DataLoader(Numbers()).batch(0, 0)
