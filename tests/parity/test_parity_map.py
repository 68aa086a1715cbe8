"""Map-style datasets: keys, samplers, batch samplers, order, and the workers' facts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from loading import HeldAt
from torch.utils.data import BatchSampler, Subset, TensorDataset, WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader

from parity.datasets import (
    EndlessSampler,
    FailingSampler,
    Held,
    Keys,
    LazySampler,
    Many,
    NoMany,
    Rows,
    Slow,
    Stuck,
    SumOfKeys,
    WorkerFacts,
    identity,
    note_worker,
    row,
)
from parity.run import Build, assert_plays, in_process, take
from shmloader import DataLoader

WORKERS = pytest.mark.parametrize("workers", [0, 2])

GIVEN: dict[str, dict[str, Any]] = {
    "one by one": {},
    "uneven": {"batch_size": 4},
    "drop_last": {"batch_size": 4, "drop_last": True},
    "larger than the dataset": {"batch_size": 40},
    "dropped entirely": {"batch_size": 40, "drop_last": True},
    "no batches": {"batch_size": None},
    "shuffled": {"batch_size": 3, "shuffle": True},
    "shuffled, no batches": {"batch_size": None, "shuffle": True},
    "list as sampler": {"sampler": [5, 5, 0, 9], "batch_size": 3},
    "generator as sampler": {"batch_size": 2, "_sampler": "generator"},
    "lists as batch sampler": {"batch_sampler": [[3, 1], [2], [0, 1, 2, 3, 4, 5], [9] * 7]},
    "tuples as batch sampler": {"batch_sampler": [(3, 1), (2,)]},
    "arrays as batch sampler": {"batch_sampler": [np.array([3, 1]), np.array([2])]},
    "prefetch 1": {"batch_size": 2, "_prefetch": 1},
    "prefetch 7": {"batch_size": 2, "_prefetch": 7},
    "identity": {"batch_size": 3, "collate_fn": identity},
    "slices as sampler": {"batch_size": None, "sampler": [[1, 2], [3]], "_dataset": "tensors"},
    "subset": {"batch_size": 2, "_dataset": "subset"},
    "getitems": {"batch_size": 5, "_dataset": "many"},
    "getitems, batch sampler": {"batch_sampler": [(1, 2), (3,)], "_dataset": "many"},
    "getitems is None": {"batch_size": 5, "_dataset": "no many"},
    "weighted": {"batch_size": 2, "_sampler": "weighted"},
    "batch sampler of a sampler": {"_sampler": "batches"},
    "sampler of batches, no collation": {"batch_size": None, "_sampler": "unbatched"},
}


def _arguments(given: dict[str, Any], workers: int) -> tuple[Any, dict[str, Any]]:
    """The dataset and arguments of one row of GIVEN; samplers that can be read only once are made anew."""
    given = dict(given)
    prefetch = given.pop("_prefetch", None)
    tensors = TensorDataset(torch.arange(20).view(10, 2), torch.arange(10))
    dataset: Any = {
        "rows": Rows(10),
        "tensors": tensors,
        "subset": Subset(tensors, [7, 1, 5]),
        "many": Many(),
        "no many": NoMany(7),
    }[given.pop("_dataset", "rows")]
    weights = torch.arange(10, dtype=torch.float)
    sampler = given.pop("_sampler", None)
    if sampler == "generator":
        given["sampler"] = (2 * k for k in range(5))
    elif sampler == "weighted":
        given["sampler"] = WeightedRandomSampler(weights, 9)
    elif sampler == "batches":
        given["batch_sampler"] = BatchSampler(LazySampler(10), 3, False)
    elif sampler == "unbatched":
        given |= {"sampler": BatchSampler(LazySampler(10), 3, False)}
        dataset = tensors
    if workers and prefetch:
        given["prefetch_factor"] = prefetch
    return dataset, given | {"num_workers": workers}


@pytest.mark.each_value
@WORKERS
@pytest.mark.parametrize("name", GIVEN)
def test_batches_are_torchs(name: str, workers: int) -> None:
    """Same batches in the same order, and the same state of the generators afterwards."""

    def play(build: Build) -> list[Any]:
        dataset, given = _arguments(GIVEN[name], workers)
        loader = build(dataset, **given)
        return [list(loader) for _ in range(2 if given.get("shuffle") else 1)]

    assert_plays(play)


KEYS = [
    *("a", ("b", 1), 3, -1, 2.5, None, True, frozenset({1}), b"c", 2**70, slice(1, 3)),
    *(np.int64(4), np.str_("d"), np.datetime64("2020-01-01"), torch.tensor(5), torch.Size([1])),
    *([1, 2], {"k": torch.tensor([1, 2])}, np.array([3, 4]), range(4), torch.arange(5000)),
]


@WORKERS
def test_keys_of_any_type_reach_the_dataset_unchanged(workers: int) -> None:
    """Strings, tuples, NumPy scalars, tensors and big numbers come by sampler and by batch sampler."""
    how = {"num_workers": workers}
    tensors = torch.arange(6).view(3, 2)
    # torch moves the caller's own key tensors to shared memory, for good: so without its workers
    for given in (
        {"batch_size": None, "sampler": KEYS},
        {"batch_sampler": [KEYS, ["x"], KEYS[::-1]], "collate_fn": identity},
        {"batch_sampler": tensors},
    ):
        assert_plays(lambda build, g=given: list(build(Keys(), **how, **g)), reference=in_process)
    assert not tensors.is_shared()


def test_many_and_large_index_batches_reach_the_workers() -> None:
    """Index batches far larger than a pipe's buffer, several of them on their way at once."""
    batches = [list(range(length)) for length in (3, 70_000, 1, 200_000, 5, 90_000, 2)]

    def play(build: Build) -> list[Any]:
        given = {"batch_sampler": batches, "collate_fn": identity}
        return list(build(SumOfKeys(), num_workers=2, prefetch_factor=4, **given))

    assert_plays(play)


@WORKERS
@pytest.mark.parametrize("batched", [True, False])
def test_an_endless_sampler_is_read_as_far_as_needed(workers: int, batched: bool) -> None:
    """Samplers are never materialised; the epoch is ended by the user."""

    def play(build: Build) -> list[Any]:
        how = {"batch_size": 3} if batched else {"batch_size": None}
        loader = build(Rows(7), sampler=EndlessSampler(), num_workers=workers, **how)
        return take(iter(loader), 50)

    assert len(assert_plays(play)) == 50


def test_a_sampler_is_read_exactly_as_far_ahead_as_by_torch() -> None:
    """It is read for prefetch_factor * num_workers batches at first, then for one per batch taken."""
    for workers, prefetch in ((0, None), (1, 1), (2, 3)):

        def play(build: Build, workers: int = workers, prefetch: Any = prefetch) -> list[int]:
            read: list[int] = []
            sampler = (read.append(k) or k for k in itertools.count())
            loader = build(Rows(99), 2, sampler=sampler, num_workers=workers, prefetch_factor=prefetch)
            iterator = iter(loader)
            lengths = [len(read)]
            for _ in range(5):
                next(iterator)
                lengths.append(len(read))
            return lengths

        assert assert_plays(play)[-1] == 2 * (5 + workers * (prefetch or 0))


@pytest.mark.parametrize("how", [{}, {"num_workers": 2, "prefetch_factor": 1}])
def test_an_error_in_a_sampler_is_raised_where_torch_raises_it(how: dict[str, Any]) -> None:
    """iter() raises, or the next() that reads so far ahead; then the epoch is over."""

    def play(build: Build, stop: int) -> list[Any]:
        loader, got = build(Rows(9), 2, sampler=FailingSampler(stop), **how), []
        try:
            iterator = iter(loader)
        except LookupError as error:
            return ["at iter()", str(error)]
        for _ in range(8):
            try:
                got.append(next(iterator))
            except (LookupError, StopIteration) as error:
                got.append((type(error), str(error)))
        return got

    for stop in (0, 3, 4, 9):
        assert_plays(lambda build, stop=stop: play(build, stop))


class RaisesOnce:
    """Indices up to 13; in the place of the seventh it raises, and goes on."""

    def __iter__(self) -> Any:
        self.asked = 0
        return self

    def __next__(self) -> int:
        self.asked += 1
        if self.asked == 7:
            raise LookupError
        if self.asked > 14:
            raise StopIteration
        return self.asked


class WorkerOf(Rows):
    def __getitem__(self, index: int) -> Any:
        return index, torch.utils.data.get_worker_info().id


def test_a_sampler_that_raises_once_uses_up_no_workers_turn() -> None:
    """The batch of that call is gone, as in torch; each later one is of the same worker as there."""

    def play(build: Build) -> list[Any]:
        iterator, got = iter(build(WorkerOf(20), batch_size=None, sampler=RaisesOnce(), num_workers=2)), []
        while True:
            try:
                got.append(next(iterator))
            except LookupError:
                got.append("error")
            except StopIteration:
                return got

    assert len(assert_plays(play)) == 13


def test_exhausted_iterators_stay_exhausted() -> None:
    """next() after the end is StopIteration each time, and the length is still known."""

    def play(build: Build, workers: int, **given: Any) -> Any:
        loader = build(Rows(5), 2, num_workers=workers, **given)
        iterator = iter(loader)
        assert iter(iterator) is iterator
        batches = list(iterator)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        return batches, len(iterator), list(loader)

    for workers, given in ((0, {}), (2, {}), (2, {"persistent_workers": True})):
        assert_plays(lambda build, w=workers, g=given: play(build, w, **g))


def test_workers_know_what_torchs_workers_know() -> None:
    """get_worker_info, its seed and dataset, one thread; worker_init_fn runs after seeding."""

    def play(build: Build) -> list[Any]:
        return list(build(WorkerFacts(6), None, num_workers=2, worker_init_fn=note_worker))

    facts = assert_plays(play)
    assert [fact["id"] for fact in facts] == [0, 1, 0, 1, 0, 1]
    assert all(fact["is_dataset"] for fact in facts)


def test_the_main_process_has_no_worker_info() -> None:
    """get_worker_info() is None before, during and after an epoch, with any number of workers."""
    assert_plays(lambda build: list(build(WorkerFacts(3), None, num_workers=0)))
    for _ in DataLoader(Rows(3), num_workers=1, multiprocessing_context="fork"):
        assert torch.utils.data.get_worker_info() is None
    assert torch.utils.data.get_worker_info() is None


def test_out_of_order_delivery_yields_every_batch_once_and_does_not_wait() -> None:
    """in_order=False: a slow batch comes after those that were ready before it."""
    rows = Held(12, at=0)
    batches = iter(DataLoader(rows, 2, num_workers=2, in_order=False, multiprocessing_context="fork"))
    first = [int(next(batches)[0, 0]) // 1000]
    rows.go.set()
    first += [int(batch[0, 0]) // 1000 for batch in batches]
    assert sorted(first) == [0, 2, 4, 6, 8, 10]
    assert first[0] != 0


def test_out_of_order_a_worker_with_a_slow_batch_gets_as_many_tasks_as_from_torch() -> None:
    """As many samples as with torch come before the slow one, except one, which depends on timing.

    Without the limit half of them would come after it.
    """

    def samples_before(loader: Any) -> int:
        order = [int(batch) for batch in loader]
        return order.index(2)

    ours, theirs = (
        samples_before(
            kind(
                Stuck(10, at=2),
                batch_size=None,
                num_workers=2,
                in_order=False,
                multiprocessing_context="fork",
            )
        )
        for kind in (DataLoader, TorchLoader)
    )
    assert abs(ours - theirs) <= 1
    assert ours >= 3


def test_in_order_delivery_waits_for_a_slow_batch() -> None:
    """Strict order is the default."""
    assert_plays(lambda build: list(build(Slow(12, at=0, seconds=0.3), 2, num_workers=2)))


def test_a_timeout_is_torchs_runtime_error() -> None:
    """The error comes when the time has run out, not when the sample is done."""
    for kind, timeout in ((DataLoader, 0.3), (DataLoader, 1), (TorchLoader, 1)):
        held = HeldAt(4, at=0)
        iterator = iter(kind(held, num_workers=1, timeout=timeout, multiprocessing_context="fork"))
        with pytest.raises(RuntimeError, match=rf"DataLoader timed out after {timeout} seconds"):
            next(iterator)
        held.released.set()  # whoever stops the worker would wait for the sample
        del iterator
    assert_plays(lambda build: list(build(Rows(4), num_workers=1, timeout=30)))


def test_the_caller_may_write_into_a_batch() -> None:
    """Writes reach neither later batches nor the batch's neighbours."""

    def play(build: Build) -> list[Any]:
        seen = []
        for batch in build(Rows(60, 3000), 2, num_workers=2):
            seen.append(batch.clone())
            batch.add_(1e6)
            batch.numpy()[0] = -1.0
            batch.requires_grad_()
        return seen

    seen = assert_plays(play)
    assert torch.equal(seen[-1][1], row(59, 3000))


def test_a_profiler_sees_each_call_of_next_as_with_torch() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), num_workers=1)
    batches = iter(loader)
    next(batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next(batches)
        next(batches)
    assert len(list(batches)) == 5
    ranges = {event.key: event.count for event in profile.key_averages()}
    name = f"enumerate(DataLoader)#{type(batches).__name__}.__next__"
    assert ranges.get(name) == 2, sorted(ranges)
