"""Training loops behind the wrappers of accelerate, Lightning and Ray, killed: see `kills.main`.

The name of the framework is the last argument. Ray's is the wrapper that `prepare_data_loader` makes, without
a cluster around it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kills import BATCHES, EPOCHS, EVERY, Log, Model, Samples, main, resume, save
from torch.utils.data import IterableDataset, RandomSampler

import shmloader


def loader_of(**options: Any) -> Any:
    samples = Samples()
    sampler = RandomSampler(samples, generator=torch.Generator().manual_seed(1))
    options = {"num_workers": 1, "generator": torch.Generator().manual_seed(2)} | options
    return shmloader.DataLoader(samples, batch_size=4, sampler=sampler, seed_per_sample=True, **options)


def loop(folder: Path, loader: Any, batches: Any) -> None:
    """Train on what a wrapper gives; its state is the loader's."""
    path, model = folder / "checkpoint.pt", Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first_epoch, lines = resume(path, model, optimizer, loader)
    log = Log(folder, lines)

    def keep(epoch: int) -> None:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        place = {"loader": loader.state_dict(), "rng": torch.get_rng_state()}
        save(path, states | place | {"epoch": epoch, "lines": log.lines})

    for epoch in range(first_epoch, EPOCHS):
        for indices, inputs in batches:
            loss = model(inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(epoch, indices, loss)
            if log.lines % EVERY == 0:
                keep(epoch)
        if log.lines == (epoch + 1) * BATCHES:
            keep(epoch + 1)


def behind_accelerate(folder: Path) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    shmloader.install()
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    prepared = Accelerator(cpu=True, dataloader_config=configuration).prepare(loader_of())
    loop(folder, prepared, prepared)


def behind_ray(folder: Path) -> None:
    from ray.train.torch import train_loop_utils

    shmloader.install()
    wrapper = train_loop_utils._WrappedDataLoader(loader_of(), torch.device("cpu"), False)
    loop(folder, wrapper, wrapper)


class Stream(IterableDataset[Any]):
    """The samples in order, without a length: so Lightning reads one batch ahead."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        while self.next < 4 * BATCHES:
            self.next += 1
            yield self.next - 1, torch.full((4,), float(self.next))
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def behind_lightning(folder: Path) -> None:
    import lightning

    path = folder / "checkpoint.ckpt"

    class Steps(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            lines = torch.load(path, weights_only=False)["lines"] if path.exists() else 0
            self.log_file = Log(folder, lines)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(batch[1])
            self.log_file.step(self.current_epoch, batch[0], loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001, momentum=0.9)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["lines"], checkpoint["rng"] = self.log_file.lines, torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.rng = checkpoint["rng"]

        def on_train_start(self) -> None:
            if path.exists():
                torch.set_rng_state(self.rng)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.log_file.lines % EVERY == 0:
                self.trainer.save_checkpoint(path.with_suffix(".new"))
                os.replace(path.with_suffix(".new"), path)

    shmloader.install()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    loader = shmloader.DataLoader(Stream(), batch_size=4, num_workers=1)
    trainer.fit(Steps(), loader, ckpt_path=path if path.exists() else None)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    framework = sys.argv[4]
    if framework == "lightning":
        import logging

        import lightning  # noqa: F401

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        main(behind_lightning)
    elif framework == "accelerate":
        import accelerate  # noqa: F401

        main(behind_accelerate)
    else:
        import ray.train.torch  # noqa: F401

        main(behind_ray)
