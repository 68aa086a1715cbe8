"""The cost of an order of many samples: memory of the main process, and time to the first batch.

``python -m benchmarks.samplers`` gives the first batch of a dataset of 50 million samples, which are made up
when they are asked for, with torch's samplers, torch's loader and this one, each in a process of its own. For
``DistributedSampler`` that is one rank of eight.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

import shmloader
from benchmarks.fresh_process import claim_output, run_fresh
from benchmarks.made_data import Numbers
from benchmarks.options import whole_number
from benchmarks.tables import render_table

RANKS = 8
BATCH_SIZE = 256


SAMPLERS: dict[str, Any] = {
    "SequentialSampler": SequentialSampler,
    "RandomSampler": RandomSampler,
    "SubsetRandomSampler": lambda dataset: SubsetRandomSampler(range(len(dataset))),
    "DistributedSampler": lambda dataset: DistributedSampler(dataset, RANKS, 0),
}
LOADERS: dict[str, Any] = {"torch": DataLoader, "shmloader": shmloader.DataLoader}


def peak_mb() -> float:
    """This process's peak memory; ``getrusage`` counts the program that started it too."""
    (kib,) = re.findall(
        r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE
    )
    return int(kib) * 1024 / 1e6


def measure(sampler: str, loader: str, samples: int, workers: int) -> dict[str, float]:
    """Seconds to the first batch, and the growth of this process's peak memory, in MB."""
    dataset = Numbers(samples)
    batches = LOADERS[loader](dataset, BATCH_SIZE, sampler=SAMPLERS[sampler](dataset), num_workers=workers)
    before_mb = peak_mb()
    begin_s = time.perf_counter()
    next(iter(batches))
    took_s = time.perf_counter() - begin_s
    return {"first_s": took_s, "peak_mb": peak_mb(), "grown_mb": peak_mb() - before_mb}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--samples", type=whole_number(RANKS), default=50_000_000, help="in the dataset (%(default)s)")
    add("--workers", type=whole_number(0), default=1, help="worker processes (%(default)s)")
    add("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        claim_output()(measure(arguments.one[0], arguments.one[1], arguments.samples, arguments.workers))
        return
    table = [["sampler", "loader", "first batch s", "peak MB", "of that, the order"]]
    options = ["--samples", str(arguments.samples), "--workers", str(arguments.workers)]
    for sampler in SAMPLERS:
        for loader in LOADERS:
            found = run_fresh(sampler, "benchmarks.samplers", *options, "--one", sampler, loader)
            figures = f"{found['first_s']:.2f}", f"{found['peak_mb']:,.0f}", f"{found['grown_mb']:,.0f}"
            table.append([sampler, loader, *figures])
    print(render_table(table, texts=2))


if __name__ == "__main__":
    main()
