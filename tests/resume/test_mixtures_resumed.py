"""Mixtures and batches of tokens in a loader: resumed at random places on other ranks, batch sizes, workers.

``SHMLOADER_LONG=1`` runs 500 random programs.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from resume_settings import by_json, by_torch
from robustness.processes import LONG
from stream_datasets import identity

from shmloader import DataLoader, Mixture, MixtureSampler, ResumeError, TokenBatchSampler

State = dict[str, Any]
PROGRAMS = 500 if LONG else 20
SIZES = {"web": 400, "code": 90, "math": 17}
MIXTURE = Mixture({name: range(size) for name, size in SIZES.items()})
LENGTHS = np.random.default_rng(3).integers(1, 60, 500)


class Indices:
    """A dataset whose samples are their indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def mixture_loader(
    options: dict[str, Any], ranks: int = 1, rank: int = 0, **arguments: Any
) -> DataLoader[Any]:
    sampler = MixtureSampler(MIXTURE, num_replicas=ranks, rank=rank, **options)
    given = {"collate_fn": identity, **arguments}
    return DataLoader(Indices(len(MIXTURE)), sampler=sampler, **given)  # type: ignore[arg-type]


def schedule(epoch: int, position: int) -> dict[str, float]:
    return {"web": 1 + position / 500, "code": 1 + epoch, "math": 0.5}


def draw_options(choose: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "weights": choose.choice([None, {"web": 3, "code": 2, "math": 1}, schedule]),
        "temperature": choose.choice([1, 3]),
        "run_length": choose.choice([1, 1, 4]),
        "seed": choose.randrange(5),
        "stopping_strategy": choose.choice(["first_exhausted", "all_exhausted", "never", "never"]),
    }
    if options["stopping_strategy"] == "never" and choose.random() < 0.8:
        options["epoch_size"] = 240
    return options


def draw_weights(choose: random.Random) -> dict[str, float]:
    return {name: choose.choice([0.5, 1, 4]) for name in SIZES}


def draw_settings(choose: random.Random) -> dict[str, Any]:
    workers = choose.choice([0, 0, 0, 1, 2])
    if not workers:
        return {}
    kind = choose.choice([{"worker_type": "thread"}, {"multiprocessing_context": "fork"}])
    dispatch = choose.choice(["static", "dynamic"])
    return {"num_workers": workers, "dispatch": dispatch, "prefetch_factor": choose.randint(1, 3), **kind}


def in_turn(by_rank: list[list[list[int]]], run_length: int) -> list[int]:
    """The samples of all ranks' batches in the global order."""
    runs = [
        np.reshape(list(itertools.chain.from_iterable(batches)), (-1, run_length)).tolist()
        for batches in by_rank
    ]
    return [index for step in zip(*runs, strict=True) for run in step for index in run]


def run_program(seed: int) -> None:
    """Runs that each continue where the one before stopped, compared with one rank that was never stopped."""
    choose = random.Random(seed)
    options, changes, epoch = draw_options(choose), [], choose.randrange(3)
    run_length, seen, state = options["run_length"], [], {}
    ended, most_more = False, 1
    for _ in range(choose.randint(2, 4)):
        ranks, steps = choose.choice([1, 2, 3, 6, 8]), choose.randint(0, 8)
        size = run_length * choose.randint(1, 5 if run_length == 1 else 2)
        arguments = {"batch_size": size, **draw_settings(choose)}
        position = len(seen) if choose.random() < 0.3 else None
        weights = draw_weights(choose)
        by_rank, states = [], []
        for rank in range(ranks):
            loader = mixture_loader(options, ranks, rank, **arguments)
            loader.set_epoch(epoch)
            loader.load_state_dict(state)
            if position is not None:
                loader.sampler.set_weights(weights)  # type: ignore[attr-defined]
            iterator = iter(loader)
            by_rank.append(list(itertools.islice(iterator, steps)))
            states.append(loader.state_dict())
            loader.close()
        assert len({tuple(map(len, batches)) for batches in by_rank}) == 1, f"program {seed}: ranks differ"
        if position is not None:
            changes.append((position, weights))
        ended = len(by_rank[0]) < steps
        most_more = ranks * run_length if by_rank[0] else most_more  # which make ranks equal
        seen += in_turn(by_rank, run_length)
        state = choose.choice([by_json, by_torch])(choose.choice(states))
        if ended:
            break
    whole = MixtureSampler(MIXTURE, num_replicas=1, rank=0, **options)
    whole.set_epoch(epoch)
    for position, weights in changes:
        whole.set_weights(weights, position=position)
    wanted = list(itertools.islice(whole, len(seen)))
    assert seen[: len(wanted)] == wanted, f"program {seed}"
    assert len(seen) - len(wanted) < most_more, f"program {seed}: more than padding came"
    assert not ended or len(seen) >= len(list(whole)), f"program {seed}: samples are missing"


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("part", range(10))
def test_random_mixtures_go_on_exactly_on_other_ranks(part: int) -> None:
    for seed in range(part, PROGRAMS // 2, 10):
        run_program(seed)


def token_loader(options: dict[str, Any], ranks: int, rank: int, **arguments: Any) -> DataLoader[Any]:
    sampler = TokenBatchSampler(LENGTHS, num_replicas=ranks, rank=rank, **options)
    given = {"collate_fn": identity, **arguments}
    return DataLoader(Indices(len(LENGTHS)), batch_sampler=sampler, **given)  # type: ignore[arg-type]


def run_token_program(seed: int) -> None:
    choose = random.Random(seed)
    options = {
        "max_tokens": choose.choice([60, 300]),
        "layout": choose.choice(["padded", "packed"]),
        "shuffle": choose.random() < 0.8,
        "seed": choose.randrange(5),
    }
    epoch, seen, state, most_more = choose.randrange(3), [], {}, 1
    for run in range(runs := choose.randint(2, 4)):
        ranks, arguments = choose.choice([1, 2, 3, 6, 8]), draw_settings(choose)
        steps = None if run == runs - 1 else choose.randint(0, 8)
        by_rank, states = [], []
        for rank in range(ranks):
            loader = token_loader(options, ranks, rank, **arguments)
            loader.set_epoch(epoch)
            loader.load_state_dict(state)
            by_rank.append(list(itertools.islice(loader, steps)))
            states.append(loader.state_dict())
            loader.close()
        assert len(set(map(len, by_rank))) == 1, f"program {seed}: ranks differ"
        seen += [batch for step in zip(*by_rank, strict=True) for batch in step]
        most_more = ranks if by_rank[0] else most_more
        state = choose.choice([by_json, by_torch])(choose.choice(states))
        if states[0]["finished"]:
            break
    whole = TokenBatchSampler(LENGTHS, num_replicas=1, rank=0, **options)  # type: ignore[arg-type]
    whole.set_epoch(epoch)
    wanted = list(whole)
    assert seen[: len(wanted)] == wanted, f"program {seed}"
    assert len(seen) - len(wanted) < most_more, f"program {seed}: more than padding came"


@pytest.mark.in_ci(4)
@pytest.mark.parametrize("part", range(10))
def test_random_token_batches_go_on_exactly_on_other_ranks(part: int) -> None:
    for seed in range(part, PROGRAMS // 2, 10):
        run_token_program(seed)


def test_changed_weights_are_in_states_in_an_epoch_and_between_epochs() -> None:
    options = {"stopping_strategy": "never", "epoch_size": 240}
    only_code = {"web": 0, "code": 1, "math": 0}
    loader = mixture_loader(options, batch_size=8)
    iterator = iter(loader)
    next(iterator)
    loader.sampler.set_weights(only_code, position=160)  # type: ignore[attr-defined]
    in_epoch = loader.state_dict()
    rest = list(iterator)
    between = loader.state_dict()
    loader.set_epoch(1)
    second = list(loader)
    again = mixture_loader(options, batch_size=8, num_workers=1)
    again.load_state_dict(by_json(in_epoch))
    assert list(again) == rest
    again = mixture_loader(options, batch_size=8)
    again.load_state_dict(by_json(between))
    again.set_epoch(1)
    assert list(again) == second
    assert {MIXTURE.source_of(index) for batch in second for index in batch} == {"code"}


def test_weights_that_are_to_change_with_the_next_epoch_are_in_the_state() -> None:
    loader = mixture_loader({}, batch_size=8)
    list(loader)
    loader.set_epoch(1)
    loader.sampler.set_weights({"web": 0, "code": 1, "math": 0})  # type: ignore[attr-defined]
    state = by_json(loader.state_dict())
    wanted = list(loader)
    again = mixture_loader({}, batch_size=8)
    again.load_state_dict(state)
    again.set_epoch(1)
    assert list(again) == wanted
    assert sum(map(len, wanted)) == SIZES["code"]


def test_weights_change_while_workers_make_batches_in_advance() -> None:
    options = {"stopping_strategy": "never"}
    with mixture_loader(options, batch_size=4, num_workers=2) as loader:
        iterator = iter(loader)
        had = list(itertools.islice(iterator, 5))
        loader.sampler.set_weights({"web": 0, "code": 0, "math": 1}, position=400)  # type: ignore[attr-defined]
        had += itertools.islice(iterator, 105)
    drawn = [MIXTURE.source_of(index) for batch in had for index in batch]
    assert set(drawn[400:]) == {"math"}
    assert "web" in drawn[384:400]


@pytest.mark.parametrize("workers", [1, 2])
def test_epochs_begun_early_are_those_begun_in_time(workers: int) -> None:
    plain, early = (
        mixture_loader({}, batch_size=8, num_workers=workers, persistent_workers=True, prefetch_epochs=on)
        for on in (False, True)
    )
    for epoch in range(3):
        for loader in (plain, early):
            loader.set_epoch(epoch)
        halves = list(itertools.islice(iter(early), 10)), early.state_dict()
        resumed = mixture_loader({}, batch_size=8)
        resumed.load_state_dict(halves[1])
        whole = list(plain)
        assert [*halves[0], *resumed] == whole
        early.load_state_dict(halves[1])
        assert [*halves[0], *early] == whole
    assert early.statistics().epochs_prefetched
    with pytest.raises(ValueError, match="was begun already"):
        early.sampler.set_weights({"web": 1, "code": 1, "math": 1})  # type: ignore[attr-defined]
    for loader in (plain, early):
        loader.close()


def test_weights_for_an_epoch_that_was_drawn_early_as_a_whole_are_refused() -> None:
    with mixture_loader(
        {"stopping_strategy": "never", "epoch_size": 16},
        batch_size=8,
        num_workers=1,
        persistent_workers=True,
        prefetch_epochs=True,
    ) as loader:
        list(loader)
        loader.set_epoch(1)
        with pytest.raises(ValueError, match=r"epoch 1 was begun already.*leave out prefetch_epochs"):
            loader.sampler.set_weights({"web": 1, "code": 0, "math": 0})  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_program_that_goes_back_may_change_the_weights_from_there_on(workers: int) -> None:
    options, only_code = {"stopping_strategy": "never"}, {"web": 0.0, "code": 1.0, "math": 0.0}
    with mixture_loader(options, batch_size=8, num_workers=workers) as loader:
        sampler: Any = loader.sampler
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
        for _ in range(200):
            next(iterator)
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="this rank has drawn the first 24 samples of epoch 0"):
            sampler.set_weights(only_code, position=16)
        sampler.set_weights(only_code)
        first = next(iter(loader))
        again = mixture_loader(options, batch_size=8)
        again.load_state_dict(by_json(loader.state_dict()))
        assert {MIXTURE.source_of(index) for index in (*first, *next(iter(again)))} == {"code"}
        loader.load_state_dict(state)
        sampler.set_weights({"web": 0, "code": 0, "math": 1}, position=400)
        iterator = iter(loader)
        drawn = [MIXTURE.source_of(index) for _ in range(50) for index in next(iterator)]
        assert set(drawn[:376]) == {"code"}
        assert set(drawn[376:]) == {"math"}


def test_without_workers_weights_may_change_from_the_first_batch_of_a_resumed_epoch_on() -> None:
    options = {"stopping_strategy": "never"}
    loader, other = (mixture_loader(options, batch_size=8) for _ in range(2))
    next(iter(loader))
    other.load_state_dict(loader.state_dict())
    iterator = iter(other)
    other.sampler.set_weights({"web": 0, "code": 0, "math": 1}, position=8)  # type: ignore[attr-defined]
    assert {MIXTURE.source_of(index) for index in next(iterator)} == {"math"}


@pytest.mark.parametrize("kind", [np.float32, np.int64, torch.tensor])
def test_weights_and_positions_may_be_numpys_or_torchs_numbers(kind: Any) -> None:
    def weights_of(numbers: list[int]) -> dict[str, Any]:
        return dict(zip(SIZES, map(kind, numbers), strict=True))

    rests, states = [], []
    for make, number in (
        (weights_of, np.int64),
        (lambda numbers: dict(zip(SIZES, numbers, strict=True)), int),
    ):
        loader = mixture_loader({"stopping_strategy": "never", "epoch_size": 400}, batch_size=8)
        sampler: Any = loader.sampler
        sampler.set_epoch(number(1))
        sampler.set_weights(make([0, 1, 1]))
        iterator = iter(loader)
        next(iterator)
        sampler.set_weights(make([1, 0, 1]), position=number(160))
        states.append(by_json(loader.state_dict()))
        rests.append(list(iterator))
    assert rests[0] == rests[1]
    assert states[0]["sampler_state"] == states[1]["sampler_state"]


def test_weights_that_are_views_of_a_tensor_stay_as_they_were_set() -> None:
    tensor = torch.tensor([0.0, 1.0, 0.0])
    loader = mixture_loader({"stopping_strategy": "never"}, batch_size=8)
    loader.sampler.set_weights(dict(zip(SIZES, tensor, strict=True)))  # type: ignore[attr-defined]
    tensor.copy_(torch.tensor([1.0, 0.0, 0.0]))
    assert {MIXTURE.source_of(index) for index in next(iter(loader))} == {"code"}


def test_another_mixture_is_refused_with_both() -> None:
    loader = mixture_loader({"weights": {"web": 3, "code": 2, "math": 1}}, batch_size=8)
    next(iter(loader))
    with pytest.raises(ResumeError, match=r"web, 400 samples, 0\.5; .* and 'web, 400 samples, 0\.333333; "):
        mixture_loader({"weights": dict.fromkeys(SIZES, 1)}, batch_size=8).load_state_dict(
            loader.state_dict()
        )


def test_a_state_is_small_and_taken_in_constant_time_in_an_endless_epoch() -> None:
    loader = mixture_loader({"stopping_strategy": "never"}, batch_size=4)
    state = dict(loader.state_dict())
    sampler: Any = loader.sampler
    assert len(sampler.state_after(10**9, 4)) == len(sampler.state_after(1, 4))
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert len(str(state)) < 1200
    with pytest.raises(TypeError, match="has no length"):
        len(loader)
