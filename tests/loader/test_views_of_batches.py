"""Views, objects and keys of a custom batch arrive as in torch: strides, shared memory, reducers, classes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import DataLoader, empty


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


def overlapping(_: list[int]) -> list[torch.Tensor]:
    whole = torch.rand(10_000)
    return [whole[i:] for i in range(20)]


@pytest.mark.parametrize(
    ("collate", "nbytes"),
    [(expanded, 16_384), (broadcast, 60), (unfolded, 16_000), (overlapping, 40_000)],
)
def test_overlapping_items_are_sent_once_and_keep_their_strides(
    collate: Callable[[Any], Any], nbytes: int
) -> None:
    torch.manual_seed(3)
    expected = next(iter(TorchLoader(Numbers(), collate_fn=collate, num_workers=1)))
    torch.manual_seed(3)
    loader = DataLoader(Numbers(), collate_fn=collate, num_workers=1)
    actual = next(iter(loader))
    pairs = zip(actual, expected, strict=True) if isinstance(expected, list) else [(actual, expected)]
    for mine, theirs in pairs:
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine, theirs)
    assert nbytes <= loader.statistics().largest_batch_nbytes < nbytes + 3000


def whole_and_parts(_: list[int]) -> tuple[torch.Tensor, ...]:
    flat = torch.zeros(6)
    return flat, flat[:3], flat[3:].view(torch.int32), torch.zeros(2)


def whole_and_parts_in_the_slot(_: list[int]) -> tuple[torch.Tensor, ...]:
    flat = empty(6)
    flat.zero_()
    return flat, flat[:3], flat[3:].view(torch.int32), torch.zeros(2)


@pytest.mark.parametrize("collate", [whole_and_parts, whole_and_parts_in_the_slot])
@pytest.mark.parametrize("loader_class", [TorchLoader, DataLoader])
def test_views_of_a_tensor_before_them_share_its_memory(loader_class: Any, collate: Any) -> None:
    for whole, first, last, other in loader_class(Numbers(), collate_fn=collate, num_workers=1):
        whole.fill_(1.0)
        assert first.tolist() == [1.0] * 3
        assert last.tolist() == [torch.tensor(1.0).view(torch.int32).item()] * 3
        assert other.tolist() == [0.0] * 2


class Locked:
    """Has no pickle of its own."""

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
    """The key of the later samples is of another class, and equal."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {("a" if index < 16 else Name("a")): torch.full((300,), index)}


def test_keys_keep_their_class_however_many_equal_ones_came_before() -> None:
    kinds = [type(next(iter(batch))) for batch in DataLoader(Renamed(), batch_size=2, num_workers=1)]
    assert kinds == [str] * 8 + [Name] * 4
