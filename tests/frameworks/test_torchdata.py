"""torchdata: its loader has an iterator of its own, which install() leaves alone."""

from __future__ import annotations

import pytest
import torch

import shmloader
from frameworks.pages import needs
from frameworks.rows import Rows

needs("torchdata")
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


def test_torchdatas_loader_stays_torchdatas() -> None:
    with shmloader.install():
        loader = StatefulDataLoader(Rows(), batch_size=4, num_workers=1)
        assert torch.cat(list(loader)).flatten().tolist() == list(range(24))
        assert loader.state_dict()
        assert loader.statistics().batches == 0
