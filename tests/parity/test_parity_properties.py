"""Drawn datasets, batches, arguments and orders of use: torch's loader agrees on all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.compare import assert_same
from parity.datasets import Draws, LazySampler, Rows, Stream, identity, row
from parity.run import Build, assert_parity, assert_plays, states, take
from parity.structures import Structured, specs
from shmloader import DataLoader

Test = Callable[..., None]


def drawn(examples: int) -> Callable[[Test], Test]:
    """Settings for examples that start processes; the examples are the same in every run of CI."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize="CI" in os.environ,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


@st.composite
def arguments(draw: Any) -> dict[str, Any]:
    """Loader arguments that go together, for a map-style dataset."""
    given: dict[str, Any] = {"num_workers": draw(st.sampled_from([0, 1, 2, 2]))}
    if given["num_workers"]:
        given["prefetch_factor"] = draw(st.integers(1, 3))
        given["persistent_workers"] = draw(st.booleans())
    how = draw(st.sampled_from(["batches", "batches", "single", "ragged"]))
    if how == "ragged":
        batches = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), max_size=6)
        given["batch_sampler"] = draw(batches)
        return given
    given["batch_size"] = draw(st.integers(1, 5)) if how == "batches" else None
    given["drop_last"] = how == "batches" and draw(st.booleans())
    given["shuffle"] = draw(st.booleans())
    return given


@drawn(14)
@given(spec=specs(odd=False), length=st.integers(5, 11), given_arguments=arguments())
def test_any_samples_and_any_arguments_give_torchs_batches(
    spec: Any, length: int, given_arguments: dict[str, Any]
) -> None:
    """Batches, errors and generator states, over two epochs."""

    def play(build: Build) -> Any:
        loader = build(Structured(spec, length), **given_arguments)
        return [list(loader), list(loader), loader.sampler.__class__]

    assert_parity(_without_tracebacks(play))


def _without_tracebacks(play: Callable[[Build], Any]) -> Callable[[Build], Any]:
    """Compare an error from a worker by its type, since its text holds the worker's traceback."""

    def caught(build: Build) -> Any:
        try:
            return play(build)
        except Exception as error:
            return type(error)

    return caught


@drawn(10)
@given(several=st.lists(specs(odd=True), min_size=1, max_size=12), held=st.booleans())
def test_any_batches_in_any_sequence_arrive_as_torch_sends_them(several: Any, held: bool) -> None:
    """Batches of changing structure and size through the same slots, several rounds of them."""

    def play(build: Build) -> Any:
        dataset = Structured(several, 4 * len(several))
        loader = build(dataset, None, collate_fn=identity, num_workers=1)
        return list(loader) if held else [batch for k, batch in enumerate(loader) if k % 4 == 3]

    assert_plays(play)


@drawn(10)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    size=st.one_of(st.none(), st.integers(1, 4)),
    last=st.booleans(),
    persistent=st.booleans(),
)
def test_any_stream_ends_as_in_torch(
    lengths: list[int], size: int | None, last: bool, persistent: bool
) -> None:
    """Workers of any lengths, whole epochs, with draws in every sample."""

    def play(build: Build) -> Any:
        loader = build(
            Stream(tuple(lengths), draws=True),
            size,
            drop_last=last and size is not None,
            num_workers=len(lengths),
            persistent_workers=persistent,
        )
        return [list(loader), list(loader), states()]

    assert_plays(play)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.just(0)),
        st.tuples(st.just("next"), st.integers(0, 2)),
        st.tuples(st.just("take"), st.integers(0, 2)),
        st.tuples(st.just("drop"), st.integers(0, 2)),
        st.tuples(st.just("epoch"), st.just(0)),
        st.tuples(st.just("draw"), st.just(0)),
    ),
    min_size=3,
    max_size=9,
)


@drawn(10)
@given(steps=STEPS, workers=st.integers(0, 2), persistent=st.booleans(), lazy=st.booleans())
def test_any_use_of_several_iterators_sees_and_draws_what_it_does_in_torch(
    steps: list[tuple[str, int]], workers: int, persistent: bool, lazy: bool
) -> None:
    """Iterators over one loader opened, read in turns and dropped; the main process draws too."""

    def play(build: Build) -> Any:
        order = {"sampler": LazySampler(9)} if lazy else {"shuffle": True}
        keep = {"persistent_workers": persistent and workers > 0, "num_workers": workers}
        loader = build(Draws(9), 2, **order, **keep)
        iterators, seen = [iter(loader)], []
        for step, which in steps:
            iterator = iterators[which % len(iterators)]
            if step == "open" and len(iterators) < 3:
                iterators.append(iter(loader))
            elif step == "next":
                seen.append(next(iterator, "end"))
            elif step == "take":
                seen.append([next(iterator, "end") for _ in range(3)])
            elif step == "drop" and len(iterators) > 1:
                iterators.remove(iterator)
            elif step == "epoch":
                seen.append(list(loader))
            elif step == "draw":
                seen.append(torch.rand(1))
            seen.append(states())
        return seen

    assert_plays(play)


@drawn(6)
@given(
    spans=st.lists(st.integers(0, 30), min_size=40, max_size=120),
    prefetch=st.integers(1, 3),
    workers=st.integers(1, 2),
)
def test_any_pattern_of_holding_and_dropping_leaves_every_held_batch_unchanged(
    spans: list[int], prefetch: int, workers: int
) -> None:
    """Batch k is held over the next spans[k] batches and is then what it was."""
    width = 2500
    iterator = iter(
        DataLoader(
            Rows(len(spans), width),
            num_workers=workers,
            prefetch_factor=prefetch,
            multiprocessing_context="fork",
        )
    )
    held: dict[int, torch.Tensor] = {}
    for index, batch in enumerate(iterator):
        held[index] = batch
        del batch
        for kept in [kept for kept in held if kept + spans[kept] <= index]:
            assert torch.equal(held.pop(kept)[0], row(kept, width)), kept
    assert_same([held[kept][0] for kept in held], [row(kept, width) for kept in held])


@drawn(5)
@given(cuts=st.lists(st.integers(0, 6), min_size=1, max_size=4), workers=st.integers(1, 2))
def test_any_epochs_broken_off_in_persistent_workers_go_on_as_in_torch(cuts: list[int], workers: int) -> None:
    """Workers have drawn for batches that were prefetched when an epoch was left; those draws stay."""

    def play(build: Build) -> Any:
        loader = build(Draws(12), 2, True, num_workers=workers, persistent_workers=True)
        return [[take(iter(loader), cut), states()] for cut in cuts] + [list(loader)]

    assert_plays(play)
