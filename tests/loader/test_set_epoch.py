"""``loader.set_epoch()``: samplers and datasets hear of it, in persistent workers too, once per call."""

from __future__ import annotations

import functools
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from caught_warnings import caught_warnings
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    get_worker_info,
)

import shmloader
from shmloader import DataLoader, WorkerTimeout


class Tells(Dataset[Any]):
    """Its samples show the effects of `set_epoch`."""

    def __init__(self) -> None:
        self.state: Any = 0

    def set_epoch(self, epoch: int) -> None:
        self.state = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return repr(self.state)


class Unchanged(Tells):
    """Ignores a call with its present epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.order = 0, list(range(4))

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.order = epoch, [(place + epoch) % 4 for place in range(4)]

    def __getitem__(self, index: int) -> Any:
        return self.epoch, self.order[index]


class Counts(Tells):
    def set_epoch(self, epoch: int) -> None:
        self.state += 1


class Draws(Tells):
    def set_epoch(self, epoch: int) -> None:
        self.state = random.Random(epoch)

    def __getitem__(self, index: int) -> Any:
        return repr(self.state and self.state.getstate()[1][:2])


class DrawsGlobally(Tells):
    """What it draws differs from call to call, and not from worker to worker."""

    def set_epoch(self, epoch: int) -> None:
        self.state = random.random(), np.random.random(), torch.rand(()).item(), np.random.standard_normal()


class Shuffles(Tells):
    """Changes a list in place."""

    def __init__(self) -> None:
        self.state = list(range(9))

    def set_epoch(self, epoch: int) -> None:
        random.Random(epoch).shuffle(self.state)


class KeepsADict(Tells):
    def __init__(self) -> None:
        self.state = {"epoch": 0}

    def set_epoch(self, epoch: int) -> None:
        self.state["epoch"] = epoch


class NumpyNumber(Tells):
    def set_epoch(self, epoch: int) -> None:
        self.state = np.int64(epoch)


class Slotted:
    """No subclass of torch's, without a ``__dict__`` and without weak references."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = 0

    def set_epoch(self, epoch: int) -> None:
        self.state = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.state


class Partial(Tells):
    def _set(self, epoch: int, scale: int) -> None:
        self.state = [epoch * scale]

    set_epoch = functools.partialmethod(_set, scale=3)


class OfAnInstance(Tells):
    """Has no method of that name in its class."""

    set_epoch = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.set_epoch = functools.partial(setattr, self, "state")  # type: ignore[method-assign,assignment]


class Unchangeable(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(f"{cls.__name__} cannot be changed")


class OfUnchangeableClass(metaclass=Unchangeable):
    def __init__(self) -> None:
        self.state = [0]

    def set_epoch(self, epoch: int) -> None:
        self.state = [self.state[0] + epoch]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.state[0]


class Passes(Tells):
    """Passes another number on to the dataset in it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch + 100)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Delegates(Dataset[Any]):
    """Has the attributes of the dataset in it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class InADict(Dataset[Any]):
    """A dataset in a dict in a list in a dict, between other values."""

    def __init__(self, inner: Any) -> None:
        others = [{"dataset": None}] * 20
        self.parts = {"files": list(range(50)), "train": [*others, {"dataset": inner}], "val": []}
        self.parts["itself"] = [self.parts]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.parts["train"][-1]["dataset"][index]


class Stream(IterableDataset[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (100 * self.epoch + k for k in range(4))


KINDS: list[Callable[[], Any]] = [
    *(Unchanged, Counts, Draws, DrawsGlobally, Shuffles, KeepsADict, NumpyNumber, Slotted, Partial, Stream),
    OfUnchangeableClass,
]
HELD: dict[str, Callable[[Any], Any]] = {
    "a Subset": lambda inner: Subset(inner, range(4)),
    "a Subset of a ConcatDataset": lambda inner: Subset(ConcatDataset([Tells(), inner]), range(3, 8)),
    "a dict in a list in a dict": InADict,
    "one that passes another number on": Passes,
    "one that delegates": Delegates,
}


def compare(make: Callable[[], Any], how: str) -> None:
    """Compare the samples of persistent workers with those that the program's own dataset gives then."""
    dataset = make()
    given: dict[str, Any] = {"worker_type": "thread"} if how == "thread" else {"multiprocessing_context": how}
    workers = 1 if make is Stream else 2
    with DataLoader(
        dataset, 2, collate_fn=repr, num_workers=workers, persistent_workers=True, **given
    ) as loader:
        seen = []
        for numbers in ((), (3,), (3,), (4, 5)):
            for number in numbers:
                loader.set_epoch(number)
            samples = list(dataset) if make is Stream else [dataset[place] for place in range(len(dataset))]
            expected = [repr(samples[place : place + 2]) for place in range(0, len(samples), 2)]
            seen.append(list(loader))
            assert seen[-1] == expected
    assert seen[0] != seen[1]


# Workers of a fork server are sent the dataset as spawned ones are, and import torch once for all.
WAYS = [
    *((kind, how) for kind in KINDS for how in ("fork", "forkserver", "thread")),
    (DrawsGlobally, "spawn"),
    (OfAnInstance, "fork"),
]


@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_workers_have_what_a_call_leaves(kind: Any, how: str, warm_helpers: None) -> None:
    compare(kind, how)


@pytest.mark.parametrize("how", ["fork", "thread"])
@pytest.mark.parametrize("kind", [Counts, Slotted])
@pytest.mark.parametrize("held", HELD)
def test_so_have_datasets_inside_another(held: str, kind: Any, how: str) -> None:
    """The outermost one that has the method is called: of one that delegates, the inner one, once."""
    compare(lambda: HELD[held](kind()), how)


def test_without_workers_the_same_are_called_once() -> None:
    inner, delegate, plain = Slotted(), Counts(), Counts()
    dataset = ConcatDataset([Passes(inner), Delegates(delegate), Subset(plain, [0]), plain])
    DataLoader(dataset).set_epoch(3)
    assert (inner.state, delegate.state, plain.state) == (103, 1, 1)


class Shifts(BatchSampler):
    """Tells its sampler another number."""

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch + 100)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda sampler: {"sampler": sampler}, 7),
        (lambda sampler: {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}, 7),
        (lambda sampler: {"batch_sampler": Shifts(sampler, 2, drop_last=False)}, 107),
        (lambda sampler: {"batch_size": None, "sampler": sampler}, 7),
    ],
)
def test_the_outermost_sampler_is_called(make: Any, expected: int) -> None:
    sampler: DistributedSampler[int] = DistributedSampler(range(8), num_replicas=2, rank=0)
    loader = DataLoader(Tells(), **make(sampler))
    loader.set_epoch(7)
    assert sampler.epoch == expected


class Part(Tells):
    """Counts how often something looks for the method."""

    looks = 0

    @property
    def set_epoch(self) -> Any:  # type: ignore[override]
        Part.looks += 1
        return super().set_epoch


def test_datasets_are_looked_for_once_for_each_iterator() -> None:
    count = 1000
    dataset = ConcatDataset([Part() for _ in range(count)])
    with DataLoader(
        dataset, num_workers=1, persistent_workers=True, sampler=SequentialSampler(range(9))
    ) as loader:
        list(loader)
        loader.set_epoch(0)
        for epoch in range(1, 4):
            assert list(loader)[0] == [str(epoch - 1)]
            Part.looks = 0
            loader.set_epoch(epoch)
            assert Part.looks == count  # to call it


def test_it_takes_time_in_proportion_to_the_parts() -> None:
    """It was quadratic: a minute for 8,000 parts."""
    dataset = ConcatDataset([Tells() for _ in range(50_000)])
    with DataLoader(
        dataset, num_workers=1, persistent_workers=True, sampler=SequentialSampler(range(4))
    ) as loader:
        began_s = time.process_time()
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert list(loader) == [[str(epoch)]] * 4
        assert time.process_time() - began_s < 10


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


class Plain(Dataset[int]):
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
    class SlowCounts(Counts):
        def __getitem__(self, index: int) -> Any:
            if index == 1 and self.state == 0:
                time.sleep(3)
            return super().__getitem__(index)

    with DataLoader(SlowCounts(), num_workers=1, persistent_workers=True, timeout=1) as loader:
        next(iter(loader))
        loader.set_epoch(1)
        with pytest.raises(WorkerTimeout):
            iter(loader)
        time.sleep(3)
        assert list(loader) == [["1"]] * 4


def test_a_new_iterators_workers_have_earlier_calls_already() -> None:
    with DataLoader(Counts(), num_workers=1, persistent_workers=True) as loader:
        list(loader)
        loader.set_epoch(1)
        loader.close()
        assert list(loader) == [["1"]] * 4


# --- the warning


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
    with DataLoader(Lazy(), num_workers=1, persistent_workers=True) as loader:
        assert [text[:2] for text in warnings_of(loader)] == ["1:"]


# --- loaders of torch's class


class Library(torch.utils.data.DataLoader[Any]):
    """A library's class."""


@pytest.mark.parametrize("how", ["fork", "spawn"])
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
    with shmloader.install():
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
