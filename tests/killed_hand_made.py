"""A training loop behind a prefetcher of its own, killed: see `kills.main`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from kills import BATCHES, EPOCHS, EVERY, Log, Model, Samples, main, resume, save
from look_ahead import Eager, InThread, InThreadForGood, in_this_thread

import shmloader


def ahead_of(loader: Any, kind: int, epochs: int) -> Any:
    """One of the look-aheads, and for the last kind one for all epochs."""
    return [InThread, Eager, in_this_thread, lambda one: InThreadForGood(one, epochs, 20)][kind](loader)


def train(folder: Path) -> None:
    path, model = folder / "checkpoint.pt", Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples, variant = Samples(), sum(map(ord, folder.name))
    loader = shmloader.DataLoader(
        samples,
        batch_size=4,
        # With one generator for both, torch's order depends on whether there are workers.
        sampler=torch.utils.data.RandomSampler(samples, generator=torch.Generator().manual_seed(1)),
        # Without workers, samples draw from the program's generators, in another thread.
        num_workers=1 + variant % 2,
        generator=torch.Generator().manual_seed(2),
        seed_per_sample=True,
    )
    first_epoch, lines = resume(path, model, optimizer, loader)
    log, kind = Log(folder, lines), variant // 2 % 4
    for_good = ahead_of(loader, kind, EPOCHS - first_epoch) if kind == 3 else None

    def checkpoint_of(epoch: int) -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": epoch,
            "lines": log.lines,
        }

    steps = itertools.count(lines + 1)
    for epoch in range(first_epoch, EPOCHS):
        for indices, inputs in loader.follow(for_good or ahead_of(loader, kind, 1)):
            loss = model(inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(epoch, indices, loss)
            if next(steps) % EVERY == 0:
                save(path, checkpoint_of(epoch))
        if log.lines == (epoch + 1) * BATCHES:
            save(path, checkpoint_of(epoch + 1))
    loader.close()


if __name__ == "__main__":
    main(train)
