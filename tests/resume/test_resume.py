"""A resumed program gets what the uninterrupted one gets: drawn loaders, places, and ways to keep a state.

The uninterrupted program and the resumed one go on for one more epoch. Batches are compared value by value,
with what samples drew, and so is the state of torch's global generator at the end.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resume_datasets import Buckets, Drawing, OwnGenerator, Plain, Stateful, StatefulToTheEnd
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shmloader import DataLoader, ShardedSampler

SAMPLERS = "sequential random replacement subset weighted distributed sharded stateful to_the_end own".split()


@dataclass(frozen=True)
class Work:
    """The settings that both loaders have in common, and the place of the stop."""

    sampler: str
    own_generator: bool
    length: int
    batch_size: int | None
    drop_last: bool
    skips: bool
    epochs_before: int
    taken: int | None  # batches before the stop; None for the epoch's end

    def sampler_of(self, dataset: Drawing, generator: torch.Generator | None) -> Any:
        length = self.length
        return {
            "sequential": lambda: SequentialSampler(dataset),
            "random": lambda: RandomSampler(dataset, generator=generator),
            "replacement": lambda: RandomSampler(dataset, True, length + 3, generator=generator),
            "subset": lambda: SubsetRandomSampler(range(length), generator=generator),
            "weighted": lambda: WeightedRandomSampler(torch.ones(length), length, generator=generator),
            "distributed": lambda: DistributedSampler(dataset, num_replicas=2, rank=1, seed=4),
            "sharded": lambda: ShardedSampler(dataset, num_replicas=2, rank=1, seed=4),
            "stateful": lambda: Stateful(length),
            "to_the_end": lambda: StatefulToTheEnd(length),
            "own": lambda: OwnGenerator(length, generator or torch.Generator().manual_seed(3)),
        }[self.sampler]()


@dataclass(frozen=True)
class Setting:
    """Settings that may differ between the loader that gives a state and the one that goes on from it."""

    workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def loader(self, work: Work) -> DataLoader[Any]:
        dataset = Drawing(work.length, bad=(1, 2) if work.skips else ())
        generator = torch.Generator().manual_seed(7) if work.own_generator else None
        kind: dict[str, Any] = {"batch_size": work.batch_size}
        sampler = work.sampler_of(dataset, generator)
        if work.batch_size is None:
            kind["sampler"] = sampler
        else:
            kind = {"batch_sampler": BatchSampler(sampler, work.batch_size, work.drop_last)}
        return DataLoader(
            dataset,
            **kind,
            generator=generator,
            on_error="skip" if work.skips else "raise",
            seed_per_sample=True,
            **{"num_workers": self.workers} | self.options,
        )


works = st.builds(
    Work,
    sampler=st.sampled_from(SAMPLERS),
    own_generator=st.booleans(),
    length=st.sampled_from([1, 7, 60]),
    batch_size=st.sampled_from([None, 1, 4, 33]),
    drop_last=st.booleans(),
    skips=st.booleans(),
    epochs_before=st.integers(0, 1),
    taken=st.one_of(st.none(), st.integers(0, 6)),
)
with_workers = st.builds(
    lambda workers, **options: Setting(workers, options),
    workers=st.integers(1, 2),
    prefetch_factor=st.integers(1, 3),
    dispatch=st.sampled_from(["static", "dynamic"]),
    multiprocessing_context=st.just("fork"),
)
settings_of_loaders = st.one_of(st.just(Setting()), with_workers)


def by_json(state: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(state)))


def by_torch(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def by_distributed_checkpoint(state: dict[str, Any], folder: Path, loader: DataLoader[Any]) -> dict[str, Any]:
    """Loads only the keys that a new loader's own state has."""
    torch.distributed.checkpoint.save({"loader": state}, checkpoint_id=folder, no_dist=True)
    found = {"loader": loader.state_dict()}
    torch.distributed.checkpoint.load(found, checkpoint_id=folder, no_dist=True)
    return found["loader"]


@dataclass
class Rest:
    """The batches behind a stop."""

    epochs: list[list[torch.Tensor]]
    at_end: torch.Tensor


def run_to(loader: DataLoader[Any], work: Work) -> tuple[dict[str, Any], torch.Tensor, Rest]:
    """Run a program to the stop, read state and generator, and go on to the end of the next epoch."""
    for _ in range(work.epochs_before):
        list(loader)
    iterator = iter(loader)
    if work.taken is None:
        list(iterator)
    else:
        for _ in zip(range(work.taken), iterator, strict=False):
            pass
    state, drawn_so_far = loader.state_dict(), torch.get_rng_state()
    assert state == loader.state_dict()
    epochs = [[] if state["finished"] else list(iterator), list(loader)]
    return state, drawn_so_far, Rest(epochs, torch.get_rng_state())


def assert_same(found: Rest, expected: Rest) -> None:
    for epoch, wanted in zip(found.epochs, expected.epochs, strict=True):
        assert [batch.tolist() for batch in epoch] == [batch.tolist() for batch in wanted]
    assert torch.equal(found.at_end, expected.at_end)


@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    work=works,
    first=settings_of_loaders,
    second=settings_of_loaders,
    keep=st.sampled_from([by_json, by_torch]),
)
def test_the_remainder_is_that_of_the_uninterrupted_program(
    work: Work, first: Setting, second: Setting, keep: Any
) -> None:
    torch.manual_seed(11)
    with first.loader(work) as loader:
        state, drawn_so_far, expected = run_to(loader, work)
    assert len(json.dumps(state)) < 1024 or not is_known(work)
    torch.manual_seed(99)  # another program, that restores torch's generator and the loader's state
    torch.rand(3)
    with second.loader(work) as loader:
        loader.load_state_dict(keep(state))
        assert loader.state_dict() == state
        torch.set_rng_state(drawn_so_far)
        epochs = [[] if state["finished"] else list(loader), list(loader)]
        assert_same(Rest(epochs, torch.get_rng_state()), expected)


def is_known(work: Work) -> bool:
    """Whether the sampler is torch's."""
    return work.sampler not in {"stateful", "to_the_end", "own"}


KINDS: dict[str, Setting] = {
    "spawn": Setting(2, {"multiprocessing_context": "spawn"}),
    "forkserver": Setting(1, {"multiprocessing_context": "forkserver"}),
    "auto": Setting(0, {"num_workers": "auto", "prefetch_factor": "auto"}),
    "persistent": Setting(2, {"persistent_workers": True}),
    "early": Setting(2, {"persistent_workers": True, "prefetch_epochs": True}),
    "out of order": Setting(1, {"in_order": False}),
    "restarts": Setting(2, {"worker_restarts": 2}),
    "static": Setting(2, {"dispatch": "static", "timeout": 60}),
}
SHUFFLED = Work("random", True, 60, 4, False, False, 0, 5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_workers_of_every_kind_go_on(kind: str, tmp_path: Path) -> None:
    """All go on from the state of a loader without workers, by a distributed checkpoint."""
    torch.manual_seed(11)
    state, drawn_so_far, expected = run_to(Setting().loader(SHUFFLED), SHUFFLED)
    torch.manual_seed(12)
    with KINDS[kind].loader(SHUFFLED) as loader:
        loader.load_state_dict(by_distributed_checkpoint(state, tmp_path, loader))
        torch.set_rng_state(drawn_so_far)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected.epochs[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_without_workers_goes_on_from_workers_of_every_kind(kind: str) -> None:
    torch.manual_seed(11)
    with KINDS[kind].loader(SHUFFLED) as loader:
        state, drawn_so_far, expected = run_to(loader, SHUFFLED)
    torch.manual_seed(12)
    other = Setting().loader(SHUFFLED)
    other.load_state_dict(state)
    torch.set_rng_state(drawn_so_far)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in expected.epochs[0]]


@pytest.mark.parametrize("taken", [0, 5, None])
@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 2), (2, 0)])
def test_worker_threads_go_on(first: int, second: int, taken: int | None) -> None:
    def make(workers: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(7)
        kind = {"worker_type": "thread"} if workers else {}
        return DataLoader(Plain(60), 4, True, num_workers=workers, generator=generator, **kind)

    with make(first) as loader:
        state, _, expected = run_to(loader, replace(SHUFFLED, taken=taken))
    with make(second) as other:
        other.load_state_dict(state)
        epochs = [[] if taken is None else list(other), list(other)]
    found = [[batch.tolist() for batch in epoch] for epoch in epochs]
    assert found == [[batch.tolist() for batch in epoch] for epoch in expected.epochs]


def test_a_program_that_comes_to_the_same_line_ends_as_the_uninterrupted_one() -> None:
    """The program is seeded as before and restores no generator; `iter()` draws as it did."""
    for sampler in SAMPLERS:
        for workers in (0, 2):
            work = Work(sampler, False, 60, 4, False, False, 0, 5)
            torch.manual_seed(11)
            with Setting(workers).loader(work) as loader:
                state, _, expected = run_to(loader, work)
            torch.manual_seed(11)
            with Setting(2 - workers).loader(work) as loader:
                loader.load_state_dict(state)
                assert_same(Rest([list(loader), list(loader)], torch.get_rng_state()), expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", [0, 2])
def test_a_state_of_a_resumed_epoch_before_its_first_batch(
    sampler: str, own_generator: bool, workers: int, taken: int
) -> None:
    """The second epoch is stopped, resumed, stopped before another batch, and resumed again."""
    work = Work(sampler, own_generator, 60, 4, False, False, 1, taken)
    torch.manual_seed(11)
    state, drawn_so_far, expected = run_to(Setting().loader(work), work)
    for _ in range(2):
        torch.manual_seed(99)
        with Setting(workers).loader(work) as loader:
            loader.load_state_dict(by_json(state))
            torch.set_rng_state(drawn_so_far)
            iter(loader)
            state, drawn_so_far = loader.state_dict(), torch.get_rng_state()
    with Setting().loader(work) as loader:
        loader.load_state_dict(by_json(state))
        torch.set_rng_state(drawn_so_far)
        assert_same(Rest([list(loader), list(loader)], torch.get_rng_state()), expected)


def test_a_batch_sampler_over_a_sharded_sampler_is_drawn_again() -> None:
    """One that reads ahead: what it has given is no prefix of the order."""

    def make() -> DataLoader[Any]:
        sampler = ShardedSampler(range(60), num_replicas=2, rank=1)
        return DataLoader(Plain(60), batch_sampler=Buckets(sampler, 4))

    loader = make()
    iterator = iter(loader)
    next(iterator)
    other = make()
    other.load_state_dict(by_json(loader.state_dict()))
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in iterator]
