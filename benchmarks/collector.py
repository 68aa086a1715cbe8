"""The cost of a garbage collection in a worker when the program holds many objects.

``python -m benchmarks.collector`` makes a dataset that refers to a million lists, and lets a forked worker
collect, with torch's loader and with this one in turn. It prints how long a collection takes, and how much
memory that was shared with the main process becomes the worker's own. See docs/decisions/0027.
"""

from __future__ import annotations

import argparse
import gc
import time
from statistics import median

import psutil
import torch
from torch.utils.data import DataLoader, Dataset

import shmloader
from benchmarks.options import whole_number
from benchmarks.tables import render_table

LISTS = 1_000_000
LOADERS = {"torch": DataLoader, "shmloader": shmloader.DataLoader}


class Collecting(Dataset[torch.Tensor]):
    """A dataset; each sample is a collection: its seconds, and the bytes that became private meanwhile."""

    def __init__(self, lists: int) -> None:
        self.lists = [[number] for number in range(lists)]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = psutil.Process()
        before_nbytes = worker.memory_full_info().uss
        began_s = time.perf_counter()
        gc.collect()
        took_s = time.perf_counter() - began_s
        more_nbytes = worker.memory_full_info().uss - before_nbytes
        return torch.tensor([took_s, more_nbytes], dtype=torch.float64)


def measure(turns: int, lists: int) -> dict[str, list[tuple[float, float]]]:
    """Collects in a fresh worker of each loader, in turn; gives the seconds and bytes of each time."""
    dataset = Collecting(lists)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in LOADERS}
    for _ in range(turns):
        for name, loader in LOADERS.items():
            ((took_s, more_nbytes),) = torch.cat(
                list(loader(dataset, num_workers=1, multiprocessing_context="fork"))
            ).tolist()
            seen[name].append((took_s, more_nbytes))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--turns", type=whole_number(1), default=5, help="how often each collects (%(default)s)")
    add("--lists", type=whole_number(0), default=LISTS, help="how many lists there are (%(default)s)")
    arguments = parser.parse_args()
    table = [["loader", "ms", "fewest", "most", "MB made private"]]
    for name, collections in measure(arguments.turns, arguments.lists).items():
        times_ms = [1e3 * took_s for took_s, _ in collections]
        private_mb = median(more_nbytes / 1e6 for _, more_nbytes in collections)
        figures = median(times_ms), min(times_ms), max(times_ms), private_mb
        table.append([name, *(f"{figure:.2f}" for figure in figures)])
    print(f"gc.collect() in a forked worker, {arguments.lists:,} lists, medians\n")
    print(render_table(table, texts=1))


if __name__ == "__main__":
    main()
