"""Without workers, batches are gathered from a dataset as it is then, and are torch's, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_outcomes import assert_same_outcomes, outcomes
from parity.compare import assert_same
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader import DataLoader
from shmloader.codec.layout import CODE_OF_TORCH_DTYPE

ROWS, BATCH = 96, 32
Make = Callable[[], Any]
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")


def x() -> torch.Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3)


def y() -> torch.Tensor:
    return torch.arange(ROWS)


def images() -> torch.Tensor:
    return torch.arange(ROWS * 12).reshape(ROWS, 3, 2, 2).to(memory_format=torch.channels_last)


def parts(*sizes: int) -> ConcatDataset[Any]:
    return ConcatDataset(
        [
            TensorDataset(*(one.clone() for one in part))
            for part in zip(x().split(list(sizes)), y().split(list(sizes)), strict=True)
        ]
    )


DATASETS: dict[str, Make] = {
    "tensors": lambda: TensorDataset(x(), y()),
    "subset of a list": lambda: Subset(TensorDataset(x(), y()), list(range(ROWS))[::-1]),
    "subset of an array": lambda: Subset(TensorDataset(x(), y()), np.arange(ROWS)[::-1]),
    "subset of a tensor": lambda: Subset(TensorDataset(x()), torch.arange(ROWS).flip(0)),
    "subset of a range": lambda: Subset(TensorDataset(x(), y()), range(9, ROWS)),
    "subset of an odd range": lambda: Subset(TensorDataset(x(), y()), range(ROWS - 1, 5, -2)),
    "subset of a run": lambda: Subset(TensorDataset(x(), y()), tuple(range(5, ROWS))),
    "stack": lambda: StackDataset(x(), TensorDataset(y())),
    "stack by name": lambda: StackDataset(b=Subset(x(), range(ROWS)), a=y().numpy()),
    "concat": lambda: parts(40, 56),
    "concat of subsets": lambda: ConcatDataset(
        [Subset(parts(90, 6), range(60)), TensorDataset(x()[:36], y()[:36])]
    ),
    "tensor": x,
    "array": lambda: x().numpy(),
    "read-only array": lambda: np.frombuffer(x().numpy().tobytes(), np.float32).reshape(ROWS, 3),
    "columns": lambda: TensorDataset(x().t().contiguous().t(), x()[:, 1]),
    "store": lambda: shmloader.share([(row, f"t{row}", np.full(2, row)) for row in range(ROWS)]),
    "store of a tensor": lambda: shmloader.share(x()),
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_gathered_and_generators_end_as_torchs(
    name: str, shuffle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def play(build: Any, own: torch.Generator | None) -> list[Any]:
        torch.manual_seed(3)
        seen: list[Any] = []
        loader = build(DATASETS[name](), BATCH, shuffle=shuffle, generator=own)
        for _ in range(2):
            for batch in loader:
                states = torch.get_rng_state(), None if own is None else own.get_state()
                seen.append((batch, *states))
        return seen

    for seed in (None, 5):
        generators = [None if seed is None else torch.Generator().manual_seed(seed) for _ in range(2)]
        with caplog.at_level(logging.DEBUG, "shmloader"):
            got = play(DataLoader, generators[0])
        assert_same(got, play(TorchLoader, generators[1]))
    assert not any("one by one" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", DATASETS)
def test_a_batch_can_be_written_to_and_resized_and_the_dataset_too(name: str) -> None:
    dataset = DATASETS[name]()
    expected = list(TorchLoader(dataset, BATCH))
    for batch in DataLoader(dataset, BATCH):
        for leaf in leaves(batch):
            leaf.fill_(77).resize_(100_000)
    assert_same(list(TorchLoader(dataset, BATCH)), expected)
    of_torch = [] if name.startswith("store") else leaves(getattr(dataset, "tensors", dataset))
    for tensor in of_torch:
        tensor.resize_(100_000)


def leaves(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    items = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
    return [leaf for part in items for leaf in leaves(part)]


def test_batches_without_items_have_the_strides_of_new_tensors() -> None:
    arrays, tensors = [np.zeros((0, 3))] * ROWS, [torch.zeros(0, 3)] * ROWS
    stores = map(shmloader.share, (arrays, tensors, [{"boxes": one} for one in arrays]))
    for dataset in (np.zeros((ROWS, 0)), StackDataset(np.zeros((ROWS, 0, 3))), *stores):
        got, expected = (next(iter(build(dataset, BATCH))) for build in (DataLoader, TorchLoader))
        assert [leaf.stride() for leaf in leaves(got)] == [leaf.stride() for leaf in leaves(expected)]


def test_images_in_channels_last_come_as_torch_joins_them() -> None:
    films = torch.arange(ROWS * 24).reshape(ROWS, 2, 2, 2, 3).permute(0, 1, 4, 2, 3)
    for dataset in (TensorDataset(images()), images(), films, TensorDataset(images()[:, :, :1, :1])):
        assert_same(list(DataLoader(dataset, BATCH)), list(TorchLoader(dataset, BATCH)))


def odd_tensors() -> list[torch.Tensor]:
    """Tensors of each dtype, and of strides and shapes that a copy might not keep."""
    octets = torch.arange(ROWS * 96, dtype=torch.int64).to(torch.uint8).reshape(ROWS, 96)
    halves = octets % 2
    found = [(halves if dtype is torch.bool else octets).view(dtype) for dtype in CODE_OF_TORCH_DTYPE]
    found += [x().reshape(ROWS, 1, 3).transpose(1, 2).contiguous().transpose(1, 2), x()[:, None, :1]]
    found += [x().expand(4, ROWS, 3)[2], x().flip(0), x()[:, 1:], y().repeat(2)[1::2]]
    conjugated = torch.view_as_complex(x()[:, :2].contiguous()).conj()
    found += [conjugated, conjugated.imag, torch.empty(ROWS, 0), torch.empty(ROWS, 2, 0, 3, 1)]
    with torch.inference_mode():
        found.append(x() + 1)
    return [*found, torch.empty_strided((ROWS, 1, 3), (3, 77, 1)).copy_(x()[:, None])]


@pytest.mark.parametrize("number", range(len(odd_tensors())))
def test_rows_of_odd_tensors_come_as_torch_joins_them(number: int) -> None:
    tensor = odd_tensors()[number]
    whole = TensorDataset(tensor)
    datasets = whole, Subset(whole, list(range(7, ROWS))), Subset(whole, list(range(ROWS))[::-1])
    for dataset in datasets:
        found = [outcomes(build(dataset, BATCH)) for build in (DataLoader, TorchLoader)]
        assert_same_outcomes(*found)


def grows(dataset: Any) -> None:
    with torch.no_grad():
        dataset.tensors[0].resize_(ROWS + 9, 5).fill_(8)


def gets_other_shape(dataset: Any) -> None:
    dataset.tensors[0].data = torch.ones(ROWS, 2, 2, dtype=torch.float32)


def shadows(dataset: Any) -> None:
    dataset.__getitems__ = lambda rows: [torch.tensor(row) for row in rows]


class Negative(torch.Tensor):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return -self.as_subclass(torch.Tensor)[index]


def replaces_class(dataset: Any) -> None:
    dataset.tensors[0].__class__ = Negative


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tensors replaced": ("tensors", lambda d: setattr(d, "tensors", (y() * 2, x()))),
    "a tensor written to": ("tensors", lambda d: d.tensors[0].mul_(-1)),
    "a tensor resized": ("tensors", grows),
    "a tensor shrunk": ("tensors", lambda d: d.tensors[1].resize_(40)),
    "a tensor's data replaced": ("tensors", gets_other_shape),
    "a tensor turned": ("tensors", lambda d: d.tensors[0].t_()),
    "a tensor that requires grad": ("tensors", lambda d: d.tensors[0].requires_grad_()),
    "a tensor's class": ("tensors", replaces_class),
    "__getitems__": ("tensors", shadows),
    "a list changed": ("subset of a list", lambda d: d.indices.reverse()),
    "a list cut": ("subset of a list", lambda d: d.indices.__delitem__(slice(40, None))),
    "a list with a bool": ("subset of a list", lambda d: d.indices.__setitem__(40, True)),
    "a range replaced": ("subset of a range", lambda d: setattr(d, "indices", range(3, 70))),
    "the tensor under a range": ("subset of a range", lambda d: d.dataset.tensors[0].resize_(40, 3)),
    "indices replaced": ("subset of a list", lambda d: setattr(d, "indices", np.arange(ROWS))),
    "indices of another kind": ("subset of an array", lambda d: setattr(d, "indices", "abc" * 32)),
    "an array changed": ("subset of an array", lambda d: d.indices.sort()),
    "the inner dataset": ("subset of an array", lambda d: setattr(d, "dataset", x())),
    "inner tensors": ("subset of a tensor", lambda d: setattr(d.dataset, "tensors", (y(), y()))),
    "a tensor of indices": ("subset of a tensor", lambda d: d.indices.resize_(40)),
    "a field": ("stack", lambda d: setattr(d, "datasets", (y(), x()))),
    "an inner field": ("stack", lambda d: shadows(d.datasets[1])),
    "a named field": ("stack by name", lambda d: d.datasets.update(a=x())),
    "a further field": ("stack by name", lambda d: d.datasets.update(c=x())),
    "a field's array": ("stack by name", lambda d: setattr(d.datasets["a"], "dtype", np.float64)),
    "a part": ("concat", lambda d: d.datasets.__setitem__(1, TensorDataset(x().double(), y()))),
    "a part of another form": ("concat", lambda d: d.datasets.__setitem__(0, TensorDataset(x()))),
    "the sizes": ("concat", lambda d: d.cumulative_sizes.__setitem__(0, 20)),
    "an array's rows": ("array", lambda d: d.__setitem__(slice(None), 5)),
    "an array's shape": ("array", lambda d: setattr(d, "shape", (ROWS * 3, 1))),
}


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype):DeprecationWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_a_dataset_that_is_changed_between_batches_gives_what_it_gives_in_torch(name: str) -> None:
    made, change = CHANGES[name]

    def play(build: Any) -> list[Any]:
        dataset = DATASETS[made]()
        iterator = iter(build(dataset, BATCH))
        seen: list[Any] = [next(iterator)]
        change(dataset)
        for _ in range(3):
            seen += outcomes_of_one(iterator)
        return seen

    got, expected = play(DataLoader), play(TorchLoader)
    assert [getattr(leaf, "requires_grad", None) for batch in got for leaf in leaves(batch)] == [
        getattr(leaf, "requires_grad", None) for batch in expected for leaf in leaves(batch)
    ]
    with torch.no_grad():
        assert_same_outcomes(*([detached(one) for one in seen] for seen in (got, expected)))
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, Exception):
            assert (type(mine), mine.args) == (type(theirs), theirs.args)


def outcomes_of_one(iterator: Any) -> list[Any]:
    try:
        return [next(iterator)]
    except Exception as error:
        return [error]


def detached(batch: Any) -> Any:
    return [leaf.detach() for leaf in leaves(batch)] if isinstance(batch, list) else batch


def test_a_class_that_is_changed_between_batches_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = iter(DataLoader(TensorDataset(x()), BATCH))
    next(iterator)
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: index)
    assert next(iterator).tolist() == list(range(BATCH, 2 * BATCH))


@pytest.mark.parametrize("batch", [[0, 40, 95], [*range(0, 96, 2)], [-1, 3] * 20, [96] * 40, [5] * 40])
@pytest.mark.parametrize("sizes", [(96,), (1, 95), (30, 30, 36), (2,) * 48])
def test_rows_of_several_datasets(sizes: tuple[int, ...], batch: list[int]) -> None:
    dataset = parts(*sizes)
    got = outcomes(DataLoader(dataset, batch_sampler=[batch, batch]))
    assert_same_outcomes(got, outcomes(TorchLoader(dataset, batch_sampler=[batch, batch])))


def test_datasets_of_other_forms_are_not_joined_as_one() -> None:
    """The first sample of a batch decides how torch joins it, so each order is another case."""
    others = [
        TensorDataset(x().double(), y()),
        TensorDataset(y(), x()),
        StackDataset(x().numpy(), y()),
        StackDataset(x(), y().numpy()),
        StackDataset(a=x(), b=y()),
        shmloader.share([(np.ones(3, np.float32), row) for row in range(ROWS)]),
    ]
    for other in others:
        for pair in ([TensorDataset(x(), y()), other], [other, TensorDataset(x(), y())]):
            dataset: Any = ConcatDataset(pair)
            batches = [list(range(80, 120)), list(range(119, 80, -1))]
            got = outcomes(DataLoader(dataset, batch_sampler=batches))
            assert_same_outcomes(got, outcomes(TorchLoader(dataset, batch_sampler=batches)))
