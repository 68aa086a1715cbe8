"""datasets of Hugging Face: map-style and iterable, under install and with the loader itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import forbid_torchs_workers

datasets = needs("datasets")
pytestmark = pytest.mark.filterwarnings("default")


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("datasets.md")


@pytest.mark.parametrize("kind", [shmloader.DataLoader, torch.utils.data.DataLoader])
def test_map_style_and_iterable_datasets_load_from_slots(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = datasets.Dataset.from_dict({"n": list(range(24))}).with_format("torch")
    forbid_torchs_workers(monkeypatch)
    with shmloader.install():
        for each in (dataset, dataset.to_iterable_dataset(num_shards=2)):
            loader = kind(each, batch_size=4, num_workers=1)
            assert torch.cat([batch["n"] for batch in loader]).tolist() == list(range(24))
            assert loader.statistics().batches == 6
