"""ShardedSampler: torch's indices, and the rest of an epoch divided anew among other ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from robustness.processes import LONG
from torch.utils.data import BatchSampler, Dataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import shmloader
from shmloader import (
    BlockSampler,
    DataLoader,
    Mixture,
    MixtureSampler,
    ResumeError,
    ShardedSampler,
    TokenBatchSampler,
)

LENGTHS = [1, 2, 7, 12, 100]


@pytest.mark.parametrize(("shuffle", "drop_last"), list(itertools.product((False, True), repeat=2)))
def test_a_whole_epoch_is_that_of_torchs_distributed_sampler(shuffle: bool, drop_last: bool) -> None:
    """Indices and lengths are the same in each epoch, even if there are more ranks than samples."""
    for length, ranks in itertools.product(LENGTHS, (1, 2, 3, 5)):
        for rank in range(ranks):
            ours, torchs = (
                kind(range(length), ranks, rank, shuffle, 3, drop_last)
                for kind in (ShardedSampler, DistributedSampler)
            )
            for epoch in (0, 4):
                ours.set_epoch(epoch)
                torchs.set_epoch(epoch)
                assert list(ours) == list(torchs), (length, ranks, rank)
                assert len(ours) == len(torchs) == len(list(ours))
    assert all(type(index) is int for index in ours)


def test_it_takes_torchs_place() -> None:
    """Frameworks look for torch's class, its attributes and ``set_epoch``."""
    sampler = shmloader.ShardedSampler(range(10), num_replicas=2, rank=1, shuffle=False, seed=9)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size) == (2, 1, 5, 10)
    assert (sampler.seed, sampler.epoch, sampler.shuffle, sampler.drop_last) == (9, 0, False, False)


def batches_after(sampler: ShardedSampler, state: dict[str, int], batch_size: int) -> list[list[int]]:
    sampler.load_state_dict(state)
    indices = list(sampler)
    return [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]


@given(st.data())
@settings(max_examples=300 if LONG else 60, deadline=None)
def test_each_sample_comes_exactly_once_over_runs_of_any_ranks_and_batch_sizes(data: Any) -> None:
    """There are three runs with other ranks and batches each; the first two are stopped anywhere."""
    length = data.draw(st.integers(1, 200), "length")
    uneven = data.draw(st.sampled_from(["pad", "drop"]), "uneven")
    state, seen = {"consumed": 0, "batches": 0}, []
    for run in range(3):
        ranks = data.draw(st.integers(1, 7), "ranks")
        batch_size = data.draw(st.integers(1, 9), "batch size")
        samplers = [
            ShardedSampler(range(length), ranks, rank, seed=5, uneven=uneven) for rank in range(ranks)
        ]
        per_rank = [batches_after(sampler, state, batch_size) for sampler in samplers]
        assert len({tuple(map(len, batches)) for batches in per_rank}) == 1, "ranks differ in their batches"
        most = len(per_rank[0])
        taken = most if run == 2 else data.draw(st.integers(0, most), "batches taken")
        # The batches of all ranks together are a stretch of the global order.
        for number in range(taken):
            seen += [
                index for at in zip(*(batches[number] for batches in per_rank), strict=True) for index in at
            ]
        states = [sampler.state_after(state["batches"] + taken, batch_size) for sampler in samplers]
        state = states[0]
        assert all(other == state for other in states), "ranks differ in their states"
        if taken == most:
            break
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(length, generator=generator).tolist()
    if uneven == "pad":
        assert seen[:length] == order
        assert len(seen) - length < ranks
    else:
        assert seen == order[: len(seen)]
        assert length - len(seen) < ranks


def test_exact_shares_have_each_sample_once() -> None:
    shares = [list(ShardedSampler(range(10), 4, rank, uneven="exact")) for rank in range(4)]
    assert [len(share) for share in shares] == [3, 3, 2, 2]
    assert [len(ShardedSampler(range(10), 4, rank, uneven="exact")) for rank in range(4)] == [3, 3, 2, 2]
    assert sorted(index for share in shares for index in share) == list(range(10))


def test_what_cannot_be_divided_equally_is_an_error_where_it_is_asked_for() -> None:
    """The error comes when the sampler is made, or when the rest is divided anew."""
    with pytest.raises(ValueError, match="10 samples cannot be divided equally among 3 ranks"):
        ShardedSampler(range(10), 3, 0, uneven="error")
    sampler = ShardedSampler(range(12), 3, 0, uneven="error")
    sampler.load_state_dict({"consumed": 3, "batches": 1})
    assert len(list(sampler)) == 3
    sampler.load_state_dict({"consumed": 2, "batches": 1})
    with pytest.raises(
        ValueError, match=r"10 samples cannot be divided equally among 3 ranks.*'pad', 'drop' or 'exact'"
    ):
        list(sampler)


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


DIVIDED: dict[str, Any] = {
    "sharded": lambda ranks, rank: {
        "sampler": ShardedSampler(Indices(), ranks, rank),
        "batch_size": 4,
    },
    "blocks": lambda ranks, rank: {
        "sampler": BlockSampler(
            Indices(), ranks, rank, blocks=range(0, 40, 8), window=2, lanes=ranks, run_length=4
        ),
        "batch_size": 4,
    },
    "tokens": lambda ranks, rank: {
        "batch_sampler": TokenBatchSampler([3] * 40, 12, num_replicas=ranks, rank=rank)
    },
    "mixture": lambda ranks, rank: {
        "sampler": MixtureSampler(Mixture({"all": Indices()}), num_replicas=ranks, rank=rank),
        "batch_size": 4,
    },
}


@pytest.mark.parametrize("kind", DIVIDED)
def test_a_resumed_epoch_is_resumed_again_while_the_next_one_is_made_early(kind: str) -> None:
    """Each sample comes once, over runs of two ranks, of one, and of one."""

    def run(ranks: int, rank: int, state: Any, most: int, **options: Any) -> Any:
        given = DIVIDED[kind](ranks, rank) | options
        with DataLoader(Indices(), collate_fn=list, **given) as loader:
            loader.load_state_dict(state)
            iterator: Any = iter(loader)
            had = [index for batch in itertools.islice(iterator, most) for index in batch]
            is_early = most < 9 and options and iterator._scheduler.states_before_early is not None
            return had, loader.state_dict(), is_early

    (one, state, _), (other, _, _) = (run(2, rank, {}, 2) for rank in range(2))
    early = {"num_workers": 1, "persistent_workers": True, "prefetch_epochs": True}
    more, state, is_early = run(1, 0, state, 5, **early)
    assert is_early
    rest, _, _ = run(1, 0, state, 9)
    assert len(rest) == 4
    assert sorted([*one, *other, *more, *rest]) == list(range(40))


def test_an_epoch_after_a_resumed_one_is_whole() -> None:
    """States count from that epoch's own beginning, also before it is drawn from."""
    sampler = ShardedSampler(range(12), 2, 0, shuffle=False)
    sampler.load_state_dict({"consumed": 8, "batches": 2})
    assert list(sampler) == [8, 10]
    assert sampler.state_after(3, 1) == {"consumed": 10, "batches": 3}
    assert sampler.state_after(0, 1) == {"consumed": 0, "batches": 0}
    assert list(sampler) == [0, 2, 4, 6, 8, 10]
    assert sampler.state_after(3, 1) == {"consumed": 6, "batches": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"uneven": "padded"}, "must be one of 'pad', 'drop', 'error', 'exact', not 'padded'"),
        ({"uneven": "pad", "drop_last": True}, "contradicts uneven='pad'"),
        ({"rank": 2}, "Invalid rank 2"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    """Errors are in torch's words where torch has the argument."""
    with pytest.raises(ValueError, match=message):
        ShardedSampler(range(4), **{"num_replicas": 2, "rank": 0} | given)


class Batches(Dataset[list[int]]):
    """Gives whole batches: its sampler is a ``BatchSampler``, and the loader joins nothing."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, indices: list[int]) -> list[int]:
        return indices


def loader_of_batches(batch_size: int, inner: Any) -> DataLoader[Any]:
    return DataLoader(Batches(), batch_size=None, sampler=BatchSampler(inner, batch_size, drop_last=False))


def test_a_batch_sampler_as_the_sampler_counts_all_samples_of_a_batch() -> None:
    loader = loader_of_batches(3, ShardedSampler(range(48), 2, 1))
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), [*iterator]
    other = loader_of_batches(3, ShardedSampler(range(48), 2, 1))
    other.load_state_dict(state)
    assert [*other] == rest


def test_a_batch_sampler_as_the_sampler_has_to_have_the_same_batch_size() -> None:
    loader = loader_of_batches(3, SequentialSampler(range(48)))
    next(iter(loader))
    with pytest.raises(ResumeError, match="batch_size is 3 in the state and 4 in this loader"):
        loader_of_batches(4, SequentialSampler(range(48))).load_state_dict(loader.state_dict())
