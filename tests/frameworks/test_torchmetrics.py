"""torchmetrics: metrics of batches that lie in slots."""

from __future__ import annotations

import pytest
import torch

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import forbid_torchs_workers

torchmetrics = needs("torchmetrics")
pytestmark = pytest.mark.filterwarnings("default")


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("torchmetrics.md")


def test_metrics_that_keep_batches_keep_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """AUROC keeps all predictions; slots are not written while it holds views of them."""
    forbid_torchs_workers(monkeypatch)
    rows = [(torch.rand(1, generator=torch.Generator().manual_seed(n))[0], n % 2) for n in range(64)]
    kept = torchmetrics.classification.BinaryAUROC()
    with shmloader.DataLoader(rows, batch_size=2, num_workers=2) as loader:
        for scores, labels in loader:
            kept.update(scores, labels)
    scores, labels = torch.stack([score for score, _ in rows]), torch.tensor([label for _, label in rows])
    assert kept.compute() == torchmetrics.functional.classification.binary_auroc(scores, labels)
