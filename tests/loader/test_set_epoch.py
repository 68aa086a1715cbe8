"""The epoch's number reaches samplers, and datasets in persistent workers."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, DistributedSampler, IterableDataset, Subset

from shmloader import DataLoader


class Tells(Dataset):
    """A dataset whose samples tell the epoch, and a number that was drawn when it was set."""

    def __init__(self, length: int = 12) -> None:
        self.length = length
        self.epoch = 0
        self.drawn = 0.0
        self.scale = 1.0
        self.private = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.drawn = random.Random(epoch).random()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.private += 1
        return {"index": index, "epoch": self.epoch, "drawn": self.drawn, "scale": self.scale}


class TellsByOther(Tells):
    """Derives from the number an attribute that is no plain value."""

    generator = random.Random(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.generator = random.Random(epoch)

    def __getitem__(self, index: int) -> dict[str, Any]:
        state = self.generator.getstate()
        self.generator.seed(str((state[1][:3], index)))
        drawn = self.generator.random()
        self.generator.setstate(state)
        return {"index": index, "epoch": self.epoch, "drawn": drawn, "scale": self.scale}


class TellsText(Tells):
    text = ""

    def __getitem__(self, index: int) -> str:
        return self.text


class Stream(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (100 * self.epoch + k for k in range(4))


WRAPPED = {
    "itself": lambda dataset: dataset,
    "a Subset": lambda dataset: Subset(dataset, range(8)),
    "a Subset of a ConcatDataset": lambda dataset: Subset(ConcatDataset([Tells(3), dataset]), range(3, 12)),
}


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver", "thread"])
def test_a_call_on_the_dataset_takes_effect_in_persistent_workers(how: str, warm_helpers: None) -> None:
    """With torch's loader it has no effect there."""
    given: dict[str, Any] = {"worker_type": "thread"} if how == "thread" else {"multiprocessing_context": how}
    dataset = Tells()
    with DataLoader(dataset, 4, num_workers=2, persistent_workers=True, **given) as loader:
        for epoch in (0, 1, 5):
            loader.dataset.set_epoch(epoch)
            dataset.scale = epoch / 8
            for batch in loader:
                assert batch["epoch"].tolist() == [epoch] * 4
                assert batch["drawn"].tolist() == [dataset.drawn] * 4
                assert batch["scale"].tolist() == [epoch / 8] * 4


class Plain(Dataset):
    """A dataset without ``set_epoch``."""

    start = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.start


@pytest.mark.parametrize("loader_class", [DataLoader, torch.utils.data.DataLoader])
def test_a_dataset_without_set_epoch_stays_as_persistent_workers_got_it(loader_class: Any) -> None:
    dataset = Plain()
    loader = loader_class(dataset, num_workers=1, persistent_workers=True)
    for start in range(3):
        assert torch.cat(list(loader)).tolist() == [0] * 4
        dataset.start = start


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loaders_own_call_reaches_datasets_inside_datasets(wrapped: str, num_workers: int) -> None:
    dataset = TellsByOther()
    seen = []
    with DataLoader(
        WRAPPED[wrapped](dataset), 4, num_workers=num_workers, persistent_workers=num_workers > 0
    ) as loader:
        for epoch in (0, 3, 4):
            loader.set_epoch(epoch)
            batches = list(loader)
            assert all(batch["epoch"].tolist() == [epoch] * len(batch["epoch"]) for batch in batches)
            seen.append([batch["drawn"].tolist() for batch in batches])
    assert seen[0] != seen[1] != seen[2]
    fresh = TellsByOther()
    fresh.set_epoch(4)
    expected = [batch["drawn"].tolist() for batch in DataLoader(WRAPPED[wrapped](fresh), 4)]
    assert seen[2] == expected


def test_it_reaches_samplers_too() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Tells(), num_replicas=2, rank=0)
    with DataLoader(Tells(), 3, sampler=sampler, num_workers=1, persistent_workers=True) as loader:
        orders = []
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            assert sampler.epoch == epoch
            orders.append([batch["index"].tolist() for batch in loader])
    assert orders[0] == orders[2] != orders[1]


def test_streams_begin_with_it() -> None:
    stream = Stream()
    with DataLoader(stream, batch_size=4, num_workers=1, persistent_workers=True) as loader:
        for epoch in range(3):
            stream.set_epoch(epoch)
            assert torch.cat(list(loader)).tolist() == [100 * epoch + k for k in range(4)]


def test_what_workers_have_changed_for_themselves_stays() -> None:
    """Only what the program has changed is sent."""

    class Counts(Tells):
        def __getitem__(self, index: int) -> dict[str, Any]:
            super().__getitem__(index)
            return {"private": self.private}

    dataset = Counts()
    with DataLoader(dataset, 4, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        dataset.set_epoch(1)
        assert torch.cat([batch["private"] for batch in loader]).tolist() == list(range(13, 25))


class Many(Tells):
    """A dataset with so many changes that they do not fit in one record."""


def test_many_changes_travel_too() -> None:
    dataset = Many()
    with DataLoader(dataset, 4, num_workers=2, persistent_workers=True) as loader:
        list(loader)
        for number in range(200):
            setattr(dataset, f"attribute_{number}", f"value {number}" * 5)
        for epoch in (2, 3):
            dataset.set_epoch(epoch)
            assert [int(batch["epoch"][0]) for batch in loader] == [epoch] * 3
        statistics = loader.statistics()
        assert statistics.slots_granted + statistics.slots_published == 0


class Refuses(Tells):
    def set_epoch(self, epoch: int) -> None:
        if epoch == 7 and torch.utils.data.get_worker_info() is not None:
            raise LookupError(f"no epoch {epoch} here")
        super().set_epoch(epoch)


def test_a_change_larger_than_a_pipe_arrives_whole() -> None:
    """It goes to the workers in many records, which wait until there is room in the pipe."""
    dataset = TellsText()
    with DataLoader(dataset, batch_size=3, num_workers=2, persistent_workers=True) as loader:
        list(loader)
        for letter in "ab":
            dataset.text = letter * 300_001
            assert {text for batch in loader for text in batch} == {dataset.text}


def test_a_long_change_takes_time_in_proportion() -> None:
    """Workers do not copy the earlier records again with each further one: that took half a minute."""
    dataset = TellsText()
    with DataLoader(dataset, batch_size=3, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        dataset.text = "a" * 4_000_000
        began_s = time.monotonic()
        next(iter(loader))
        assert time.monotonic() - began_s < 10


def test_an_error_of_set_epoch_in_a_worker_is_raised_with_the_first_batch() -> None:
    with DataLoader(Refuses(), 4, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        loader.set_epoch(7)
        with pytest.raises(LookupError, match="no epoch 7 here"):
            list(loader)


def test_an_error_of_set_epoch_is_none_of_the_next_epoch() -> None:
    """The second worker has no batch in the epoch that it cannot begin."""
    batches = [[0]]
    with DataLoader(Refuses(), batch_sampler=batches, num_workers=2, persistent_workers=True) as loader:
        list(loader)
        loader.set_epoch(7)
        with pytest.raises(LookupError, match="no epoch 7 here"):
            list(loader)
        loader.set_epoch(1)
        batches.append([1])
        assert [batch["epoch"].item() for batch in loader] == [1, 1]


class Sometimes(list[int]):
    """A sampler that cannot be iterated while a flag is set."""

    raises = False

    def __iter__(self) -> Iterator[int]:
        if self.raises:
            raise LookupError("not now")
        return super().__iter__()


@pytest.mark.parametrize("through", ["loader", "dataset"])
def test_an_epoch_that_could_not_be_begun_loses_no_change(through: str) -> None:
    dataset, sampler = Tells(), Sometimes(range(12))
    given: dict[str, Any] = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
    with DataLoader(dataset, sampler=sampler, **given) as loader:
        list(loader)
        (loader if through == "loader" else dataset).set_epoch(4)
        sampler.raises = True
        with pytest.raises(LookupError, match="not now"):
            iter(loader)
        sampler.raises = False
        assert [sample["epoch"] for sample in loader] == [4] * 12
