"""Default collation remembers facts from batch to batch, which never changes a batch."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from parity.compare import assert_same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, default_collate

from shmloader import DataLoader

# Each is a sample's value for its key; consecutive batches differ in one thing only.
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
    {"x": np.ones(3, np.float32), "s": "text"},
    {"x": np.full(3, 2, np.float32), "s": "text"},
    {"x": torch.ones(3), "s": "text"},
    {"x": np.ones(3, np.float32), "s": np.ones((2, 3), np.uint8)},
    {"x": np.ones(3, np.float32), "s": np.zeros((2, 3), np.uint8).T},
    {"x": np.ones(3, np.float64), "s": "text"},
    {"x": np.ones(3, ">f4"), "s": "text"},
    {"x": np.ones(4, np.bool_), "s": "text"},
    {"x": np.ones(6, np.float32)[::2], "s": "text"},
    {"x": np.ones(6, np.float32)[::-1], "s": "text"},
    {"x": np.array(1.0), "s": "text"},
    {"x": np.ones((0, 3), np.float32), "s": "text"},
    {"x": np.array(["a"]), "s": "text"},
]


class Values(Dataset[Any]):
    """Each of ``VALUES`` is used for one batch of three samples, over and over."""

    def __len__(self) -> int:
        return 3 * len(VALUES) * 4

    def __getitem__(self, index: int) -> Any:
        return VALUES[index // 3 % len(VALUES)]


class MixedArrays(Dataset[Any]):
    """Every second batch of three has arrays that do not match; some have the right total size."""

    ODD = (
        (np.ones(4, np.float32), np.ones(3, np.float32), np.ones(2, np.float32)),
        (np.ones(3, np.float32), np.ones(3, np.float64), np.ones(3, np.float32)),
        (np.ones(3, np.float32), np.ones(3, ">f4"), np.ones(3, np.float32)),
        (np.ones(3, np.float32), torch.ones(3), np.ones(3, np.float32)),
        (np.ones(3, np.float32), np.ones((1, 3), np.float32), np.ones(3, np.float32)),
        (np.ones(3, np.float32), np.float32(1), np.ones(3, np.float32)),
        (np.ones(3, np.float32), np.array(1, np.float32), np.ones(3, np.float32)),
        (np.ones((3, 2), np.float32), np.ones((3, 1), np.float32), np.ones((3, 3), np.float32)),
        (np.ones(3, np.float32), np.ma.ones(3, np.float32), np.ones(3, np.float32)),
        (np.ones(3, np.float32), np.ones(3, np.float32), [1.0, 1.0, 1.0]),
    )

    def __init__(self, *, in_dicts: bool) -> None:
        self.in_dicts = in_dicts

    def __len__(self) -> int:
        return 6 * len(self.ODD) * 2

    def __getitem__(self, index: int) -> Any:
        batch, place = divmod(index, 3)
        odd = self.ODD[batch // 2 % len(self.ODD)]
        array = odd[place] if batch % 2 else np.full(3, index, np.float32)
        return {"x": array, "s": "text"} if self.in_dicts else array


class Mixed(Dataset[Any]):
    """The first sample of every second batch does not match the others."""

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


def by_default_collate(samples: list[Any]) -> Any:
    """A user's collate function, which sees the collated batch."""
    return default_collate(samples)


@pytest.mark.each_value
@pytest.mark.parametrize("collate", [None, by_default_collate])
@pytest.mark.parametrize(
    "dataset",
    [Values(), Mixed(), MixedArrays(in_dicts=True), MixedArrays(in_dicts=False)],
    ids=["values", "mixed", "arrays in dicts", "arrays"],
)
def test_batches_that_differ_in_one_thing_from_the_last_are_as_torch_makes_them(
    dataset: Any, collate: Any
) -> None:
    expected = _all(TorchLoader(dataset, batch_size=3, num_workers=1, collate_fn=collate))
    got = _all(DataLoader(dataset, batch_size=3, num_workers=1, collate_fn=collate))
    assert len(expected) == len(dataset) // 3
    assert 0 < sum(isinstance(item, type) for item in expected) < len(expected)
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


class Nested(Dataset[Any]):
    """Nested tensors of one layout, alone or in a container."""

    def __init__(self, layout: torch.layout, way: str) -> None:
        self.layout, self.way = layout, way

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they are new
            nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=self.layout)
        return {"alone": nested, "dict": {"x": nested, "n": 1}, "list": [1, nested]}[self.way]


@pytest.mark.each_value
@pytest.mark.parametrize("way", ["alone", "dict", "list"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_with_torchs_words(layout: torch.layout, way: str) -> None:
    for workers in (0, 1):
        with pytest.raises(RuntimeError, match="Batches of nested tensors are not currently supported"):
            next(iter(DataLoader(Nested(layout, way), 2, num_workers=workers)))


class Wide(Dataset[Any]):
    """Dicts with more tensors than the outputs that are remembered for a slot."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {f"{place}": torch.full((2,), 10_000 * index + place) for place in range(1500)}


def test_a_batch_of_more_leaves_than_are_remembered_arrives_whole() -> None:
    for got, expected in zip(DataLoader(Wide(), 2, num_workers=1), TorchLoader(Wide(), 2), strict=True):
        assert_same(got, expected)
        del got
