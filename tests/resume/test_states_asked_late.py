"""States of the program's own samplers and streams are read once an epoch, until the program asks for one.

The first state that it asks for is exact all the same, and later ones are read with each batch.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_datasets import Plain
from resume_loaders import take, values
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from shmloader import DataLoader, ResumeError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:to resume, .* samples")


class Shuffled(Sampler[int]):
    """Draws its orders from a private generator, which its state does not include, with its first index."""

    def __init__(self, length: int, *, tells_length: bool = True) -> None:
        self.length, self.tells_length = length, tells_length
        self.rng = np.random.default_rng(4)
        self.order: list[int] = []
        self.place = self.calls = 0

    def __len__(self) -> int:
        if not self.tells_length:
            raise TypeError
        return self.length

    def __iter__(self) -> Iterator[int]:
        if not self.place:
            self.order = self.rng.permutation(self.length).tolist()
        while self.place < self.length:
            self.place += 1
            yield self.order[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = state["order"], state["place"]


def of_sampler(sampler: Any, workers: int = 0, **options: Any) -> DataLoader[Any]:
    kind = {"worker_type": "thread", "prefetch_factor": 3} if workers else {}
    return DataLoader(Plain(40), sampler=sampler, num_workers=workers, **{"batch_size": 4} | kind | options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_samplers_state_is_read_at_the_beginning_of_an_epoch_until_one_is_asked_for(workers: int) -> None:
    sampler = Shuffled(40)
    with of_sampler(sampler, workers, persistent_workers=bool(workers)) as loader:
        for epoch in range(3):
            values(loader)
            assert sampler.calls <= 2 * (epoch + 1)
        before = sampler.calls
        iterator = iter(loader)
        take(iterator, 1)
        loader.state_dict()
        drawn = 1 + 6 * bool(workers)
        values(iterator)
        assert sampler.calls - before == 2 + 10 - drawn
        values(loader)
        assert sampler.calls - before == 2 + 10 - drawn + 11


class Tensors(Shuffled):
    """Has a large tensor that stays, and a small one that is changed in place."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.large, self.counts = torch.rand(1000), torch.zeros(3, dtype=torch.int64)

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            self.counts[index % 3] += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"large": self.large, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.large, self.counts = state["large"], state["counts"]


def test_of_a_samplers_tensors_those_that_change_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, deepcopy = [], copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda one, memo=None: copied.append(one) or deepcopy(one, memo))
    loader, other = of_sampler(Tensors(40)), of_sampler(sampler := Tensors(40))
    loader.state_dict()
    iterator = iter(loader)
    take(iterator, 6)
    state, sizes = loader.state_dict(), [len(one) for one in copied if isinstance(one, torch.Tensor)]
    assert sizes.count(1000) == 2, "for the first state, and at the epoch's beginning"
    assert sizes.count(3) == 2 + 6
    other.load_state_dict(state)
    assert values(other) == values(iterator)
    assert sampler.counts.sum() == 40
    assert torch.equal(sampler.large, loader.sampler.large)


def test_every_n_steps_given_asks_for_states() -> None:
    sampler = Shuffled(40)
    values(of_sampler(sampler, snapshot_every_n_steps=1))
    assert sampler.calls == 11


@pytest.mark.each_value
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tells_length", [True, False])
@pytest.mark.parametrize("epochs_before", [0, 1])
def test_the_first_state_of_a_sampler_is_exact(workers: int, tells_length: bool, epochs_before: int) -> None:
    """From where its state has the order: also after the last batch, and after the loop was left."""

    def make() -> DataLoader[Any]:
        sampler = Shuffled(40, tells_length=tells_length)
        return of_sampler(sampler, workers, persistent_workers=bool(workers))

    for taken, leaves in itertools.product(range(1 if tells_length else 2, 11), [False, True]):
        with make() as loader:
            for _ in range(epochs_before):
                values(loader)
            iterator = iter(loader)
            take(iterator, taken)
            order = loader.sampler.order  # type: ignore[union-attr]
            if leaves:
                del iterator
            state = loader.state_dict()
            rest = [order[begin : begin + 4] for begin in range(4 * taken, 40, 4)]
            assert leaves or values(iterator) == rest
        with make() as other:
            other.load_state_dict(state)
            assert values(other) == rest, (taken, leaves)
            assert sorted(itertools.chain(*values(other))) == list(range(40))


def test_a_finished_state_of_a_sampler_that_was_not_asked_for_begins_the_next_epoch() -> None:
    for asked in (False, True):
        loader = of_sampler(Shuffled(40))
        if asked:
            loader.state_dict()
        values(loader)
        state, sampler = loader.state_dict(), loader.sampler
        sampler.rng = np.random.default_rng(9)  # type: ignore[union-attr]
        following = values(loader)
        for batch_size in (4, 8):  # between two epochs it may change
            again = Shuffled(40)
            again.rng = np.random.default_rng(9)
            other = of_sampler(again, batch_size=batch_size)
            other.load_state_dict(state)
            assert [*itertools.chain(*values(other))] == [*itertools.chain(*following)]


class Led(Shuffled):
    """The program changes its order in the middle of an epoch, and its state includes that."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"order": self.order.copy()}

    def lead(self) -> None:
        self.order[self.place :] = self.order[self.place :][::-1]


@pytest.mark.parametrize("taken", [5, 10])
def test_what_cannot_be_drawn_again_from_the_epochs_beginning_is_refused_and_the_way_round_works(
    taken: int,
) -> None:
    for asked in (False, True):
        loader = of_sampler(Led(40))
        if asked:
            loader.state_dict()
        iterator = iter(loader)
        take(iterator, 3)
        loader.sampler.lead()  # type: ignore[union-attr]
        take(iterator, taken - 3)
        if taken == 10:
            values(iterator)
        state, rest = loader.state_dict(), values(iterator)
        other = of_sampler(Led(40))
        other.load_state_dict(state)
        if asked:
            assert len(values(other)) == (len(rest) or 10)
        else:
            with pytest.raises(
                ResumeError, match=r"now gives other batches(.|\n)*loader.state_dict\(\) before"
            ):
                values(other)


# --- streams


class Walk(IterableDataset[int]):
    """A random walk whose generator goes on from epoch to epoch; ``log`` lists the reads of its state."""

    def __init__(self, log: Path | None = None) -> None:
        self.rng, self.place, self.log = np.random.default_rng(6), 0, log

    def __iter__(self) -> Iterator[int]:
        while self.place < 30:
            self.place += 1
            yield int(self.rng.integers(1 << 30))
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        if self.log is not None:
            note(self.log, self.place)
        # The worker's number: its stream has moved on in its own way.
        return {
            "place": self.place,
            "rng": self.rng.bit_generator.state,
            "of": getattr(get_worker_info(), "id", 0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of"] == getattr(get_worker_info(), "id", 0)
        self.place, self.rng.bit_generator.state = state["place"], state["rng"]


class Weights(torch.nn.Module, IterableDataset[int]):  # type: ignore[misc]
    """A stream that is a module: its state is its weights."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log, self.weight = log, torch.nn.Parameter(torch.zeros(3))
        self.register_state_dict_pre_hook(lambda *_: note(log, 0))

    def __iter__(self) -> Iterator[int]:
        yield from range(30)


def note(log: Path, place: int) -> None:
    with log.open("a") as file:
        file.write(f"{place}\n")


def calls(log: Path) -> int:
    return len(log.read_text().split()) if log.exists() else 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streams_state_is_read_once_an_epoch_until_one_is_asked_for(workers: int, tmp_path: Path) -> None:
    parts, log = max(workers, 1), tmp_path / "log"
    with DataLoader(Walk(log), 3, num_workers=workers, persistent_workers=bool(workers)) as loader:
        for epoch in range(2):
            values(loader)
            assert calls(log) == parts * (epoch + 1)
        loader.state_dict()
        values(loader)
        assert calls(log) == parts * (2 + 10)


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_are_no_place_in_a_stream(workers: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with DataLoader(Weights(log), 3, num_workers=workers) as loader:
        values(loader)
        iterator = iter(loader)
        take(iterator, 4)
        assert calls(log) == 0
        state, rest = loader.state_dict(), values(iterator)
    with DataLoader(Weights(log), 3, num_workers=workers) as other:
        other.load_state_dict(state)
        assert values(other) == rest
    assert calls(log) == 0


@pytest.mark.each_value
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("epochs_before", [0, 1])
def test_the_first_state_of_a_stream_is_exact(workers: int, epochs_before: int) -> None:
    """From the first batch of each worker on: also in a later epoch, and after the loop was left."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": bool(workers)}
    for taken in (max(workers, 1), 5, 9, 10):
        with DataLoader(Walk(), 3, **options) as loader:
            for _ in range(epochs_before):
                values(loader)
            iterator = iter(loader)
            take(iterator, taken)
            state = loader.state_dict()
            more = take(iterator, min(4, 10 - taken))
            later, rest = loader.state_dict(), values(iterator)
        for state_then, expected in ((state, more + rest), (later, rest)):
            with DataLoader(Walk(), 3, **options) as other:
                other.load_state_dict(state_then)
                assert values(other) == expected, taken
