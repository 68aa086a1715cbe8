"""Batches are gathered straight into the slot if that is certain to be right; else fetched by sample."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import vectorised_datasets as made
from batch_outcomes import assert_same_outcomes, outcomes
from parity.compare import assert_same
from torch.utils.data import (
    ConcatDataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader, why_per_sample
from shmloader.codec import Decoder, Encoder, read_leaves
from shmloader.codec.layout import DTYPES
from shmloader.codec.slot_allocator import SlotAllocator, set_current_allocator
from shmloader.memory import Segment
from shmloader.sources import NOT_GATHERED, Gatherer
from shmloader.store import Store, StoreDescription

ROWS = 12
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence for multidimensional:UserWarning"),
]


# --- the way that is chosen


def gathered(dataset: Any, batch: list[int], caplog: pytest.LogCaptureFixture) -> bool:
    """Whether a worker of this process makes a batch without its samples, by its log."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "shmloader"):
        outcomes(DataLoader(dataset, batch_sampler=[batch], num_workers=1, worker_type="thread"))
    return not any("one by one" in record.getMessage() for record in caplog.records)


def test_a_function_put_into_torchs_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TensorDataset(torch.arange(4.0))
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: (self.tensors[0][index] * 100,))
    assert why_per_sample(dataset) is not None
    loader = DataLoader(dataset, batch_size=4, num_workers=1, worker_type="thread")
    assert next(iter(loader))[0].tolist() == [0, 100, 200, 300]


X, Y = torch.rand(ROWS, 4), torch.arange(ROWS)
GATHERED = {
    "tensors": TensorDataset(X, Y),
    "one tensor": TensorDataset(X),
    "columns of a matrix": TensorDataset(X[:, 1:3], X[:, 0]),
    "shared tensors": shmloader.share(TensorDataset(torch.rand(1 << 18, 2))),
    "subset": Subset(TensorDataset(X), [3, 2, 1, 0]),
    "rows in any order of memory": TensorDataset(torch.rand(4, 3, ROWS).permute(2, 1, 0)),
    "stack": StackDataset(x=X, y=TensorDataset(Y)),
    "concat": ConcatDataset([TensorDataset(X, Y), Subset(TensorDataset(X, Y), [2, 1])]),
    "store of numbers": shmloader.share([float(i) for i in range(ROWS)]),
    "store of tuples": shmloader.share([(np.ones(3), i, str(i)) for i in range(ROWS)]),
    "store of dicts": shmloader.share([{"x": torch.ones(3), "n": i} for i in range(ROWS)]),
    "store of a table": shmloader.share(pa.table({"x": [0.5] * ROWS, "n": range(ROWS)})),
    "store of an array": shmloader.share(np.ones((ROWS, 3))),
    "ndarray": np.ones((ROWS, 3), np.float32),
    "own": made.Batches(),
    "subset of own": Subset(made.Batches(), [4, 3, 2, 1]),
}


@pytest.mark.parametrize("name", GATHERED)
def test_batches_are_gathered(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert why_per_sample(GATHERED[name]) is None
    assert gathered(GATHERED[name], [1, 3, -1], caplog)


def _shadowed() -> TensorDataset:
    dataset = TensorDataset(X)
    dataset.__getitems__ = lambda indices: [(7 * X[index],) for index in indices]  # type: ignore[attr-defined]
    return dataset


PER_SAMPLE = {
    "a subclass that changes nothing": (made.NamedTensors(X, Y), "no __getbatch__"),
    "a Subset's subclass": (made.DoubledSubset(TensorDataset(X), range(8)), "no __getbatch__"),
    "a TensorDataset's subclass": (made.DoubledTensors(X), "no __getbatch__"),
    "a subclass with __getitems__": (made.TensorsInBulk(X), "no __getbatch__"),
    "a subclass that makes up methods": (made.TensorsThatMakeUpMethods(X), "no __getbatch__"),
    "an instance with __getitems__": (_shadowed(), "overrides"),
    "inside a Subset": (Subset(made.DoubledTensors(X), range(8)), "no __getbatch__"),
    "several datasets": (ConcatDataset([TensorDataset(X), TensorDataset(Y)]), "Join these into one"),
    "any dataset": (made.Samples(), "no __getbatch__"),
    "list": ([1, 2, 3, 4], "list"),
    "another's __getbatch__": (made.OtherSamples(), "no __getbatch__"),
    "another's __getbatch__, in bulk": (made.OtherSamplesInBulk(), "no __getbatch__"),
    "requires grad": (TensorDataset(X.clone().requires_grad_()), "Pass tensor.detach()"),
    "sparse": (TensorDataset(X.to_sparse()), "Pass a dense tensor"),
    "conjugate": (TensorDataset(torch.ones(ROWS, 2, dtype=torch.complex64).conj()), "tensor.resolve_conj()"),
    "a tensor's subclass": (TensorDataset(torch.nn.Parameter(X, requires_grad=False)), "Parameter"),
    "objects": (np.array([{}] * ROWS), "Pass an array of a dtype that torch has"),
    "columns in memory": (np.ones((4, ROWS)).T, "np.ascontiguousarray(array)"),
    "indices that are no ints": (Subset(TensorDataset(X), "abc"), "str"),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_anything_unusual_is_fetched_sample_by_sample(name: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset, reason = PER_SAMPLE[name]
    assert reason in str(why_per_sample(dataset))
    assert not gathered(dataset, [1, 3, 0], caplog)
    batches = [[1, 3, 0], [2, 2]]
    expected = outcomes(TorchLoader(dataset, batch_sampler=batches))
    got = outcomes(DataLoader(dataset, batch_sampler=batches))
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, torch.Tensor | list) and theirs[0].requires_grad:
            assert mine[0].requires_grad
            assert torch.equal(mine[0], theirs[0])
        else:
            assert_same_outcomes([mine], [theirs])


def test_with_another_collate_fn_samples_are_fetched(caplog: pytest.LogCaptureFixture) -> None:
    given_: list[Any] = []

    def collate(samples: list[Any]) -> Any:
        given_.append(samples)
        return default_collate(samples)

    dataset = TensorDataset(X, Y)
    assert "collate_fn" in str(why_per_sample(dataset, collate))
    assert why_per_sample(dataset, default_collate) is None
    list(DataLoader(dataset, 5, collate_fn=collate))
    assert [len(samples) for samples in given_] == [5, 5, 2]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


GETBATCH = "Give it a method __getbatch__(indices) that returns the whole batch"
WHOLE_NUMBERS = "Pass a list of ints, or an array or tensor of int64 with one dimension"
ADVICE = [
    (
        _shadowed(),
        (
            "the program overrides how TensorDataset gets a sample. Give a class of your own a method "
            "__getbatch__(indices) that returns the whole batch"
        ),
    ),
    (
        made.Samples(),
        (
            "shmloader cannot tell how Samples makes its samples, and there is no __getbatch__ beside its "
            f"__getitem__. {GETBATCH}"
        ),
    ),
    (
        [1, 2, 3],
        (
            "a list holds each sample as an object of its own. Give the loader shmloader.share() of the "
            "list: whole batches are gathered from what that returns"
        ),
    ),
    (
        Subset((1, 2, 3), [0]),  # type: ignore[arg-type]
        (
            "a tuple holds each sample as an object of its own. Give the loader shmloader.share() of the "
            "tuple: whole batches are gathered from what that returns"
        ),
    ),
    (
        Stream(),
        (
            "the dataset is iterable-style, and gives its samples one by one. Only a map-style dataset can "
            "give a batch at once"
        ),
    ),
    (Subset(TensorDataset(X), "abc"), f"the indices of a Subset are a str. {WHOLE_NUMBERS}"),
    (
        Subset(TensorDataset(X), np.ones((2, 2))),
        f"the indices of a Subset are a ndarray of float64, 2-d. {WHOLE_NUMBERS}",
    ),
    (
        Subset(TensorDataset(X), torch.ones(2, dtype=torch.int32)),
        f"the indices of a Subset are a Tensor of torch.int32, 1-d. {WHOLE_NUMBERS}",
    ),
    (Subset(TensorDataset(X), [1, 2.0]), "not all indices are ints of 64 bits. Convert them with int()"),
]


@pytest.mark.parametrize(("dataset", "reason"), ADVICE, ids=lambda value: type(value).__name__)
def test_a_reason_says_what_to_change(dataset: Any, reason: str) -> None:
    assert why_per_sample(dataset) == reason


def test_what_is_shared_of_a_list_is_gathered() -> None:
    assert why_per_sample(shmloader.share([1, 2, 3])) is None


class Flipped:
    """A worker_init_fn that changes how tensors are joined."""

    def __call__(self, worker_id: int = 0) -> None:
        from torch.utils.data._utils.collate import default_collate_fn_map

        self.before = dict(default_collate_fn_map)
        default_collate_fn_map[torch.Tensor] = lambda batch, **_: -torch.stack(list(batch))

    def undo(self) -> None:
        from torch.utils.data._utils.collate import default_collate_fn_map

        default_collate_fn_map.clear()
        default_collate_fn_map.update(self.before)


def test_a_changed_map_of_collate_functions_is_heeded() -> None:
    dataset = TensorDataset(X)
    for batch in DataLoader(dataset, 4, num_workers=2, worker_init_fn=Flipped()):
        assert (batch[0] <= 0).all()
    flipped, iterator = Flipped(), iter(DataLoader(dataset, 4))
    assert (next(iterator)[0] >= 0).all()
    flipped()
    try:
        assert why_per_sample(dataset) is None
        assert why_per_sample(dataset, default_collate) is not None
        assert (next(iterator)[0] <= 0).all()
    finally:
        flipped.undo()


def test_worker_threads_gather_and_leave_this_thread_gathering(caplog: pytest.LogCaptureFixture) -> None:
    dataset = Subset(TensorDataset(X, Y), list(range(1, ROWS)))
    expected = list(TorchLoader(dataset, 4))
    with caplog.at_level(logging.DEBUG, "shmloader"):
        assert_same(list(DataLoader(dataset, 4, num_workers=2, worker_type="thread")), expected)
    assert not any("one by one" in record.getMessage() for record in caplog.records)
    assert why_per_sample(dataset, default_collate) is None
    assert gathered(dataset, [0, 1], caplog)


def test_a_dataset_that_changes_between_batches_is_read_as_it_is() -> None:
    indices, dataset = list(range(ROWS)), TensorDataset(torch.zeros(ROWS, 2))
    iterator = iter(DataLoader(Subset(dataset, indices), 3))
    assert (next(iterator)[0] == 0).all()
    indices.reverse()
    dataset.tensors = (torch.arange(ROWS),)
    assert next(iterator)[0].tolist() == [8, 7, 6]
    dataset.tensors = (torch.ones(ROWS, requires_grad=True),)
    assert next(iterator)[0].requires_grad
    dataset.__getitems__ = lambda rows: [5] * len(rows)  # type: ignore[attr-defined]
    assert next(iterator).tolist() == [5, 5, 5]


def test_a_batch_is_no_view_of_the_dataset() -> None:
    x = torch.zeros(ROWS, 2)
    for dataset in (TensorDataset(x), Subset(TensorDataset(x), range(ROWS)), x):
        batch = next(iter(DataLoader(dataset, 4)))
        leaf = batch[0] if isinstance(batch, list) else batch
        leaf.fill_(9)
    assert (x == 0).all()


# --- straight into the slot


@contextlib.contextmanager
def slot() -> Iterator[SlotAllocator]:
    """A slot to make batches in, as in a worker."""
    segment = Segment()
    reserved = segment.reserve(0, 0, 1 << 16)
    allocator = SlotAllocator(segment)
    allocator.begin(0, reserved, reserved)
    set_current_allocator(allocator)
    try:
        yield allocator
    finally:
        set_current_allocator(None)
        allocator.release()
        segment.close()


def leaves_of(batch: Any) -> list[Any]:
    """Tensors and placeholders."""
    if isinstance(batch, torch.Tensor | pickle.PickleBuffer):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [leaf for part in parts if not isinstance(part, str) for leaf in leaves_of(part)]


IN_PLACE = [name for name in GATHERED if "own" not in name]


@pytest.mark.parametrize("name", [*IN_PLACE, "own"])
def test_leaves_are_written_where_they_are_read(name: str) -> None:
    with slot() as allocator:
        batch = Gatherer(GATHERED[name], default_collate, in_worker=True).gather([1, 3, 2])
        assert (name == "own") == any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(batch))
        end = allocator.cursor
        header_begin, header_end, _ = Encoder(allocator).encode(batch)
        header = bytes(allocator.view()[header_begin:header_end])
        for leaf in read_leaves(header):
            if name != "own" or DTYPES[leaf.code].torch_dtype is torch.float32:
                assert leaf.offset < end
        arrived = Decoder().decode(np.frombuffer(allocator.view(), np.uint8), header)
        assert_same(arrived, next(iter(TorchLoader(GATHERED[name], batch_sampler=[[1, 3, 2]]))))
        del arrived


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_repeated_batch_is_made_of_the_same_outputs(name: str) -> None:
    with slot() as allocator:
        gatherer = Gatherer(GATHERED[name], default_collate, in_worker=True)
        batch = gatherer.gather([1, 3, 2])
        first, end = list(map(id, leaves_of(batch))), allocator.cursor
        allocator.begin(0, allocator.nbytes, allocator.limit_nbytes)
        assert list(map(id, leaves_of(gatherer.gather([3, 0, 0])))) == first
        assert allocator.cursor == end


def test_a_batch_that_cannot_be_gathered_leaves_the_slot_as_it_was() -> None:
    with slot() as allocator:
        allocator.tensor((3,), torch.int64)  # of a dataset's or the program's own
        before = allocator.cursor
        ragged = shmloader.share([torch.ones(2 if row < 6 else 3) for row in range(ROWS)])
        gatherer = Gatherer(StackDataset(X, ragged), default_collate, in_worker=True)
        assert gatherer.gather([1, 7]) is NOT_GATHERED
        assert allocator.cursor == before
        assert gatherer.gather([1, 2]) is not NOT_GATHERED
        assert allocator.cursor > before


def test_each_batch_has_the_outputs_that_its_own_rows_fit_in() -> None:
    rows = [
        {"n": n, "ragged": np.zeros(n % 3 + 1), "some": None if n == 5 else n / 2, "text": str(n)}
        for n in range(40)
    ]
    store = shmloader.share(rows)
    with slot() as allocator:
        gatherer = Gatherer(store, default_collate, in_worker=True)
        for indices, in_slot in (
            ([1, 4, 7], {"n", "ragged", "some"}),
            ([2, 8, 11], {"n", "ragged", "some"}),  # of another shape than before
            ([2, 5, 8], set()),
            ([3, 6, 9], {"n", "ragged", "some"}),
        ):
            allocator.begin(0, allocator.nbytes, allocator.limit_nbytes)
            batch = gatherer.gather(indices)
            if 5 in indices:
                assert batch is NOT_GATHERED
                continue
            assert {name for name, leaf in batch.items() if isinstance(leaf, pickle.PickleBuffer)} == in_slot
            header_begin, header_end, _ = Encoder(allocator).encode(batch)
            header = bytes(allocator.view()[header_begin:header_end])
            arrived = Decoder().decode(np.frombuffer(allocator.view(), np.uint8), header)
            assert_same(arrived, default_collate([rows[index] for index in indices]))
            del arrived, batch


class Squares(Store[float]):
    """A store of the program's own, whose ``take`` gives another dtype than single rows have."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return ROWS

    def row(self, index: int) -> float:
        return float(index**2)

    def take(self, indices: Any, out: Any = None) -> Any:
        assert out is None
        return np.square(np.asarray(indices)).astype(self.dtype)

    def describe(self) -> StoreDescription:
        return StoreDescription("squares", ROWS, 0, 0)

    def to_arrow(self) -> Any:
        raise TypeError("squares are made when they are read")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32])
def test_a_part_of_a_store_of_the_programs_own_is_read_row_by_row(dtype: Any) -> None:
    """As the store itself, of which the loader knows no more than of another dataset."""
    for dataset in (Squares(dtype), Squares(dtype)[2:], Squares(dtype)[2:].select([5, 0, 9, 2])):
        expected = default_collate([dataset[index] for index in (1, 3, 0)])
        for how in ({}, {"num_workers": 1}, {"num_workers": 1, "worker_type": "thread"}):
            loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=[[1, 3, 0]], **how)
            assert_same(next(iter(loader)), expected)
