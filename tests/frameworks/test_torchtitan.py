"""Trainers of torchtitan's style: states in torch's distributed checkpoints, one key per rank."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import shmloader
from frameworks.pages import outcome
from frameworks.rows import Rows

pytestmark = pytest.mark.filterwarnings("default")


def test_the_pages_program() -> None:
    """Three steps, a checkpoint, five more in a new trainer: torch's losses of eight steps, bit for bit."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for features, targets in DataLoader(dataset, batch_size=8, shuffle=True, generator=generator):
        loss = torch.nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    assert outcome("torchtitan.md", "slots") == {"losses": losses, "batches": 8}


@pytest.mark.parametrize("kind", [shmloader.DataLoader, DataLoader])
def test_ranks_keep_their_places_apart(kind: Any, tmp_path: Path) -> None:
    """Torch's class too, under install; and the dataset is not in the checkpoint."""
    import torch.distributed.checkpoint as dcp

    def make() -> Any:
        return kind(Heavy(), batch_size=4, num_workers=1)

    with shmloader.install(stateful=True):
        loaders = [make(), make()]
        for taken, loader in enumerate(loaders, 1):
            iterator = iter(loader)
            for _ in range(taken):
                next(iterator)
        dcp.save({f"loader of rank {n}": loader for n, loader in enumerate(loaders)}, checkpoint_id=tmp_path)
        again = [make(), make()]
        dcp.load({f"loader of rank {n}": loader for n, loader in enumerate(again)}, checkpoint_id=tmp_path)
        assert [next(iter(loader))[0].item() for loader in again] == [4, 8]
        for loader in [*loaders, *again]:
            loader.close()


class Heavy(Rows):
    def __reduce__(self) -> Any:
        raise pickle.PicklingError("the dataset was pickled")
