"""The global generators: states of the program's own may set torch's; NumPy's may be of any kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from resume_datasets import OwnGenerator, Plain
from resume_loaders import take, values
from torch.utils.data import IterableDataset, Sampler

from shmloader import DataLoader


class Noise(IterableDataset[float]):
    """Draws from torch's global generator, which its state includes."""

    place = 0

    def __iter__(self) -> Iterator[float]:
        while self.place < 30:
            self.place += 1
            yield torch.rand(()).item()
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        torch.set_rng_state(state["rng"])


class Drawn(Sampler[int]):
    """The same as a sampler."""

    def __init__(self) -> None:
        self.noise = Noise()
        self.state_dict, self.load_state_dict = self.noise.state_dict, self.noise.load_state_dict

    def __len__(self) -> int:
        return 30

    def __iter__(self) -> Iterator[int]:
        return (int(drawn * 30) for drawn in self.noise)


def of_stream() -> DataLoader[Any]:
    return DataLoader(Noise(), 3)


def of_sampler() -> DataLoader[Any]:
    return DataLoader(Plain(30), 3, sampler=Drawn())


@pytest.mark.parametrize("make", [of_stream, of_sampler])
@pytest.mark.parametrize("asked", [False, True], ids=["asked late", "asked before"])
def test_a_state_that_sets_torchs_generator_is_exact_without_workers(make: Any, asked: bool) -> None:
    torch.manual_seed(3)
    loader = make()
    if asked:
        loader.state_dict()
    iterator = iter(loader)
    take(iterator, 4)
    state, rest, at_end = loader.state_dict(), values(iterator), torch.get_rng_state()
    torch.manual_seed(8)
    other = make()
    other.load_state_dict(state)
    assert values(other) == rest
    assert torch.equal(torch.get_rng_state(), at_end)


class Augmented(Noise):
    """Draws its samples' noise from torch's generator; its state has its place only."""

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def test_the_generator_stays_as_the_program_has_set_it_where_a_state_does_not_set_it() -> None:
    """The samples since the state was read are drawn again, with their noise."""
    torch.manual_seed(3)
    loader = DataLoader(Augmented(), 3)
    iterator = iter(loader)
    take(iterator, 4)
    state, drawn_so_far, rest = loader.state_dict(), torch.get_rng_state(), values(iterator)
    other = DataLoader(Augmented(), 3)
    other.load_state_dict(state)
    torch.set_rng_state(drawn_so_far)
    assert values(other) == rest


@pytest.fixture
def pcg64() -> Iterator[None]:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    yield
    np.random.set_bit_generator(before)


class FromNumpy(OwnGenerator):
    """Draws from NumPy's global generator."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(np.random.randint(self.length))


@pytest.mark.usefixtures("pcg64")
@pytest.mark.filterwarnings("error")
def test_numpys_generator_may_be_of_any_kind(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(Plain(40), 4, sampler=OwnGenerator(40, torch.Generator()))
    take(iter(loader), 4)
    loader.state_dict()
    assert not caplog.text
    loader = DataLoader(Plain(40), 4, sampler=FromNumpy(40, None))
    take(iter(loader), 4)
    loader.state_dict()
    assert "draws from a global generator" in caplog.text
    before = np.random.get_state(legacy=False)
    values(DataLoader(Plain(8), 4, seed_per_sample=True))
    assert np.random.get_state(legacy=False) == before


def test_draws_of_a_sampler_are_looked_at_in_two_batches_of_the_first_epoch() -> None:
    loader = DataLoader(Plain(128), 4, sampler=OwnGenerator(128, torch.Generator()))
    with mock.patch.object(np.random, "get_state", wraps=np.random.get_state) as looked:
        values(loader)
        assert looked.call_count == 4  # before and after each
        values(loader)
        assert looked.call_count == 4


class Told(Sampler[int]):
    """Has an order for each epoch, without a generator."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + 5 * place) % 12 for place in range(12)])


@pytest.mark.parametrize("sampler", [lambda: list(range(12)), Told], ids=["list", "told"])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_state_of_an_epoch_begun_early_leaves_torchs_generator(sampler: Any, taken: int) -> None:
    """What the program drew between the early draw of the order and the epoch's begin is not drawn again."""
    options = {"num_workers": 1, "persistent_workers": True, "prefetch_epochs": True}
    loader = DataLoader(Plain(12), 2, sampler=sampler(), **options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        for _ in range(6 if epoch == 0 else taken):
            next(iterator)
            torch.rand(1)
    state, before = loader.state_dict(), torch.get_rng_state()
    assert loader.statistics().epochs_prefetched == 1
    rest = values(iterator)
    loader.close()
    other = DataLoader(Plain(12), 2, sampler=sampler())
    other.load_state_dict(state)
    assert values(other) == rest
    assert torch.equal(torch.get_rng_state(), before)
