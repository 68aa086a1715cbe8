"""Views, objects and keys of a custom batch arrive as in torch: strides, reducers, classes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from parity.compare import assert_same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import DataLoader


class Numbers(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def expanded(_: list[int]) -> torch.Tensor:
    return torch.rand(1, 64, 64).expand(64, -1, -1)


def broadcast(_: list[int]) -> torch.Tensor:
    return torch.rand(3, 1, 5).expand(3, 4, 5)


def unfolded(_: list[int]) -> torch.Tensor:
    return torch.arange(4000.0).unfold(0, 100, 1)


@pytest.mark.parametrize(
    ("collate", "nbytes"),
    [(expanded, 16_384), (broadcast, 60), (unfolded, 16_000)],
)
def test_overlapping_items_are_sent_once_and_keep_their_strides(
    collate: Callable[[Any], Any], nbytes: int
) -> None:
    torch.manual_seed(3)
    expected = next(iter(TorchLoader(Numbers(), collate_fn=collate, num_workers=1)))
    torch.manual_seed(3)
    loader = DataLoader(Numbers(), collate_fn=collate, num_workers=1)
    actual = next(iter(loader))
    assert actual.stride() == expected.stride()
    assert torch.equal(actual, expected)
    assert nbytes <= loader.statistics().largest_batch_nbytes < nbytes + 3000


def whole_and_parts(_: list[int]) -> tuple[torch.Tensor, ...]:
    flat = torch.zeros(6)
    return flat, flat[:3], flat[3:].view(torch.int32), torch.zeros(2)


def test_views_of_one_tensor_arrive_as_tensors_of_their_own() -> None:
    """torch's tensors share memory there; see docs/architecture.md, "When a batch is copied"."""
    for whole, first, last, other in DataLoader(Numbers(), collate_fn=whole_and_parts, num_workers=1):
        whole.fill_(1.0)
        assert first.tolist() == [0.0] * 3
        assert last.tolist() == [0] * 3
        assert other.tolist() == [0.0] * 2


class Locked:
    """Cannot be pickled."""

    def __init__(self, value: int) -> None:
        self.value, self.lock = value, threading.Lock()


ForkingPickler.register(Locked, lambda locked: (Locked, (locked.value,)))


def locked(samples: list[int]) -> list[Locked]:
    return [Locked(value) for value in samples]


def test_reducers_that_the_program_registers_are_used() -> None:
    loader = DataLoader(Numbers(), batch_size=4, collate_fn=locked, num_workers=1)
    assert [[item.value for item in batch] for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Name(str):
    __slots__ = ()


class Renamed(Dataset):
    """The later samples have an equal key of another class."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {("a" if index < 16 else Name("a")): torch.full((300,), index)}


def test_keys_keep_their_class_however_many_equal_ones_came_before() -> None:
    kinds = [type(next(iter(batch))) for batch in DataLoader(Renamed(), batch_size=2, num_workers=1)]
    assert kinds == [str] * 8 + [Name] * 4


class ManyDimensions(Dataset[Any]):
    """Samples with more dimensions than a NumPy array may have; the second one has no items."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        items = torch.arange(6).reshape(2, 3) + index
        return items.reshape(2, *[1] * 70, 3), torch.empty([0] + [1] * 70)


@pytest.mark.parametrize(
    "arguments", [{"batch_size": 2}, {"batch_size": None}, {"batch_size": 2, "collate_fn": list}]
)
def test_tensors_may_have_more_dimensions_than_arrays(arguments: dict[str, Any]) -> None:
    expected = list(TorchLoader(ManyDimensions(), num_workers=1, **arguments))
    assert_same(list(DataLoader(ManyDimensions(), num_workers=1, **arguments)), expected)
