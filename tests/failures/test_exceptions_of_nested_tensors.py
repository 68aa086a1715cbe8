"""Nested tensors, which torch's default collate refuses, are refused with torch's error in workers too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


class Nested(Dataset):
    def __init__(self, layout: torch.layout, in_dict: bool) -> None:
        self.layout, self.in_dict = layout, in_dict

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=self.layout)
        return {"plain": torch.ones(2), "nested": nested} if self.in_dict else nested


@pytest.mark.parametrize("in_dict", [False, True])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("workers", [0, 1])
def test_nested_tensors_are_refused_in_torchs_words(
    workers: int, layout: torch.layout, in_dict: bool
) -> None:
    dataset = Nested(layout, in_dict)
    with pytest.raises(RuntimeError) as by_torch:
        next(iter(TorchLoader(dataset, batch_size=2)))
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(dataset, batch_size=2, num_workers=workers)))
    assert "nested tensors are not currently supported by the default collate_fn" in str(by_torch.value)
    assert (type(caught.value), str(caught.value)) == (type(by_torch.value), str(by_torch.value))
