"""The time to the first batch: making the loader, starting its workers, handing them the data set."""

from __future__ import annotations

import importlib
import itertools
import os
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.limit import CHECKED_BATCHES
from benchmarks.loaders import Loader
from benchmarks.machine import CpuMeter
from benchmarks.reading import batch_nbytes, take_checksum, touch
from benchmarks.records import Measurement, Spec
from benchmarks.workloads import Workload


def measure_startup(spec: Spec, workload: Workload, dataset: Any, contestant: Loader | None) -> Measurement:
    """Measures the time to the first batch, once, in a process that has not loaded before.

    Imports are done before. Without a contestant, a batch is fetched and collated in this process: the time
    that is left without workers.
    """
    for package in contestant.packages if contestant else ():
        importlib.import_module(package)
    meter = CpuMeter()
    start_s = time.perf_counter()
    loader: Iterable[Any]
    if contestant is None:
        loader = (workload.reference_batch(dataset, number) for number in range(CHECKED_BATCHES))
        name = "limit"
    else:
        prefetch_factor = workload.prefetch_factor or spec.prefetch_factor
        loader = contestant.build(
            dataset, workload.batch_size, spec.workers, prefetch_factor, **workload.options()
        )
        name = contestant.name
    made_s = time.perf_counter() - start_s
    batches = iter(loader)
    first = next(batches)
    touch(first)
    first_batch_s = time.perf_counter() - start_s
    cpu_s, foreign_s = meter.read()
    nbytes = batch_nbytes(first)
    checksum = take_checksum(itertools.chain([first], batches), CHECKED_BATCHES)
    return Measurement(
        contestant=name,
        batches=1,
        window_s=first_batch_s,
        batches_per_s=1 / first_batch_s,
        samples_per_s=workload.batch_size / first_batch_s,
        nbytes_per_s=nbytes / first_batch_s,
        cpu_s=cpu_s,
        foreign_share=foreign_s / first_batch_s / (os.cpu_count() or 1),
        batch_nbytes=nbytes,
        checksum=checksum,
        first_batch_s=first_batch_s,
        made_s=made_s,
    )
