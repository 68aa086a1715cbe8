"""What persistent workers make of ``loader.set_epoch()``: generators, shares, errors, when it is sent."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from epoch_datasets import Counts, Plain, Tells
from torch.utils.data import get_worker_info

from shmloader import DataLoader, WorkerTimeout


class Augments(Tells):
    """Its samples draw from global generators, which `set_epoch` seeds if asked to."""

    def __init__(self, seeds: bool) -> None:
        self.seeds = seeds

    def set_epoch(self, epoch: int) -> None:
        if self.seeds:
            random.seed(epoch)
            np.random.seed(epoch)
            torch.manual_seed(epoch)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return random.random(), np.random.standard_normal(), torch.rand(()).item()


def test_the_workers_own_generators_are_put_back() -> None:
    """Else all workers would draw the same numbers; with an odd number of normal ones, one is in reserve."""
    found = []
    for seeds in (False, True):
        torch.manual_seed(5)
        with DataLoader(
            Augments(seeds), num_workers=2, persistent_workers=True, collate_fn=lambda samples: samples[0]
        ) as loader:
            seen = list(loader)
            for epoch in range(2):
                loader.set_epoch(epoch)
                seen += list(loader)
        found.append(seen)
        assert len(set(seen)) == len(seen)
    assert found[0] == found[1]


def test_a_worker_derives_its_own_from_the_number() -> None:
    class PerWorker(Tells):
        def set_epoch(self, epoch: int) -> None:
            info = get_worker_info()
            self.state = epoch * 10 + (9 if info is None else info.id)

    with DataLoader(PerWorker(), num_workers=2, persistent_workers=True) as loader:
        list(loader)
        loader.set_epoch(1)
        assert list(loader) == [["10"], ["11"]] * 2


def test_what_workers_have_changed_for_themselves_stays() -> None:
    class Reads(Tells):
        reads = 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return self.reads

    with DataLoader(Reads(), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        loader.set_epoch(1)
        assert torch.cat(list(loader)).tolist() == [5, 6, 7, 8]


class HasPart(Tells):
    """The part of a thread's worker, which its `worker_init_fn` writes."""

    part = -1

    def __getitem__(self, index: int) -> Any:
        return self.state, self.part


def take_part(worker_id: int) -> None:
    get_worker_info().dataset.part = worker_id  # type: ignore[union-attr]


def test_threads_begin_with_the_dataset_as_it_is_and_what_worker_init_fn_makes_of_it() -> None:
    given: dict[str, Any] = {"num_workers": 2, "worker_type": "thread", "persistent_workers": True}
    with DataLoader(HasPart(), worker_init_fn=take_part, collate_fn=lambda one: one[0], **given) as loader:
        list(loader)
        for epoch in (3, 4):
            loader.set_epoch(epoch)
            assert list(loader) == [(epoch, 0), (epoch, 1)] * 2


class SharedByThreads(Counts):
    def __copy__(self) -> Any:
        return self


def test_threads_make_no_call_of_their_own() -> None:
    dataset = SharedByThreads()
    with DataLoader(dataset, num_workers=2, worker_type="thread", persistent_workers=True) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert list(loader) == [[str(epoch + 1)]] * 4
    assert dataset.state == 3


@pytest.mark.parametrize("loader_class", [DataLoader, torch.utils.data.DataLoader])
def test_a_dataset_without_set_epoch_stays_as_persistent_workers_got_it(loader_class: Any) -> None:
    dataset = Plain()
    loader = loader_class(dataset, num_workers=1, persistent_workers=True)
    for start in range(3):
        assert torch.cat(list(loader)).tolist() == [0] * 4
        dataset.start = start
        if loader_class is DataLoader:
            loader.set_epoch(start)


def test_many_calls_arrive_whole() -> None:
    """They go to the workers in many records, which wait until there is room in the pipe."""
    with DataLoader(Counts(), num_workers=2, persistent_workers=True) as loader:
        list(loader)
        for epoch in range(100):
            loader.set_epoch(epoch)
        assert list(loader) == [["100"]] * 4
        statistics = loader.statistics()
        assert statistics.slots_granted + statistics.slots_published == 0


class Refuses(Tells):
    def set_epoch(self, epoch: int) -> None:
        if epoch == 7 and get_worker_info() is not None:
            raise LookupError(f"no epoch {epoch} here")
        super().set_epoch(epoch)


def test_an_error_of_set_epoch_in_a_worker_is_raised_with_the_first_batch() -> None:
    with DataLoader(Refuses(), 4, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        loader.set_epoch(7)
        with pytest.raises(LookupError, match="no epoch 7 here") as caught:
            list(loader)
        assert "raised by Refuses.set_epoch(7)" in caught.value.__notes__[0]
        assert "persistent_workers=False" in caught.value.__notes__[0]


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
        assert list(loader) == [["1"], ["1"]]


def test_a_call_that_raises_here_is_not_made_in_workers() -> None:
    class RefusesHere(Counts):
        def set_epoch(self, epoch: int) -> None:
            if epoch == 7:
                raise LookupError(epoch)
            super().set_epoch(epoch)

    with DataLoader(RefusesHere(), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        loader.set_epoch(3)
        with pytest.raises(LookupError):
            loader.set_epoch(7)
        assert list(loader) == [["1"]] * 4


class Broadcasts(Tells):
    def set_epoch(self, epoch: int) -> None:
        number = torch.tensor(epoch + 10 * dist.get_rank() + 100 * dist.get_world_size())
        if epoch:
            dist.broadcast(number, 0)
        self.state = number.item()


@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
def test_a_collective_in_a_worker_is_an_error_that_names_it_and_the_way_round() -> None:
    """A forked worker has the process group without its threads: it would wait for ever."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            with DataLoader(Broadcasts(), num_workers=1, persistent_workers=True, timeout=60) as loader:
                list(loader)
                loader.set_epoch(0)
                assert list(loader) == [["100"]] * 4
                loader.set_epoch(1)
                with pytest.raises(ValueError, match="Process group") as caught:
                    list(loader)
            assert "raised by Broadcasts.set_epoch(1)" in caught.value.__notes__[0]
            assert "process group" in caught.value.__notes__[0]
            with DataLoader(Broadcasts(), num_workers=1) as loader:
                loader.set_epoch(1)
                assert list(loader) == [["101"]] * 4
        finally:
            dist.destroy_process_group()


class Sometimes(list[int]):
    """A sampler that cannot be iterated while a flag is set."""

    raises = False

    def __iter__(self) -> Iterator[int]:
        if self.raises:
            raise LookupError("not now")
        return super().__iter__()


def test_an_epoch_that_could_not_be_begun_loses_no_call() -> None:
    sampler = Sometimes(range(4))
    given: dict[str, Any] = {"batch_size": None, "num_workers": 2, "persistent_workers": True}
    with DataLoader(Counts(), sampler=sampler, **given) as loader:
        list(loader)
        loader.set_epoch(4)
        sampler.raises = True
        with pytest.raises(LookupError, match="not now"):
            iter(loader)
        sampler.raises = False
        assert list(loader) == ["1"] * 4


def test_calls_that_were_sent_are_not_sent_again_when_the_wait_for_workers_fails() -> None:
    go_on = multiprocessing.get_context("fork").Event()

    class SlowCounts(Counts):
        def __getitem__(self, index: int) -> Any:
            if index == 1 and self.state == 0:
                go_on.wait()
            return super().__getitem__(index)

    with DataLoader(SlowCounts(), num_workers=1, persistent_workers=True, timeout=5) as loader:
        next(iter(loader))
        loader.set_epoch(1)
        with pytest.raises(WorkerTimeout):
            iter(loader)
        go_on.set()
        assert list(loader) == [["1"]] * 4


def test_a_new_iterators_workers_have_earlier_calls_already() -> None:
    with DataLoader(Counts(), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        loader.set_epoch(1)
        loader.close()
        assert list(loader) == [["1"]] * 4
