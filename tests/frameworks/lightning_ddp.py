"""Two ranks of Lightning on CPU, by the strategy that is named: each writes its samples.

    python lightning_ddp.py STRATEGY FOLDER

Torch's own iterators are forbidden, and the options of the rebuilt loader are checked, in both ranks.
"""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import Dataset, dataloader

import shmloader


class Rows(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Loader(shmloader.DataLoader):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Model(lightning.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder = folder
        self.seen: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.extend(batch.flatten().tolist())
        return self.layer(batch).mean()

    def on_train_end(self) -> None:
        loader = self.trainer.train_dataloader
        assert (loader.worker_restarts, loader.on_error) == (2, "skip"), "options were lost"
        assert isinstance(loader.sampler, torch.utils.data.DistributedSampler)
        (self.folder / f"rank{self.global_rank}").write_text(" ".join(map(str, sorted(self.seen))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def forbid(*_: Any, **__: Any) -> None:
    raise AssertionError("torch's own iterator was made")


dataloader._MultiProcessingDataLoaderIter.__init__ = forbid

if __name__ == "__main__":
    strategy, folder = sys.argv[1:]
    loader = Loader(Rows(), batch_size=4, shuffle=True, num_workers=1, worker_restarts=2, on_error="skip")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model(Path(folder)), loader)
