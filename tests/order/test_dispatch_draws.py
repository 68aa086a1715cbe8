"""``dispatch="dynamic"``: neither batches nor draws of samples depend on which worker made which batch."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_datasets import SMALL, Draws, plain, play
from hypothesis import given, settings
from hypothesis import strategies as st
from robustness.processes import LONG
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from shmloader import DataLoader
from shmloader.worker.random_state import sample_seeds

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class DrawsInBatches(Draws):
    """Fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def draws_when_collated(samples: list[Any]) -> Any:
    return default_collate(samples), torch.rand(1), random.random()


# --- batches and their order


def as_documented(
    dataset: Draws, batches: list[list[int]], base_seed: int, epoch: int, by_batch: bool
) -> list[Any]:
    """The oracle: the batches of an epoch, one sample after the other, in this process."""
    made = []
    for seq, indices in enumerate(batches):
        samples = []
        for position, index in enumerate(indices):
            if position == 0 or not by_batch:
                seeds = sample_seeds(base_seed, epoch, seq, position if by_batch else position + 1)
                torch.manual_seed(seeds[0])
                random.seed(seeds[1])
                np.random.seed(seeds[2])
            samples.append(dataset[index])
        made.append(plain(default_collate(samples)))
    return made


@settings(max_examples=25 if LONG else 8, derandomize="CI" in os.environ, **SMALL)
@given(
    lengths=st.lists(st.integers(1, 4), max_size=9),
    slow=st.frozensets(st.integers(0, 7), max_size=3),
    workers=st.integers(1, 3),
    prefetch=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 5), max_size=2),
    by_batch=st.booleans(),
    in_order=st.booleans(),
    kept=st.booleans(),
)
def test_any_loader_gives_what_the_oracle_does(
    lengths: list[int],
    slow: frozenset[int],
    workers: int,
    prefetch: int,
    cuts: list[int],
    by_batch: bool,
    in_order: bool,
    kept: bool,
) -> None:
    """Epochs are left early or whole, with slow samples, batches of any size, kept or not."""
    dataset = (DrawsInBatches if by_batch else Draws)(8, slow)
    batches = [[(3 * seq + k) % 8 for k in range(length)] for seq, length in enumerate(lengths)]
    with DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=prefetch,
        persistent_workers=True,
        in_order=in_order,
        dispatch="dynamic",
    ) as loader:
        seen: list[list[Any]] = []
        for cut in [*cuts, len(batches)]:
            iterator = iter(loader)
            epoch = [next(iterator) for _ in range(min(cut, len(batches)))]
            seen.append(epoch if kept else [plain(batch) for batch in epoch])
        assert next(iterator, None) is None
        base_seed = iterator._base_seed
        del iterator
    for number, epoch in enumerate(seen):
        expected = as_documented(dataset, batches, base_seed, number, by_batch)
        found = [plain(batch) for batch in epoch]
        if in_order:
            assert found == expected[: len(found)]
        else:
            assert all(batch in expected for batch in found)
            assert len(found) < len(expected) or sorted(map(repr, found)) == sorted(map(repr, expected))


@pytest.mark.parametrize("kind", [Draws, DrawsInBatches])
@pytest.mark.parametrize("size", [None, 3])
def test_draws_are_the_same_with_any_number_of_workers_and_in_every_run(kind: type, size: int | None) -> None:
    """There are two shuffled epochs, with different draws."""
    dataset = kind(20, frozenset({4, 11}))
    one, *others = [
        play(dataset, 2, batch_size=size, shuffle=True, num_workers=workers) for workers in (1, 2, 3, 3)
    ]
    assert all(other == one for other in others)
    assert one[0] != one[1]
    assert play(dataset, 2, seed=6, batch_size=size, shuffle=True, num_workers=1) != one


@pytest.mark.parametrize("workers", [1, 2])
def test_each_epoch_of_the_same_workers_draws_differently(workers: int) -> None:
    epochs = play(Draws(6), 3, batch_size=2, num_workers=workers)
    drawn = [[batch["torch"] for batch in epoch] for epoch in epochs]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_samples_of_an_epoch_draw_differently_even_of_one_index() -> None:
    """A sampler that gives an index often, as oversampling does, gets as many augmentations."""
    (batches,) = play(Draws(4), batch_sampler=[[1, 1], [1, 1]], num_workers=2)
    for name in ("torch", "numpy", "random"):
        assert len({repr(value) for batch in batches for value in batch[name]}) == 4


def test_what_collate_fn_draws_is_the_same_too() -> None:
    """Samples that come from one call, or draw nothing, are tried too."""
    for dataset in (Draws(12), DrawsInBatches(12), TensorDataset(torch.arange(12))):
        found = [
            play(dataset, batch_size=2, num_workers=workers, collate_fn=draws_when_collated)
            for workers in (1, 3)
        ]
        assert found[0] == found[1]
        assert len({batch[1][0] for batch in found[0][0]}) == 6


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_going_on_without_bad_samples_is_the_same_with_any_number_of_workers(on_error: str) -> None:
    found = []
    for workers in (1, 3):
        with pytest.warns(RuntimeWarning, match="4 bad sample"):
            found.append(play(SomeBad(16), batch_size=4, num_workers=workers, on_error=on_error))
    assert found[0] == found[1]
    assert [len(batch["index"]) for batch in found[0][0]] == [3 if on_error == "skip" else 4] * 4


class SomeBad(Draws):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        if index % 4 == 2:
            raise ValueError(index)
        return sample


def test_workers_of_another_start_method_draw_the_same(warm_helpers: None) -> None:
    found = [
        play(Draws(8), batch_size=2, num_workers=2, multiprocessing_context=method)
        for method in ("fork", "forkserver")
    ]
    assert found[0] == found[1]


def test_a_dataset_that_seeds_itself_draws_what_it_seeded() -> None:
    """The dataset's own seed is set after the loader's."""
    (batches,) = play(SeedsItself(4), batch_size=1, num_workers=2)
    expected = [float(torch.rand(1, generator=torch.Generator().manual_seed(i))) for i in range(4)]
    assert [batch[0] for batch in batches] == pytest.approx(expected, abs=0)


class SeedsItself(Draws):
    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return float(torch.rand(1))


class OwnGenerators(Draws):
    """Draws from ``get_worker_info().rng``."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info.dataset is self
        rng = info.rng
        drawn = torch.rand(1, generator=rng.torch_generator), rng.random_generator.random()
        return *drawn, rng.numpy_generator.random(), torch.rand(1, generator=rng.torch_generator)


def test_generators_of_the_worker_are_seeded_for_each_sample_in_processes_and_threads() -> None:
    """Threads leave the program's global generators alone."""
    found = [play(OwnGenerators(12), batch_size=3, num_workers=workers) for workers in (1, 3)]
    torch.manual_seed(5)
    state = random.getstate(), np.random.get_state()[1].tolist()
    found.append(play(OwnGenerators(12), batch_size=3, num_workers=2, worker_type="thread"))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state
    assert found[0] == found[1] == found[2]
    assert len({value for batch in found[0][0] for value in batch[2]}) == 12
