"""skorch: a loader for each epoch, made with the arguments that the net was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import OPTIONS, forbid_torchs_workers, options_of

skorch = needs("skorch")
pytestmark = pytest.mark.filterwarnings("default")


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("skorch.md")


def test_skorch_passes_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch's loader gets the options; under install torch's loaders get them too."""
    forbid_torchs_workers(monkeypatch)
    made: list[Any] = []

    class Noted(skorch.NeuralNetRegressor):
        def get_iterator(self, dataset: Any, training: bool = False) -> Any:
            made.append(super().get_iterator(dataset, training=training))
            return made[-1]

    def fit(**arguments: Any) -> None:
        net = Noted(torch.nn.Linear, module__in_features=1, module__out_features=1, verbose=0, **arguments)
        net.fit(torch.randn(24, 1), torch.randn(24, 1))

    given = {f"iterator_train__{name}": value for name, value in OPTIONS.items() if name != "prefetch_epochs"}
    fit(iterator_train=shmloader.DataLoader, iterator_train__num_workers=1, max_epochs=1, **given)
    assert options_of(made[0]) == OPTIONS | {"prefetch_epochs": False}
    with shmloader.install(worker_restarts=2):
        fit(iterator_train__num_workers=1, max_epochs=1)
        assert made[-2].worker_restarts == 2
        assert made[-2].statistics().batches > 0
