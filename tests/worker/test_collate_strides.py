"""A batch that begins with an ndarray of strides that torch does not take is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_outcomes import outcomes
from torch.utils.data import DataLoader as TorchLoader

from shmloader import DataLoader

PACKED = np.zeros((4, 3), [("one", "u1"), ("four", "<f4")])["four"]
WAYS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda a: a,
    "dict": lambda a: {"a": a},
    "list": lambda a: [a],
}
REFUSED = {
    "negative": np.ones((2, 3), np.float32)[:, ::-1],
    "negative, of one item": np.ones((1, 3), np.float32)[::-1],
    "no multiple of the item": PACKED[1],
}
TAKEN = {
    "apart": np.ones((3, 6), np.float32)[:, ::2],
    "upon one another": np.broadcast_to(np.float32(2), (3, 4)),
    "columns": np.ones((3, 4), np.float32).T,
    "none": np.array(2.0),
    "no items": np.ones((0, 3), np.float32),
}


def made(array: np.ndarray[Any, Any], way: str) -> tuple[list[Any], list[Any]]:
    """Three batches of the array, twice in each, by torch and by a worker."""
    samples = [WAYS[way](array)] * 6
    mine = outcomes(DataLoader(samples, 2, num_workers=1, worker_type="thread"))
    return mine, outcomes(TorchLoader(samples, 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_strides_that_torch_refuses_are_refused(name: str, way: str) -> None:
    mine, theirs = made(REFUSED[name], way)
    assert isinstance(theirs[0], ValueError)
    assert (type(mine[0]), mine[0].args) == (ValueError, theirs[0].args)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TAKEN)
def test_strides_that_torch_takes_are_joined(name: str, way: str) -> None:
    mine, theirs = made(TAKEN[name], way)
    for one, other in zip(mine, theirs, strict=True):
        inside = [batch if way == "alone" else batch["a" if way == "dict" else 0] for batch in (one, other)]
        assert torch.equal(*inside)
