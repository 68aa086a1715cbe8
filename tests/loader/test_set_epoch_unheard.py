"""Where no call of ``loader.set_epoch()`` reaches workers, a warning says so; loaders of torch's class."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caught_warnings import caught_warnings
from epoch_datasets import Plain, Tells
from torch.utils.data import Dataset, DistributedSampler, Subset

import shmloader
from shmloader import DataLoader


class Lazy(Dataset[Any]):
    """Holds something that opens at the first look at it."""

    class Proxy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise AssertionError("opened")

    def __init__(self) -> None:
        self.proxy, self.told = Lazy.Proxy(), Tells()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AssertionError("opened")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.told[index]


def warnings_of(loader: Any, epochs: int = 4, each: Callable[[int], Any] = int) -> list[str]:
    """The warnings of each epoch, with its number."""
    with caught_warnings() as caught:
        found: list[str] = []
        for epoch in range(epochs):
            each(epoch)
            list(loader)
            found += [f"{epoch}: {one.message}" for one in caught]
            caught.clear()
    return found


@pytest.mark.parametrize("kind", ["process", "thread"])
@pytest.mark.parametrize("make", [Tells, lambda: Subset(Tells(), [1, 2])])
def test_where_the_loader_is_never_told_one_warning_says_so_at_the_second_epoch(make: Any, kind: Any) -> None:
    dataset = make()
    with DataLoader(dataset, num_workers=1, persistent_workers=True, worker_type=kind) as loader:
        found = warnings_of(loader)
        loader.close()
        found += warnings_of(loader)
    assert len(found) == 1
    assert found[0].startswith("1: Tells has set_epoch()")
    assert "shmloader.set_epoch(loader, epoch)" in found[0]


def test_a_warning_that_is_an_error_costs_no_batch() -> None:
    with DataLoader(Tells(), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="has set_epoch"):
                iter(loader)
            assert len(list(loader)) == 4


@pytest.mark.parametrize(
    "arguments", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str
)
def test_else_there_is_none(arguments: dict[str, Any]) -> None:
    with DataLoader(Tells(), **arguments) as loader:
        assert not warnings_of(loader, each=loader.set_epoch if "persistent_workers" in arguments else int)
    with DataLoader(Plain(), **arguments) as loader:
        assert not warnings_of(loader)


def test_the_warning_runs_no_code_of_the_dataset() -> None:
    with DataLoader(Lazy(), num_workers=1, worker_type="thread", persistent_workers=True) as loader:
        assert [text[:2] for text in warnings_of(loader)] == ["1:"]


# --- loaders of torch's class


class Library(torch.utils.data.DataLoader[Any]):
    """A library's class."""


@pytest.mark.parametrize("how", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, Library])
def test_loaders_of_torchs_class_are_told_under_install(kind: Any, how: str, warm_helpers: None) -> None:
    sampler: DistributedSampler[int] = DistributedSampler(range(4), num_replicas=1, rank=0)
    with shmloader.install():
        loader = kind(
            Tells(), sampler=sampler, num_workers=1, persistent_workers=True, multiprocessing_context=how
        )
        for epoch in range(3):
            shmloader.set_epoch(loader, epoch)
            assert list(loader) == [[str(epoch)]] * 4
            assert sampler.epoch == epoch
        loader.close()


def test_their_states_have_the_number() -> None:
    with shmloader.install(stateful=True):
        loader = torch.utils.data.DataLoader(Tells(), num_workers=1)
        shmloader.set_epoch(loader, 5)
        next(iter(loader))
        state = loader.state_dict()  # type: ignore[attr-defined]
        later = torch.utils.data.DataLoader(Tells(), num_workers=1)
        later.load_state_dict(state)  # type: ignore[attr-defined]
        assert list(later) == [["5"]] * 3
        loader.close()  # type: ignore[attr-defined]


def test_torchs_own_persistent_workers_are_not_reached_and_a_warning_says_so() -> None:
    loader = torch.utils.data.DataLoader(Tells(), num_workers=1, persistent_workers=True)
    shmloader.set_epoch(loader, 1)
    assert list(loader) == [["1"]] * 4
    with pytest.warns(UserWarning, match=r"torch's own"):
        shmloader.set_epoch(loader, 2)
    assert list(loader) == [["1"]] * 4
    loader._iterator._shutdown_workers()  # type: ignore[attr-defined]


class OfNoBase:
    """A dataset that is not torch's, which threads share."""

    state = 0

    def set_epoch(self, epoch: int) -> None:
        self.state = epoch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.state


class Shared(OfNoBase, Dataset[int]):
    """The copies that threads would have of it are the one object."""

    def __copy__(self) -> Any:
        return self


@pytest.mark.parametrize("make", [OfNoBase, Shared])
def test_threads_that_share_the_dataset_hear_of_it_without_a_warning(make: Any) -> None:
    dataset = make()
    with DataLoader(dataset, num_workers=1, persistent_workers=True, worker_type="thread") as loader:
        assert warnings_of(loader, each=dataset.set_epoch) == []
        dataset.set_epoch(7)
        assert torch.cat(list(loader)).tolist() == [7, 7]
