"""One side of `benchmarks.checkouts`: a process with one checkout's loader, and this checkout's workloads.

`shmloader` may be any version here. So this module and those that it imports use only its public names (a
test checks that).
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import shmloader
from benchmarks.fresh_process import claim_output
from benchmarks.loaders import batching
from benchmarks.reading import touch
from benchmarks.workloads import STARTUP, WORKLOADS, Workload


@dataclass(frozen=True)
class Turn:
    """One turn of one checkout's loader; µs are for each batch.

    Attributes:
        batches_per_s: Batches per second, by the clock; for a start-up, the inverse of the time to the first.
        next_us: Time in `next()`, by the clock.
        main_cpu_us: Processor time of the main process.
        workers_cpu_us: Processor time of all workers, and of processes that start them.
    """

    batches_per_s: float
    next_us: float
    main_cpu_us: float
    workers_cpu_us: float


def make_loader(workload: Workload, dataset: Any, workers: int) -> Any:
    """Makes the checkout's loader."""
    options = batching(workload.batch_size, workload.options())
    return shmloader.DataLoader(
        dataset,
        num_workers=workers,
        prefetch_factor=workload.prefetch_factor or 2,
        persistent_workers=True,
        **options,
    )


def serve(workload: Workload, workers: int, answer: Any) -> None:
    """Reads lines with a number of seconds, loads for that time, and answers with a `Turn`.

    A line with null only waits until all is warm.
    """
    with make_loader(workload, workload.make_dataset(), workers) as loader:
        batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(loader))
        ready = workers * (workload.prefetch_factor or 2)  # batches that are made while no line has come
        load(batches, 0.5, workload.compute_s)
        for line in sys.stdin:
            seconds = json.loads(line)
            if seconds is None:
                answer(None)
                continue
            for _ in range(ready):
                next(batches)
            answer(asdict(load(batches, seconds, workload.compute_s)))


def load(batches: Iterator[Any], seconds: float, compute_s: float) -> Turn:
    """Takes and reads batches for the given time, and computes between two of them."""
    main = psutil.Process()
    workers = main.children(recursive=True)
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


def start_up(workload: Workload, workers: int, answer: Any) -> None:
    """Makes a loader when a second line of the input comes, and answers with the cost of its first batch."""
    dataset = workload.make_dataset()
    main = psutil.Process()
    sys.stdin.readline()
    answer(None)
    if not sys.stdin.readline():
        return
    before_us, began_s = _cpu_us([main]), time.perf_counter()
    with make_loader(workload, dataset, workers) as loader:
        touch(next(iter(loader)))
        took_s = time.perf_counter() - began_s
        main_us, workers_us = _cpu_us([main]) - before_us, _cpu_us(main.children(recursive=True))
    answer(asdict(Turn(1 / took_s, 1e6 * took_s, main_us, workers_us)))


def _cpu_us(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(1e6 * (each.user + each.system) for each in times)


def main(checkout: str, name: str, workers: str) -> None:
    """Runs one checkout. Arguments: the folder of its package, a workload, and the number of workers."""
    package = Path(shmloader.__file__).resolve()
    if Path(checkout) not in package.parents:
        sys.exit(f"error: shmloader is imported from {package}, not from {checkout}")
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    if workload.start_method is not None:
        multiprocessing.set_start_method(workload.start_method)
    (start_up if workload.kind == STARTUP else serve)(workload, int(workers), claim_output())


if __name__ == "__main__":
    main(*sys.argv[1:])
