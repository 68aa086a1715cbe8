"""``set_epoch`` has the same effect on a dataset in persistent workers as in the program, once per call."""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, Subset, get_worker_info

from shmloader import DataLoader, WorkerTimeout
from shmloader.worker.set_epoch_calls import is_noted


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


class KeepsADict(Tells):
    def __init__(self) -> None:
        self.state = {"epoch": 0}

    def set_epoch(self, epoch: int) -> None:
        self.state["epoch"] = epoch


class Derives(Tells):
    """Nothing in it has "epoch" in its name."""

    def __init__(self) -> None:
        self.seed, self.state = 0, [0]

    def set_epoch(self, epoch: int) -> None:
        self.seed, self.state = epoch, [epoch * 10]

    def __getitem__(self, index: int) -> Any:
        return self.seed, self.state[0]


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


class ByKeyword(Tells):
    def set_epoch(self, epoch: int, *, scale: int = 1) -> None:
        self.state = epoch * scale


class Partial(Tells):
    def _set(self, epoch: int, scale: int) -> None:
        self.state = [epoch * scale]

    set_epoch = functools.partialmethod(_set, scale=3)


class Cached(Derives):
    set_epoch = functools.lru_cache(Derives.set_epoch)


class CallsBase(Counts):
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)


class Passes(Tells):
    """Passes the call on to the dataset in it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch)

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

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.parts["train"][-1]["dataset"][index]


class ByName(Dataset[Any]):
    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return [part and part[index] for part in self.parts.values()]


KINDS: list[Callable[[], Any]] = [
    *(
        Unchanged,
        Counts,
        Draws,
        KeepsADict,
        Derives,
        NumpyNumber,
        Slotted,
        ByKeyword,
        CallsBase,
        Partial,
        Cached,
    ),
]
HELD: dict[str, Callable[[Any], Any]] = {
    "a Subset": lambda inner: Subset(inner, range(4)),
    "a dict": lambda inner: ByName(nothing=None, inner=inner, other=Counts()),
    "a dict in a list in a dict": InADict,
    "one that passes calls on": Passes,
    "one that delegates": Delegates,
}


def epochs(loader: DataLoader[Any], target: Any) -> list[Any]:
    """The batches of four epochs; ``target.set_epoch`` is called before each but the first."""
    seen = [list(loader)]
    for epoch in (3, 3, 5):
        target.set_epoch(epoch)
        seen.append(list(loader))
    return seen


def compare(make: Callable[[], Any], called: Callable[[Any], Any], through: str, how: str) -> None:
    """Compare persistent workers with no workers. ``called`` finds the dataset that the program calls."""
    seen = []
    for workers in (0, 2):
        given: dict[str, Any] = {"num_workers": workers, "collate_fn": repr}
        if workers:
            kind = {"worker_type": how} if how == "thread" else {"multiprocessing_context": how}
            given |= {"persistent_workers": True} | kind
        dataset = make()
        with DataLoader(dataset, 2, **given) as loader:
            target = loader if through == "loader" else called(dataset)
            seen.append(epochs(loader, target))
    assert seen[1] == seen[0]
    assert seen[0][0] != seen[0][1]


# Workers of a fork server are sent the dataset as spawned ones are, and import torch once for all.
# Threads share the dict, which the program has changed already.
WAYS = [
    *((kind, how) for kind in KINDS for how in ("fork", "forkserver")),
    *((kind, "thread") for kind in KINDS if kind is not KeepsADict),
    (Draws, "spawn"),
]
CALLED = [
    (held, through)
    for held in HELD
    for through in ("inner", "outer", "loader")
    if through != "outer" or held.startswith("one that")  # which has set_epoch
]


@pytest.mark.parametrize("through", ["dataset", "loader"])
@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_workers_have_what_a_call_leaves(kind: Any, how: str, through: str, warm_helpers: None) -> None:
    compare(kind, lambda dataset: dataset, through, how)


@pytest.mark.parametrize("how", ["fork", "thread"])
@pytest.mark.parametrize("kind", [Counts, Slotted])
@pytest.mark.parametrize(("held", "through"), CALLED)
def test_so_have_datasets_inside_another(held: str, through: str, kind: Any, how: str) -> None:
    inner: list[Any] = []

    def make() -> Any:
        inner.append(kind())
        return HELD[held](inner[-1])

    compare(make, lambda dataset: inner[-1] if through == "inner" else dataset, through, how)


def test_two_loaders_of_one_dataset_both_hear_of_each_call() -> None:
    dataset = Counts()
    given: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    with DataLoader(dataset, **given) as one, DataLoader(dataset, **given) as other:
        assert list(one) == list(other) == [["0"]] * 4
        dataset.set_epoch(1)
        assert list(one) == [["1"]] * 4
        dataset.set_epoch(2)
        assert list(one) == list(other) == [["2"]] * 4


def test_a_loader_of_the_inner_dataset_hears_of_calls_on_the_outer_one() -> None:
    inner = Counts()
    outer = Passes(inner)
    given: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    with DataLoader(outer, **given) as one, DataLoader(inner, **given) as other:
        for epoch in range(3):
            assert list(one) == list(other) == [[str(epoch)]] * 4
            outer.set_epoch(epoch)


class Scales(Tells):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1
        self.order: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.state = epoch
        self.order = [*self.order, epoch * self.scale]

    def __getitem__(self, index: int) -> Any:
        return repr((self.state, self.scale, self.order))


def test_attributes_are_set_before_and_after_the_calls_as_in_the_program() -> None:
    dataset = Scales()
    with DataLoader(dataset, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        dataset.set_epoch(1)
        dataset.scale = 7
        dataset.set_epoch(2)
        dataset.scale, dataset.state = 9, 17
        for _ in range(2):
            assert list(loader) == [["(17, 9, [1, 14])"]] * 4


def test_what_cannot_be_pickled_is_not_repeated_and_a_warning_says_so() -> None:
    class Takes(Tells):
        def set_epoch(self, epoch: int, then: Callable[[], None] = int) -> None:
            super().set_epoch(epoch)

    dataset = Takes()
    with DataLoader(dataset, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        with pytest.warns(UserWarning, match="cannot repeat this call of set_epoch"):
            dataset.set_epoch(1, lambda: None)
        assert len(list(loader)) == 4
        dataset.set_epoch(2)
        assert list(loader) == [["2"]] * 4


def test_calls_that_were_sent_are_not_sent_again_when_the_wait_for_workers_fails() -> None:
    class SlowCounts(Counts):
        def __getitem__(self, index: int) -> Any:
            if index == 1 and self.state == 0:
                time.sleep(3)
            return super().__getitem__(index)

    dataset = SlowCounts()
    with DataLoader(dataset, num_workers=1, persistent_workers=True, timeout=1) as loader:
        next(iter(loader))
        dataset.set_epoch(1)
        with pytest.raises(WorkerTimeout):
            iter(loader)
        time.sleep(3)
        assert list(loader) == [["1"]] * 4


def test_what_a_worker_derives_for_itself_stays() -> None:
    class PerWorker(Tells):
        def set_epoch(self, epoch: int) -> None:
            info = get_worker_info()
            self.state = epoch * 10 + (9 if info is None else info.id)

    dataset = PerWorker()
    with DataLoader(dataset, num_workers=2, persistent_workers=True) as loader:
        list(loader)
        dataset.set_epoch(1)
        assert list(loader) == [["10"], ["11"]] * 2


def test_a_call_that_raises_is_not_repeated() -> None:
    class Refuses(Tells):
        def set_epoch(self, epoch: int) -> None:
            if epoch == 7:
                raise LookupError(epoch)
            super().set_epoch(epoch)

    dataset = Refuses()
    with DataLoader(dataset, num_workers=1, persistent_workers=True) as loader:
        list(loader)
        dataset.set_epoch(3)
        with pytest.raises(LookupError):
            dataset.set_epoch(7)
        assert list(loader) == [["3"]] * 4


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


def test_the_loaders_call_reaches_a_class_that_cannot_be_changed() -> None:
    with DataLoader(OfUnchangeableClass(), num_workers=2, persistent_workers=True) as loader:
        seen = [sum(map(int, loader))]
        for epoch in (1, 2):
            loader.set_epoch(epoch)
            seen.append(sum(map(int, loader)))
    assert seen == [0, 4, 12]


def test_calls_are_noted_for_persistent_workers_alone_and_while_the_dataset_lives() -> None:
    class Own(Tells):
        def set_epoch(self, epoch: int) -> None:
            """Note where it was defined."""

    method = Own.__dict__["set_epoch"]
    dataset = Own()
    list(DataLoader(dataset, num_workers=1))
    assert Own.__dict__["set_epoch"] is method
    assert not is_noted(dataset)
    with DataLoader(dataset, num_workers=1, persistent_workers=True) as loader:
        for _ in range(2):
            list(loader)
        assert is_noted(dataset)
        assert Own.set_epoch.__wrapped__ is method  # type: ignore[attr-defined]
        assert Own.set_epoch.__doc__ == method.__doc__
    assert not is_noted(Own())
    numbers = id(dataset)
    del dataset, loader
    gc.collect()
    later = [Own() for _ in range(100)]
    assert not any(map(is_noted, later)), numbers
