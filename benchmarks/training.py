"""A training loop whose steps compute for a set time: the share of time that it waits for data."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.limit import CHECKED_BATCHES, checksum_without_loader, outputs_like
from benchmarks.loaders import Loader
from benchmarks.machine import CpuMeter
from benchmarks.reading import batch_nbytes, count_wrong, take_checksum, touch
from benchmarks.records import Measurement, Spec
from benchmarks.workloads import Workload


@dataclass
class Loop:
    """One run of a loop: the values that were read of its batches, its time, and its time in `next`."""

    touched: list[float]
    window_s: float
    wait_s: float


def train(batches: Iterator[Any], seconds: float, min_batches: int, compute_s: float) -> Loop:
    """Takes a batch, reads it, and computes, over and over.

    A step lasts `compute_s` by the clock and keeps this process's core busy. A step of a fixed amount of work
    would grow longer with a loader that uses more of the cores, and hide that.
    """
    loop = Loop([], 0.0, 0.0)
    start_s = time.perf_counter()
    while loop.window_s < seconds or len(loop.touched) < min_batches:
        asked_s = time.perf_counter()
        batch = next(batches)
        loop.wait_s += time.perf_counter() - asked_s
        loop.touched.append(touch(batch))
        end_s = time.perf_counter() + compute_s
        while time.perf_counter() < end_s:
            sum(range(100))
        loop.window_s = time.perf_counter() - start_s
        if loop.window_s > 4 * seconds:
            break
    return loop


def measure_training(spec: Spec, workload: Workload, dataset: Any, contestant: Loader | None) -> Measurement:
    """Runs the loop with a loader; without one, over a batch that is always ready."""
    reference = workload.reference_batch(dataset, 0)
    expected = [touch(workload.reference_batch(dataset, number)) for number in range(workload.period_batches)]
    if contestant is None:
        name, checksum = "limit", checksum_without_loader(workload, dataset, outputs_like(reference))
        batches: Iterator[Any] = itertools.repeat(reference)
    else:
        name = contestant.name
        prefetch_factor = workload.prefetch_factor or spec.prefetch_factor
        loader = contestant.build(
            dataset, workload.batch_size, spec.workers, prefetch_factor, **workload.options()
        )
        batches = iter(loader)
        checksum = take_checksum(batches, CHECKED_BATCHES)
    warm = train(batches, spec.warmup_s, 4 * spec.workers, workload.compute_s)
    meter = CpuMeter()
    loop = train(batches, spec.seconds, spec.min_batches, workload.compute_s)
    cpu_s, foreign_s = meter.read()
    nbytes, count = batch_nbytes(reference), len(loop.touched)
    wrong = count_wrong(warm.touched + loop.touched, expected, CHECKED_BATCHES) if contestant else 0
    return Measurement(
        contestant=name,
        batches=count,
        window_s=loop.window_s,
        batches_per_s=count / loop.window_s,
        samples_per_s=count * workload.batch_size / loop.window_s,
        nbytes_per_s=count * nbytes / loop.window_s,
        cpu_s=cpu_s,
        foreign_share=foreign_s / loop.window_s / (os.cpu_count() or 1),
        batch_nbytes=nbytes,
        checksum=checksum,
        wrong_batches=wrong,
        wait_share=loop.wait_s / loop.window_s,
    )
