"""transformers' Trainer: training, evaluation and resumed epochs from slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import forbid_torchs_workers

transformers = needs("transformers")
pytestmark = pytest.mark.filterwarnings("default")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen.append(features.flatten().tolist())
        return {"loss": torch.nn.functional.mse_loss(self.layer(features), labels)}


class Loaders(transformers.TrainerCallback):
    """Keeps the loaders that Trainer trains with."""

    def on_step_end(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
        self.loader = train_dataloader


ROWS = [{"features": torch.tensor([float(n)]), "labels": torch.tensor([1.0])} for n in range(24)]


def train(folder: Path, resume: str | None = None, *callbacks: Any, **more: Any) -> tuple[Model, Any]:
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        dataloader_num_workers=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", "num_train_epochs": 1} | more,
    )
    torch.manual_seed(0)
    model, loaders = Model(), Loaders()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=ROWS, eval_dataset=ROWS[:8], callbacks=[loaders, *callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    return model, loaders.loader


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("trainer.md")


def test_options_of_install_reach_trainers_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_torchs_workers(monkeypatch)
    with shmloader.install(worker_restarts=2, dispatch="dynamic", on_error="skip"):
        _, loader = train(tmp_path)
        assert (loader.worker_restarts, loader.dispatch, loader.on_error) == (2, "dynamic", "skip")
        assert loader.base_dataloader.statistics().batches == 6


def test_a_loader_of_the_programs_own_keeps_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader of a resumed epoch keeps its options too."""

    def own(trainer: Any) -> Any:
        return trainer.accelerator.prepare(
            shmloader.DataLoader(ROWS, batch_size=4, num_workers=2, on_error="skip", worker_restarts=3)
        )

    forbid_torchs_workers(monkeypatch)
    monkeypatch.setattr(transformers.Trainer, "get_train_dataloader", own)
    with shmloader.install():
        _, loader = train(tmp_path, save_strategy="steps", save_steps=2)
        assert (loader.worker_restarts, loader.on_error) == (3, "skip")
        resumed, loader = train(tmp_path, str(tmp_path / "checkpoint-2"))
        assert (loader.worker_restarts, loader.on_error) == (3, "skip")
    assert resumed.seen == [[float(n) for n in range(start, start + 4)] for start in range(8, 24, 4)]


def test_a_resumed_epoch_comes_from_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches after the checkpoint are those of the undisturbed epoch; earlier ones are not fetched."""
    whole, _ = train(tmp_path / "torchs")
    forbid_torchs_workers(monkeypatch)
    with shmloader.install(worker_restarts=2):
        train(tmp_path / "ours", save_strategy="steps", save_steps=2)
        checkpoint = str(tmp_path / "ours" / "checkpoint-2")
        resumed, _ = train(tmp_path / "resumed", checkpoint)
    assert resumed.seen == whole.seen[2:]


@pytest.mark.parametrize("step", [2, 6, 8])
def test_the_callback_goes_on_from_the_loaders_state(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped in the first epoch, at its end or in the second has a whole run's batches."""
    from shmloader.frameworks.trainer import LoaderState

    forbid_torchs_workers(monkeypatch)
    two = {"num_train_epochs": 2, "ignore_data_skip": True}
    with shmloader.install(stateful=True):
        whole, _ = train(tmp_path, None, LoaderState(), save_strategy="steps", save_steps=2, **two)
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        assert json.loads((tmp_path / f"checkpoint-{step}" / "loader_state_0.json").read_text())
        resumed, loader = train(tmp_path / "resumed", checkpoint, LoaderState(checkpoint), **two)
        assert resumed.seen == whole.seen[step:]
        assert loader.base_dataloader.statistics().batches == 12 - step


def test_the_callback_says_what_it_needs(tmp_path: Path) -> None:
    from shmloader.frameworks.trainer import LoaderState

    with pytest.raises(RuntimeError, match=r"needs shmloader.install\(stateful=True\)"):
        train(tmp_path, None, LoaderState())
    with shmloader.install(), pytest.raises(RuntimeError, match=r"needs shmloader.install\(stateful=True\)"):
        train(tmp_path, None, LoaderState())
    with shmloader.install(stateful=True):
        train(tmp_path, None, LoaderState(), save_strategy="steps", save_steps=2)
        with pytest.raises(ValueError, match="ignore_data_skip=True"):
            train(tmp_path, str(tmp_path / "checkpoint-2"), LoaderState())
