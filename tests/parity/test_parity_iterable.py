"""Iterable-style datasets: uneven workers, ends, lengths, persistence; torch's data pipes."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import MapDataPipe

from parity.compare import differences
from parity.datasets import CountedStream, SizedStream, Stream, identity
from parity.pipes import double, iter_pipe, map_pipe
from parity.run import Build, assert_plays, builder, outcome, states, take
from shmloader import DataLoader, ResumeError, errors, why_per_sample

LENGTHS = [(0,), (5,), (3, 3), (1, 9), (9, 1), (0, 4), (4, 0), (0, 0), (7, 2, 4), (1, 0, 6)]
SHAPES: list[dict[str, Any]] = [
    {"batch_size": None},
    {"batch_size": 2},
    {"batch_size": 3, "drop_last": True},
]


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_uneven_and_empty_workers_yield_torchs_batches(persistent: bool) -> None:
    """Every worker comes to its own end, in torch's order, and drops its own last batch."""

    def play(build: Build) -> Any:
        seen = []
        for lengths in LENGTHS:
            loader = build(
                Stream(lengths, draws=True),
                2,
                drop_last=len(lengths) == 3,
                num_workers=len(lengths),
                persistent_workers=persistent,
            )
            seen += [list(loader) for _ in range(2 if persistent else 1)]
        return seen

    assert_plays(play)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_streams_without_workers_and_with_one_agree_with_torch(shape: dict[str, Any]) -> None:
    """Batched, unbatched and with a dropped end."""
    for workers in (0, 1):
        assert_plays(
            lambda build, n=workers: list(build(Stream((7,)), num_workers=n, collate_fn=identity, **shape))
        )


def test_a_broken_off_stream_starts_again_in_persistent_workers() -> None:
    """The second epoch is whole, and each worker's copy knows how often it was iterated."""

    def play(build: Build) -> Any:
        loader = build(CountedStream(), num_workers=2, persistent_workers=True)
        first = take(iter(loader), 2)
        return [first, list(loader), list(loader)]

    first, second, third = assert_plays(play)
    assert {int(batch[0]) for batch in first + second + third} == {1, 2, 3}


def test_exhausted_streams_stay_exhausted() -> None:
    """next() after the end is StopIteration, with workers that persist and with others."""

    def play(build: Build, **given: Any) -> Any:
        iterator = iter(build(Stream((3, 1)), 2, num_workers=2, **given))
        batches = list(iterator)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        return batches

    for persistent in (False, True):
        assert_plays(lambda build, p=persistent: play(build, persistent_workers=p))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_longer_than_its_length_warns_in_torchs_words(workers: int) -> None:
    """The warning comes once len() was asked for, at every batch too many, with the advice for workers."""
    dataset = SizedStream((6, 6), 5)

    def play(build: Build, ask: bool) -> Any:
        loader = build(dataset, batch_size=None, num_workers=workers)
        length = len(loader) if ask else None
        return length, list(loader)

    assert_plays(lambda build: play(build, True))
    assert_plays(lambda build: play(build, False))
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert len(loader) == 5
    with pytest.warns(UserWarning, match="was reported to be 5"):
        list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_longer_than_its_length_goes_on_if_that_warning_is_an_error(workers: int) -> None:
    def play(build: Build) -> Any:
        loader = build(SizedStream((6, 6), 5), batch_size=None, num_workers=workers)
        len(loader)
        iterator = iter(loader)
        seen = take(iterator, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            with pytest.raises(UserWarning, match="was reported to be 5"):
                next(iterator)
        return seen, list(iterator)

    assert_plays(play)


def test_persistent_workers_stay_if_the_attribute_for_their_number_changes() -> None:
    def play(build: Build) -> Any:
        loader = build(Stream((3, 5)), 2, num_workers=2, persistent_workers=True)
        seen = [list(loader)]
        for number in (1, 3):
            loader.num_workers = number
            seen.append(list(loader))
        return seen

    assert_plays(play)


def test_a_stream_with_in_order_off_yields_every_batch_once() -> None:
    """The order may be any."""
    loader = DataLoader(Stream((5, 9)), 2, num_workers=2, in_order=False, multiprocessing_context="fork")
    firsts = sorted(int(x) // 1000 for batch in loader for x in batch["x"][:, 0])
    assert firsts == [*range(5), *range(100, 109)]


@pytest.mark.parametrize("start_method", ["forkserver"], indirect=True)
def test_streams_do_not_depend_on_the_start_method(start_method: str) -> None:
    """Uneven, persistent, drawing, with a break long before the first worker's end.

    Later, the number of tasks sent to torch's other worker depends on which of the two was faster.
    """

    def play(build: Build) -> Any:
        loader = build(Stream((13, 7), draws=True), 2, num_workers=2, persistent_workers=True, drop_last=True)
        return [take(iter(loader), 2), list(loader), list(loader), states()]

    assert_plays(play, start_method)


PIPES = {"iter": iter_pipe, "map": map_pipe}
HOW: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.each_value
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("make_pipe", PIPES.values(), ids=PIPES)
@pytest.mark.parametrize("own_generator", [False, True])
def test_data_pipes_load_torchs_way_and_one_warning_says_why(
    make_pipe: Any, how: dict[str, Any], own_generator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shuffled pipe is divided among workers as by torch, and all generators draw what they do there."""
    monkeypatch.setattr(errors, "_said", set())

    def play(build: Build) -> Any:
        generator = torch.Generator().manual_seed(4) if own_generator else None
        loader = build(make_pipe(20), 3, True, generator=generator, worker_init_fn=double, **how)
        seen = [list(loader), take(iter(loader), 2), list(loader), states()]
        return [*seen, None if generator is None else generator.get_state()]

    ours, theirs = outcome(play, builder(DataLoader)), outcome(play, builder(TorchLoader))
    (kind, text), ours.warned = ours.warned[0], ours.warned[1:]
    assert kind is RuntimeWarning
    assert re.search(r"not available for DataPipes, which torch's .* shards\. .* as an IterableDataset", text)
    assert not differences(ours, theirs)
    assert sorted(torch.cat(ours.result[0]).tolist()) == [2 * k for k in range(20)]


@pytest.mark.parametrize("make_pipe", PIPES.values(), ids=PIPES)
def test_states_of_data_pipes_are_empty_and_no_other_can_be_loaded(
    make_pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frameworks ask each loader for its state."""
    monkeypatch.setattr(errors, "_said", set())
    loader = DataLoader(make_pipe(20), num_workers=1)
    with pytest.warns(RuntimeWarning, match="DataPipe is empty, and cannot be resumed: .* seeds") as told:
        assert loader.state_dict() == loader.state_dict() == {}
    assert len(told) == 1
    loader.load_state_dict({})
    with pytest.raises(ResumeError, match=r"for DataPipes, which torch's .* seeds .*a map-style dataset\.$"):
        loader.load_state_dict({"batches": 1})


def test_data_pipes_are_not_divided_by_the_loader() -> None:
    with pytest.raises(NotImplementedError, match=r"for DataPipes.* not divide streams as shard='auto' asks"):
        iter(DataLoader(iter_pipe(20), shard="auto"))
    with pytest.raises(ValueError, match="needs an iterable-style dataset"):
        DataLoader(map_pipe(20), shard="auto")


class Gathering(MapDataPipe[Any]):
    """A pipe with a method that gives whole batches, which torch's way never calls."""

    def __getitem__(self, index: int) -> int:
        return index

    def __getbatch__(self, indices: Any) -> Any:
        raise NotImplementedError


def test_samples_of_data_pipes_are_fetched_one_by_one_for_one_reason() -> None:
    for pipe in (Gathering(), map_pipe(4), iter_pipe(4)):
        assert "the dataset is a DataPipe, which torch's own iterator loads" in str(why_per_sample(pipe))


def test_options_without_effect_on_a_data_pipe_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    loader = DataLoader(map_pipe(4), num_workers="auto", worker_type="thread")
    with pytest.warns(RuntimeWarning, match=r"effect: num_workers='auto' .*, worker_type='thread'\.$"):
        assert [int(batch) for batch in loader] == [0, 2, 4, 6]
