"""A dataset's own batches replace its samples; if one cannot be made, the bad samples are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import vectorised_datasets as made
from batch_outcomes import outcomes
from parity.compare import assert_same
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader

ROWS = 12
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


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
    if not workers:  # in this process; samples of several datasets are fetched one by one
        assert set(own.asked) == ({"sample"} if type(wrap(own)) is ConcatDataset else {"batch"})


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


def test_columns_of_getitems_are_torchs_error() -> None:
    got = outcomes(DataLoader(made.Columns(), 7))
    expected = outcomes(TorchLoader(made.Columns(), 7))
    assert [(type(e), e.args) for e in got] == [(type(e), e.args) for e in expected]
