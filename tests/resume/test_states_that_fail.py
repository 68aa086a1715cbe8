"""A ``state_dict()`` of a sampler or stream that fails is an error only if a state is asked for."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from resume_datasets import Plain
from resume_loaders import values
from torch.utils.data import BatchSampler, IterableDataset, Sampler
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader, ResumeError


def raises() -> Any:
    raise RuntimeError("the sampler has no place yet")


def needs_an_argument() -> Any:
    return operator.neg()  # type: ignore[call-arg]


FAILURES = [raises, needs_an_argument, threading.Lock]


class Fails(Sampler[Any]):
    """Twelve indices; its state is what ``state`` returns."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self.state = state

    def __iter__(self) -> Any:
        return iter(range(12))

    def __len__(self) -> int:
        return 12

    def state_dict(self) -> Any:
        return {"state": self.state()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class FailingStream(Fails, IterableDataset[int]):
    """The same as a dataset."""


class FailingBatches(Fails):
    """The same as a batch sampler."""

    def __iter__(self) -> Any:
        return BatchSampler(range(12), 3, drop_last=False).__iter__()


def make(kind: type[Fails], state: Callable[[], Any], loader: Any, **options: Any) -> Any:
    if kind is FailingStream:
        return loader(kind(state), 3, **options)
    if kind is FailingBatches:
        return loader(Plain(12), batch_sampler=kind(state), **options)
    return loader(Plain(12), 3, sampler=kind(state), **options)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("state", FAILURES)
@pytest.mark.parametrize("kind", [Fails, FailingBatches, FailingStream])
def test_only_a_state_that_is_asked_for_raises(
    kind: type[Fails], state: Callable[[], Any], workers: int
) -> None:
    expected = values(make(kind, state, TorchLoader))
    with make(kind, state, DataLoader, num_workers=workers) as loader:
        assert values(loader) == expected
        iterator = iter(loader)
        next(iterator)
        for _ in range(2):
            with pytest.raises(ResumeError, match=rf"state_dict\(\) of {kind.__name__} cannot be") as raised:
                loader.state_dict()
        assert kind is FailingStream or isinstance(raised.value.__cause__, RuntimeError | TypeError)
        assert values(iterator) == expected[1:]


def test_under_install_such_a_state_is_empty() -> None:
    with shmloader.install(stateful=True):
        loader = make(Fails, raises, TorchLoader)
        next(iter(loader))
        with pytest.warns(RuntimeWarning, match="the sampler has no place yet"):
            assert loader.state_dict() == {}


def test_a_state_that_fails_before_the_first_batch_only_is_of_no_account() -> None:
    place: list[Any] = []
    sampler = Fails(lambda: place or raises())
    loader = DataLoader(Plain(12), 3, sampler=sampler)
    with pytest.raises(ResumeError, match="no place yet"):
        loader.state_dict()
    iterator = iter(loader)
    place += range(40)
    next(iterator)
    before = loader.state_dict()["sampler_state"]
    place[0] = torch.tensor(7)
    assert loader.state_dict()["sampler_state"] == before  # it was copied


class Odd:
    """A sampler or dataset of six; a missing attribute raises no AttributeError."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError if name.startswith("__") else KeyError(name)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter(range(6))

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class OddStream(Odd, IterableDataset[int]):
    """The same as a stream."""


@pytest.mark.parametrize("workers", [0, 1])
def test_attributes_that_only_this_loader_asks_for_may_raise(workers: int) -> None:
    options = {"num_workers": workers, "persistent_workers": bool(workers)}
    for make_loader in (
        lambda: DataLoader(Odd(), 3, sampler=Odd(), **options),
        lambda: DataLoader(OddStream(), 3, **options),
    ):
        with make_loader() as loader:
            for _ in range(2):
                assert values(loader) == [[0, 1, 2], [3, 4, 5]]
