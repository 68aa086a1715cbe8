"""Two ranks of Lightning on CPU that save in mid-epoch or at its last batch, and resume, started by torchrun.

    torchrun --nproc-per-node 2 lightning_resumed.py FOLDER (stock|torchdata|install|asked)

Each rank writes, as JSON, for each case the batches of an undisturbed run, those before the checkpoint, and
those of a run that has loaded it; and what is said if each rank draws an order of its own.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

import shmloader

EPOCHS = 3
CASES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {"mid-epoch": 2, "a later epoch": 6, "last batch": 4, "last batch of a later epoch": 8}),
    ({"limit_train_batches": 3}, {"cut epochs": 3, "cut epochs, a later one": 5}),
    ({"sharded": True}, {"with a sampler of the program": 2, "its last batch": 4}),
]
"""Arguments, and the steps after which a checkpoint is resumed from."""


class Rows(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.append(batch.flatten().tolist())
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def loader_of(mode: str, sharded: bool) -> Any:
    kind: Any = DataLoader
    if mode == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    sampler = shmloader.ShardedSampler(Rows()) if sharded else None
    return kind(Rows(), batch_size=4, sampler=sampler, shuffle=None if sharded else True, num_workers=1)


def fit(mode: str, folder: Path, checkpoint: Path | None = None, **case: Any) -> list[list[float]]:
    lightning.seed_everything(5)  # it seeds the DistributedSampler
    torch.manual_seed(5 if checkpoint is None else 6)
    loader, model = loader_of(mode, case.pop("sharded", False)), Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, filename="{step}", save_top_k=-1)],
        **case,
    )
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return model.seen


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo")
    if mode in ("install", "asked"):
        shmloader.install(stateful=mode == "asked")
    found: dict[str, Any] = {}
    for number, (case, steps) in enumerate(CASES):
        whole = fit(mode, folder / str(number), **case)
        for name, step in steps.items():
            try:
                rest = fit(mode, folder / "rest", folder / str(number) / f"step={step}.ckpt", **case)
            except Exception as error:
                if mode != "torchdata":
                    raise
                rest = repr(error)
            found[name] = whole, whole[:step], rest
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(mode, folder / "drawn", use_distributed_sampler=False)
    found["said"] = [str(one.message) for one in said if "for 2 ranks" in str(one.message)]
    (folder / f"rank{torch.distributed.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
