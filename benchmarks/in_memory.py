"""Data in memory without workers, against slicing it.

``python -m benchmarks.in_memory`` makes epochs of a table of floats and labels, in batches of 256, with
torch's loader, with this one, and by slicing the table: copies of ``x[a:b]`` and ``y[a:b]``, or ``x[rows]``
in the shuffled epochs and of a subset in disorder. A batch has memory of its own, so views (``x[a:b]``
alone) are only printed beside.
All take turns; a figure is the median of the turns, in microseconds a batch, of processor time, so that what
else the machine does counts less. torch's operations have one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset

import shmloader
from benchmarks.options import whole_number
from benchmarks.tables import render_table

BATCH_SIZE = 256
Epoch = Callable[[], Iterable[Any]]


IN_DISORDER = "Subset, in disorder"


def make_datasets(x: Any, y: Any) -> dict[str, Any]:
    """Makes the same samples as datasets of torch's classes."""
    whole, half = TensorDataset(x, y), len(x) // 2
    return {
        "TensorDataset": whole,
        "Subset": Subset(whole, list(range(len(x)))),
        IN_DISORDER: Subset(whole, torch.randperm(len(x)).tolist()),
        "StackDataset": StackDataset(x, y),
        "ConcatDataset": ConcatDataset(
            [TensorDataset(x[:half], y[:half]), TensorDataset(x[half:], y[half:])]
        ),
    }


def contestants(
    dataset: Any, x: torch.Tensor, y: torch.Tensor, *, shuffle: bool, in_disorder: bool
) -> dict[str, Epoch]:
    """The ways to make an epoch, by name."""
    order = torch.tensor(dataset.indices) if in_disorder else None

    def slices() -> Iterable[Any]:
        if shuffle or order is not None:
            rows = torch.randperm(len(x)) if order is None else order
            if shuffle and order is not None:
                rows = order[torch.randperm(len(x))]
            return ((x[some], y[some]) for some in rows.split(BATCH_SIZE))
        places = range(0, len(x), BATCH_SIZE)
        return ((x[a : a + BATCH_SIZE].clone(), y[a : a + BATCH_SIZE].clone()) for a in places)

    torchs, ours = (make(dataset, BATCH_SIZE, shuffle=shuffle) for make in (DataLoader, shmloader.DataLoader))
    return {"torch": lambda: torchs, "shmloader": lambda: ours, "slicing": slices}


def measure(ways: dict[str, Epoch], turns: int) -> dict[str, float]:
    """Microseconds a batch of each way, which take turns."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, epoch in ways.items():
            begin_s = time.process_time()
            batches = sum(1 for _ in epoch())
            took[name].append((time.process_time() - begin_s) / batches * 1e6)
    return {name: median(figures) for name, figures in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--turns", type=whole_number(1), default=9, help="epochs of each (%(default)s)")
    add("--rows", type=whole_number(2), default=65_536, help="rows of the table (%(default)s)")
    add("--floats", type=whole_number(1), default=64, help="floats in a row (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.rand(arguments.rows, arguments.floats), torch.arange(arguments.rows)
    table = [["dataset", "order", "torch us", "shmloader us", "slicing us", "of slicing"]]
    for name, dataset in make_datasets(x, y).items():
        for shuffle in (False, True):
            ways = contestants(dataset, x, y, shuffle=shuffle, in_disorder=name == IN_DISORDER)
            found = measure(ways, arguments.turns)
            figures = [f"{found[way]:,.1f}" for way in ("torch", "shmloader", "slicing")]
            ratio = found["shmloader"] / found["slicing"]
            table.append([name, "shuffled" if shuffle else "plain", *figures, f"{ratio:.2f}"])
    places = range(0, len(x), BATCH_SIZE)
    views: dict[str, Epoch] = {
        "views": lambda: ((x[a : a + BATCH_SIZE], y[a : a + BATCH_SIZE]) for a in places)
    }
    print(render_table(table, texts=2))
    print(f"\nviews of the table: {measure(views, arguments.turns)['views']:.1f} us")


if __name__ == "__main__":
    main()
