"""Gathered batches equal those of torch's DataLoader, and batches are gathered whenever that is certain."""

from __future__ import annotations

import doctest
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from batch_outcomes import assert_same_outcomes, outcomes
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from parity.compare import assert_same, differences
from parity.run import descriptors_for_torch
from robustness.processes import LONG
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
)
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader

ROWS = 12
quick = settings(
    max_examples=150 if LONG else 40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
with_workers = settings(
    quick, max_examples=12 if LONG else 6, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
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
    """Draw a function that makes row ``i`` of a store."""
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
    shared = tensors(rows).map(lambda t: TensorDataset(shmloader.share(t)))
    return st.one_of(tensor_datasets, tensor_datasets, shared, stores(rows), tensors(rows), arrays(rows))


@st.composite
def datasets(draw: st.DrawFn, rows: int = ROWS, depth: int = 2) -> Any:
    """Trees of torch's datasets over all containers of rows."""
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
    # torch's errors for samples that do not match are other ones in workers.
    expected = [b if isinstance(a, Exception) else a for a, b in zip(expected, here, strict=True)]
    assert_same_outcomes(got, expected)


@settings(quick, max_examples=60 if LONG else 20)
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


@pytest.mark.each_value
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
    """Torch's documentation uses samplers of index batches for datasets that load many samples at once."""
    dataset = Asked(TensorDataset(torch.rand(100, 3)))
    given_ = SAMPLERS_OF_BATCHES[which]
    got = list(DataLoader(dataset, batch_size=None, **given_, **how))
    expected = list(TorchLoader(dataset, batch_size=None, **given_))
    assert_same(got, expected)


class Asked(Dataset[Any]):
    """A dataset whose items include the index that was requested."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return index, self.dataset[index]


def test_the_page_about_it_says_what_is() -> None:
    page = Path(__file__).parents[2] / "docs" / "vectorised.md"
    assert doctest.testfile(str(page), module_relative=False) == (0, 6)


def test_differences_are_seen() -> None:
    """The comparison used by these tests notices lists instead of tuples, and other dtypes."""
    assert differences([torch.ones(2)], (torch.ones(2),))
    assert differences(["a"], ("a",))
    assert differences(torch.ones(2), torch.ones(2).double())
