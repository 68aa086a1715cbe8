"""What is written to one leaf of a batch never shows in another, in whichever memory the batch was made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

import shmloader
from shmloader import DataLoader

BATCHES = 8


class Images(Dataset[Any]):
    """Of 100 KiB: their batches are large enough for placement."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((160, 160), float(index))


class Twice(Images):
    """One tensor in two places of a sample."""

    def __getitem__(self, index: int) -> Any:
        image = super().__getitem__(index)
        return image, image


class Part(Images):
    """A view before its base, made in the slot by the dataset."""

    def __getitem__(self, index: int) -> Any:
        image = shmloader.empty(160, 160)
        return image.fill_(index)[3], image


def and_flat(samples: list[torch.Tensor]) -> Any:
    batch = default_collate(samples)
    return batch, batch.flatten(1)


def part_first(samples: list[torch.Tensor]) -> Any:
    batch = default_collate(samples)
    return batch[1:3], batch


def between(samples: list[torch.Tensor]) -> Any:
    """Parts that are apart, in any order; the last one overlaps two of them."""
    batch = default_collate(samples)
    return {"c": batch[3], "a": batch[0], "b": batch[1:3], "over": batch[2:]}


def placed(samples: list[torch.Tensor]) -> Any:
    batch = torch.stack(samples)
    return {"batch": batch, "first": batch[0]}


def array_and_tensor(samples: list[torch.Tensor]) -> Any:
    batch = np.stack([sample.numpy() for sample in samples])
    return batch, torch.from_numpy(batch)


def made_empty(samples: list[torch.Tensor]) -> Any:
    batch = shmloader.empty(len(samples), *samples[0].shape)
    torch.stack(samples, out=batch)
    return batch, torch.nn.Parameter(batch, requires_grad=False), batch.numpy(), batch.untyped_storage()


def values_of(leaf: Any) -> np.ndarray[Any, Any]:
    """An array over a leaf."""
    if isinstance(leaf, torch.UntypedStorage):
        leaf = torch.empty(0, dtype=torch.uint8).set_(leaf)
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf


def assert_apart(dataset: Dataset[Any], collate: Callable[[Any], Any] | None, **options: Any) -> None:
    options = {"batch_size": 4, "num_workers": 1, "collate_fn": collate} | options
    for batch in DataLoader(dataset, **options):
        leaves = [values_of(leaf) for leaf in (batch.values() if isinstance(batch, dict) else batch)]
        for number, leaf in enumerate(leaves):
            before = [other.copy() for other in leaves]
            np.add(leaf, 1, out=leaf)
            for other, (now, then) in enumerate(zip(leaves, before, strict=True)):
                assert np.array_equal(now, then) == (other != number), (number, other)


COLLATES = [and_flat, part_first, between, placed, array_and_tensor, made_empty]


@pytest.mark.parametrize("collate", COLLATES)
def test_views_of_one_tensor_or_array_share_nothing(collate: Callable[[Any], Any]) -> None:
    assert_apart(Images(), collate)


@pytest.mark.filterwarnings("ignore::shmloader.SpillWarning")
def test_views_share_nothing_without_placement_in_threads_or_in_pieces() -> None:
    assert_apart(Images(), placed, place_results=False)
    assert_apart(Images(), and_flat, worker_type="thread")
    assert_apart(Images(), and_flat, memory_budget_nbytes=1 << 20)


def test_one_tensor_twice_in_a_sample_becomes_two() -> None:
    assert_apart(Twice(), None)
    assert_apart(Twice(), default_collate, batch_size=None)
    column = torch.arange(32.0 * 64 * 64).view(32, 64, 64)
    assert_apart(TensorDataset(column, column), None)


def test_parts_of_what_a_dataset_makes_in_the_slot_share_nothing() -> None:
    assert_apart(Part(), None, batch_size=None)


def test_views_share_nothing_in_spawned_workers(start_method: str) -> None:
    assert_apart(Images(), and_flat, multiprocessing_context=start_method)


def same_twice(samples: list[torch.Tensor]) -> Any:
    batch = default_collate(samples)
    return batch, batch


def test_one_tensor_twice_in_a_batch_stays_one_object_as_in_torch() -> None:
    for one, other in DataLoader(Images(), 4, num_workers=1, collate_fn=same_twice):
        assert one is other
