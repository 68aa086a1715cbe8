"""`TokenBatchSampler`: budgets, order, ranks, and epochs that are resumed elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shmloader import DataLoader, TokenBatchSampler, collate_packed, share

CHANCE = np.random.default_rng(7)
LENGTHS = np.clip(CHANCE.lognormal(4, 1, 3000).astype(np.int64) + 1, 1, 2000)
LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed"])


def sampler(lengths: Any = LENGTHS, max_tokens: int = 2000, **options: Any) -> TokenBatchSampler:
    return TokenBatchSampler(lengths, max_tokens, **{"num_replicas": 1, "rank": 0, **options})


def tokens(batch: list[int], layout: str, lengths: Any = LENGTHS) -> int:
    of_batch = np.asarray(lengths)[batch]
    return int(of_batch.sum() if layout == "packed" else of_batch.max() * len(batch))


lengths_and_budget = st.integers(1, 40).flatmap(
    lambda most: st.tuples(st.lists(st.integers(1, most), min_size=1, max_size=80), st.just(most))
)


@LAYOUTS
@given(drawn=lengths_and_budget, shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_each_sample_comes_once_within_the_budget(
    layout: str, drawn: tuple[list[int], int], shuffle: bool, epoch: int
) -> None:
    lengths, most = drawn
    batches = sampler(lengths, most, layout=layout, shuffle=shuffle)
    batches.set_epoch(epoch)
    given_batches = list(batches)
    assert sorted(itertools.chain(*given_batches)) == list(range(len(lengths)))
    assert len(batches) == len(given_batches)
    assert all(batch and tokens(batch, layout, lengths) <= most for batch in given_batches)


def best_fit(lengths: list[int], most: int) -> int:
    """The number of rows of best fit, longest first, sample by sample."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(left) if room >= length]
        if fitting:
            left[min(fitting, key=left.__getitem__)] -= length
        else:
            left.append(most - length)
    return len(left)


@given(drawn=lengths_and_budget)
def test_packed_batches_are_as_few_as_those_of_best_fit(drawn: tuple[list[int], int]) -> None:
    lengths, most = drawn
    assert len(sampler(lengths, most, layout="packed")) == best_fit(lengths, most)


def test_padding_is_a_small_part_of_random_batches_padding() -> None:
    def padding(batches: Any) -> float:
        used = sum(LENGTHS[batch].sum() for batch in batches)
        return 1 - used / sum(tokens(batch, "padded") for batch in batches)

    assert padding(list(sampler())) < 0.1 * padding(CHANCE.permutation(len(LENGTHS)).reshape(-1, 20))


@LAYOUTS
def test_an_epoch_has_an_order_of_its_own_and_repeats_it(layout: str) -> None:
    one, other = sampler(layout=layout), sampler(layout=layout)
    first = list(one)
    assert first == list(other)
    other.set_epoch(1)
    assert list(other) != first
    assert [set(batch) for batch in other] != [set(batch) for batch in first]
    assert list(sampler(layout=layout, seed=1)) != first


def test_without_shuffling_the_longest_come_first() -> None:
    longest = [LENGTHS[batch].max() for batch in sampler(shuffle=False)]
    assert longest == sorted(longest, reverse=True)


def test_a_padded_batch_has_at_most_so_many_samples() -> None:
    assert max(map(len, sampler([1] * 100, 64, max_samples=10))) == 10
    assert max(map(len, sampler([1] * 100, 64))) == 64


@LAYOUTS
@pytest.mark.parametrize("ranks", [2, 6, 8])
def test_any_number_of_ranks_has_the_same_batches_step_by_step(layout: str, ranks: int) -> None:
    alone = list(sampler(layout=layout))
    shares = [list(sampler(layout=layout, num_replicas=ranks, rank=rank)) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    together = list(itertools.chain(*zip(*shares, strict=True)))
    assert together[: len(alone)] == alone
    assert together[len(alone) :] == alone[: len(together) - len(alone)]  # repeated, to be even


@pytest.mark.parametrize("uneven", ["drop", "exact"])
def test_batches_that_do_not_divide_are_left_out_or_dealt_out(uneven: Any) -> None:
    lengths = [5] * 7
    shares = [
        list(sampler(lengths, 5, uneven=uneven, num_replicas=3, rank=rank, shuffle=False))
        for rank in range(3)
    ]
    assert [len(share) for share in shares] == ([2, 2, 2] if uneven == "drop" else [3, 2, 2])
    assert len({tuple(batch) for share in shares for batch in share}) == (6 if uneven == "drop" else 7)


def test_batches_that_do_not_divide_are_an_error_if_asked_for() -> None:
    with pytest.raises(ValueError, match="7 batches cannot be divided equally among 3 ranks"):
        list(sampler([5] * 7, 5, uneven="error", num_replicas=3, rank=1))


class Tokens(torch.utils.data.Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.full((int(LENGTHS[index]),), index)


def seen(batch: Any) -> list[int]:
    return [int(batch["input_ids"][0, begin]) for begin in batch["cu_seq_lens_q"][:-1]]


def loader(workers: int, **options: Any) -> DataLoader:
    batches = sampler(layout="packed", **options)
    return DataLoader(Tokens(), batch_sampler=batches, collate_fn=collate_packed, num_workers=workers)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (3, 2)], ids=str)
def test_an_epoch_is_resumed_on_other_ranks_with_other_workers(ranks: tuple[int, int]) -> None:
    before, after = ranks
    taken: list[list[int]] = []
    for rank in range(before):
        one = loader(2, num_replicas=before, rank=rank)
        one.set_epoch(3)
        taken += [seen(batch) for batch in itertools.islice(one, 7)]
        state = one.state_dict()
        one.close()
    rest: list[list[int]] = []
    for rank in range(after):
        one = loader(0, num_replicas=after, rank=rank)
        one.load_state_dict(state)
        rest += [seen(batch) for batch in one]
    whole = sampler(layout="packed")
    whole.set_epoch(3)
    indices = {tuple(batch) for batch in [*taken, *rest]}
    assert indices == set(map(tuple, whole))
    assert len(taken) + len(rest) < len(indices) + after  # a few are repeated, to be even


def test_a_resumed_epoch_has_as_many_batches_as_its_length_says() -> None:
    batches = sampler(num_replicas=2, rank=1)
    batches.set_epoch(2)
    batches.load_state_dict({"consumed": 20, "batches": 10})
    length = len(batches)
    assert len(list(batches)) == length
    assert len(list(batches)) == length + 10


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 9, 12], {}, "sample 2 has 12 tokens.* 1 to max_tokens=10. There are 1 such samples among 3"),
        ([3, 0], {}, "sample 1 has 0 tokens"),
        ([], {}, "at least one sample"),
        ([0.5], {}, "float64"),
        ([3], {"layout": "ragged"}, "layout must be"),
        ([3], {"uneven": "never"}, "uneven must be"),
        ([3], {"max_samples": 0}, "max_samples=0"),
        ([3], {"max_samples": 2, "layout": "packed"}, "padded"),
        ([3], {"rank": 1}, "rank=1 is not a rank"),
        ([3], {"num_replicas": 2, "rank": None}, "=2 without a rank: this process is rank 0 of 1"),
    ],
)
def test_wrong_arguments_are_named(lengths: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(lengths, 10, **options)


@pytest.mark.parametrize("wrong", ["4096", 40.5, float("nan"), None])
def test_a_budget_that_is_no_whole_number_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"max_tokens must be a whole number, such as 4096, not {wrong!r}"):
        sampler([3], wrong)


def test_lengths_may_be_a_stores_column() -> None:
    rows = share([{"length": int(length)} for length in LENGTHS])
    assert list(sampler(rows["length"])) == list(sampler())


def test_packed_samples_are_joined_as_by_transformers_collator() -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [4, 5, 6]}, {"input_ids": [7], "labels": [8]}]
    batch = collate_packed(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 7]]
    assert batch["labels"].tolist() == [[-100, 5, 6, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 4]
    assert batch["max_length_q"] == batch["max_length_k"] == 3


@pytest.mark.parametrize("lengths", [[3, 0], [0, 3], [2, 0, 1], [0, 0]])
def test_an_empty_sample_changes_no_label_and_no_dtype(lengths: list[int]) -> None:
    rows = [{"input_ids": list(range(n)), "labels": torch.arange(n)} for n in lengths]
    batch = collate_packed(rows)
    assert batch["labels"].tolist() == [[place or -100 for n in lengths for place in range(n)]]
    assert batch["cu_seq_lens_q"].diff().tolist() == lengths
    if any(lengths):
        assert batch["input_ids"].dtype is torch.int64


def test_a_sample_whose_parts_differ_in_length_is_named() -> None:
    with pytest.raises(ValueError, match="sample 1 of 2 differ in length: input_ids: 2, labels: 1"):
        collate_packed([{"input_ids": [1], "labels": [1]}, {"input_ids": [1, 2], "labels": [3]}])
