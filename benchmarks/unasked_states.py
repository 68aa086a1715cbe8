"""The cost of states that the program never asks for: epochs of datasets and samplers with a large state.

``python -m benchmarks.unasked_states`` iterates over a stream and a sampler with a ``state_dict()`` of 40 MB,
and over a stream that is an ``nn.Module`` with weights of that size, with torch's loader and with this one in
turn. It prints the seconds of an epoch, medians over the turns, and their ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import shmloader
from benchmarks.options import whole_number
from benchmarks.tables import render_table

BATCH_SIZE = 32
LOADERS: dict[str, Callable[..., Any]] = {"torch": DataLoader, "shmloader": shmloader.DataLoader}


class Rows(Dataset[torch.Tensor]):
    """Rows of 1,000 floats."""

    def __init__(self, batches: int) -> None:
        self.length, self.row = batches * BATCH_SIZE, torch.rand(1_000)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.row + index


class Order(Sampler[int]):
    """A sampler whose state has as many numbers as fill the megabytes."""

    def __init__(self, batches: int, mb: int) -> None:
        self.length, self.numbers = batches * BATCH_SIZE, torch.arange(mb * 125_000)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]


class Stream(IterableDataset[torch.Tensor]):
    """The rows as a stream with such a state."""

    def __init__(self, batches: int, mb: int) -> None:
        self.rows, self.order = Rows(batches), Order(batches, mb)
        self.state_dict, self.load_state_dict = self.order.state_dict, self.order.load_state_dict

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.rows[index] for index in self.order)


class Module(torch.nn.Module, IterableDataset[torch.Tensor]):
    """The rows as a stream with weights of that size."""

    def __init__(self, batches: int, mb: int) -> None:
        super().__init__()
        self.rows, self.weight = Rows(batches), torch.nn.Parameter(torch.zeros(mb * 250_000))

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self.rows[index] for index in range(len(self.rows)))


CASES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "stream": lambda batches, mb: {"dataset": Stream(batches, mb)},
    "sampler": lambda batches, mb: {"dataset": Rows(batches), "sampler": Order(batches, mb)},
    "nn.Module": lambda batches, mb: {"dataset": Module(batches, mb)},
}


def measure(turns: int, batches: int, mb: int, workers: int) -> dict[str, dict[str, float]]:
    """The median seconds of an epoch, by case and loader; the workers have started before."""
    found: dict[str, dict[str, float]] = {}
    for case, arguments_of in CASES.items():
        options = {"num_workers": workers, "persistent_workers": bool(workers), "batch_size": BATCH_SIZE}
        loaders = {name: make(**arguments_of(batches, mb), **options) for name, make in LOADERS.items()}
        took_s: dict[str, list[float]] = {name: [] for name in loaders}
        for turn in range(turns + 1):
            for name, loader in loaders.items():
                began_s = time.perf_counter()
                for _ in loader:
                    pass
                if turn:
                    took_s[name].append(time.perf_counter() - began_s)
        found[case] = {name: median(seconds) for name, seconds in took_s.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--turns", type=whole_number(1), default=5, help="epochs of each loader (%(default)s)")
    add("--batches", type=whole_number(1), default=1_000, help="batches of an epoch (%(default)s)")
    add("--mb", type=whole_number(0), default=40, help="megabytes of a state (%(default)s)")
    add("--workers", type=whole_number(0), default=1, help="worker processes (%(default)s)")
    given = parser.parse_args()
    table = [["state of", *LOADERS, "ratio"]]
    for case, took_s in measure(given.turns, given.batches, given.mb, given.workers).items():
        figures = [f"{seconds:.3f}" for seconds in took_s.values()]
        table.append([case, *figures, f"{took_s['shmloader'] / took_s['torch']:.2f}"])
    print(f"Seconds of {given.batches:,} batches, {given.workers} worker(s), states of {given.mb} MB\n")
    print(render_table(table, texts=1))


if __name__ == "__main__":
    main()
