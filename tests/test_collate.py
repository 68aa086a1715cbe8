"""What default collation remembers from batch to batch never shows: all is as torch makes it."""

from typing import Any

import numpy as np
import pytest
import torch
from parity.compare import assert_same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import DataLoader

# Each a sample's value for its key; consecutive batches differ in one thing only.
VALUES: list[dict[Any, Any]] = [
    {"x": torch.ones(3), "s": "text"},
    {"x": torch.ones(3), "s": "text"},
    {"x": torch.full((3,), 2.0), "s": "other"},
    {"x": torch.ones(4), "s": "text"},
    {"x": torch.ones(3, dtype=torch.float64), "s": "text"},
    {"x": torch.ones(3), "s": b"bytes"},
    {"x": torch.ones(3), "s": 1},
    {"x": "text", "s": torch.ones(3)},
    {"s": "text", "x": torch.ones(3)},
    {"x": torch.ones(3), "s": "text", "more": torch.zeros(2, 2)},
    {"x": torch.ones(3)},
    {"x": torch.ones(3), "s": "text"},
    {"x": torch.nn.Parameter(torch.ones(3), requires_grad=False), "s": "text"},
    {"x": torch.ones(1).expand(3), "s": ""},
    {"x": torch.ones(0), "s": "text"},
    {"x": torch.tensor(5.0), "s": "text"},
    {1: torch.ones(3), 2.5: "not a string"},
    {"x": {"y": torch.ones(3)}, "s": ("a", "b")},
    {"x": torch.ones(3, dtype=torch.bfloat16), "s": "text"},
    {"x": 2**70, "s": "text"},
    {"x": torch.ones(3).to_sparse(), "s": "text"},
]


class Values(Dataset[Any]):
    """Each of ``VALUES`` for one batch of three samples, over and over."""

    def __len__(self) -> int:
        return 3 * len(VALUES) * 4

    def __getitem__(self, index: int) -> Any:
        return VALUES[index // 3 % len(VALUES)]


class Mixed(Dataset[Any]):
    """The first sample of every second batch does not go with the others."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        odd = index % 8 == 1
        return {"x": torch.ones(5 if odd else 3), "s": None if odd else "text"}


def _all(loader: Any) -> list[Any]:
    """Batches, and the types of errors in their places; nothing is held, so slots are used again."""
    iterator, got = iter(loader), []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return got
        except Exception as error:
            got.append(type(error))
            continue
        got.append(_copied(batch))
        del batch


def _copied(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return item.clone()
    if isinstance(item, dict):
        return {key: _copied(value) for key, value in item.items()}
    return type(item)(map(_copied, item)) if isinstance(item, list | tuple) else item


@pytest.mark.parametrize("dataset", [Values(), Mixed()], ids=["values", "mixed"])
def test_batches_that_differ_in_one_thing_from_the_last_are_as_torch_makes_them(dataset: Any) -> None:
    expected = _all(TorchLoader(dataset, batch_size=3, num_workers=1))
    got = _all(DataLoader(dataset, batch_size=3, num_workers=1))
    assert len(expected) == len(dataset) // 3
    assert sum(isinstance(item, type) for item in expected) > 0
    assert_same(got, expected)


@pytest.mark.parametrize("other", [(1.0, 2.0), [1.0, 2.0], 1, "text", None, {"a": 1}])
def test_an_array_beside_something_else_is_joined_as_torch_joins_it(other: Any) -> None:
    outcomes = []
    for loader in (TorchLoader([np.ones(2), other], 2), DataLoader([np.ones(2), other], 2, num_workers=1)):
        try:
            outcomes.append(next(iter(loader)).tolist())
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
