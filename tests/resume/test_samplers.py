"""Samplers that are not torch's: those that can be drawn from again, and others; and their epochs."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from resume_datasets import FromRandom, FromRandomOneByOne, OwnGenerator, Plain, Stateful, StatefulToTheEnd
from resume_loaders import started, take, values
from torch.utils.data import DistributedSampler, Sampler, WeightedRandomSampler

from shmloader import DataLoader, ResumeError


def test_a_sampler_that_draws_elsewhere_is_refused() -> None:
    loader = DataLoader(Plain(40), 4, sampler=FromRandom(40))
    next(iter(loader))
    other = DataLoader(Plain(40), 4, sampler=FromRandom(40))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ResumeError, match="now gives other batches than the 1 "):
        iter(other)


def test_a_sampler_that_ends_early_is_refused() -> None:
    class Short(FromRandom):
        def __iter__(self) -> Any:
            return iter(range(self.length))

    sampler = Short(40)
    loader = DataLoader(Plain(40), 4, sampler=sampler)
    iterator = iter(loader)
    take(iterator, 5)
    state = loader.state_dict()
    sampler.length = 8
    loader.load_state_dict(state)
    with pytest.raises(ResumeError, match=r"taken after 5 batches, and the sampler .* ended after 2"):
        iter(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_among_the_program_is_refused(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its draws cannot be repeated. A program that only saves the state continues, with a warning."""
    with DataLoader(Plain(40), 4, sampler=OwnGenerator(40, None), num_workers=workers) as loader:
        iterator = iter(loader)
        take(iterator, 3)
        state = loader.state_dict()
        assert len(values(iterator)) == 7
        loader.state_dict()
        (record,) = caplog.records
        assert "the sampler (OwnGenerator) draws from a global generator" in record.message
        loader.load_state_dict(state)
        with pytest.raises(ResumeError, match=r"OwnGenerator.* batch by batch"):
            values(loader)


class Slow(Sampler[int]):
    """Always the same order; other threads run meanwhile."""

    def __iter__(self) -> Iterator[int]:
        for number in range(40):
            time.sleep(0.001)
            yield number


@pytest.mark.parametrize("draws_in", ["the main thread", "another thread", "a worker thread"])
def test_a_sampler_is_not_blamed_for_what_another_thread_draws(draws_in: str) -> None:
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set():
            random.random()

    def drawing(samples: list[torch.Tensor]) -> torch.Tensor:
        for _ in range(2000):
            random.random()
        return torch.stack(samples)

    options: dict[str, Any] = {"num_workers": 1, "worker_type": "thread", "collate_fn": drawing}
    options = options if draws_in == "a worker thread" else {}
    with DataLoader(Plain(40), 4, sampler=Slow(), **options) as loader:
        loader.load_state_dict(started(DataLoader(Plain(40), 4, sampler=Slow())))
        with ThreadPoolExecutor(1) as pool:
            if draws_in == "the main thread":
                reading = pool.submit(lambda: values(loader))
                reading.add_done_callback(lambda _: ended.set())
                draw()
                rest = reading.result()
            else:
                if draws_in == "another thread":
                    pool.submit(draw)
                try:
                    rest = values(loader)
                finally:
                    ended.set()
        assert len(rest) == 9


def test_a_sampler_that_draws_among_the_program_in_another_thread_brings_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(Plain(40), 4, sampler=OwnGenerator(40, None))
    take(iterator := iter(loader), 3)
    loader.load_state_dict(loader.state_dict())
    del iterator
    caplog.clear()
    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(lambda: values(loader)).result()) == 7
    (record,) = caplog.records
    assert (
        "the batches of a resumed epoch may be others: the sampler (OwnGenerator) or another thread draws"
        in record.message
    )


@pytest.mark.parametrize("draw", [random.randrange, np.random.randint])
def test_a_sampler_that_draws_elsewhere_among_the_program_is_refused(draw: Callable[[int], int]) -> None:
    """It is refused even if a seed at the program's beginning repeats the first batches."""

    def make() -> DataLoader[Any]:
        random.seed(1)
        np.random.seed(1)
        return DataLoader(Plain(40), 4, sampler=FromRandomOneByOne(40, draw))

    loader = make()
    take(iter(loader), 1)
    state = loader.state_dict()
    other = make()
    other.load_state_dict(state)
    with pytest.raises(ResumeError, match="batch by batch"):
        values(other)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_draws_elsewhere_now_and_then_is_refused(workers: int) -> None:
    """It draws the order of five batches at once; when the program stopped, some were drawn in advance."""

    class Chunks(FromRandom):
        def __iter__(self) -> Any:
            for begin in range(0, self.length, 20):
                yield from random.sample(range(begin, begin + 20), 20)

    def make() -> DataLoader[Any]:
        random.seed(1)
        return DataLoader(Plain(80), 4, sampler=Chunks(80), num_workers=workers)

    with make() as loader:
        take(iter(loader), 3)
        state = loader.state_dict()
    with make() as other:
        other.load_state_dict(state)
        with pytest.raises(ResumeError, match=r"Chunks.* batch by batch"):
            values(other)


def test_the_samplers_epoch_is_set_by_the_state_and_another_one_is_refused() -> None:
    def make() -> DataLoader[Any]:
        dataset = Plain(40)
        return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, 0))

    loader = make()
    loader.set_epoch(3)
    iterator = iter(loader)
    next(iterator)
    state, rest = loader.state_dict(), values(iterator)
    other = make()
    other.load_state_dict(state)
    assert other.sampler.epoch == 3  # type: ignore[union-attr]
    assert values(other) == rest
    other.load_state_dict(state)
    other.set_epoch(0)
    with pytest.raises(ResumeError, match="sampler's epoch 3, and the sampler is set to epoch 0"):
        iter(other)


def test_the_epoch_reaches_the_dataset() -> None:
    class Counted(Plain):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    loader = DataLoader(Counted(8), 2)
    loader.set_epoch(5)
    next(iter(loader))
    other = DataLoader(Counted(8), 2)
    other.load_state_dict(loader.state_dict())
    assert other.dataset.epoch == 5  # type: ignore[attr-defined]


class AtOnce(OwnGenerator):
    """Draws the order in __iter__, and gives batches of four."""

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.length, generator=self.generator).view(-1, 4).tolist())


@pytest.mark.each_value
@pytest.mark.parametrize("drawn_from", ["a generator of its own", "the loader's", "torch's global one"])
@pytest.mark.parametrize("epochs_before", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 10])
def test_a_sampler_that_draws_at_once_goes_on(drawn_from: str, epochs_before: int, taken: int) -> None:
    """torch calls its __iter__ before a base seed is drawn without workers, and after that with workers."""

    def make(workers: int) -> DataLoader[Any]:
        generator = None if drawn_from == "torch's global one" else torch.Generator().manual_seed(3)
        of_loader = generator if drawn_from == "the loader's" else None
        sampler = AtOnce(40, generator)
        return DataLoader(Plain(40), batch_sampler=sampler, generator=of_loader, num_workers=workers)

    torch.manual_seed(5)
    loader = make(0)
    for _ in range(epochs_before):
        values(loader)
    iterator = iter(loader)
    take(iterator, taken)
    state, drawn_so_far = loader.state_dict(), torch.get_rng_state()
    rest, at_end = [values(iterator), values(loader)], torch.get_rng_state()
    torch.manual_seed(6)
    with make(0) as other:
        other.load_state_dict(state)
        torch.set_rng_state(drawn_so_far)
        assert [values(other), values(other)] == rest
        assert torch.equal(torch.get_rng_state(), at_end)
    with make(2) as other:
        other.load_state_dict(state)
        assert values(other) == rest[0]


@pytest.mark.in_ci(1)
@pytest.mark.each_value
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epochs_before", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 5, None])
def test_a_sampler_with_a_state_may_draw_from_the_loaders_generator(
    workers: int, epochs_before: int, taken: int | None
) -> None:
    """Base seeds are drawn from it between the sampler's epochs, which the sampler's state does not know."""

    def make() -> DataLoader[Any]:
        sampler = StatefulToTheEnd(40)
        return DataLoader(Plain(40), 4, sampler=sampler, generator=sampler.generator, num_workers=workers)

    with make() as loader:
        for _ in range(epochs_before):
            values(loader)
        iterator = iter(loader)
        had = values(itertools.islice(iterator, taken))
        state = loader.state_dict()
        rest = values(iterator) if len(had) == taken else values(loader)
        following = values(loader)
    with make() as other:
        other.load_state_dict(state)
        assert [values(other), values(other)] == [rest, following]


class SeedInState(Sampler[int]):
    """Draws a seed from torch's global generator when an epoch begins; only its state has the seed.

    With its last index it has begun anew. Its length may be another one than 40, or missing.
    """

    def __init__(self, told: int | None) -> None:
        self.told = told
        self.drawn, self.position = 0, 0

    def __len__(self) -> int:
        if self.told is None:
            raise NotImplementedError
        return self.told

    def __iter__(self) -> Any:
        if not self.position:
            self.drawn = int(torch.randint(1 << 40, ()))
        order = torch.randperm(40, generator=torch.Generator().manual_seed(self.drawn)).tolist()
        for index in order[self.position :]:
            self.position = (self.position + 1) % 40
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn, self.position = state["drawn"], state["position"]


@pytest.mark.each_value
@pytest.mark.parametrize(("workers", "told"), [(0, 40), (2, 40), (2, 44), (2, 8)])
@pytest.mark.parametrize("taken", [1, 2, 9, 10])
def test_a_seed_that_only_a_samplers_state_has_is_not_drawn_again(
    workers: int, told: int, taken: int
) -> None:
    with DataLoader(Plain(40), 4, sampler=SeedInState(told), num_workers=workers) as loader:
        iterator = iter(loader)
        take(iterator, taken)
        state, rest = loader.state_dict(), values(iterator)
    assert len(rest) == 10 - taken
    with DataLoader(Plain(40), 4, sampler=SeedInState(told), num_workers=workers) as other:
        other.load_state_dict(state)
        assert values(other) == rest
        assert len(values(other)) == 10


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epochs_before", [0, 1])
def test_a_seed_is_drawn_once_for_an_epoch_that_begins_with_a_state(workers: int, epochs_before: int) -> None:
    with DataLoader(Plain(40), 4, sampler=SeedInState(40), num_workers=workers) as loader:
        for _ in range(epochs_before):
            values(loader)
        state, drawn_so_far = loader.state_dict(), torch.get_rng_state()
        wanted = [values(loader), values(loader)]
    with DataLoader(Plain(40), 4, sampler=SeedInState(40), num_workers=workers) as other:
        other.load_state_dict(state)
        torch.set_rng_state(drawn_so_far)
        assert [values(other), values(other)] == wanted


class KeepsItsSeed(SeedInState):
    """Stores its drawn seed as ``seed``, a name that other samplers use for a setting."""

    def __init__(self) -> None:
        super().__init__(40)
        self.seed = 0

    def __iter__(self) -> Any:
        for index in super().__iter__():
            self.seed = self.drawn
            yield index

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | {"seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.seed = state["seed"]


@pytest.mark.parametrize("taken", [1, 3, 9])
def test_a_seed_that_a_samplers_state_has_too_is_no_setting(taken: int) -> None:
    loader = DataLoader(Plain(40), 4, sampler=KeepsItsSeed())
    iterator = iter(loader)
    take(iterator, taken)
    state, rest = loader.state_dict(), values(iterator)
    other = DataLoader(Plain(40), 4, sampler=KeepsItsSeed())
    other.load_state_dict(state)
    assert values(other) == rest


def test_a_seed_that_a_samplers_state_lacks_is_a_setting() -> None:
    def make(seed: int) -> DataLoader[Any]:
        sampler = SeedInState(40)
        sampler.seed = seed  # type: ignore[attr-defined]
        return DataLoader(Plain(40), 4, sampler=sampler)

    state = started(make(1))
    make(1).load_state_dict(state)
    with pytest.raises(ResumeError, match="sampler's seed is 1 in the state and 2 in this loader"):
        make(2).load_state_dict(state)


def test_an_epoch_that_is_over_is_not_drawn_again_where_a_sampler_tells_a_greater_length() -> None:
    loader = DataLoader(Plain(40), 4, sampler=SeedInState(44))
    values(loader)
    state, drawn_so_far = loader.state_dict(), torch.get_rng_state()
    following = values(loader)
    other = DataLoader(Plain(40), 4, sampler=SeedInState(44))
    other.load_state_dict(state)
    torch.set_rng_state(drawn_so_far)
    assert values(other) == following


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_is_still_in_the_epoch_that_was_left_is_not_resumed(workers: int) -> None:
    """It begins the next epoch only with its first batch; loaded before, it would go on with the one left."""
    with DataLoader(Plain(80), 4, sampler=Stateful(80), num_workers=workers) as loader:
        loader.state_dict()
        take(iter(loader), 3)
        left = loader.state_dict()
        iterator = iter(loader)
        early = loader.state_dict()
        batches = take(iterator, 1)
        state, rest = loader.state_dict(), values(iterator)
    other = DataLoader(Plain(80), 4, sampler=Stateful(80))
    with pytest.raises(ResumeError, match="before an epoch's first batch, and the epoch before was left"):
        other.load_state_dict(early)
    other.load_state_dict(state)
    assert values(other) == rest
    other = DataLoader(Plain(80), 4, sampler=Stateful(80))
    other.load_state_dict(left)
    assert values(other) == (batches + rest)[3:]  # this sampler begins the same epoch again


def test_a_state_is_the_same_again_before_the_next_batch_where_a_sampler_has_no_length() -> None:
    with DataLoader(Plain(40), 4, sampler=SeedInState(None), num_workers=2) as loader:
        loader.state_dict()  # from now on the sampler's state is read with each batch
        iterator = iter(loader)
        take(iterator, 3)
        state, rest = loader.state_dict(), values(iterator)
    assert state["sampler_batches"] == 3
    other = DataLoader(Plain(40), 4, sampler=SeedInState(None))
    other.load_state_dict(state)
    iterator = iter(other)
    assert other.state_dict()["sampler_state"] == state["sampler_state"]
    assert values(iterator) == rest


class Pops(Sampler[int]):
    """Gives the rest of a list; its state is that list itself, and it keeps a list that it loads."""

    def __init__(self, length: int) -> None:
        self.left = list(range(length))

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop()

    def state_dict(self) -> dict[str, list[int]]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.left = state["left"]


@pytest.mark.parametrize("taken", [0, 3])
def test_a_sampler_may_change_the_state_that_it_was_given(taken: int) -> None:
    loader = DataLoader(Plain(40), 4, sampler=Pops(40))
    iterator = iter(loader)
    take(iterator, taken)
    state, rest = loader.state_dict(), values(iterator)
    with DataLoader(Plain(40), 4, sampler=Pops(40), num_workers=2) as other:
        for _ in range(2):
            other.load_state_dict(state)
            iterator = iter(other)
            state = other.state_dict()
        assert values(iterator) == rest


@pytest.mark.parametrize("workers", [0, 1])
def test_a_weighted_sampler_that_draws_from_the_global_generator_goes_on(workers: int) -> None:
    def loader() -> DataLoader[Any]:
        sampler = WeightedRandomSampler([0.1 + index % 3 for index in range(40)], 40)
        return DataLoader(list(range(40)), 8, sampler=sampler, num_workers=workers)

    torch.manual_seed(3)
    whole = [batch.tolist() for batch in loader()]
    torch.manual_seed(3)
    first = loader()
    batches = iter(first)
    taken = [next(batches).tolist() for _ in range(2)]
    state = first.state_dict()
    torch.manual_seed(99)
    second = loader()
    second.load_state_dict(state)
    assert taken + [batch.tolist() for batch in second] == whole


class Breaks(Sampler[int]):
    """Draws from torch's global generator, and raises at an index."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(12).tolist()
        for number in range(12):
            if number == self.at:
                raise LookupError(number)
            yield order[number]


@pytest.mark.parametrize("at", [0, 6])
def test_a_sampler_that_raised_is_asked_again_and_raises_again(at: int) -> None:
    """Its exception is no batch. It comes from next(), where it came before."""

    loader = DataLoader(Plain(12), 3, sampler=Breaks(at), collate_fn=list)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(at // 3)]
    before = loader.state_dict()
    with pytest.raises(LookupError):
        next(iterator)
    after = loader.state_dict()
    assert after["batches"] == before["batches"] == len(first)
    assert next(iterator, None) is None  # a generator that has raised has ended
    for state in (before, after):
        other = DataLoader(Plain(12), 3, sampler=Breaks(at), collate_fn=list)
        other.load_state_dict(state)
        rest = iter(other)
        with pytest.raises(LookupError):
            next(rest)
        assert next(rest, None) is None


class RaisesOnce(Sampler[int]):
    def __init__(self) -> None:
        self.raises_at = -1

    def __iter__(self) -> Iterator[int]:
        for number in range(24):
            if number == self.raises_at:
                self.raises_at = -1
                raise OSError("not reachable")
            yield number


def test_a_state_stays_loaded_until_an_iterator_has_begun_with_it() -> None:
    """A sampler raises while an iterator sends its first tasks; the next one begins there again."""
    before = DataLoader(range(24), 4, sampler=RaisesOnce(), num_workers=2)
    for _ in itertools.islice(before, 2):
        pass
    state = before.state_dict()
    before.close()
    sampler = RaisesOnce()
    loader = DataLoader(range(24), 4, sampler=sampler, num_workers=2)
    loader.load_state_dict(state)
    sampler.raises_at = 9
    with pytest.raises(OSError, match="not reachable"):
        next(iter(loader))
    assert next(iter(loader)).tolist() == [8, 9, 10, 11]
    loader.close()
