"""Two ranks train on a mixture by accelerate or Lightning: each writes its indices as JSON.

torchrun --nproc-per-node 2 mixture_ranks.py FOLDER (accelerate|lightning)
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import shmloader

EPOCHS = 2
MIXTURE = shmloader.Mixture(
    {
        "a": [torch.tensor([float(n)]) for n in range(90)],
        "b": [torch.tensor([float(n)]) for n in range(90, 130)],
    }
)


def loader_of(**ranks: int) -> Any:
    sampler = shmloader.MixtureSampler(
        MIXTURE, {"a": 1, "b": 2}, stopping_strategy="never", epoch_size=80, **ranks
    )
    return shmloader.DataLoader(MIXTURE, batch_size=4, sampler=sampler, num_workers=1)


def by_accelerate() -> list[list[float]]:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of(num_replicas=1, rank=0))
    seen = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        seen += [batch.flatten().tolist() for batch in loader]
    accelerator.end_training()
    return seen


def by_lightning() -> list[list[float]]:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[float]] = []

        def train_dataloader(self) -> Any:
            return loader_of()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            self.seen.append(batch.flatten().tolist())
            return self.layer(batch).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    model = Model()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", devices=2, strategy="ddp", **quiet)
    trainer.fit(model)
    return model.seen


if __name__ == "__main__":
    seen = by_accelerate() if sys.argv[2] == "accelerate" else by_lightning()
    Path(sys.argv[1], f"rank{os.environ['RANK']}").write_text(json.dumps(seen), encoding="utf-8")
