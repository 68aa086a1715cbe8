"""Arrays of a dataset are in a spawned worker what they are in one of torch's, where each is a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset

from shmloader import DataLoader


class Own(np.ndarray):
    """A kind of array of the program's own."""


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def structured(size: int) -> Any:
    return np.ones(size // 2, [("a", ">i2"), ("b", "<f8")])


KINDS: dict[str, Callable[[int], Any]] = {
    "plain": lambda size: np.arange(size, dtype=np.float32),
    "big-endian": lambda size: np.arange(size).astype(">f4"),
    "read-only": lambda size: read_only(np.arange(size)),
    "over bytes": lambda size: np.frombuffer(np.arange(size).tobytes(), np.int64),
    "both": lambda size: read_only(np.arange(size).astype(">i8")),
    "Fortran": lambda size: read_only(np.asfortranarray(np.arange(size).astype(">i8").reshape(2, -1))),
    "permuted": lambda size: np.arange(size).reshape(2, 5, -1).transpose(1, 2, 0),
    "strided": lambda size: read_only(np.arange(size))[::3],
    "backwards": lambda size: np.arange(size)[::-1],
    "structured": lambda size: read_only(structured(size)),
    "texts": lambda size: np.arange(size).astype(">U7"),
    "times": lambda size: read_only(np.arange(size).astype(">M8[s]")),
    "no items": lambda size: read_only(np.empty((0, size), ">f8")),
    "one item": lambda size: read_only(np.array(size, ">f8")),
    "objects": lambda size: read_only(np.array([None, "a", size], object)),
    "a subclass": lambda size: np.arange(size).astype(">i4").view(Own),
    "masked": lambda size: np.ma.array(np.arange(size).astype(">i4")),
}
SIZES = {"small": 60, "large": 300_000}
NAMES = [f"{size} {kind}" for kind in KINDS for size in SIZES]


class Arrays(Dataset):
    """Sample i describes the i-th array, which is an attribute."""

    def __init__(self) -> None:
        for name in NAMES:
            size, _, kind = name.partition(" ")
            setattr(self, name, KINDS[kind](SIZES[size]))

    def __len__(self) -> int:
        return len(NAMES)

    def __getitem__(self, index: int) -> Any:
        array = getattr(self, NAMES[index])
        contents = array.tobytes() if not array.dtype.hasobject else repr(array)
        try:
            as_tensor = str(torch.from_numpy(array).dtype)
        except (TypeError, ValueError) as error:
            as_tensor = str(error)
        layout = array.flags.writeable, array.strides
        return type(array).__name__, array.dtype.str, array.shape, contents, as_tensor, layout


def described(kind: Any, **options: Any) -> dict[str, Any]:
    loader = kind(Arrays(), batch_size=None, num_workers=1, multiprocessing_context="spawn", **options)
    return dict(zip(NAMES, loader, strict=True))


@pytest.fixture(scope="module")
def of_torch() -> dict[str, Any]:
    return described(torch.utils.data.DataLoader)


@pytest.fixture(scope="module")
def of_ours() -> dict[str, Any]:
    return described(DataLoader)


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    return described(DataLoader, share_dataset=True)


@pytest.mark.in_ci(14)
@pytest.mark.parametrize("name", NAMES)
def test_an_array_is_what_it_is_in_torchs_worker(
    name: str, of_torch: dict[str, Any], of_ours: dict[str, Any]
) -> None:
    assert of_ours[name] == of_torch[name]


@pytest.mark.in_ci(14)
@pytest.mark.parametrize("name", NAMES)
def test_a_shared_array_differs_only_by_being_read_only_where_it_is_shared(
    name: str, of_torch: dict[str, Any], shared: dict[str, Any]
) -> None:
    assert shared[name][:-1] == of_torch[name][:-1]
