"""A resumed program gets the rest of the uninterrupted one: drawn loaders, places, and ways to keep a state.

The uninterrupted program and the resumed one continue for one more epoch. Batches are compared value by
value, with what samples drew, and so is the state of torch's global generator at the end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from resume_datasets import Buckets, Drawing, OwnGenerator, Plain, Stateful, StatefulToTheEnd
from resume_settings import (
    Setting,
    by_distributed_checkpoint,
    by_json,
    cheap_settings,
    settings_with,
    ways_to_keep,
)
from robustness.processes import LONG
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shmloader import DataLoader, ShardedSampler

QUIET = ("ignore:This DataLoader will create", "ignore:torch.distributed is .*uninitialized")
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


def loader_of(work: Work, setting: Setting) -> DataLoader[Any]:
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
        **setting.arguments,
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


@dataclass
class Rest:
    """The batches after a stop."""

    epochs: list[list[torch.Tensor]]
    at_end: torch.Tensor


def run_to(loader: DataLoader[Any], work: Work) -> tuple[dict[str, Any], torch.Tensor, Rest]:
    """Run a program to the stop, read state and generator, and continue to the end of the next epoch."""
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


def go_on(work: Work, first: Setting, second: Setting, keep: Any) -> None:
    """Compare the rest of a resumed program with that of the uninterrupted one.

    Out of order, the epochs' batches are compared as sets. Threads draw differently from processes. Later
    epochs with persistent workers differ from those without.
    """
    torch.manual_seed(11)
    with loader_of(work, first) as loader:
        state, drawn_so_far, expected = run_to(loader, work)
    assert len(json.dumps(state)) < 1024 or not is_known(work)
    torch.manual_seed(99)  # another program, that restores torch's generator and the loader's state
    torch.rand(3)
    with loader_of(work, second) as loader:
        loader.load_state_dict(keep(state, lambda: loader_of(work, Setting())))
        assert loader.state_dict() == state
        torch.set_rng_state(drawn_so_far)
        found = Rest([[] if state["finished"] else list(loader), list(loader)], torch.get_rng_state())
    if first.persistent != second.persistent:
        del found.epochs[1:], expected.epochs[1:]
        found.at_end = expected.at_end
    for rest in (found, expected):
        if first.in_threads != second.in_threads:
            rest.epochs = [[batch[..., 0] for batch in epoch] for epoch in rest.epochs]
        if not (first.in_order and second.in_order):
            rest.epochs = [sorted(epoch, key=torch.Tensor.tolist) for epoch in rest.epochs]
    assert_same(found, expected)


@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning", *QUIET)
@settings(max_examples=300 if LONG else 30, deadline=None)
@given(
    work=works,
    first=cheap_settings(in_order=[True, False]),
    second=cheap_settings(in_order=[True, False]),
    keep=ways_to_keep,
)
def test_the_remainder_is_that_of_the_uninterrupted_program(
    work: Work, first: Setting, second: Setting, keep: Any
) -> None:
    go_on(work, first, second, keep)


def settings_by(method: str) -> st.SearchStrategy[Setting]:
    return settings_with([method, "fork"], persistent=[True], in_order=[True, False])


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning", *QUIET)
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_the_start_method_may_be_another_one(method: str) -> None:
    """As above, with few examples: spawned workers import torch. They are persistent and do so once."""

    @settings(max_examples=25 if LONG else 3, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(work=works, first=settings_by(method), second=settings_by(method), keep=ways_to_keep)
    def check(work: Work, first: Setting, second: Setting, keep: Any) -> None:
        go_on(work, first, second, keep)

    check()


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
SPAWN = pytest.param("spawn", marks=pytest.mark.long)
SHUFFLED = Work("random", True, 60, 4, False, False, 0, 5)


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize("kind", [SPAWN, *(kind for kind in KINDS if kind != "spawn")])
def test_workers_of_every_kind_go_on(kind: str) -> None:
    """All resume from the state of a loader without workers, through a distributed checkpoint."""
    torch.manual_seed(11)
    state, drawn_so_far, expected = run_to(loader_of(SHUFFLED, Setting()), SHUFFLED)
    torch.manual_seed(12)
    with loader_of(SHUFFLED, KINDS[kind]) as loader:
        loader.load_state_dict(by_distributed_checkpoint(state, lambda: loader))
        torch.set_rng_state(drawn_so_far)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected.epochs[0]]


@pytest.mark.parametrize("kind", [SPAWN, *(kind for kind in KINDS if kind != "spawn")])
def test_a_loader_without_workers_goes_on_from_workers_of_every_kind(kind: str) -> None:
    torch.manual_seed(11)
    with loader_of(SHUFFLED, KINDS[kind]) as loader:
        state, drawn_so_far, expected = run_to(loader, SHUFFLED)
    torch.manual_seed(12)
    other = loader_of(SHUFFLED, Setting())
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
            with loader_of(work, Setting(workers)) as loader:
                state, _, expected = run_to(loader, work)
            torch.manual_seed(11)
            with loader_of(work, Setting(2 - workers)) as loader:
                loader.load_state_dict(state)
                assert_same(Rest([list(loader), list(loader)], torch.get_rng_state()), expected)


@pytest.mark.each_value
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
    state, drawn_so_far, expected = run_to(loader_of(work, Setting()), work)
    for _ in range(2):
        torch.manual_seed(99)
        with loader_of(work, Setting(workers)) as loader:
            loader.load_state_dict(by_json(state))
            torch.set_rng_state(drawn_so_far)
            iter(loader)
            state, drawn_so_far = loader.state_dict(), torch.get_rng_state()
    with loader_of(work, Setting()) as loader:
        loader.load_state_dict(by_json(state))
        torch.set_rng_state(drawn_so_far)
        assert_same(Rest([list(loader), list(loader)], torch.get_rng_state()), expected)


def test_a_batch_sampler_over_a_sharded_sampler_is_drawn_again() -> None:
    """It reads ahead: its indices so far are no prefix of the order."""

    def make() -> DataLoader[Any]:
        sampler = ShardedSampler(range(60), num_replicas=2, rank=1)
        return DataLoader(Plain(60), batch_sampler=Buckets(sampler, 4))

    loader = make()
    iterator = iter(loader)
    next(iterator)
    other = make()
    other.load_state_dict(by_json(loader.state_dict()))
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in iterator]
