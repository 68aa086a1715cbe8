"""Programs that call their dataset's ``set_epoch`` get torch's samples from persistent workers."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shmloader import DataLoader

EPOCHS = 3
LENGTH = 24


class Ordered(Dataset[Any]):
    """Gives samples in an order that `set_epoch` draws from a global generator."""

    def __init__(self, shuffle: Callable[[list[int]], Any]) -> None:
        self.order = list(range(LENGTH))
        self.shuffle = shuffle

    def set_epoch(self, epoch: int) -> None:
        self.order = list(range(LENGTH))
        self.shuffle(self.order)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.order[index]


def shuffle_by_torch(order: list[int]) -> None:
    order[:] = torch.randperm(len(order)).tolist()


SHUFFLES = {"random": random.shuffle, "numpy": np.random.shuffle, "torch": shuffle_by_torch}


class Seeds(Ordered):
    """Seeds the global generators, and augments by them."""

    def __init__(self) -> None:
        super().__init__(random.shuffle)

    def set_epoch(self, epoch: int) -> None:
        random.seed(epoch)
        np.random.seed(epoch)
        torch.manual_seed(epoch)

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.random(), torch.rand(()).item()


class Reads(Ordered):
    """Keeps its place in a file as a number, which `set_epoch` does not touch."""

    def __init__(self) -> None:
        super().__init__(random.shuffle)
        self.place = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        self.place += 1
        return self.place


class Shared(IterableDataset[Any]):
    """A list of which `take_share` gives each worker its share, and `set_epoch` sets the whole."""

    def __init__(self) -> None:
        self.order = list(range(LENGTH))

    def set_epoch(self, epoch: int) -> None:
        self.order = list(range(LENGTH))

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


def take_share(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.order = info.dataset.order[worker_id :: info.num_workers]


class Collective(Ordered):
    """Draws the order on rank 0."""

    def __init__(self) -> None:
        super().__init__(shuffle_by_torch)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        order = torch.tensor(self.order)
        dist.broadcast(order, 0)
        self.order = order.tolist()


@pytest.fixture
def process_group() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def seed_all() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def play(
    build: Any, dataset: Any, then: Callable[[Any], Any] = lambda dataset: None, **arguments: Any
) -> list[Any]:
    """The samples of epochs before each of which the program calls the dataset's `set_epoch`."""
    seed_all()
    loader = build(dataset, 2, collate_fn=list, num_workers=2, persistent_workers=True, **arguments)
    seen = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* has set_epoch", UserWarning)
        for epoch in range(EPOCHS):
            dataset.set_epoch(epoch)
            seen.append(list(loader))
            then(dataset)
    seen.append([random.random(), np.random.random(), torch.rand(()).item()])
    loader._iterator._shutdown_workers()
    return seen


def assert_as_torch(make: Callable[[], Any], **arguments: Any) -> list[Any]:
    played = play(DataLoader, make(), **arguments)
    assert played == play(torch.utils.data.DataLoader, make(), **arguments)
    return played


def assert_each_once(seen: list[Any]) -> None:
    for epoch in seen[:EPOCHS]:
        assert sorted(sample for batch in epoch for sample in batch) == list(range(LENGTH))


@pytest.mark.parametrize(
    ("drawn_by", "how"),
    [
        *((one, "fork") for one in SHUFFLES),
        ("numpy", "forkserver"),
        pytest.param("numpy", "spawn", marks=pytest.mark.long),
    ],
)
def test_an_order_of_a_global_generator_is_the_same_in_all_workers(drawn_by: str, how: str) -> None:
    seen = assert_as_torch(lambda: Ordered(SHUFFLES[drawn_by]), multiprocessing_context=how)
    assert_each_once(seen)


def test_a_seeded_global_generator_is_not_seeded_in_workers() -> None:
    seen = assert_as_torch(Seeds)
    drawn = [sample[1:] for epoch in seen[:EPOCHS] for batch in epoch for sample in batch]
    assert len(set(drawn)) == EPOCHS * LENGTH


def test_shares_of_workers_stay() -> None:
    seen = assert_as_torch(Shared, worker_init_fn=take_share)
    assert_each_once(seen)


@pytest.mark.parametrize("where", ["process", "thread"])
def test_a_place_that_the_program_moves_stays_in_the_worker(where: str) -> None:
    given = {} if where == "process" else {"worker_type": "thread"}
    expected = play(torch.utils.data.DataLoader, Reads(), lambda dataset: dataset[0])
    assert play(DataLoader, Reads(), lambda dataset: dataset[0], **given) == expected


def test_a_collective_runs_where_the_program_calls_it(process_group: None) -> None:
    assert_as_torch(Collective)


def test_a_class_is_as_it_was() -> None:
    """Else a class that is pickled by value would be pickled with what replaced its methods."""

    class Own(Reads):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    before = dict(vars(Own))
    play(DataLoader, Own())
    assert dict(vars(Own)) == before
