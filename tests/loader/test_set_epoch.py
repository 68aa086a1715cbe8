"""``loader.set_epoch()``: samplers and datasets hear of it, in persistent workers too, once per call."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from epoch_datasets import Counts, Tells
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from shmloader import DataLoader


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
    pytest.param(DrawsGlobally, "spawn", marks=pytest.mark.long),
    (OfAnInstance, "fork"),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_workers_have_what_a_call_leaves(kind: Any, how: str, warm_helpers: None) -> None:
    compare(kind, how)


@pytest.mark.each_value
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
            assert list(loader) == [[str(epoch - 1)]] * 9
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
