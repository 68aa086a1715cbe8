"""``prefetch_epochs``: batches of the next epoch are made early, and are the same as without it."""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drawing_datasets import Draws, DrawsFromItsOwn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from loading import Numbered
from resume_datasets import Stateful
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
    """Batches, the generators' states at every moment that the program sees, and the statistics."""
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    seen: list[Any] = []
    given = {"num_workers": 2, "batch_size": 3, "persistent_workers": True, "dataset": Draws(length)} | make()
    with DataLoader(prefetch_epochs=prefetch, **given) as loader:
        use(Watched(loader, seen))  # type: ignore[arg-type]
        return seen, loader.statistics()


class Watched:
    """A loader that notes its batches, with the generators' states after each."""

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


def assert_same(use: Use, make: Callable[[], dict[str, Any]], length: int = 22, *, draws: bool = True) -> Any:
    """Play with and without prefetching and compare; returns the statistics of the former.

    Args:
        use: The program.
        make: Arguments of the loader, made anew for each play.
        length: Length of the dataset.
        draws: Whether to compare also draws of samples in workers, where discarded batches have drawn.
    """
    plain, _ = play(use, make, False, length)
    prefetched, statistics = play(use, make, True, length)
    if not draws:
        plain, prefetched = (list(map(_without_draws, seen)) for seen in (plain, prefetched))
    assert prefetched == plain
    return statistics


def _without_draws(one: Any) -> Any:
    is_batch = isinstance(one, list) and len(one) > 1 and all(isinstance(column, list) for column in one[:2])
    return one[0] if is_batch else one


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(8)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True, "generator": seeded()},
    "with replacement": lambda: {
        "sampler": RandomSampler(range(22), replacement=True, num_samples=50, generator=seeded()),
    },
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * 11, 22, generator=seeded())},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(4, 20), generator=seeded())},
    "a list": lambda: {"sampler": [5, 3, 1, 9, 7, 11, 13, 15, 17, 19]},
    "batches": lambda: {"batch_sampler": [[k, k + 1] for k in range(10)], "batch_size": 1},
    "single samples": lambda: {"batch_size": None, "shuffle": True, "generator": seeded()},
    "of one's own, with an epoch": lambda: {"sampler": OwnSampler()},
    "threads": lambda: {
        "worker_type": "thread",
        "shuffle": True,
        "dataset": DrawsFromItsOwn(22),
        "generator": seeded(),
    },
    "dynamic": lambda: {"dispatch": "dynamic", "shuffle": True, "generator": seeded()},
}


class OwnSampler(Sampler[int]):
    """Its order depends on the epoch that it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch, self.epoch + 9))


def whole(loader: Any, epochs: int = 3) -> None:
    for _ in range(epochs):
        list(loader)


def whole_with_epochs(loader: Any) -> None:
    for epoch in range(4):
        loader.loader.batch_sampler.sampler.set_epoch(epoch)
        list(loader)


@pytest.mark.parametrize("which", SAMPLERS)
def test_whole_epochs_are_the_same(which: str) -> None:
    """Order, draws of samples, and the program's generators at every moment are the same."""
    use = whole_with_epochs if "epoch" in which else whole
    statistics = assert_same(use, SAMPLERS[which])
    assert statistics.epochs_prefetched == 2 + (use is whole_with_epochs)
    assert statistics.epochs_in_vain == 0


def distributed() -> dict[str, Any]:
    return {"sampler": DistributedSampler(range(22), num_replicas=2, rank=1)}


def test_set_epoch_is_foreseen() -> None:
    """It is called before each epoch, as it should be, with the next number."""
    statistics = assert_same(whole_with_epochs, distributed)
    assert statistics.epochs_prefetched == 3


def test_where_set_epoch_is_not_called_it_is_foreseen_from_the_second_epoch_on() -> None:
    statistics = assert_same(lambda loader: whole(loader, 5), distributed, draws=False)
    assert (statistics.epochs_in_vain, statistics.epochs_prefetched) == (1, 3)


def test_an_unforeseen_epoch_is_made_anew() -> None:
    def use(loader: Any) -> None:
        for epoch in (0, 1, 7, 2, 2):
            loader.loader.batch_sampler.sampler.set_epoch(epoch)
            list(loader)

    statistics = assert_same(use, distributed, draws=False)
    assert statistics.epochs_prefetched == 1
    assert statistics.epochs_in_vain == 2  # and then no more are made early


def test_set_epoch_before_the_last_epochs_end_is_foreseen_too() -> None:
    def use(loader: Any) -> None:
        sampler = loader.loader.batch_sampler.sampler
        for epoch in range(3):
            for number, _ in enumerate(loader):
                if number == 2:
                    sampler.set_epoch(epoch + 1)

    assert assert_same(use, distributed).epochs_prefetched == 2


def test_set_epoch_of_the_loader_is_no_reason_where_the_dataset_has_none() -> None:
    def use(loader: Any) -> None:
        for epoch in range(4):
            loader.loader.set_epoch(epoch)
            list(loader)

    statistics = assert_same(use, distributed)
    assert (statistics.epochs_prefetched, statistics.epochs_in_vain) == (3, 0)


class SeededByEpoch(Sampler[int]):
    """Draws index by index from a generator that `set_epoch` seeds."""

    def __init__(self) -> None:
        self.epoch, self.generator = 0, seeded()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.generator.manual_seed(epoch)

    def __iter__(self) -> Iterator[int]:
        for _ in range(22):
            yield int(torch.randint(22, (), generator=self.generator))


@pytest.mark.parametrize("which", ["in order", "shuffled", "a list"])
def test_what_the_program_draws_is_no_reason(which: str) -> None:
    """The program, or another loader, draws from generators that the sampler does not use."""

    def use(loader: Any) -> None:
        for _ in range(3):
            for _ in loader:
                torch.rand(1)
                np.random.rand(2)
                random.random()
            list(DataLoader(Numbered(3)))

    statistics = assert_same(use, SAMPLERS[which])
    assert (statistics.epochs_prefetched, statistics.epochs_in_vain) == (2, 0)


@pytest.mark.parametrize("cut", [0, 1, 4, 6, 7, 8])
@pytest.mark.parametrize("which", ["in order", "shuffled"])
def test_an_epoch_left_early_discards_what_was_made_early(cut: int, which: str) -> None:
    """There are eight batches: the last ones come while the next epoch is made."""

    def use(loader: Any) -> None:
        for _ in range(2):
            for number, _ in enumerate(loader):
                if number + 1 >= cut:
                    break
        whole(loader, 2)

    statistics = assert_same(use, SAMPLERS[which], draws=False)
    assert (statistics.epochs_in_vain > 0) == (4 < cut < 8)  # all eight without the end is a whole epoch


def test_a_sampler_is_set_back_where_an_epoch_is_left_early() -> None:
    def use(loader: Any) -> None:
        assert len(list(itertools.islice(loader, 7))) == 7
        whole(loader, 2)

    assert assert_same(use, SAMPLERS["shuffled"], draws=False).epochs_in_vain == 1


def test_a_sampler_is_set_back_where_the_loader_is_closed() -> None:
    def use(loader: Any) -> None:
        whole(loader, 1)
        loader.loader.close()
        assert len(list(itertools.islice(loader, 7))) == 7
        loader.loader.close()
        whole(loader, 2)

    assert_same(use, SAMPLERS["shuffled"])


class HasEpoch(Numbered):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 1000 * self.epoch


def test_a_dataset_that_is_told_of_the_epoch_has_it_in_every_batch() -> None:
    with DataLoader(HasEpoch(16), 4, num_workers=2, persistent_workers=True, prefetch_epochs=True) as loader:
        for epoch in range(4):
            loader.set_epoch(epoch)
            assert [int(batch[0, 0]) for batch in loader] == [1000 * epoch + k for k in range(0, 16, 4)]
        assert loader.statistics().epochs_in_vain > 0


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
    """Epochs are whole or cut, also of few batches, with draws and set_epoch between them."""

    def make() -> dict[str, Any]:
        rules: dict[str, Any] = {"prefetch_factor": prefetch, "num_workers": workers, "batch_size": 2}
        if which == "shuffled" and length:
            return rules | {"shuffle": True, "generator": seeded()}
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

    assert_same(use, make, length, draws=False)


# --- cases in which nothing is made early


class Counts(Sampler[int]):
    """Changes with each epoch by itself."""

    epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(range(self.epochs, self.epochs + 9))


class Untold(SeededByEpoch):
    """It does not tell the epoch's number."""

    def __init__(self) -> None:
        super().__init__()
        del self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(epoch)


GLOBAL = "its {} draws from torch's global generator"
NOT_EARLY: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "shuffled": (lambda: {"shuffle": True}, GLOBAL.format("RandomSampler")),
    "subset": (lambda: {"sampler": SubsetRandomSampler(range(9))}, GLOBAL.format("SubsetRandomSampler")),
    "weighted": (
        lambda: {"sampler": WeightedRandomSampler([1.0] * 22, 22)},
        GLOBAL.format("WeightedRandomSampler"),
    ),
    "epoch unknown": (lambda: {"sampler": Untold()}, "its Untold has set_epoch(), and no number `epoch`"),
    "epoch that seeds": (
        lambda: {"sampler": SeededByEpoch()},
        "its SeededByEpoch has a generator, which set_epoch() may seed",
    ),
    "counts": (lambda: {"sampler": Counts()}, "its Counts draws from torch's global generator"),
    "state": (lambda: {"sampler": Stateful(22)}, "its Stateful has a state_dict()"),
    "out of order": (lambda: {"in_order": False, "num_workers": 1}, "it needs in_order=True"),
}


@pytest.mark.parametrize("which", NOT_EARLY)
def test_where_it_would_change_the_order_nothing_is_made_early_and_that_is_said(which: str) -> None:
    make, reason = NOT_EARLY[which]
    with pytest.warns(
        UserWarning, match=re.escape(f"prefetch_epochs=True has no effect for this loader: {reason}")
    ) as said:
        statistics = assert_same(whole, make)
    assert statistics.epochs_prefetched == statistics.epochs_in_vain == 0
    # Others are Python's own about forks.
    places = {warning.filename for warning in said if issubclass(warning.category, UserWarning)}
    assert places == {__file__}, "it points at the program"
