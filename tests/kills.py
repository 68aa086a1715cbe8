"""A training program that is killed at random moments and started again, until it is through.

A program that is tested imports what it needs, and each run of it is a fork of that: so a thousand kills take
minutes.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

BATCHES = 15
EPOCHS = 2
EVERY = 4
"""Steps from one checkpoint to the next."""

Train = Callable[[Path], None]


class Samples(torch.utils.data.Dataset[Any]):
    """Sample ``i`` is ``i``, with a random number."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(4)


class Model(torch.nn.Module):
    """Draws from torch's global generator in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.layer(inputs)).square().mean()


class Log:
    """The lines of all steps so far; those after the last checkpoint go when the program begins again."""

    def __init__(self, folder: Path, lines: int) -> None:
        path = folder / "log"
        before = path.read_text().splitlines()[:lines] if lines else []
        path.with_suffix(".new").write_text("".join(f"{line}\n" for line in before))
        os.replace(path.with_suffix(".new"), path)  # a kill while it is written would lose the lines before
        self.file = path.open("a")
        self.lines = lines

    def step(self, epoch: int, indices: torch.Tensor, loss: torch.Tensor) -> None:
        self.file.write(f"{epoch} {indices.tolist()} {loss.item().hex()}\n")
        self.file.flush()
        self.lines += 1


def resume(path: Path, model: Model, optimizer: torch.optim.Optimizer, loader: Any) -> tuple[int, int]:
    """Go on from the checkpoint, if there is one; returns its epoch, and the lines of the log then."""
    if not path.exists():
        return 0, 0
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    loader.load_state_dict(checkpoint["loader"])
    torch.set_rng_state(checkpoint["rng"])
    return checkpoint["epoch"], checkpoint["lines"]


def save(path: Path, checkpoint: Any) -> None:
    """Replace a checkpoint: a kill leaves the old one or the new one."""
    torch.save(checkpoint, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def run(train: Train, folder: Path) -> int:
    """Run a program in a fork, in a process group of its own; its pid."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            train(folder)
            status = 0
        except BaseException:  # a fork must not go on with what its parent does
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pid


def killed_until_done(train: Train, folder: Path, seed: int, most_s: float) -> int:
    """Run a program and kill it, up to ``most_s`` after its start, until a run ends by itself.

    Returns:
        How often it was killed.
    """
    chance, kills = random.Random(seed), 0
    folder.mkdir()
    while True:
        pid = run(train, folder)
        deadline_s = time.monotonic() + chance.uniform(0, most_s)
        while time.monotonic() < deadline_s:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                assert status == 0, f"the program failed with status {status}"
                return kills
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        kills += 1


def main(train: Train) -> None:
    """The command ``python PROGRAM FOLDER KILLS SEED``: so many kills, and the same as an undisturbed run."""
    folder, wanted, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.optim.SGD(Model().parameters())  # the first imports for two seconds, in which all kills would come
    (folder / "whole").mkdir(parents=True)
    began_s = time.monotonic()
    assert os.waitpid(run(train, folder / "whole"), 0)[1] == 0
    whole_s = time.monotonic() - began_s
    whole = (folder / "whole" / "log").read_text()
    assert len(whole.splitlines()) == EPOCHS * BATCHES
    kills = programs = 0
    while kills < wanted:
        name = folder / f"program {programs}"
        kills += killed_until_done(train, name, seed + programs, 1.2 * whole_s)
        programs += 1
        assert (name / "log").read_text() == whole, f"{name}: other batches or losses than undisturbed"
    print(f"{kills} kills of {programs} programs, in {time.monotonic() - began_s:.0f} s: all as undisturbed")
