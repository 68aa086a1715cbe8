"""ShardedSampler in a loader: an epoch is resumed by other ranks, batch sizes and workers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resume_settings import cheap_settings, ways_to_keep
from robustness.processes import LONG
from stream_datasets import identity

from shmloader import DataLoader, ResumeError, ShardedSampler

State = dict[str, Any]


def loader_of(length: int, ranks: int, rank: int, **arguments: Any) -> DataLoader[Any]:
    sampler = ShardedSampler(range(length), ranks, rank, seed=3)
    return DataLoader(range(length), sampler=sampler, collate_fn=identity, **arguments)  # type: ignore[arg-type]


def taken(loader: DataLoader[Any], batches: int) -> tuple[list[Any], State]:
    iterator = iter(loader)
    had = list(itertools.islice(iterator, batches))
    state = loader.state_dict()
    loader.close()
    return had, state


@pytest.mark.in_ci
@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
@given(st.data())
@settings(max_examples=200 if LONG else 40, deadline=None)
def test_each_sample_comes_exactly_once_over_three_runs(data: Any) -> None:
    """Each run has other ranks, batches and workers, and a state of any rank of the run before."""
    length = data.draw(st.integers(1, 90), "length")
    seen: list[int] = []
    state: State = {}
    for run in range(3):
        ranks, size = data.draw(st.integers(1, 4), "ranks"), data.draw(st.integers(1, 7), "batch size")
        setting = data.draw(cheap_settings(in_order=[True]), "setting")
        stop = 1000 if run == 2 else data.draw(st.integers(0, 6), "batches taken")
        by_rank, states = [], []
        for rank in range(ranks):
            loader = loader_of(length, ranks, rank, batch_size=size, **setting.arguments)
            loader.load_state_dict(state)
            had, after = taken(loader, stop)
            by_rank.append(had)
            states.append(after)
        assert len({tuple(map(len, had)) for had in by_rank}) == 1, "ranks differ in their batches"
        seen += [index for had in zip(*by_rank, strict=True) for at in zip(*had, strict=True) for index in at]
        keep = data.draw(ways_to_keep, "way to keep the state")
        state = keep(data.draw(st.sampled_from(states), "state"), lambda: loader_of(length, 1, 0))
        if len(seen) >= length:
            break
    assert sorted(seen[:length]) == list(range(length))
    assert len(seen) - length < ranks


def test_the_same_ranks_go_on_bit_for_bit_and_then_begin_the_next_epoch() -> None:
    """The batches are those of an uninterrupted loader; large ones, slices of arrays, are tried too."""
    for size in (3, 40):
        given = {"batch_size": size, "num_workers": 1}
        whole = loader_of(200, 2, 1, **given)
        epochs = []
        for epoch in range(2):
            whole.set_epoch(epoch)
            epochs.append(list(whole))
        _, state = taken(loader_of(200, 2, 1, **given), 2)
        loader = loader_of(200, 2, 1, **given)
        loader.load_state_dict(state)
        assert list(loader) == epochs[0][2:]
        loader.set_epoch(1)
        assert list(loader) == epochs[1]
        whole.close()


def test_its_state_is_small_and_does_not_grow() -> None:
    """The state is under 1 KB at batch 5 and at batch 900."""
    loader = loader_of(10_000, 2, 0, batch_size=5)
    sizes = []
    for number, _ in enumerate(loader):
        if number in (5, 900):
            sizes.append(len(json.dumps(loader.state_dict() | {"checksum": 0})))  # of ten digits or fewer
    assert max(sizes) < 1024
    assert max(sizes) - min(sizes) <= 6  # the digits of the numbers


def test_another_seed_or_length_is_refused() -> None:
    """The order would be another one."""
    _, state = taken(loader_of(20, 2, 0, batch_size=2), 3)
    with pytest.raises(ResumeError, match="dataset_len is 20 in the state and 24"):
        loader_of(24, 2, 0, batch_size=2).load_state_dict(state)
    sampler = ShardedSampler(range(20), 2, 0, seed=4)
    with pytest.raises(ResumeError, match="seed is 3 in the state and 4"):
        DataLoader(range(20), 2, sampler=sampler).load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [2, "auto"])
@pytest.mark.parametrize("given", [{"ranks": 3}, {"rank": 1}, {"batch_size": 3}], ids=str)
def test_out_of_order_a_state_holds_for_its_own_rank_and_batches_only(
    given: dict[str, Any], workers: Any
) -> None:
    """A rank has not had a prefix of the order then, even if its batches came in order by chance.

    ``"auto"`` begins with one worker, and may add more.
    """
    kind = {"length": 48, "ranks": 2, "rank": 0, "batch_size": 4}
    had, state = taken(loader_of(**kind, num_workers=workers, in_order=False), 3)
    again = loader_of(**kind, num_workers=2)
    again.load_state_dict(state)
    more, state = taken(again, 1)  # in order now, and still not a prefix on all ranks
    with pytest.raises(ResumeError, match="with in_order=False its batches are no prefix of the order"):
        loader_of(**kind | given).load_state_dict(state)
    last = loader_of(**kind)
    last.load_state_dict(state)
    found = [index for batch in [*had, *more, *last] for index in batch]
    assert sorted(found) == sorted(ShardedSampler(range(48), 2, 0, seed=3))
    loader_of(**kind | given).load_state_dict(last.state_dict())  # between epochs nothing is left


def test_a_subclass_with_an_order_of_its_own_is_drawn_again() -> None:
    """Its indices so far are no prefix of the order that ranks share."""

    class Reversed(ShardedSampler):
        def __iter__(self) -> Any:
            return reversed(list(super().__iter__()))

    def make(ranks: int) -> DataLoader[Any]:
        sampler = Reversed(range(40), ranks, 1)
        return DataLoader(range(40), 4, sampler=sampler, collate_fn=identity)  # type: ignore[arg-type]

    loader = make(2)
    iterator = iter(loader)
    list(itertools.islice(iterator, 2))
    state, rest = loader.state_dict(), list(iterator)
    other = make(2)
    other.load_state_dict(state)
    assert list(other) == rest
    with pytest.raises(ResumeError, match="num_replicas is 2 in the state and 3 in this loader"):
        make(3).load_state_dict(state)
