"""One side of `benchmarks.checkouts`: a process with one checkout's loader, and this one's benchmarks.

Started as a script, with the checkout in ``PYTHONPATH``; after each line that it reads it loads for so many
seconds, and writes how it went.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import shmloader  # of the checkout; from here on, packages come from this one

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.loaders import batching  # noqa: E402
from benchmarks.reading import touch  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402


@dataclass(frozen=True)
class Turn:
    """What one checkout's loader did in one turn; µs are for each batch.

    Attributes:
        batches_per_s: Batches, by the clock.
        next_us: Time in ``next()``, by the clock.
        main_cpu_us: Processor time of the main process.
        workers_cpu_us: That of all workers.
    """

    batches_per_s: float
    next_us: float
    main_cpu_us: float
    workers_cpu_us: float


def serve(checkout: Path, name: str, workers: int) -> None:
    """Loads whenever it is told for how long, in this process, and says how it went."""
    if checkout not in Path(shmloader.__file__).parents:
        sys.exit(f"error: shmloader is imported from {shmloader.__file__}, not from {checkout}")
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    prefetch_factor = workload.prefetch_factor or 2
    # What anybody else prints is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with shmloader.DataLoader(
        workload.dataset(workload.batch_size * workload.period_batches),
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        multiprocessing_context="fork",  # any other way, workers would import this checkout's package
        **batching(workload.batch_size, workload.options()),
    ) as loader:
        batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(loader))
        ready = workers * prefetch_factor  # batches that are made while nobody asks
        _load(batches, 0.5, workload.compute_s)
        for line in sys.stdin:
            asked = line.strip()
            turn = None
            if asked:
                for _ in range(ready):
                    next(batches)
                turn = _load(batches, float(asked), workload.compute_s)
            print(json.dumps(asdict(turn) if turn else None), file=answers, flush=True)


def _load(batches: Iterator[Any], seconds: float, compute_s: float) -> Turn:
    main = psutil.Process()
    workers = main.children()
    before = _cpu_us([main]), _cpu_us(workers)
    began_s = now_s = time.perf_counter()
    in_next_s, count = 0.0, 0
    while now_s < began_s + seconds:
        batch = next(batches)
        in_next_s += time.perf_counter() - now_s
        touch(batch)
        count += 1
        until_s = time.perf_counter() + compute_s
        while time.perf_counter() < until_s:
            sum(range(100))
        now_s = time.perf_counter()
    main_us, workers_us = _cpu_us([main]) - before[0], _cpu_us(workers) - before[1]
    took_s = now_s - began_s
    return Turn(count / took_s, 1e6 * in_next_s / count, main_us / count, workers_us / count)


def _cpu_us(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(1e6 * (each.user + each.system) for each in times)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
