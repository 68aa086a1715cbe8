"""What profiling costs: epochs with a profile and without, in turn.

``python -m benchmarks.profile_cost`` prints the processor time of main process and workers per batch, medians
over the turns, and their ratio. The workers are persistent: each epoch tells them whether to measure.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch.utils.data import Dataset

from benchmarks.options import whole_number
from benchmarks.tables import render_table
from shmloader import DataLoader

SHAPES = {"tiny": (1, (4,), 10_000), "rows": (1024, (64,), 400), "images": (256, (3, 64, 64), 150)}
"""Batch size, shape of a sample, batches in an epoch."""


class Samples(Dataset[torch.Tensor]):
    """Tensors that lie in memory."""

    def __init__(self, length: int, shape: tuple[int, ...]) -> None:
        self.samples, self.length = list(torch.rand(64, *shape)), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index % 64]


def processor_s() -> float:
    """Processor time of this process and its workers so far."""
    me = psutil.Process()
    tasks = [
        task for one in (me, *me.children()) for task in Path(f"/proc/{one.pid}/task").glob("*/schedstat")
    ]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def measure(name: str, turns: int) -> list[str]:
    """A row of the table."""
    batch_size, shape, batches = SHAPES[name]
    spent: dict[bool, list[float]] = {False: [], True: []}
    dataset = Samples(batches * batch_size, shape)
    with DataLoader(dataset, batch_size, num_workers=1, persistent_workers=True) as loader:
        for turn in range(-1, turns):
            for profiled in (turn % 2 == 0, turn % 2 != 0):
                block: Any = loader.profile() if profiled else contextlib.nullcontext()
                with block:
                    before_s = processor_s()
                    for _ in loader:
                        pass
                    spent_s = processor_s() - before_s
                if turn >= 0:  # the first one is warm-up
                    spent[profiled].append(spent_s / batches)
    ratios = [with_it / without for without, with_it in zip(spent[False], spent[True], strict=True)]
    without, with_it = (median(spent[profiled]) * 1e6 for profiled in (False, True))
    return [name, f"{without:,.1f}", f"{with_it:,.1f}", f"{median(ratios):.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=whole_number(1), default=11, help="epochs of each kind (11)")
    arguments = parser.parse_args()
    head = ["batches", "us per batch", "profiled", "ratio"]
    print(render_table([head, *(measure(name, arguments.turns) for name in SHAPES)], texts=1))


if __name__ == "__main__":
    main()
