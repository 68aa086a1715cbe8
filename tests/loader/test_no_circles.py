"""Memory and descriptors are freed with their last user, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import loading
import pytest
import torch
from stream_datasets import Numbers
from thread_loaders import join_workers
from torch.utils.data import Dataset, Subset

from shmloader import DataLoader, WorkerDied, WorkerTimeout, share

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # Python 3.12
]


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def slot_files() -> int:
    """How many descriptors of slots this process has."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing
            continue
    return sum("shmloader-slots" in path for path in paths)


class Epochs(loading.Numbered):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def finish(loader: DataLoader[Any]) -> None:
    list(loader)


def leave(loader: DataLoader[Any]) -> None:
    next(iter(loader))


def two_epochs(loader: DataLoader[Any]) -> None:
    list(loader)
    loader.set_epoch(1)
    list(loader)


WORKERS = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "worker_type": "thread"},
    {"num_workers": 2, "worker_type": "thread", "persistent_workers": True},
]


@pytest.mark.each_value
@pytest.mark.parametrize("arguments", WORKERS, ids=str)
@pytest.mark.parametrize("end", [finish, leave, two_epochs])
@pytest.mark.parametrize(
    "make",
    [
        lambda: loading.Numbered(24),
        lambda: Epochs(24),
        lambda: Numbers(24),
        lambda: Subset(loading.Numbered(24), range(24)),
        lambda: share(loading.Numbered(24)),
    ],
    ids=["plain", "set_epoch", "stream", "subset", "shared"],
)
def test_the_dataset_dies_with_its_loader(
    make: Callable[[], Dataset[Any]], end: Callable[[DataLoader[Any]], None], arguments: dict[str, Any]
) -> None:
    """It may be large; no descriptor stays open."""
    dataset = make()
    alive = weakref.ref(dataset)
    before = slot_files()
    loader = DataLoader(dataset, batch_size=4, **arguments)
    end(loader)
    loader.close()
    join_workers()
    assert slot_files() == before
    del loader, dataset
    assert alive() is None


def fail(loader: DataLoader[Any]) -> None:
    loader.dataset.bad = 8  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="8"):
        list(loader)


def lose_a_worker(loader: DataLoader[Any]) -> None:
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(WorkerDied):
        list(iterator)


def wait_too_long(loader: DataLoader[Any]) -> None:
    loader.dataset.slow = 8  # type: ignore[attr-defined]
    loader.timeout = 0.1
    with pytest.raises(WorkerTimeout):
        list(loader)


class Flawed(loading.Numbered):
    bad = slow = -1

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise ValueError(index)
        if index == self.slow:
            time.sleep(2)
        return super().__getitem__(index)


@pytest.mark.parametrize("end", [fail, lose_a_worker, wait_too_long])
def test_the_dataset_dies_after_an_error_too(end: Callable[[DataLoader[Any]], None]) -> None:
    """A program that catches the error and begins anew must not have two datasets."""
    dataset = Flawed(400)
    alive = weakref.ref(dataset)
    before = slot_files()
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    end(loader)
    del loader, dataset
    assert alive() is None
    assert slot_files() == before
