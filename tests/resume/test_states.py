"""States at any moment: what they hold, what is refused, and what users of torchdata ran into."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_datasets import DiesOnce, Drawing, FromRandom, FromRandomOneByOne, Late, OwnGenerator, Plain
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from shmloader import BadSampleWarning, DataLoader, ResumeError


def build(workers: int = 2, length: int = 40, **options: Any) -> DataLoader[Any]:
    """A shuffled loader with a generator of its own."""
    options = {"batch_size": 4, "shuffle": True, "multiprocessing_context": "fork"} | options
    if not workers:
        del options["multiprocessing_context"]
    generator = torch.Generator().manual_seed(7)
    return DataLoader(Plain(length), num_workers=workers, generator=generator, **options)


def values(batches: Any) -> list[list[int]]:
    return [batch.flatten().tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain(*batches))


def take(iterator: Any, number: int) -> list[list[int]]:
    return values(next(iterator) for _ in range(number))


def fetched(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


# --- what a state is


def test_a_state_has_the_same_keys_at_any_moment_and_starts_no_worker() -> None:
    loader = build()
    states = [loader.state_dict()]
    assert loader.statistics().slots_free == 0
    iterator = iter(loader)
    states.append(loader.state_dict())
    for _ in iterator:
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    assert len({frozenset(state) for state in states}) == 1
    assert {type(value) for state in states for value in state.values()} <= {int, str, bool, type(None)}
    assert max(len(json.dumps(state)) for state in states) < 1024
    assert [state["batches"] for state in states] == [0, *range(11), 10]
    assert [state["finished"] for state in states] == [False] * 12 + [True]


def test_a_state_is_new_each_time() -> None:
    """accelerate adds a key to it, which is ignored when it is loaded."""
    loader = build(0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    state["_iterator_finished"] = True
    assert "_iterator_finished" not in loader.state_dict()
    state["batches"] = 1
    again = build(0)
    again.load_state_dict(state)
    assert values(again) == values(iterator)


def test_the_state_of_an_epoch_of_a_million_batches_is_no_larger() -> None:
    loader = build(0, length=4_000_000)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 1024


def test_an_empty_state_does_nothing() -> None:
    loader, other = build(0), build(0)
    loader.load_state_dict({})
    assert values(loader) == values(other)


def test_a_loaded_state_is_the_loaders_until_it_iterates() -> None:
    loader = build(0)
    iterator = iter(loader)
    take(iterator, 3)
    state = loader.state_dict()
    other = build(0)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert take(iter(other), 1) == take(iterator, 1)
    assert other.state_dict()["batches"] == 4


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda loader: pickle.loads(pickle.dumps(loader)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_copy_has_the_loaded_state_too(kind: str, workers: int) -> None:
    loader = build(0)
    iterator = iter(loader)
    take(iterator, 3)
    with build(workers) as other:
        other.load_state_dict(loader.state_dict())
        with COPIES[kind](other) as copied:
            assert copied.state_dict() == loader.state_dict()
            rest = values(iterator)
            assert values(copied) == rest
        if kind != "copy":  # which has the generator in common
            assert values(other) == rest


def rebuilt(loader: DataLoader[Any]) -> DataLoader[Any]:
    """As Lightning does it."""
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)


def test_a_loader_made_of_one_with_a_state_warns_that_it_begins_anew() -> None:
    """Once, and not where that one has gone on from its state."""
    loader = build(0)
    loader.load_state_dict(started(build(0)))
    other = rebuilt(loader)
    with pytest.warns(RuntimeWarning, match="load_state_dict.. was called on another loader of this dataset"):
        assert len(values(other)) == 10
    assert len(values(other)) == 10
    assert len(values(loader)) == 9
    assert len(values(rebuilt(loader))) == 10
    assert len(values(build(0))) == 10  # of another dataset


# --- what torchdata's users ran into


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_for_what_the_program_has_taken(workers: int) -> None:
    """Not for what was prefetched, nor one batch ahead."""
    with build(workers) as loader:
        expected = values(loader)
    with build(workers) as loader:
        for number, _ in enumerate(loader, 1):
            state = loader.state_dict()
            with build(0) as other:
                other.load_state_dict(state)
                assert values(other) == expected[number:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global generator"])
def test_the_state_at_the_epochs_end_begins_the_next_one(workers: int, own: bool) -> None:
    def make() -> DataLoader[Any]:
        loader = build(workers)
        return loader if own else DataLoader(Plain(40), 4, True, num_workers=workers)

    torch.manual_seed(3)
    with make() as loader:
        values(loader)
        state, drawn = loader.state_dict(), torch.get_rng_state()
        expected = values(loader)
    torch.manual_seed(4)
    with make() as other:
        other.load_state_dict(state)
        torch.set_rng_state(drawn)
        assert values(other) == expected


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["plain", "persistent"])
def test_the_state_after_a_break_is_the_place_of_the_break(options: dict[str, Any]) -> None:
    with build(**options) as loader:
        expected = values(loader)
    with build(**options) as loader:
        for number, _ in enumerate(loader, 1):
            if number == 3:
                break
        state = loader.state_dict()
        assert state["batches"] == 3
        with build(1) as other:
            other.load_state_dict(state)
            assert values(other) == expected[3:]
        second = values(loader)  # as with torch's: a new epoch
        assert sorted(flat(second)) == list(range(40))
        assert second != expected


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("taken", [0, 3, 10, None])
@pytest.mark.parametrize("prefetch_epochs", [False, True])
def test_persistent_workers_go_on_in_any_epoch(epoch: int, taken: int | None, prefetch_epochs: bool) -> None:
    """The base seed is that of the first epoch; early index batches count for the next one."""

    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(7)
        return DataLoader(
            Drawing(40), 4, True, num_workers=2, generator=generator, persistent_workers=True,
            prefetch_epochs=prefetch_epochs, seed_per_sample=True, multiprocessing_context="fork",
        )  # fmt: skip

    with make() as loader:
        for _ in range(epoch):
            list(loader)
        iterator = iter(loader)
        if taken is None:
            list(iterator)
        else:
            take(iterator, taken)
        state = loader.state_dict()
        expected = values(iterator) + values(loader) + values(loader)
    with make() as other:
        list(other)  # a live iterator gives way to the one that goes on
        other.load_state_dict(state)
        rest = [] if taken is None else values(other)
        assert rest + values(other) + values(other) == expected


def test_the_state_of_another_rank_is_refused() -> None:
    def rank(number: int) -> DataLoader[Any]:
        dataset = Plain(40)
        return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, number))

    loader = rank(0)
    next(iter(loader))
    with pytest.raises(ResumeError, match="sampler's rank is 0 in the state and 1 in this loader"):
        rank(1).load_state_dict(loader.state_dict())


# --- nothing comes twice


@pytest.mark.parametrize("workers", [0, 2])
def test_no_sample_that_was_returned_is_fetched_again(workers: int, tmp_path: Path) -> None:
    loader = build(0)
    iterator = iter(loader)
    seen = take(iterator, 6)
    log = tmp_path / "fetched"
    with build(workers) as other:
        other.dataset.log = log  # type: ignore[attr-defined]
        other.load_state_dict(loader.state_dict())
        rest = values(other)
    assert sorted(fetched(log)) == sorted(flat(rest))
    assert sorted(flat(seen + rest)) == list(range(40))


def test_out_of_order_the_set_of_samples_is_exact(tmp_path: Path) -> None:
    """The first batch is late, until others have come: those are not made again."""

    def make(workers: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(Late(80, log=tmp_path / "fetched"), 4, num_workers=workers, **options)

    with make(2, in_order=False) as loader:
        iterator = iter(loader)
        seen = take(iterator, 2)
        state = loader.state_dict()
    assert state["batches"] == 0
    assert state["batches_behind"]
    for workers in (0, 2):
        with make(workers) as other:
            other.load_state_dict(state)
            iterator = iter(other)
            again = seen + take(iterator, 2)
            with make(1, in_order=False) as third:
                third.load_state_dict(other.state_dict())
                assert sorted(flat(again + values(third))) == list(range(80))


def test_positions_that_came_early_are_left_out_once() -> None:
    """The same, with a state that is certain to have such positions."""
    loader = build(0)
    batches = values(loader)
    loader = build(0)
    next(iter(loader))
    state = loader.state_dict() | {"batches": 2, "batches_behind": "3,5"}
    for workers in (0, 2):
        with build(workers) as other:
            other.load_state_dict(state)
            assert other.state_dict() == state
            iterator = iter(other)
            assert other.state_dict()["batches_behind"] == "3,5"
            assert take(iterator, 1) == [batches[2]]
            assert (other.state_dict()["batches"], other.state_dict()["batches_behind"]) == (4, "5")
            assert values(iterator) == [batches[4], *batches[6:]]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_left_out_and_batches_that_raise_count(workers: int) -> None:
    def make(on_error: Any) -> DataLoader[Any]:
        return DataLoader(Drawing(12, bad=(2, 3)), 2, num_workers=workers, on_error=on_error)

    loader = make("raise")
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="sample 2 is bad"):
        next(iterator)
    assert loader.state_dict()["batches"] == 2
    loader.close()
    other = make("skip")
    iterator = iter(other)
    take(iterator, 2)
    assert other.state_dict()["batches"] == 3
    with pytest.warns(BadSampleWarning, match="2 bad"):
        other.close()


def test_a_worker_that_was_replaced_changes_nothing(tmp_path: Path) -> None:
    def make() -> DataLoader[Any]:
        dataset = DiesOnce(40, tmp_path / "died")
        return DataLoader(dataset, 4, num_workers=2, worker_restarts=1, seed_per_sample=True)

    with make() as loader:
        iterator = iter(loader)
        seen = take(iterator, 4)
        assert loader.statistics().worker_restarts == 1
        state, rest = loader.state_dict(), values(iterator)
        assert [batch[0] for batch in seen + rest] == list(range(0, 40, 4))
    with make() as other:
        other.load_state_dict(state)
        assert values(other) == rest


def test_the_batch_of_an_interrupted_call_comes_again() -> None:
    """Without workers, Ctrl-C while a sample is fetched: the program has not had that batch."""
    loader = DataLoader(Plain(40), 4)
    iterator = iter(loader)
    take(iterator, 2)
    loader.dataset.interrupt_at = 8  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert loader.state_dict()["batches"] == 2


def test_the_batch_of_a_call_that_is_interrupted_late_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers, after the batch was taken and before it is returned."""
    with build(1) as loader:
        iterator = iter(loader)
        take(iterator, 2)

        def interrupt() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(iterator._lifecycle, "leave", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert loader.state_dict()["batches"] == 2


# --- samplers


def test_a_sampler_that_draws_elsewhere_is_refused() -> None:
    loader = DataLoader(Plain(40), 4, sampler=FromRandom(40))
    next(iter(loader))
    other = DataLoader(Plain(40), 4, sampler=FromRandom(40))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ResumeError, match="gave other batches than those 1 "):
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
    """Nothing tells what it would draw again. A program that only saves the state goes on, and is warned."""
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


@pytest.mark.parametrize("draw", [random.randrange, np.random.randint])
def test_a_sampler_that_draws_elsewhere_among_the_program_is_refused(draw: Callable[[int], int]) -> None:
    """Also where a seed at the program's beginning has it give the first batches once more."""

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


# --- wrong states


def started(loader: DataLoader[Any]) -> dict[str, Any]:
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 41}, "dataset_len is 40 in the state and 41 in this loader"),
        ({"batch_size": 5}, "batch_size is 4 in the state and 5 in this loader"),
        ({"drop_last": True}, "drop_last is False in the state and True in this loader"),
        ({"shuffle": False}, "sampler is 'BatchSampler of RandomSampler' in the state and 'BatchSampler of"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ResumeError, match=message) as error:
        build(0, **options).load_state_dict(started(build(0)))
    assert "num_workers" in str(error.value)
    assert isinstance(error.value, ValueError)


def test_between_epochs_batch_size_and_length_may_change() -> None:
    loader = build(0)
    values(loader)
    state = loader.state_dict()
    other = build(0, batch_size=5, length=50)
    other.load_state_dict(state)
    assert sorted(flat(values(other))) == list(range(50))


@pytest.mark.parametrize("seed", [1, None])
def test_the_seed_of_a_distributed_sampler_counts(seed: int | None) -> None:
    dataset = Plain(40)
    state = started(DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, 0, seed=0)))
    other = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, 0, seed=seed or 0))
    if seed is None:
        other.load_state_dict(state)
    else:
        with pytest.raises(ResumeError, match="sampler's seed is 0 in the state and 1 in this loader"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_num_yielded": 3}, "no state of a shmloader.DataLoader"),
        ({"version": 99}, "version 99"),
    ],
)
def test_what_is_no_state_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(ResumeError, match=message):
        build(0).load_state_dict(state)


def test_a_broken_state_of_a_generator_is_refused() -> None:
    state = started(build(0)) | {"sampler_generator": "nonsense"}
    loader = build(0)
    loader.load_state_dict(state)
    with pytest.raises(ResumeError, match=r"'sampler_generator' is 'nonsense'.*no state of a generator"):
        iter(loader)


def test_two_iterators_in_use_at_once_are_refused() -> None:
    loader = build(0)
    with pytest.raises(ResumeError, match="two iterators"):
        for _ in zip(loader, loader, strict=True):
            loader.state_dict()
    older = iter(loader)
    next(older)
    newer = iter(loader)  # the older one is still there, and left alone
    next(newer)
    assert loader.state_dict()["batches"] == 1


def test_samplers_of_one_batch_sampler_are_known_through_it() -> None:
    dataset = Plain(40)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(
        dataset, batch_sampler=BatchSampler(RandomSampler(dataset, generator=generator), 4, False)
    )
    state = started(loader)
    assert (state["batch_size"], state["sampler"]) == (4, "BatchSampler of RandomSampler")
    assert state["sampler_generator"].startswith("drawn 1 ")
