"""Ray Train: two workers train on lines of Python's library, and each line is seen once in an epoch.

Needs Ray: pip install 'ray[train]'
"""

import inspect
import statistics
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch.utils.data import Dataset

import shmloader

EPOCHS = 2


class Lines(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Counts of a line's characters, and whether it is an example in a docstring or a comment."""

    def __init__(self) -> None:
        self.lines = shmloader.share(inspect.getsource(statistics).splitlines())

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        line = self.lines[index]
        codes = torch.tensor([ord(c) % 128 for c in line], dtype=torch.long)
        counts = torch.bincount(codes, minlength=128).float()
        return counts, torch.tensor(float(">>>" in line or line.lstrip().startswith("#")))


def train(_: dict[str, Any]) -> None:
    """Run in each worker of Ray Train."""
    shmloader.install()  # Ray makes the loader anew, as torch's: it is to load this way too
    dataset = Lines()
    sampler = shmloader.ShardedSampler(dataset, seed=0)
    loader: Any = shmloader.DataLoader(dataset, batch_size=64, sampler=sampler, num_workers=1)
    loader = ray.train.torch.prepare_data_loader(loader)
    model = ray.train.torch.prepare_model(torch.nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        losses: list[float] = []
        for counts, labels in loader:
            error = torch.nn.functional.binary_cross_entropy_with_logits(model(counts).squeeze(1), labels)
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            losses.append(error.item())
        loss = sum(losses) / len(losses)
        if ray.train.get_context().get_world_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, {len(sampler)} of {len(dataset)} lines on this rank")
        ray.train.report({"epoch": epoch, "loss": loss})


def main() -> None:
    """Train on two workers of this machine."""
    trainer = ray.train.torch.TorchTrainer(train, scaling_config=ray.train.ScalingConfig(num_workers=2))
    trainer.fit()


if __name__ == "__main__":
    main()
