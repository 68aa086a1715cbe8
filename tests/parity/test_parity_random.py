"""Randomness: the same draws in workers and samplers, the same generator states afterwards."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, TensorDataset, random_split

from parity.datasets import (
    Draws,
    DrawsAndFacts,
    EagerSampler,
    LazySampler,
    Rows,
    WorkerFacts,
    identity,
    note_worker,
    reseed_worker,
)
from parity.run import Build, assert_plays, states, take

Play = Callable[..., Any]


def epochs(build: Build, **given: Any) -> Any:
    """Three full epochs."""
    loader = build(Draws(), 2, **given)
    return [list(loader) for _ in range(3)]


def broken_off(build: Build, size: int | None = 2, **given: Any) -> Any:
    """Leave an epoch in its middle, twice, then run a full one; note the states in between."""
    loader, seen = build(Draws(), size, **given), []
    for stop in (1, 3):
        for count, batch in enumerate(loader, 1):
            seen.append(batch)
            if count == stop:
                break
        seen.append(states())
    seen.append(list(loader))
    return seen


def interleaved(build: Build, **given: Any) -> Any:
    """Three iterators over one loader, read in turns; with persistent workers they are one iterator."""
    loader = build(Draws(), 2, **given)
    iterators = [iter(loader) for _ in range(3)]
    same = [iterators[0] is other for other in iterators]
    rounds = [[next(iterator) for iterator in iterators] for _ in range(2)]
    iterators.pop(1)
    rest = [list(iterator) for iterator in iterators]
    return same, rounds, rest, states()


def drawing_along(build: Build, size: int | None = 2, **given: Any) -> Any:
    """The main process draws between the batches, as a model's dropout does."""
    seen = []
    for batch in build(Draws(), size, **given):
        seen += [batch, torch.rand(2), np.random.rand(1), states()]
    return seen


def created_early(build: Build, **given: Any) -> Any:
    """The states of the generators at construction, at iter(), at the first batch and at the end."""
    seen: list[Any] = [states()]
    loader = build(Draws(), 2, **given)
    seen.append(states())
    iterator = iter(loader)
    seen.append(states())
    seen += [next(iterator), states(), list(iterator), states()]
    return seen


PLAYS: list[Play] = [epochs, broken_off, interleaved, drawing_along, created_early]
HOW: dict[str, dict[str, Any]] = {
    "in process": {},
    "1 worker": {"num_workers": 1},
    "3 workers": {"num_workers": 3, "prefetch_factor": 1},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.each_value
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("play", PLAYS)
def test_draws_and_states_are_torchs(play: Play, how: str) -> None:
    """Shuffled, with samples that draw from torch, NumPy and random."""
    if (play, how) == (interleaved, "3 workers") and resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 80:
        pytest.skip("nine workers at once, of three loaders, need more than 64 descriptors (ulimit -n)")
    assert_plays(lambda build: play(build, shuffle=True, **HOW[how]))


@pytest.mark.in_ci(1)
@pytest.mark.each_value
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("play", [broken_off, created_early])
def test_a_generator_of_the_callers_is_drawn_from_as_by_torch(play: Play, how: str) -> None:
    """The generator seeds the workers and shuffles; the global one is left alone."""

    def with_generator(build: Build) -> Any:
        generator = torch.Generator().manual_seed(9)
        sampler = RandomSampler(range(12), replacement=True, num_samples=80, generator=generator)
        seen = []
        for order in ({"shuffle": True}, {"sampler": sampler}):
            seen.append(play(build, generator=generator, **order, **HOW[how]))
            seen.append(generator.get_state())
        return seen

    assert_plays(with_generator)


@pytest.mark.in_ci(1)
@pytest.mark.each_value
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("sampler", [EagerSampler, LazySampler])
def test_samplers_that_draw_globally_leave_the_state_that_torch_leaves(sampler: type, how: str) -> None:
    """The state shows how often iter() was called on a sampler, and how far it was read."""
    assert_plays(lambda build: broken_off(build, sampler=sampler(30), **HOW[how]))
    # without a batch sampler between, which calls iter() only when its first batch is wanted
    assert_plays(lambda build: broken_off(build, size=None, sampler=sampler(12), **HOW[how]))
    assert_plays(lambda build: drawing_along(build, size=None, sampler=sampler(12), **HOW[how]))


def _everything(build: Build) -> Any:
    """All plays that are needed for one start method: epochs, breaks, persistence, an init function."""
    seen = [epochs(build, shuffle=True, num_workers=2, persistent_workers=True)]
    persistent = build(Draws(40), 2, num_workers=2, persistent_workers=True, worker_init_fn=note_worker)
    seen.append(take(iter(persistent), 3))
    seen += [list(persistent), states()]
    return seen


@pytest.mark.parametrize(
    "start_method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"], indirect=True
)
def test_draws_do_not_depend_on_the_start_method(start_method: str) -> None:
    """Epochs, one of them left early, in persistent workers with the facts of torch's forked workers."""

    def play(build: Build) -> Any:
        given = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": note_worker}
        loader = build(DrawsAndFacts(10), 2, True, collate_fn=identity, **given)
        return [list(loader), take(iter(loader), 2), list(loader), states()]

    assert assert_plays(play, start_method)[0][0][0]["is_dataset"]


def test_persistent_workers_go_on_drawing_where_they_stopped() -> None:
    """Workers are not seeded again; batches that were prefetched before a break have drawn."""
    assert_plays(_everything)


@pytest.mark.parametrize("init", [note_worker, reseed_worker])
def test_worker_init_fn_runs_after_the_seeding_and_before_the_first_sample(init: Any) -> None:
    """The draws and seeds of worker_init_fn change what the samples draw."""
    assert_plays(lambda build: epochs(build, num_workers=2, worker_init_fn=init))


def test_seeds_differ_between_workers_and_epochs_as_in_torch() -> None:
    """base_seed + worker id; a new base seed for each epoch, unless the workers persist."""

    def play(build: Build) -> Any:
        fresh = build(WorkerFacts(4), None, num_workers=2)
        kept = build(WorkerFacts(4), None, num_workers=2, persistent_workers=True)
        return [list(loader) for loader in (fresh, fresh, kept, kept)]

    first, second, third, fourth = assert_plays(play)
    seeds = [[fact["seed"] for fact in facts] for facts in (first, second, third, fourth)]
    assert seeds[0] != seeds[1]
    assert seeds[2] == seeds[3]
    assert seeds[0][1] == seeds[0][0] + 1


def test_the_base_seed_may_exceed_32_bits() -> None:
    """NumPy's seed in a worker mixes both halves of it."""

    def play(build: Build) -> Any:
        generator = torch.Generator()
        loader = build(Draws(4), 2, num_workers=1, generator=generator)
        seen = []
        for seed in range(4):
            generator.manual_seed(seed)
            seen.append(list(loader))
        return seen

    assert_plays(play)


def test_batches_before_and_after_a_pickled_generator_state_agree() -> None:
    """Restoring the generators' states replays an epoch."""

    def play(build: Build) -> Any:
        loader = build(Draws(), 2, shuffle=True, num_workers=2)
        kept = torch.get_rng_state()
        first = list(loader)
        torch.set_rng_state(kept)
        return first, list(loader)

    assert_plays(play)


def test_worked_examples_shuffle_as_in_torch() -> None:
    """TensorDataset and random_split, the usual way to begin."""

    def play(build: Build) -> Any:
        data = TensorDataset(torch.randn(30, 3), torch.randint(5, (30,)))
        train, held_out = random_split(data, [20, 10])
        loaders = [
            build(train, 8, True, num_workers=2, drop_last=True),
            build(held_out, 8, num_workers=1),
        ]
        return [[list(loader) for loader in loaders] for _ in range(2)]

    assert_plays(play)
    assert_plays(lambda build: list(build(Rows(9), 2, True, num_workers=1)))
