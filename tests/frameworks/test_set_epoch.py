"""``set_epoch`` by the frameworks' own calls: persistent workers' datasets hear of each epoch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import shmloader
from frameworks.pages import needs

accelerate, lightning, transformers = needs("accelerate"), needs("lightning"), needs("transformers")
pytestmark = pytest.mark.filterwarnings("default")

HOW = pytest.mark.parametrize("how", ["fork", "spawn"])


class Tells(Dataset[Any]):
    """Its samples are the epoch; it notes the calls in the program's process."""

    def __init__(self) -> None:
        self.epoch = -1
        self.calls: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.calls.append(epoch)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"features": torch.tensor([float(self.epoch)]), "labels": torch.tensor([1.0])}


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.told = Tells()

    def set_epoch(self, epoch: int) -> None:
        self.told.set_epoch(epoch)

    @property
    def calls(self) -> list[int]:
        return self.told.calls

    def __iter__(self) -> Iterator[Any]:
        return (self.told[place] for place in range(4))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[float] = []

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += features.flatten().tolist()
        return {"loss": torch.nn.functional.mse_loss(self.layer(features), labels)}


class Trained(lightning.LightningModule):  # type: ignore[misc]  # without Lightning it is Any
    def __init__(self) -> None:
        super().__init__()
        self.model, self.automatic_optimization = Model(), False

    def training_step(self, batch: Any, _: int) -> None:
        self.model(**batch)

    def configure_optimizers(self) -> None:
        return None


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    modules = ("accelerate.data_loader", "lightning.pytorch.loops.fit_loop", "lightning.fabric.wrappers")
    before = [dict(vars(sys.modules[name])) for name in modules]
    yield
    shmloader.uninstall()
    accelerate.state.AcceleratorState._reset_state(True)
    assert [dict(vars(sys.modules[name])) for name in modules] == before


def make(dataset: Any, how: str = "fork", **more: Any) -> Any:
    given = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": how} | more
    return DataLoader(dataset, batch_size=2, **given)


def epochs_in(batches: Any) -> list[float]:
    return [float(number) for batch in batches for number in batch["features"].flatten()]


def prepared(dataset: Any, **arguments: Any) -> Any:
    return accelerate.Accelerator(cpu=True).prepare(make(dataset, **arguments))


@HOW
@pytest.mark.parametrize("kind", [Tells, Stream])
def test_accelerate_tells_workers_what_it_tells_the_dataset(kind: Any, how: str) -> None:
    """It counts epochs itself; its own `set_epoch` sets the count. The calls here are those without us."""
    calls = []
    for installs in (False, True):
        if installs:
            shmloader.install()
        dataset = kind()
        loader = prepared(dataset, how=how)
        assert epochs_in(loader) == [0.0] * 4
        seen = epochs_in(loader)
        loader.set_epoch(5)
        seen += epochs_in(loader)
        calls.append(dataset.calls)
        if installs:
            assert seen == [1.0] * 4 + [5.0] * 4
            loader.base_dataloader.close()
        else:
            assert seen == [0.0] * 8
            loader.base_dataloader._iterator._shutdown_workers()
    assert calls[0] == calls[1]


def test_accelerates_dispatcher_tells_them_too() -> None:
    shmloader.install()
    given = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    loader = accelerate.Accelerator(cpu=True, dataloader_config=given).prepare(make(Tells()))
    assert [epochs_in(loader) for _ in range(3)] == [[float(epoch)] * 4 for epoch in range(3)]
    loader.base_dataloader.close()


def test_a_prepared_loader_is_told_by_set_epoch() -> None:
    """It counts on from there."""
    shmloader.install()
    loader = prepared(Tells())
    seen = epochs_in(loader)
    shmloader.set_epoch(loader, 7)
    assert seen + epochs_in(loader) + epochs_in(loader) == [0.0] * 4 + [7.0] * 4 + [8.0] * 4
    loader.base_dataloader.close()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("make_loader", [make, lambda *a, **k: shmloader.DataLoader(*a, num_workers=1, **k)])
@pytest.mark.parametrize("installs", [True, False])
def test_a_loader_of_fabrics_is_told_by_set_epoch(installs: bool, make_loader: Any, keeps: bool) -> None:
    """Fabric counts on from there, for the sampler and for the dataset."""
    if installs:
        shmloader.install()
    dataset = Tells()
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(make_loader(dataset, sampler=sampler, persistent_workers=keeps))
    for epoch in (5, 9):
        shmloader.set_epoch(loader, epoch)
        seen = [float(number) for batch in loader for number in batch["features"].flatten()]
        reached = installs or not keeps or isinstance(loader._dataloader, shmloader.DataLoader)
        assert (seen, sampler.epoch) == ([float(epoch if reached else 5)] * 4, epoch)
    if isinstance(loader._dataloader, shmloader.DataLoader) or installs:
        loader._dataloader.close()


@HOW
def test_trainer_tells_them(tmp_path: Path, how: str) -> None:
    calls, seen = [], []
    for installs in (False, True):
        if installs:
            shmloader.install()
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            num_train_epochs=3,
            dataloader_num_workers=1,
            dataloader_persistent_workers=True,
            dataloader_multiprocessing_context=how,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        model, dataset = Model(), Tells()
        transformers.Trainer(model, arguments, train_dataset=dataset).train()
        calls.append(dataset.calls)
        seen.append(model.seen)
    assert seen == [[0.0] * 12, [0.0] * 4 + [1.0] * 4 + [2.0] * 4]
    assert calls[0] == calls[1]


def fit(model: Any, *loaders: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, enable_model_summary=False, **quiet
    )
    trainer.fit(model, *loaders)


@HOW
@pytest.mark.parametrize("kind", [DataLoader, shmloader.DataLoader])
def test_lightning_tells_them_what_it_tells_samplers(kind: Any, how: str) -> None:
    """Its first call comes after its first ``iter()``: workers, and orders of samplers, are made by then."""
    shmloader.install()
    sampler: DistributedSampler[int] = DistributedSampler(range(4), num_replicas=1, rank=0)
    given: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": how}
    loader = kind(Tells(), 2, sampler=sampler, **given)
    model = Trained()
    fit(model, loader)
    assert model.model.seen == [-1.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert sampler.epoch == 2
    loader.close()


def test_it_may_be_imported_after_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are patched when a loader is made."""
    name = "lightning.pytorch.loops.fit_loop"
    module = sys.modules[name]
    monkeypatch.delitem(sys.modules, name)
    shmloader.install()
    monkeypatch.setitem(sys.modules, name, module)
    dataset = Tells()
    model = Trained()
    fit(model, make(dataset, num_workers=0, persistent_workers=False, how=None))
    assert dataset.calls == [0, 1, 2]
    assert model.model.seen == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


def test_fabric_tells_them() -> None:
    shmloader.install()
    loader = lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(make(Tells()))
    assert [epochs_in(loader) for _ in range(3)] == [[float(epoch)] * 4 for epoch in range(3)]
    loader._dataloader.close()


def test_torchdatas_loader_stays_as_it_is() -> None:
    stateful = needs("torchdata.stateful_dataloader").StatefulDataLoader
    shmloader.install()
    dataset = Tells()
    fit(Trained(), stateful(dataset, batch_size=2))
    assert dataset.calls == []
