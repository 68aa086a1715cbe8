"""The private memory of a worker whose collate function makes large results, over many batches.

`python -m benchmarks.worker_heap` loads 500 batches of 38 MB, and 500 of random sizes up to that, with a warm
heap and with glibc's defaults (`SHMLOADER_WARM_MEMORY=0`). It prints a worker's anonymous memory after 100
batches and after the last, and its page faults for each batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch.utils.data import Dataset

from benchmarks.tables import render_table
from shmloader.memory.process_memory import read_memory

BATCHES, SETTLED = 500, 100
LARGEST_NBYTES = 38 << 20


class Sizes(Dataset[int]):
    """Sizes of batches in bytes: all the largest, or random ones."""

    def __init__(self, *, vary: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(1 << 20, LARGEST_NBYTES, (BATCHES,), generator=generator)
        self._sizes = (drawn if vary else torch.full_like(drawn, LARGEST_NBYTES)).tolist()

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> int:
        return int(self._sizes[index])


def scale(samples: list[int]) -> torch.Tensor:
    """Makes a batch by way of another tensor of half its size, as a conversion does."""
    return torch.ones(samples[0] // 4, dtype=torch.float16).float()


@dataclass(frozen=True)
class Growth:
    """A worker's heap in bytes after `SETTLED` batches and after all; page faults for each later batch."""

    settled_nbytes: int
    last_nbytes: int
    faults: float


def measure(*, vary: bool) -> Growth:
    """Loads all batches in this process's only worker."""
    from shmloader import DataLoader

    readings: list[tuple[int, int]] = []
    loader = DataLoader(Sizes(vary=vary), num_workers=1, collate_fn=scale)
    for number, _ in enumerate(loader, 1):
        if number in (SETTLED, BATCHES - 4):  # the worker still lives
            (worker,) = psutil.Process().children()
            stat = Path(f"/proc/{worker.pid}/stat").read_text()
            faults = int(stat.rpartition(")")[2].split()[7])
            readings.append((read_memory(worker.pid)["Anonymous"], faults))  # without slots
    (settled, before), (last, after) = readings
    return Growth(settled, last, (after - before) / (BATCHES - 4 - SETTLED))


def measure_apart(sizes: str, *, warm: bool) -> Growth:
    """Measures in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.worker_heap", "--one", sizes]
    environment = os.environ | {"SHMLOADER_WARM_MEMORY": str(int(warm))}
    made = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return Growth(**json.loads(made.stdout.splitlines()[-1]))


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", choices=("equal", "random"), help="measure in this process, print JSON")
    chosen = parser.parse_args(arguments)
    if chosen.one:
        print(json.dumps(asdict(measure(vary=chosen.one == "random"))))
        return
    table = [["batches", "heap", f"MiB after {SETTLED}", "MiB at the end", "page faults per batch"]]
    for sizes in ("equal", "random"):
        for warm in (False, True):
            found = measure_apart(sizes, warm=warm)
            about = f"{BATCHES} of {'' if sizes == 'equal' else 'up to '}{LARGEST_NBYTES >> 20} MiB"
            memory = [f"{nbytes / (1 << 20):.0f}" for nbytes in (found.settled_nbytes, found.last_nbytes)]
            table.append([about, "warm" if warm else "glibc's defaults", *memory, f"{found.faults:,.0f}"])
    print(render_table(table, texts=2))


if __name__ == "__main__":
    main()
