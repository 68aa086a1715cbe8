"""Bugs that users of StatefulDataLoader and of the frameworks around it ran into.

The numbers are those of issues at GitHub, ``data`` for meta-pytorch/data. Two are elsewhere: states that cost
10 ms and more (data#1317) are measured by ``benchmarks/resume.py``, and epochs of a stream that stay short
after a resumed one (datasets#7447) are in ``test_streams.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resume_datasets import Drawing, Plain
from resume_loaders import build, flat, take, values
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from shmloader import DataLoader, ResumeError


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_is_for_what_the_program_has_taken(workers: int) -> None:
    """It counts no prefetched batch and none ahead (data#1520), also with another num_workers (data#1337)."""
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


@pytest.mark.each_value
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
        list(other)  # a live iterator ends when another one resumes
        other.load_state_dict(state)
        rest = [] if taken is None else values(other)
        assert rest + values(other) + values(other) == expected


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_state_of_one_rank_holds_for_all_that_share_an_order(epoch: int) -> None:
    """Frameworks save one rank's state for all (Lightning, accelerate)."""
    loaders = [of_rank(rank) for rank in (0, 1)]
    wholes = []
    for loader in loaders:
        loader.set_epoch(epoch)
        wholes.append(values(loader))
    loaders[0].set_epoch(epoch)
    take(iter(loaders[0]), 3)
    state = loaders[0].state_dict()
    for rank, whole in enumerate(wholes):
        loader = of_rank(rank)
        loader.load_state_dict(state)
        assert values(loader) == whole[3:]
    with pytest.raises(ResumeError, match="sampler's num_replicas is 2 in the state and 3"):
        of_rank(1, 3).load_state_dict(state)


def of_rank(rank: int, ranks: int = 2, **arguments: Any) -> DataLoader[Any]:
    dataset = Plain(40)
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, ranks, rank), **arguments)


def test_out_of_order_a_state_holds_for_its_rank_only() -> None:
    with of_rank(0, num_workers=2, in_order=False) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with pytest.raises(ResumeError, match=r"sampler's rank is 0 in the state and 1.*save and load"):
        of_rank(1).load_state_dict(state)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [(RandomSampler(range(40)), "run is 'rank 0 of 2' in the state and 'rank 1 of 2'"), (None, None)],
    ids=["random", "sequential"],
)
def test_an_order_that_a_rank_has_drawn_is_refused_on_others(
    sampler: Any, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether other ranks have drawn the same one is not known. All have the order of the dataset."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    loader: DataLoader[Any] = DataLoader(Plain(40), 4, sampler=sampler)
    take(iter(loader), 2)
    state = loader.state_dict()
    DataLoader(Plain(40), 4, sampler=sampler).load_state_dict(state)
    monkeypatch.setenv("RANK", "1")
    other: DataLoader[Any] = DataLoader(Plain(40), 4, sampler=sampler)
    if message is not None:
        with pytest.raises(ResumeError, match=f"{message}.*save and load a state on each rank"):
            other.load_state_dict(state)
        monkeypatch.delenv("RANK")
    other.load_state_dict(state)  # of one process, too
    assert len(values(other)) == 8


@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_while_iter_runs_is_that_before_it(workers: int) -> None:
    """The sampler or another thread may ask for it: the base seed is drawn, but no epoch has begun."""
    states = []

    class Asking(BatchSampler):
        def __iter__(self) -> Any:
            states.append(loader.state_dict())
            return super().__iter__()

    generator = torch.Generator().manual_seed(7)
    sampler = Asking(RandomSampler(range(40), generator=generator), 4, False)
    loader = DataLoader(Plain(40), batch_sampler=sampler, num_workers=workers, generator=generator)
    with loader:
        before, expected = loader.state_dict(), values(loader)
    assert states == [before] * len(states)
    loader.load_state_dict(states[0])
    with loader:
        assert values(loader) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_finished_states_lead_from_program_to_program(workers: int) -> None:
    """No epoch is dropped and none comes twice; a loaded state is returned unchanged (data#1437)."""
    with build(workers, length=100, batch_size=1) as loader:
        expected = [values(loader) for _ in range(4)]
    found, state = [], {}
    for _ in range(2):
        with build(workers, length=100, batch_size=1) as loader:
            loader.load_state_dict(state)
            assert not state or loader.state_dict() == state
            found += [values(loader) for _ in range(2)]
            state = loader.state_dict()
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_resumed_again_and_again(workers: int) -> None:
    """Its batches are counted from the epoch's beginning each time."""
    with build(0) as loader:
        expected = values(loader)
    found, state = [], {}
    for _ in range(4):
        with build(workers) as loader:
            loader.load_state_dict(state)
            found += take(iter(loader), 2)
            state = loader.state_dict()
    assert found == expected[:8]
    assert state["batches"] == 8


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "global generator"])
def test_a_state_before_the_first_epoch_draws_nothing(own: bool) -> None:
    """Frameworks ask for it when they wrap a loader, before ranks agree on a seed (accelerate#4204)."""
    generator = torch.Generator().manual_seed(7) if own else None
    loader = DataLoader(Plain(40), 4, True, num_workers=2, generator=generator)
    drawn_from = generator or torch.default_generator
    before = drawn_from.get_state()
    loader.state_dict()
    assert torch.equal(drawn_from.get_state(), before)
