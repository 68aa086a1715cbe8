"""Fabric: its wrapper, and loaders that it builds anew for ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import ARGUMENTS, OPTIONS, Rows, forbid_torchs_workers, options_of

lightning = needs("lightning")
pytestmark = pytest.mark.filterwarnings("default")


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("fabric.md")


def test_options_survive_the_wrapper_and_the_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is rebuilt as for the second of two ranks."""
    forbid_torchs_workers(monkeypatch)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(shmloader.DataLoader(Rows(), batch_size=4, **ARGUMENTS | OPTIONS))
    assert options_of(loader) == OPTIONS
    assert torch.cat(list(loader)).flatten().tolist() == list(range(24))
    loader._dataloader.close()
    ranks: dict[str, Any] = {"num_replicas": 2, "rank": 1, "shuffle": False}
    monkeypatch.setattr(fabric, "_requires_distributed_sampler", lambda _: True)
    monkeypatch.setattr(type(fabric.strategy), "distributed_sampler_kwargs", ranks, raising=False)
    rebuilt = fabric.setup_dataloaders(shmloader.DataLoader(Rows(), batch_size=4, **ARGUMENTS | OPTIONS))
    assert isinstance(rebuilt.sampler, DistributedSampler)
    assert options_of(rebuilt) == OPTIONS
    assert torch.cat(list(rebuilt)).flatten().tolist() == list(range(1, 24, 2))
    rebuilt._dataloader.close()
