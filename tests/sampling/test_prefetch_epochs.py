"""``prefetch_epochs``: batches of the next epoch are made early, and nobody can tell from what comes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drawing_datasets import Draws, DrawsFromItsOwn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loading import Numbered
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shmloader import DataLoader

Use = Callable[[DataLoader], None]


def states() -> list[Any]:
    _, key, position, *_ = np.random.get_state()
    return [torch.get_rng_state().tolist(), key.tolist(), position, random.getstate()]


def play(use: Use, make: Callable[[], dict[str, Any]], prefetch: bool, length: int = 22) -> tuple[Any, Any]:
    """What comes, with the generators' states wherever the program could look, and the statistics."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    seen: list[Any] = []
    given = {"num_workers": 2, "batch_size": 3, "persistent_workers": True, "dataset": Draws(length)} | make()
    with DataLoader(prefetch_epochs=prefetch, **given) as loader:
        use(Watched(loader, seen))  # type: ignore[arg-type]
        return seen, loader.statistics()


class Watched:
    """A loader whose batches are noted, with the generators' states after each."""

    def __init__(self, loader: DataLoader, seen: list[Any]) -> None:
        self.loader, self.seen = loader, seen

    def __iter__(self) -> Iterator[Any]:
        self.seen.append("epoch")
        iterator = iter(self.loader)
        self.seen.append(states())
        for batch in iterator:
            self.seen += [[torch.as_tensor(column).tolist() for column in batch], states()]
            yield batch
        self.seen.append(states())


def assert_same(use: Use, make: Callable[[], dict[str, Any]], length: int = 22) -> Any:
    """Play with and without; the statistics of the former."""
    plain, _ = play(use, make, False, length)
    prefetched, statistics = play(use, make, True, length)
    assert prefetched == plain
    return statistics


def whole(loader: Any, epochs: int = 3) -> None:
    for _ in range(epochs):
        list(loader)


def whole_with_epochs(loader: Any) -> None:
    for epoch in range(4):
        loader.loader.batch_sampler.sampler.set_epoch(epoch)
        list(loader)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "shuffled by a generator": lambda: {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(8),
    },
    "with replacement": lambda: {
        "sampler": RandomSampler(range(22), replacement=True, num_samples=50),
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * 11, 22)},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(4, 20))},
    "a list": lambda: {"sampler": [5, 3, 1, 9, 7, 11, 13, 15, 17, 19]},
    "batches": lambda: {"batch_sampler": [[k, k + 1] for k in range(10)], "batch_size": 1},
    "single samples": lambda: {"batch_size": None, "shuffle": True},
    "threads": lambda: {"worker_type": "thread", "shuffle": True, "dataset": DrawsFromItsOwn(22)},
}


@pytest.mark.parametrize("which", SAMPLERS)
def test_whole_epochs_are_the_same(which: str) -> None:
    """Order, what samples draw, and the generators' states at every moment."""
    statistics = assert_same(whole, SAMPLERS[which])
    assert statistics.epochs_prefetched == 2
    assert statistics.epochs_in_vain == 0


def distributed(**given: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"sampler": DistributedSampler(range(22), num_replicas=2, rank=1, **given)}


def test_set_epoch_is_foreseen() -> None:
    """Called before each epoch, as it is to be, with the next number."""
    statistics = assert_same(whole_with_epochs, distributed())
    assert statistics.epochs_prefetched == 3


def test_where_set_epoch_is_not_called_it_is_foreseen_from_the_second_epoch_on() -> None:
    statistics = assert_same(lambda loader: whole(loader, 5), distributed())
    assert (statistics.epochs_in_vain, statistics.epochs_prefetched) == (1, 3)


def test_an_unforeseen_epoch_is_made_anew() -> None:
    def use(loader: Any) -> None:
        for epoch in (0, 1, 7, 2, 2):
            loader.loader.batch_sampler.sampler.set_epoch(epoch)
            list(loader)

    statistics = assert_same(use, distributed())
    assert statistics.epochs_prefetched == 1
    assert statistics.epochs_in_vain == 2  # and then no more are made early


def test_set_epoch_before_the_last_epochs_end_is_foreseen_too() -> None:
    def use(loader: Any) -> None:
        sampler = loader.loader.batch_sampler.sampler
        for epoch in range(3):
            for number, _ in enumerate(loader):
                if number == 2:
                    sampler.set_epoch(epoch + 1)

    assert assert_same(use, distributed()).epochs_prefetched == 2


CHANGES: dict[str, Callable[[Any], None]] = {
    "draws from torch": lambda loader: torch.rand(1),
    "seeds torch": lambda loader: torch.manual_seed(4),
    "seeds as it was": lambda loader: torch.set_rng_state(torch.Generator().manual_seed(9).get_state()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["shuffled", "with replacement", "weighted", "subset"])
def test_a_program_that_draws_or_seeds_between_epochs_gets_what_it_would_have_got(
    change: str, which: str
) -> None:
    def use(loader: Any) -> None:
        for _ in range(3):
            list(loader)
            CHANGES[change](loader)

    assert assert_same(use, SAMPLERS[which]).epochs_in_vain > 0


@pytest.mark.parametrize("which", ["in order", "shuffled by a generator", "a list"])
def test_draws_from_a_generator_that_the_sampler_does_not_use_are_no_reason(which: str) -> None:
    """As those of another loader, which draws its base seed: of one for validation, say."""

    def use(loader: Any) -> None:
        for _ in range(3):
            for _ in loader:
                torch.rand(1)
            list(DataLoader(Numbered(3)))

    statistics = assert_same(use, SAMPLERS[which])
    assert (statistics.epochs_prefetched, statistics.epochs_in_vain) == (2, 0)


def test_what_numpy_and_random_draw_in_the_program_is_no_reason() -> None:
    def use(loader: Any) -> None:
        for _ in range(3):
            for _ in loader:
                np.random.rand(2)
                random.random()

    assert assert_same(use, SAMPLERS["shuffled"]).epochs_prefetched == 2


def test_a_program_that_draws_with_every_batch_has_nothing_made_early_after_a_while() -> None:
    """As dropout does on the CPU."""

    def use(loader: Any) -> None:
        for _ in range(6):
            for _ in loader:
                torch.rand(3)

    statistics = assert_same(use, SAMPLERS["shuffled"])
    assert statistics.epochs_prefetched == 0
    assert statistics.epochs_in_vain == 2


def changes_weights(sampler: Any) -> None:
    sampler.weights[3] = 100.0


def changes_indices(sampler: Any) -> None:
    sampler.indices[3] = 21


def changes_a_list(sampler: Any) -> None:
    sampler[0] = 20


def changes_the_length(sampler: Any) -> None:
    sampler.data_source.append(22)


IN_PLACE: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "weights": (lambda: WeightedRandomSampler([1.0] * 22, 22), changes_weights),
    "indices": (lambda: SubsetRandomSampler(list(range(15))), changes_indices),
    "a list": (lambda: list(range(15)), changes_a_list),
    "the data's length": (lambda: torch.utils.data.SequentialSampler(list(range(12))), changes_the_length),
    "another generator": (
        lambda: RandomSampler(range(22), generator=torch.Generator().manual_seed(1)),
        lambda sampler: setattr(sampler, "generator", torch.Generator().manual_seed(1)),
    ),
    "its generator's state": (
        lambda: RandomSampler(range(22), generator=torch.Generator().manual_seed(1)),
        lambda sampler: sampler.generator.manual_seed(5),
    ),
    "the seed": (
        lambda: DistributedSampler(range(22), 2, 0),
        lambda sampler: setattr(sampler, "seed", sampler.seed + 9),
    ),
    "the rank": (
        lambda: DistributedSampler(range(22), 2, 0),
        lambda sampler: setattr(sampler, "rank", 1 - sampler.rank),
    ),
}


@pytest.mark.parametrize("which", IN_PLACE)
def test_a_sampler_that_is_changed_between_epochs_is_asked_anew(which: str) -> None:
    """Whatever of it the index batches depend on."""
    make, change = IN_PLACE[which]

    def use(loader: Any) -> None:
        for _ in range(2):
            list(loader)
            change(loader.loader.batch_sampler.sampler)
        list(loader)

    assert assert_same(use, lambda: {"sampler": make()}, 30).epochs_in_vain >= 1


def test_another_batch_size_between_epochs_is_honoured() -> None:
    def use(loader: Any) -> None:
        list(loader)
        loader.loader.batch_sampler.batch_size = 5
        list(loader)

    assert assert_same(use, SAMPLERS["shuffled"]).epochs_in_vain == 1


@pytest.mark.parametrize("cut", [0, 1, 4, 6, 7, 8])
@pytest.mark.parametrize("which", ["in order", "shuffled"])
def test_an_epoch_left_early_voids_what_was_made_early(cut: int, which: str) -> None:
    """Eight batches: the last ones come while the next epoch is made. Workers draw on where they would."""

    def use(loader: Any) -> None:
        for _ in range(2):
            for number, _ in enumerate(loader):
                if number + 1 >= cut:
                    break
        whole(loader, 2)

    statistics = assert_same(use, SAMPLERS[which])
    assert statistics.epochs_prefetched >= 1
    assert (statistics.epochs_in_vain > 0) == (4 < cut < 8)  # all eight without the end is a whole epoch


def test_threads_put_back_what_is_theirs_and_not_the_programs_generators() -> None:
    """The program draws from its own meanwhile."""

    def use(loader: Any) -> None:
        for cut in (6, 7, 9):
            for number, _ in enumerate(loader):
                time.sleep(0.02)  # whatever the workers do meanwhile, they do it before this
                np.random.rand(1)
                random.random()
                if number + 1 == cut:
                    break

    assert assert_same(use, SAMPLERS["threads"]).epochs_in_vain == 2


@settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize="CI" in os.environ,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
@given(
    length=st.integers(0, 14),
    prefetch=st.integers(1, 3),
    workers=st.integers(1, 2),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("epoch"), st.just(0)),
            st.tuples(st.just("cut"), st.integers(0, 8)),
            st.tuples(st.just("draw"), st.just(0)),
            st.tuples(st.just("set"), st.integers(0, 3)),
        ),
        max_size=8,
    ),
    which=st.sampled_from(["in order", "shuffled", "distributed"]),
)
def test_any_use_sees_the_same(
    length: int, prefetch: int, workers: int, steps: list[tuple[str, int]], which: str
) -> None:
    """Epochs whole and cut, also of few batches, with draws and set_epoch between."""

    def make() -> dict[str, Any]:
        rules: dict[str, Any] = {"prefetch_factor": prefetch, "num_workers": workers, "batch_size": 2}
        if which == "shuffled" and length:
            return rules | {"shuffle": True}
        if which == "distributed" and length:
            return rules | {"sampler": DistributedSampler(range(length), 1, 0)}
        return rules

    def use(loader: Any) -> None:
        sampler = loader.loader.batch_sampler.sampler
        for step, number in steps:
            if step == "epoch":
                list(loader)
            elif step == "cut":
                for k, _ in enumerate(loader):
                    if k >= number:
                        break
            elif step == "draw":
                torch.rand(1)
            elif isinstance(sampler, DistributedSampler):
                sampler.set_epoch(number)

    assert_same(use, make, length)


# --- where nothing is made early


class OwnSampler(Sampler[int]):
    """Changes with each epoch by itself: to be asked once for each."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        yield from range(self.epochs, self.epochs + 9)


class OwnRandomSampler(RandomSampler):
    """A subclass may depend on anything."""


KNOWN = "what its next epoch depends on is known of torch's own samplers only, and "
NOT_EARLY: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a sampler of one's own": (lambda: {"sampler": OwnSampler()}, f"{KNOWN}OwnSampler is not one of torch's"),
    "a subclass": (
        lambda: {"sampler": OwnRandomSampler(range(22))},
        f"{KNOWN}OwnRandomSampler is not one of torch's",
    ),
    "out of order": (lambda: {"in_order": False, "num_workers": 1}, "it needs in_order=True"),
    "dynamic": (lambda: {"dispatch": "dynamic"}, "it needs in_order=True and dispatch='static'"),
}


@pytest.mark.parametrize("which", NOT_EARLY)
def test_where_it_could_not_be_told_nothing_is_made_early_and_that_is_said(which: str) -> None:
    make, reason = NOT_EARLY[which]
    with pytest.warns(
        UserWarning, match=f"prefetch_epochs=True has no effect for this loader: {reason}"
    ) as said:
        statistics = assert_same(whole, make)
    assert statistics.epochs_prefetched == statistics.epochs_in_vain == 0
    assert {warning.filename for warning in said} == {__file__}, "it points at the program"
