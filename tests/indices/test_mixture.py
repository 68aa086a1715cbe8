"""`Mixture` and `MixtureSampler`: shares, orders of the sources, ends of epochs, ranks, changes."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from batch_outcomes import assert_same_outcomes, outcomes
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, ConcatDataset, IterableDataset, TensorDataset

from shmloader import DataLoader, Mixture, MixtureSampler, ResumeError, share, why_per_sample
from shmloader.indices.mixture_order import MixtureOrder, Segment

SIZES = {"web": 1000, "code": 300, "math": 50}
MIXTURE = Mixture({name: range(size) for name, size in SIZES.items()})
WEIGHTS = {"web": 5, "code": 3, "math": 2}
NEVER: dict[str, Any] = {"stopping_strategy": "never", "epoch_size": 5120}
ENDS: list[dict[str, Any]] = [{}, {"stopping_strategy": "all_exhausted"}, NEVER]


def sampler(weights: Any = WEIGHTS, **options: Any) -> MixtureSampler:
    return MixtureSampler(MIXTURE, weights, **{"num_replicas": 1, "rank": 0, **options})


def epoch_of(one: MixtureSampler, epoch: int) -> list[int]:
    one.set_epoch(epoch)
    return list(one)


def names(indices: list[int]) -> list[str]:
    return [MIXTURE.source_of(index) for index in indices]


def of_source(indices: list[int], name: str) -> list[int]:
    return [index for index in indices if MIXTURE.source_of(index) == name]


def test_of_each_256_samples_a_source_has_its_share() -> None:
    drawn = names(list(sampler(**NEVER)))
    for begin in range(0, len(drawn), 256):
        counts = Counter(drawn[begin : begin + 256])
        assert all(abs(counts[name] - 256 * weight / 10) <= 1 for name, weight in WEIGHTS.items())
    assert len({tuple(drawn[begin : begin + 256]) for begin in range(0, len(drawn), 256)}) == 20


shares = st.lists(st.floats(0, 1), min_size=1, max_size=5).filter(any)


@given(
    segments=st.lists(st.tuples(st.integers(1, 900), shares), min_size=1, max_size=4),
    block=st.sampled_from([7, 256]),
    places=st.lists(st.integers(0, 3000), min_size=1, max_size=3),
    wanted=st.lists(st.integers(1, 300), min_size=5, max_size=5),
)
def test_an_order_counts_and_ends_as_its_draws_do(
    segments: Any, block: int, places: list[int], wanted: list[int]
) -> None:
    begins = np.cumsum([0, *(length for length, _ in segments[:-1])]).tolist()
    parts = []
    for begin, (_, given_shares) in zip(begins, segments, strict=True):
        padded = np.array([*given_shares, *[0.0] * (5 - len(given_shares))])
        fixed = padded / padded.sum()
        parts.append(Segment(begin, fixed if begin % 2 else lambda _, fixed=fixed: fixed))
    order = MixtureOrder((1, 2), 5, parts, block)

    def drawn_from(begin: int, count: int) -> Any:
        pieces: list[Any] = []
        for at, piece in order.chunks(begin):
            assert at == begin + sum(map(len, pieces))
            pieces.append(piece)
            if sum(map(len, pieces)) >= count:
                return np.concatenate(pieces)[:count]
        raise AssertionError("the order has an end")

    drawn = drawn_from(0, 3000)
    for place in places:
        assert order.counts(place).tolist() == np.bincount(drawn[:place], minlength=5).tolist()
        assert (drawn_from(place, 3000 - place) == drawn[place:]).all()
    totals = np.cumsum(drawn[:, None] == np.arange(5), 0)
    for reached in (np.any, np.all):
        done = reached(totals >= np.array(wanted), axis=1)
        if done.any():
            assert order.first_with(np.array(wanted), reached) == done.argmax() + 1


def test_a_source_gives_all_its_samples_before_one_comes_again_also_across_epochs() -> None:
    one = sampler(**NEVER)
    drawn = [index for epoch in range(3) for index in epoch_of(one, epoch)]
    for name, size in SIZES.items():
        of_it = of_source(drawn, name)
        times = [of_it[begin : begin + size] for begin in range(0, len(of_it) - size + 1, size)]
        assert len(times) > 3
        assert all(len(set(once)) == size for once in times)
        assert len(set(map(tuple, times))) == len(times)


def test_a_later_epoch_needs_no_earlier_one() -> None:
    one = sampler(**NEVER)
    epochs = [epoch_of(one, epoch) for epoch in range(3)]
    assert [epoch_of(sampler(**NEVER), epoch) for epoch in (2, 0)] == [epochs[2], epochs[0]]
    far = sampler(stopping_strategy="never", epoch_size=1_000_000)
    far.set_epoch(1000)
    assert len(list(itertools.islice(far, 10))) == 10


def test_without_shuffling_each_source_has_its_own_order() -> None:
    drawn = list(sampler(shuffle=False, **NEVER))
    for name, size in SIZES.items():
        begin = of_source(drawn, name)[0]
        wanted = [begin + number % size for number in range(len(of_source(drawn, name)))]
        assert of_source(drawn, name) == wanted


def test_epochs_end_with_the_first_or_last_source_that_is_exhausted() -> None:
    drawn = list(sampler())
    counts = Counter(names(drawn))
    assert counts["math"] == SIZES["math"]
    assert names(drawn)[-1] == "math"
    assert all(counts[name] < SIZES[name] for name in ("web", "code"))
    longer = list(sampler(stopping_strategy="all_exhausted"))
    counts = Counter(names(longer))
    assert all(counts[name] >= size for name, size in SIZES.items())
    last = names(longer)[-1]
    assert counts[last] == SIZES[last]
    assert longer[: len(drawn)] == drawn
    endless = sampler(stopping_strategy="never")
    assert list(itertools.islice(endless, len(drawn))) == drawn
    with pytest.raises(TypeError, match="has no length"):
        len(endless)


def test_each_epoch_has_its_own_order_and_the_seed_counts() -> None:
    one = sampler()
    assert epoch_of(one, 0) == epoch_of(sampler(), 0) != epoch_of(one, 1)[:200]
    assert epoch_of(sampler(seed=1), 0)[:100] != epoch_of(one, 0)[:100]


@pytest.mark.parametrize("options", ENDS, ids=str)
@pytest.mark.parametrize("run_length", [1, 4])
@pytest.mark.parametrize("ranks", [2, 6, 8])
def test_any_number_of_ranks_has_the_same_order(options: Any, run_length: int, ranks: int) -> None:
    for uneven in ("pad", "drop", "exact"):
        given_options = {"run_length": run_length, "uneven": uneven, **options}
        alone = list(sampler(**given_options))
        of_ranks = [sampler(num_replicas=ranks, rank=rank, **given_options) for rank in range(ranks)]
        given_out = [list(one) for one in of_ranks]
        assert [len(one) for one in of_ranks] == list(map(len, given_out))
        runs = [np.reshape(one, (-1, run_length)).tolist() for one in given_out]
        together = [
            index for step in itertools.zip_longest(*runs, fillvalue=[]) for run in step for index in run
        ]
        if uneven == "exact":
            assert together == alone
            continue
        assert len(set(map(len, given_out))) == 1
        assert abs(len(together) - len(alone)) < ranks * run_length
        more = list(itertools.islice(sampler(run_length=run_length, stopping_strategy="never"), 9000))
        wanted = alone if "epoch_size" in options else more
        assert together[: len(wanted)] == wanted[: len(together)]


def test_draws_that_do_not_divide_are_an_error_if_asked_for() -> None:
    with pytest.raises(ValueError, match="draws cannot be divided equally among 7 ranks"):
        list(sampler(num_replicas=7, rank=0, uneven="error"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_the_batch_for_a_run_length_a_batch_has_one_source(ranks: int) -> None:
    for rank in range(ranks):
        one = sampler(run_length=16, num_replicas=ranks, rank=rank, **NEVER)
        sources = [set(names(batch)) for batch in BatchSampler(one, 16, drop_last=False)]
        assert all(len(batch) == 1 for batch in sources)
        counts = Counter(name for batch in sources for name in batch)
        assert abs(counts["code"] / len(sources) - 0.3) < 0.03


def test_weights_follow_temperature_sizes_and_tokens() -> None:
    def shares_of(weights: Any = None, **options: Any) -> list[float]:
        drawn = Counter(
            names(list(sampler(weights, stopping_strategy="never", epoch_size=51_200, **options)))
        )
        return [drawn[name] / 51_200 for name in SIZES]

    sizes = np.array(list(SIZES.values()), float)
    assert shares_of() == pytest.approx(sizes / sizes.sum(), abs=0.01)
    assert shares_of(temperature=2) == pytest.approx(sizes**0.5 / (sizes**0.5).sum(), abs=0.01)
    assert shares_of(WEIGHTS, temperature=100) == pytest.approx([1 / 3] * 3, abs=0.01)
    lengths = {"web": [10] * 1000, "code": [40] * 300, "math": [10, 30] * 25}
    equal = shares_of(dict.fromkeys(SIZES, 1), lengths=lengths)
    tokens = np.array(equal) * [10, 40, 20]
    assert tokens / tokens.sum() == pytest.approx([1 / 3] * 3, abs=0.01)
    tokens = np.array(shares_of(lengths=lengths)) * [10, 40, 20]
    assert tokens / tokens.sum() == pytest.approx(np.array([10_000, 12_000, 1000]) / 23_000, abs=0.01)


def test_a_source_of_weight_0_is_never_drawn() -> None:
    for zero in SIZES:
        drawn = names(list(sampler({**WEIGHTS, zero: 0}, **NEVER)))
        assert set(drawn) == SIZES.keys() - {zero}


def test_weights_may_be_a_function_of_epoch_and_position() -> None:
    calls = []

    def schedule(epoch: int, position: int) -> dict[str, float]:
        calls.append((epoch, position))
        return {"web": 1, "code": float(position >= 2560), "math": float(epoch)}

    one = sampler(schedule, **NEVER)
    first, second = names(epoch_of(one, 0)), names(epoch_of(one, 1))
    assert set(first[:2560]) == {"web"}
    assert Counter(first[2560:])["code"] == 1280
    assert set(first) == {"web", "code"}
    assert Counter(second[:2560])["math"] == 1280
    assert set(calls) >= {(0, 0), (0, 256), (1, 0), (1, 4864)}
    parts = [list(sampler(schedule, num_replicas=2, rank=rank, **NEVER)) for rank in range(2)]
    assert list(itertools.chain(*zip(*parts, strict=True))) == epoch_of(one, 0)


def test_weights_change_at_a_position_on_all_ranks_and_later_epochs_keep_them() -> None:
    only_web = {"web": 1, "code": 0, "math": 0}
    whole = list(sampler(**NEVER))
    parts = []
    for rank in range(2):
        one = sampler(num_replicas=2, rank=rank, **NEVER)
        drawing = iter(one)
        had = list(itertools.islice(drawing, 100))
        one.set_weights(only_web, position=1001)
        parts.append(had + list(drawing))
        assert set(names(epoch_of(one, 1))) == {"web"}
    together = list(itertools.chain(*zip(*parts, strict=True)))
    assert together[:1001] == whole[:1001]
    assert set(names(together[1001:])) == {"web"}
    of_it = of_source(together, "web")
    assert all(len(set(of_it[begin : begin + 1000])) == 1000 for begin in range(0, len(of_it) - 999, 1000))


def test_weights_change_with_the_next_iteration() -> None:
    one = sampler()
    before = epoch_of(one, 0)
    one.set_epoch(1)
    one.set_weights({"web": 0, "code": 1, "math": 0})
    assert names(list(one)) == ["code"] * 300
    one.set_epoch(2)
    assert names(list(one)) == ["code"] * 300
    assert epoch_of(one, 0) == before


def test_a_change_that_comes_too_late_is_refused_with_the_numbers() -> None:
    one = sampler(**NEVER)
    drawing = iter(one)
    next(drawing)
    with pytest.raises(
        ValueError, match=r"position=100 in epoch 0 is too early.* first 128 samples of epoch 0"
    ):
        one.set_weights(WEIGHTS, position=100)
    with pytest.raises(ValueError, match="epoch 0 was begun already"):
        one.set_weights(WEIGHTS)
    with pytest.raises(ValueError, match="position=-1"):
        sampler().set_weights(WEIGHTS, position=-1)
    one.set_epoch(1)
    one.set_weights(WEIGHTS)


def test_epochs_without_an_end_are_refused() -> None:
    with pytest.raises(ValueError, match="math is never exhausted"):
        sampler({**WEIGHTS, "math": 0}, stopping_strategy="all_exhausted")
    endless = sampler(lambda *_: {**WEIGHTS, "math": 0}, stopping_strategy="all_exhausted")
    endless._sizes = endless._sizes // 50  # so that it is found soon
    with pytest.raises(ValueError, match="epoch 0 has no end"):
        len(endless)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ({"web": 1}, {}, "for web, code, math, and not {'web': 1}"),
        ({**WEIGHTS, "more": 1}, {}, "more"),
        (dict.fromkeys(SIZES, 0), {}, "not all 0"),
        ({**WEIGHTS, "web": -1}, {}, "at least 0"),
        ({**WEIGHTS, "web": float("nan")}, {}, "nan"),
        (WEIGHTS, {"temperature": 0}, "temperature must be a number of more than 0, not 0"),
        (WEIGHTS, {"stopping_strategy": "last"}, "stopping_strategy must be one of 'first_exhausted'"),
        (WEIGHTS, {"uneven": "last"}, "uneven must be"),
        (WEIGHTS, {"epoch_size": 10}, "needs stopping_strategy='never'"),
        (
            WEIGHTS,
            {"epoch_size": 10, "stopping_strategy": "never", "run_length": 4},
            "multiple of run_length=4",
        ),
        (WEIGHTS, {"run_length": 0}, "run_length=0"),
        (WEIGHTS, {"seed": -1}, "seed=-1"),
        (WEIGHTS, {"rank": 1}, "rank=1 is not a rank"),
        (WEIGHTS, {"num_replicas": 2, "rank": None}, "num_replicas=2 without a rank"),
        (WEIGHTS, {"lengths": {"web": [1]}}, "lengths must be of web, code, math"),
        (WEIGHTS, {"lengths": {name: [1.5] for name in SIZES}}, "lengths of web must be 1,000 whole numbers"),
    ],
)
def test_wrong_arguments_are_named(weights: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(weights, **options)


def test_what_is_no_mixture_and_no_weights_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="a MixtureSampler draws from a Mixture, not from a list: pass shml"):
        MixtureSampler([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weights are a dict of numbers by source, or a .*, not \[6, 3, 1\]"):
        sampler([6, 3, 1])


def test_a_state_in_the_middle_of_a_run_is_refused() -> None:
    one = sampler(run_length=4)
    next(iter(one))
    assert one.state_after(2, 8)["consumed"] == 16
    with pytest.raises(ResumeError, match="batch_size=6 and run_length=4"):
        one.state_after(2, 6)


def test_a_damaged_state_changes_nothing() -> None:
    one = sampler()
    state = {**one.state_after(2, 8), "changes": [[0, 0, {"web": 0, "code": 1, "math": 0}]]}
    del state["batches"]
    with pytest.raises(KeyError, match="batches"):
        one.load_state_dict(state)
    assert list(one) == list(sampler())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())


def test_sources_that_are_no_map_style_datasets_with_samples_are_named() -> None:
    with pytest.raises(TypeError, match="'web' of a Mixture has no length"):
        Mixture({"web": Stream()})
    with pytest.raises(ValueError, match="'web' of a Mixture has no samples"):
        Mixture({"web": []})
    with pytest.raises(TypeError, match="a dict of datasets by name"):
        Mixture([[1]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        Mixture({})


def rows(count: int, begin: int = 0, kind: type = float) -> Any:
    return share([{"x": torch.arange(3) + n, "y": kind(n), "name": n} for n in range(begin, begin + count)])


GATHERED = {
    "tensors": lambda: [TensorDataset(torch.arange(9.0)), TensorDataset(torch.arange(100.0, 120))],
    "stores": lambda: [rows(9), rows(20, 100)],
    "a store and a slice": lambda: [rows(9), rows(30, 100)[5:25]],
    "stores of other dtypes": lambda: [rows(9), rows(20, 100, int)],
    "stores of texts": lambda: [share([f"{n}" for n in range(9)]), share([f"{n}" for n in range(20)])],
    "lists": lambda: [list(range(9)), list(range(20))],
}


@pytest.mark.parametrize("kind", GATHERED)
@pytest.mark.parametrize("with_source", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_several_sources_are_those_of_their_samples(
    kind: str, with_source: bool, workers: int
) -> None:
    sources = GATHERED[kind]()
    mixture = Mixture({"a": sources[0], "b": sources[1]}, with_source=with_source)
    batches = [[0, 12, 3, 28, 9], [1, 2], [10, 11], [-1, 8], [4]]
    numbered = [[(sample, number) for sample in source] for number, source in enumerate(sources)]
    plain: Any = ConcatDataset(numbered if with_source else [list(source) for source in sources])
    loader = DataLoader(mixture, batch_sampler=batches, num_workers=workers)
    assert_same_outcomes(
        outcomes(loader), outcomes(torch.utils.data.DataLoader(plain, batch_sampler=batches))
    )


def test_sources_that_fetch_several_samples_are_asked_once_for_each_batch() -> None:
    class Several(torch.utils.data.Dataset[int]):
        def __init__(self, size: int) -> None:
            self.size, self.calls = size, 0

        def __len__(self) -> int:
            return self.size

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.calls += 1
            return [self.size * 100 + index for index in indices]

    sources = {"a": Several(5), "b": Several(7)}
    mixture = Mixture(sources)
    assert mixture.__getitems__ is not None
    assert mixture.__getitems__([6, 0, 11, 4, -1]) == [701, 500, 706, 504, 706]
    assert [source.calls for source in sources.values()] == [1, 1]
    assert Mixture({**sources, "c": [1]}).__getitems__ is None
    with pytest.raises(IndexError, match="a Mixture of 12 samples"):
        mixture.__getitems__([12])


def test_why_a_mixture_is_not_gathered_is_told() -> None:
    assert why_per_sample(Mixture({"a": rows(3), "b": rows(4)})) is None
    assert "a list holds each sample" in str(why_per_sample(Mixture({"a": [1], "b": [2]})))
