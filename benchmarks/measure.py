"""One measurement, in the fresh process that it has to itself: `python -m benchmarks.measure SPEC`.

The last line of the output is the measurement, as JSON.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.limit import CHECKED_BATCHES, measure_limit
from benchmarks.loaders import LOADERS, Loader
from benchmarks.machine import CpuMeter, open_descriptors
from benchmarks.reading import batch_in_pages_nbytes, batch_nbytes, touch, update_digest
from benchmarks.records import Measurement, Spec
from benchmarks.workloads import WORKLOADS, Repeated, Workload

LONGEST_WINDOW = 4
"""How many times `seconds` a window may last where batches come slowly."""


def load_plugins(paths: tuple[str, ...]) -> None:
    """Imports files that register workloads or loaders.

    They are imported under their own names, so that spawned workers can import them too.
    """
    for path in map(Path, paths):
        if str(path.parent.resolve()) not in sys.path:
            sys.path.append(str(path.parent.resolve()))
        importlib.import_module(path.stem)


def measure(spec: Spec) -> Measurement:
    """Measures one contestant on one workload."""
    load_plugins(spec.plugins)
    workload = WORKLOADS[spec.workload]
    if spec.quick:
        workload = workload.quick()
    dataset = workload.make_dataset()
    if spec.contestant == "limit":
        return measure_limit(spec, workload, dataset)
    return measure_loader(spec, workload, dataset, LOADERS[spec.contestant])


def measure_loader(spec: Spec, workload: Workload, dataset: Repeated, contestant: Loader) -> Measurement:
    """Consumes one long epoch: checked batches, warm-up, timed window, descriptor count."""
    period = range(workload.period_batches)
    expected = [touch(workload.reference_batch(dataset, number)) for number in period]
    reference = workload.reference_batch(dataset, 0)
    loader = contestant.build(dataset, workload.batch_size, spec.workers, spec.prefetch_factor)
    batches = iter(loader)
    checksum = take_checksum(batches)
    warm = consume(batches, spec.warmup_s, min_batches=2 * spec.workers * spec.prefetch_factor)
    meter = CpuMeter()
    descriptors = [open_descriptors()]
    start_s = time.perf_counter()
    touched = consume(batches, spec.seconds, spec.min_batches)
    window_s = time.perf_counter() - start_s
    cpu_s, foreign_s = meter.read()
    descriptors += count_descriptors(batches, spec.descriptor_batches, spec.seconds)
    statistics = contestant.statistics(loader) if contestant.statistics else None
    nbytes, count = batch_nbytes(reference), len(touched)
    slots = spec.prefetch_factor * spec.workers + 2
    return Measurement(
        contestant=contestant.name,
        batches=count,
        window_s=window_s,
        batches_per_s=count / window_s,
        samples_per_s=count * workload.batch_size / window_s,
        nbytes_per_s=count * nbytes / window_s,
        cpu_s=cpu_s,
        foreign_share=foreign_s / window_s / (os.cpu_count() or 1),
        batch_nbytes=nbytes,
        checksum=checksum,
        wrong_batches=count_wrong(warm + touched, expected),
        descriptors_min=min(descriptors),
        descriptors_max=max(descriptors),
        reserved_nbytes=(statistics or {}).get("reserved_nbytes"),
        slot_bound_nbytes=slots * batch_in_pages_nbytes(reference),
        statistics=statistics,
    )


def take_checksum(batches: Iterator[Any]) -> str:
    """Takes the checksum of the first batches: of all their bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for _ in range(CHECKED_BATCHES):
        update_digest(digest, next(batches))
    return digest.hexdigest()


def consume(batches: Iterator[Any], seconds: float, min_batches: int) -> list[float]:
    """Touches batches for a while, and says what was read of each.

    The previous batch is held while the next one is asked for, as a for loop does it.
    """
    touched: list[float] = []
    start_s = time.perf_counter()
    for batch in batches:
        touched.append(touch(batch))
        passed_s = time.perf_counter() - start_s
        if passed_s >= seconds and (len(touched) >= min_batches or passed_s >= LONGEST_WINDOW * seconds):
            break
    return touched


def count_descriptors(batches: Iterator[Any], count: int, seconds: float) -> list[int]:
    """Counts the open descriptors at each of some batches; untimed, since counting takes time.

    It ends after `count` batches, or after `seconds` where they come slowly.
    """
    counts: list[int] = []
    end_s = time.perf_counter() + seconds
    for batch in batches:
        touch(batch)
        counts.append(open_descriptors())
        if len(counts) == count or time.perf_counter() >= end_s:
            break
    return counts


def count_wrong(touched: list[float], expected: list[float]) -> int:
    """Counts the batches that were not the batch that was due, by what was read of them."""
    return sum(
        value != expected[number % len(expected)]
        for number, value in enumerate(touched, start=CHECKED_BATCHES)
    )


def main() -> None:
    """Does what the command line says, within its time."""
    spec = Spec.from_json(sys.argv[1])
    faulthandler.dump_traceback_later(spec.timeout_s, exit=True)
    print(measure(spec).to_json(), flush=True)


if __name__ == "__main__":
    main()
