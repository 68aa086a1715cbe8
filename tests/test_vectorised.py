"""What is gathered is what torch's DataLoader makes of the samples, and is gathered wherever that is sure."""

from __future__ import annotations

import contextlib
import doctest
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
import vectorised_datasets as made
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from parity.compare import assert_same, differences
from parity.run import descriptors_for_torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader, why_per_sample
from shmloader.segment import new_segment
from shmloader.slot_writer import SlotWriter, set_current_writer
from shmloader.sources import NOT_GATHERED, Gatherer

ROWS = 12
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
with_workers = settings(quick, max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence for multidimensional:UserWarning"),
]


class Pair(NamedTuple):
    left: Any
    right: Any


# --- drawing datasets

DTYPES = [torch.float32, torch.uint8, torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.uint16]
ARRAY_DTYPES = ["f4", "u1", "?", "i8", "f2", "c8", "u2", "u8", ">f4", "U3", "M8[s]"]


@st.composite
def tensors(draw: st.DrawFn, rows: int) -> torch.Tensor:
    """Tensors in any memory order that rows can have."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = int(np.prod([rows, *shape]))
    whole = torch.arange(size).reshape(rows, *shape).to(draw(st.sampled_from(DTYPES)))
    order = draw(st.sampled_from(["plain", "plain", "apart", "spread", "permuted", "channels_last"]))
    if order == "apart":
        return torch.stack([whole, whole], 1)[:, 1]
    if order == "spread":
        return whole[:1].expand_as(whole)
    if order == "permuted" and whole.dim() > 1:
        return whole.transpose(0, -1).contiguous().transpose(0, -1)
    if order == "channels_last" and whole.dim() == 4:
        return whole.to(memory_format=torch.channels_last)
    return whole


@st.composite
def arrays(draw: st.DrawFn, rows: int) -> np.ndarray[Any, Any]:
    """Arrays of dtypes that torch has, and of others."""
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    whole = np.arange(int(np.prod([rows, *shape]))).astype("i8").reshape(rows, *shape)
    array = whole.astype(draw(st.sampled_from(ARRAY_DTYPES)))
    return np.asfortranarray(array) if draw(st.booleans()) else array


def values(draw: st.DrawFn, depth: int) -> Callable[[int], Any]:
    """What makes row ``i`` of a store."""
    kinds = ["int", "float", "bool", "str", "bytes", "tensor", "array", "scalar", "mixed", "ragged", "none"]
    kind = draw(
        st.sampled_from(kinds[:-3] * 3 + kinds[-3:] + (["dict", "tuple", "pair", "list"] * 3) * depth)
    )
    if kind == "dict":
        fields = [values(draw, depth - 1) for _ in range(draw(st.integers(1, 3)))]
        return lambda i: {f"k{n}": field(i) for n, field in enumerate(fields)}
    if kind in ("tuple", "pair", "list"):
        first, second = values(draw, depth - 1), values(draw, depth - 1)
        make: Any = {"tuple": lambda a, b: (a, b), "pair": Pair, "list": lambda a, b: [a, b]}[kind]
        return lambda i: make(first(i), second(i))
    simple: dict[str, Callable[[int], Any]] = {
        "int": lambda i: i - 5,
        "float": lambda i: i / 2,
        "bool": lambda i: i % 2 == 0,
        "str": lambda i: f"t{i}",
        "bytes": lambda i: b"b" * i,
        "tensor": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
        "array": lambda i: np.full((2, 1), i, np.float32),
        "scalar": np.float32,
        "mixed": lambda i: i if i % 2 else float(i),
        "ragged": torch.ones,
        "none": lambda i: None,
    }
    return simple[kind]


@st.composite
def stores(draw: st.DrawFn, rows: int) -> Any:
    """Stores of any kind, also sliced."""
    how = draw(st.sampled_from(["rows", "rows", "rows", "array", "tensor", "slice"]))
    if how == "array":
        array = draw(arrays(rows))
        assume(array.dtype.kind != "U")
        return shmloader.share(array)
    if how == "tensor":
        return shmloader.share(draw(tensors(rows)))
    make = values(draw, 2)
    if how == "slice":
        return shmloader.share([make(i) for i in range(2 * rows)])[::2]
    return shmloader.share([make(i) for i in range(rows)])


def leaves(rows: int) -> st.SearchStrategy[Any]:
    tensor_datasets = st.lists(tensors(rows), min_size=1, max_size=3).map(lambda t: TensorDataset(*t))
    shared = tensors(rows).map(lambda t: TensorDataset(shmloader.share(t).tensor))
    return st.one_of(tensor_datasets, tensor_datasets, shared, stores(rows), tensors(rows), arrays(rows))


@st.composite
def datasets(draw: st.DrawFn, rows: int = ROWS, depth: int = 2) -> Any:
    """Trees of torch's datasets over what rows can lie in."""
    kinds_of_tree = ["leaf", "subset", "stack", "stack by name"][: 4 if depth else 1]
    how = draw(st.sampled_from(kinds_of_tree + ["concat"] * (depth > 0 and rows > 1)))
    if how == "leaf":
        return draw(leaves(rows))
    if how == "subset":
        indices = draw(st.lists(st.integers(-rows, rows - 1), min_size=rows, max_size=rows))
        kinds: list[Callable[[list[int]], Any]] = [list, tuple, np.array, torch.tensor]
        kinds += [lambda i: list(np.array(i)), lambda i: range(rows)[::-1], shmloader.share]
        return Subset(draw(datasets(rows, depth - 1)), draw(st.sampled_from(kinds))(indices))
    if how == "concat":
        cut = draw(st.integers(1, rows - 1))
        if draw(st.booleans()):
            whole = draw(datasets(rows, depth - 1))
            return ConcatDataset([Subset(whole, range(cut)), Subset(whole, range(cut, rows))])
        return ConcatDataset([draw(datasets(cut, depth - 1)), draw(datasets(rows - cut, depth - 1))])
    if how == "stack":
        return StackDataset(draw(datasets(rows, depth - 1)), draw(datasets(rows, depth - 1)))
    return StackDataset(b=draw(datasets(rows, depth - 1)), a=draw(datasets(rows, depth - 1)))


def index_batches(rows: int = ROWS) -> st.SearchStrategy[list[list[int]]]:
    batch = st.lists(st.integers(-rows, rows - 1), min_size=1, max_size=40)
    return st.lists(batch, min_size=1, max_size=3)


def outcomes(loader: Any) -> list[Any]:
    """Each batch, or the exception in its place; those of samplers and workers do not occur here."""
    got: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            got.append(next(iterator))
        except StopIteration:
            return got
        except Exception as error:
            got.append(error)


def assert_same_outcomes(got: list[Any], expected: list[Any]) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, Exception):
            # In a worker torch has the traceback for a message, and a KeyError of its own.
            assert isinstance(mine, Exception), f"a batch, where torch raises {theirs!r}"
            assert isinstance(theirs, type(mine)), f"{mine!r} is not {theirs!r}"
        else:
            assert not isinstance(mine, Exception), f"torch makes a batch of it, and not {mine!r}"
            assert_same(mine, theirs)


# --- equality with torch


@quick
@given(datasets(), index_batches())
@example(ConcatDataset([torch.ones(3, 2), torch.ones(9, 2)]), [[0, 3, 1, 11, -1]])
@example(ConcatDataset([torch.ones(3), torch.ones(9, dtype=torch.float64)]), [[0, 3], [4, 5]])
@example(shmloader.share([(f"t{i}", i) for i in range(ROWS)]), [[0, 5, 3]])
@example(np.arange(ROWS, dtype=np.uint64), [[0, 5, 3]])  # torch refuses NumPy's scalars of this dtype
@example(
    ConcatDataset(
        [
            StackDataset(a=torch.ones(6), b=torch.zeros(6)),
            StackDataset(b=torch.ones(6), a=torch.zeros(6)),
        ]
    ),
    [[7, 1], [1, 7]],
)
def test_batches_in_this_process_are_torchs(dataset: Any, batches: list[list[int]]) -> None:
    expected = outcomes(TorchLoader(dataset, batch_sampler=batches))
    assert_same_outcomes(outcomes(DataLoader(dataset, batch_sampler=batches)), expected)


@with_workers
@given(datasets(), index_batches())
def test_batches_of_two_workers_are_torchs(dataset: Any, batches: list[list[int]]) -> None:
    batches = [*batches, *batches, *batches]  # the first ones find no room in their slots yet
    got = outcomes(DataLoader(dataset, batch_sampler=batches, num_workers=2))
    with descriptors_for_torch():
        expected = outcomes(TorchLoader(dataset, batch_sampler=batches, num_workers=2))
    here = outcomes(TorchLoader(dataset, batch_sampler=batches))
    # Where samples do not go together torch's own errors are other ones in workers.
    expected = [b if isinstance(a, Exception) else a for a, b in zip(expected, here, strict=True)]
    assert_same_outcomes(got, expected)


@settings(quick, max_examples=60)
@given(
    datasets(depth=1), st.lists(st.sampled_from([0, 3, -1, ROWS, -ROWS - 1, 10**20, True, None]), max_size=3)
)
def test_odd_indices_raise_what_they_raise_in_torch(dataset: Any, odd: list[Any]) -> None:
    batches = [[0, 1, *odd]]
    expected = outcomes(TorchLoader(dataset, batch_sampler=batches))
    got = outcomes(DataLoader(dataset, batch_sampler=batches))
    assert_same_outcomes(got, expected)
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, Exception) and not isinstance(dataset, torch.Tensor):
            assert (type(mine), mine.args) == (type(theirs), theirs.args)


COLUMNS: dict[str, Any] = {
    "int8": pa.array(range(ROWS), pa.int8()),
    "uint64": pa.array(range(ROWS), pa.uint64()),
    "float32": pa.array([i / 3 for i in range(ROWS)], pa.float32()),
    "float16": pa.array(np.arange(ROWS, dtype=np.float16)),
    "float64": pa.chunked_array([[0.5] * 5, [1.5] * (ROWS - 5)]),
    "bool": pa.array([i % 3 == 0 for i in range(ROWS)]),
    "string": pa.array([f"t{i}" for i in range(ROWS)]),
    "binary": pa.array([b"b" * i for i in range(ROWS)]),
    "list": pa.array([[i, 2] for i in range(ROWS)]),
    "ragged": pa.array([[i] * i for i in range(ROWS)]),
    "struct": pa.array([{"x": i, "y": "t"} for i in range(ROWS)]),
    "dictionary": pa.array(["a", "b", "c"] * (ROWS // 3)).dictionary_encode(),
    "with nulls": pa.array([1, None] * (ROWS // 2)),
    "timestamp": pa.array(range(ROWS), pa.timestamp("s")),
    "decimal": pa.array(range(ROWS), pa.decimal128(9)),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_arrow_tables_are_joined_as_their_rows_are(name: str) -> None:
    column, batches = COLUMNS[name], [[0, 5, -1, 5], [2], [ROWS]]
    for dataset in (shmloader.share(column), shmloader.share(pa.table({"n": range(ROWS), "x": column}))):
        for wrapped in (dataset, Subset(dataset, range(ROWS)), StackDataset(dataset, dataset)):
            expected = outcomes(TorchLoader(wrapped, batch_sampler=batches))
            assert_same_outcomes(outcomes(DataLoader(wrapped, batch_sampler=batches)), expected)
            assert isinstance(expected[2], IndexError)


KINDS_OF_INDEX_BATCH = {
    "list": list,
    "tuple": tuple,
    "range": lambda rows: range(2, 11, 3),
    "array": np.array,
    "int32": lambda rows: np.array(rows, np.int32),
    "tensor": torch.tensor,
    "list of numpy ints": lambda rows: list(np.array(rows)),
    "list of tensors": lambda rows: list(torch.tensor(rows)),
    "bools": lambda rows: [True, False],
    "long": lambda rows: rows * 300,
    "large": lambda rows: [*rows, *rows, *rows, *rows, *rows, *rows, *rows, *rows, *rows, *rows, 2**40],
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS_OF_INDEX_BATCH)
def test_index_batches_of_any_kind(kind: str, workers: int) -> None:
    dataset = TensorDataset(torch.rand(ROWS, 3), torch.arange(ROWS))
    batches = [KINDS_OF_INDEX_BATCH[kind]([1, 5, 1, -2])]
    expected = outcomes(TorchLoader(dataset, batch_sampler=batches))
    got = outcomes(DataLoader(dataset, batch_sampler=batches, num_workers=workers))
    assert_same_outcomes(got, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_no_random_number_is_drawn(workers: int) -> None:
    dataset = Subset(TensorDataset(torch.rand(100, 3), torch.arange(100)), range(90))

    def play(build: Any) -> tuple[Any, ...]:
        torch.manual_seed(1)
        random.seed(1)
        batches = list(build(dataset, 16, shuffle=True, num_workers=workers))
        return batches, torch.get_rng_state(), random.getstate()

    got = play(DataLoader)
    with descriptors_for_torch():
        expected = play(TorchLoader)
    assert_same(got, expected)


SAMPLERS_OF_BATCHES = {
    "none": {},
    "small": {"sampler": BatchSampler(range(100), 6, drop_last=False)},
    "large": {"sampler": BatchSampler(SequentialSampler(range(100)), 40, drop_last=False)},
    "lists": {"sampler": [list(range(50)), list(range(50, 90))]},
}


@pytest.mark.parametrize("which", SAMPLERS_OF_BATCHES)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "worker_type": "thread"},
        {"num_workers": 2, "dispatch": "dynamic"},
        {"num_workers": 2, "on_error": "skip"},
    ],
    ids=lambda how: " ".join(map(str, how.values())) or "no workers",
)
def test_without_batches_a_dataset_is_asked_as_by_torch(which: str, how: dict[str, Any]) -> None:
    """Torch's documentation has samplers of index batches for datasets that load many samples at once."""
    dataset = Asked(TensorDataset(torch.rand(100, 3)))
    given_ = SAMPLERS_OF_BATCHES[which]
    got = list(DataLoader(dataset, batch_size=None, **given_, **how))
    expected = list(TorchLoader(dataset, batch_size=None, **given_))
    assert_same(got, expected)


class Asked(Dataset[Any]):
    """A dataset that gives with each item what it was asked for."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return index, self.dataset[index]


# --- which way is taken


def gathered(dataset: Any, batch: list[int], caplog: pytest.LogCaptureFixture) -> bool:
    """Whether a worker of this process makes a batch without its samples; looks at what it logs."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "shmloader"):
        outcomes(DataLoader(dataset, batch_sampler=[batch], num_workers=1, worker_type="thread"))
    return not any("one by one" in record.getMessage() for record in caplog.records)


def test_without_workers_only_a_datasets_own_batches_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    tensor = torch.arange(10.0)
    with caplog.at_level(logging.DEBUG, "shmloader"):
        batches = list(DataLoader(TensorDataset(tensor), batch_size=5))
    assert any("there are no workers" in record.getMessage() for record in caplog.records)
    tensor.resize_(1000)  # torch's views of a storage as ndarrays would forbid it for good
    batches[0][0].resize_(100)


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
    "a subclass that changes nothing": made.NamedTensors(X, Y),
    "subset": Subset(TensorDataset(X), [3, 2, 1, 0]),
    "concat": ConcatDataset([TensorDataset(X), Subset(TensorDataset(X), range(2))]),
    "stack": StackDataset(x=X, y=TensorDataset(Y)),
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
    "a Subset's subclass": (made.DoubledSubset(TensorDataset(X), range(8)), "overrides"),
    "a TensorDataset's subclass": (made.DoubledTensors(X), "overrides"),
    "a subclass with __getitems__": (made.TensorsInBulk(X), "overrides"),
    "a subclass that makes up methods": (made.TensorsThatMakeUpMethods(X), "overrides"),
    "an instance with __getitems__": (_shadowed(), "overrides"),
    "inside a Subset": (Subset(made.DoubledTensors(X), range(8)), "overrides"),
    "inside a ConcatDataset": (ConcatDataset([TensorDataset(X), made.DoubledTensors(X)]), "overrides"),
    "any dataset": (made.Samples(), "no __getbatch__"),
    "list": ([1, 2, 3, 4], "list"),
    "another's __getbatch__": (made.OtherSamples(), "no __getbatch__"),
    "another's __getbatch__, in bulk": (made.OtherSamplesInBulk(), "no __getbatch__"),
    "requires grad": (TensorDataset(X.clone().requires_grad_()), "requires grad"),
    "sparse": (TensorDataset(X.to_sparse()), "not plain"),
    "conjugate": (TensorDataset(torch.ones(ROWS, 2, dtype=torch.complex64).conj()), "not plain"),
    "a tensor's subclass": (TensorDataset(torch.nn.Parameter(X, requires_grad=False)), "Parameter"),
    "permuted rows": (TensorDataset(torch.rand(4, 3, ROWS).permute(2, 1, 0)), "not contiguous"),
    "objects": (np.array([{}] * ROWS), "not plain"),
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
    columns = made.ViewColumns()
    columns.x.zero_()
    x = torch.zeros(ROWS, 2)
    for dataset in (TensorDataset(x), Subset(TensorDataset(x), range(ROWS)), x, columns):
        batch = next(iter(DataLoader(dataset, 4)))
        leaf = batch["x"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
        leaf.fill_(9)
    assert (x == 0).all()
    assert (columns.x == 0).all()


# --- datasets that make their batches themselves


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda own: own,
        lambda own: Subset(own, range(5, 40)),
        lambda own: ConcatDataset([own, Subset(own, [1, 2])]),
        lambda own: StackDataset(own, own),
    ],
    ids=["alone", "subset", "concat", "stack"],
)
def test_a_getbatch_takes_the_samples_place(wrap: Callable[[Any], Any], workers: int) -> None:
    own = made.Batches()
    expected = list(TorchLoader(wrap(made.Samples()), 7, shuffle=False))
    assert_same(list(DataLoader(wrap(own), 7, num_workers=workers)), expected)
    if not workers:  # there, samples of several datasets are fetched one by one
        assert set(own.asked) == ({"batch"} if type(wrap(own)) in (made.Batches, Subset) else {"sample"})


def test_indices_that_are_no_ints_are_for_samples() -> None:
    own = made.Batches()
    list(DataLoader(own, batch_sampler=[[np.uint8(3)], [torch.tensor(3)], [True]]))
    assert own.asked == ["sample"] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_getbatch_raises_is_raised(workers: int) -> None:
    got = outcomes(DataLoader(made.FailingBatches(), 4, num_workers=workers))
    assert [type(batch) for batch in got] == [dict, KeyError] + [dict] * 8
    assert got[1].args == ("a batch with row 5",)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning")
def test_bad_samples_are_found_behind_a_failing_getbatch(workers: int) -> None:
    loader = DataLoader(made.FailingBatches(), 4, num_workers=workers, on_error="skip")
    assert [len(batch["x"]) for batch in loader] == [4, 3] + [4] * 8
    figures = loader.statistics()
    assert (figures.bad_samples, figures.batches_one_by_one) == (1, 1)
    assert [bad.index for bad in figures.bad_sample_list] == [5]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["skip", "replace"])
@pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning")
def test_rows_that_do_not_exist_are_bad_samples(mode: str, workers: int) -> None:
    dataset = TensorDataset(torch.arange(ROWS))
    loader = DataLoader(dataset, batch_sampler=[[0, 1], [2, 99, 3], [4]], num_workers=workers, on_error=mode)
    got = [batch[0].tolist() for batch in loader]
    assert got == [[0, 1], [2, 3] if mode == "skip" else [2, 3, 3], [4]]
    assert loader.statistics().bad_samples == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_columns_of_getitems_are_the_batch(workers: int) -> None:
    expected = [
        default_collate([made.Columns()[i] for i in range(begin, min(begin + 7, made.ROWS))])
        for begin in range(0, made.ROWS, 7)
    ]
    assert_same(list(DataLoader(made.Columns(), 7, num_workers=workers)), expected)


def test_columns_of_another_length_are_torchs_error() -> None:
    got = outcomes(DataLoader(made.BadColumns(), 7))
    expected = outcomes(TorchLoader(made.BadColumns(), 7))
    assert [(type(e), e.args) for e in got] == [(type(e), e.args) for e in expected]


# --- straight into the slot


@contextlib.contextmanager
def slot() -> Iterator[SlotWriter]:
    """A slot to make batches in, as in a worker."""
    segment = new_segment()
    version, reserved = segment.reserve(0, 0, 0, 1 << 16)
    writer = SlotWriter(segment)
    writer.begin(0, version, reserved, reserved)
    set_current_writer(writer)
    try:
        yield writer
    finally:
        set_current_writer(None)
        writer.release()
        segment.close(1)


def leaves_of(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [leaf for part in parts if not isinstance(part, str) for leaf in leaves_of(part)]


IN_PLACE = [name for name in GATHERED if "own" not in name]


@pytest.mark.parametrize("name", [*IN_PLACE, "own"])
def test_leaves_are_written_where_they_are_read(name: str) -> None:
    with slot() as writer:
        batch = Gatherer(GATHERED[name], default_collate).gather([1, 3, 2])
        for leaf in leaves_of(batch):
            if name != "own" or leaf.dtype is torch.float32:
                assert writer.offset_of(leaf.data_ptr(), leaf.nbytes) is not None
        assert_same(batch, next(iter(TorchLoader(GATHERED[name], batch_sampler=[[1, 3, 2]]))))


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_repeated_batch_is_made_of_the_same_outputs(name: str) -> None:
    with slot() as writer:
        gatherer = Gatherer(GATHERED[name], default_collate)
        batch = gatherer.gather([1, 3, 2])
        first, end = list(map(id, leaves_of(batch))), writer.cursor
        assert writer.collated is batch  # so that its header is remembered
        writer.begin(0, writer.version, writer.nbytes, writer.limit_nbytes)
        assert list(map(id, leaves_of(gatherer.gather([3, 0, 0])))) == first
        assert writer.cursor == end


def test_a_batch_that_cannot_be_gathered_leaves_the_slot_as_it_was() -> None:
    with slot() as writer:
        writer.tensor((3,), torch.int64)  # of a dataset's or the program's own
        before = writer.cursor
        mixed = ConcatDataset([X[:6], X[6:].double()])
        gatherer = Gatherer(StackDataset(X, mixed), default_collate)
        assert gatherer.gather([1, 7]) is NOT_GATHERED
        assert writer.cursor == before
        assert gatherer.gather([1, 2]) is not NOT_GATHERED
        assert writer.cursor > before


def test_the_page_about_it_says_what_is() -> None:
    page = Path(__file__).parents[1] / "docs" / "vectorised.md"
    assert doctest.testfile(str(page), module_relative=False) == (0, 6)


def test_differences_are_seen() -> None:
    """The comparison that these tests rest on sees lists for tuples, and other dtypes."""
    assert differences([torch.ones(2)], (torch.ones(2),))
    assert differences(["a"], ("a",))
    assert differences(torch.ones(2), torch.ones(2).double())
