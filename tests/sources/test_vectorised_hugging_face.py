"""Hugging Face datasets are read by their own batched access. Runs where that package is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from parity.compare import assert_same
from torch.utils.data import ConcatDataset, StackDataset, Subset
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader, why_per_sample

ROWS = 40
hugging_face = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
WAYS: dict[str, Callable[[Any], Any]] = {
    "all": lambda dataset: dataset,
    "selected": lambda dataset: dataset.select(range(10, 40)),
    "shuffled": lambda dataset: dataset.shuffle(seed=1),
    "some columns": lambda dataset: dataset.select_columns(["whole", "vector"]),
    "subset": lambda dataset: Subset(dataset, list(range(5, 25))),
}


@pytest.fixture(scope="module")
def dataset() -> Any:
    return hugging_face.Dataset.from_dict(
        {
            "whole": list(range(ROWS)),
            "fraction": [i / 2 for i in range(ROWS)],
            "text": [f"text {i}" for i in range(ROWS)],
            "truth": [i % 3 == 0 for i in range(ROWS)],
            "vector": [[float(i), 1.0, 2.0] for i in range(ROWS)],
            "matrix": [[[i, 1], [2, 3]] for i in range(ROWS)],
            "record": [{"x": i, "y": [i, i]} for i in range(ROWS)],
        }
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_batches_are_torchs(dataset: Any, kind: str | None, way: str) -> None:
    rows = WAYS[way](dataset.with_format(kind))
    assert why_per_sample(rows) is None
    expected = list(TorchLoader(rows, 16))
    assert_same(list(DataLoader(rows, 16)), expected)
    assert_same(list(DataLoader(rows, 16, num_workers=2)), expected)


@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_ragged_columns_are_what_they_are_to_torch(kind: str | None) -> None:
    rows = hugging_face.Dataset.from_dict({"ragged": [[1] * (i + 1) for i in range(8)]}).with_format(kind)
    with pytest.raises(RuntimeError) as expected:
        list(TorchLoader(rows, 4))
    with pytest.raises(RuntimeError) as got:
        list(DataLoader(rows, 4))
    assert got.value.args == expected.value.args


def test_a_format_of_the_programs_own_is_asked_as_by_torch(dataset: Any) -> None:
    calls: list[int] = []

    def double(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        calls.append(len(batch["whole"]))
        return {"double": [2 * number for number in batch["whole"]]}

    rows = dataset.with_transform(double)
    assert "custom" in str(why_per_sample(rows))
    assert_same(list(DataLoader(rows, 16)), list(TorchLoader(rows, 16)))
    assert calls == [16, 16, 8] * 2


CONCATENATED: dict[str, Callable[[Any], Any]] = {
    "concat": lambda rows: ConcatDataset([rows, rows]),
    "subset of concat": lambda rows: Subset(ConcatDataset([rows, rows]), range(5, 60)),
    "concat of subset": lambda rows: ConcatDataset([Subset(rows, [3, 1, 2]), rows]),
    "stack of concat": lambda rows: StackDataset(ConcatDataset([rows, rows]), range(2 * ROWS)),
    "concat of stack": lambda rows: ConcatDataset([StackDataset(x=rows), StackDataset(x=rows)]),
}


@pytest.mark.parametrize("way", CONCATENATED)
@pytest.mark.parametrize("kind", [None, "numpy", "torch"])
def test_a_concat_dataset_asks_for_single_rows(dataset: Any, kind: str | None, way: str) -> None:
    rows = CONCATENATED[way](dataset.add_column("tenth", [i / 10 for i in range(ROWS)]).with_format(kind))
    assert "concatenate_datasets" in str(why_per_sample(rows))
    assert_same(list(DataLoader(rows, 16, num_workers=2)), list(TorchLoader(rows, 16)))
