"""One measurement, in the fresh process that it has to itself: `python -m benchmarks.measure SPEC`.

Its one answer is the measurement.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import peers  # noqa: F401 - registers its loaders
from benchmarks.copying import MEMCPY, measure_copying
from benchmarks.fresh_process import claim_output
from benchmarks.limit import CHECKED_BATCHES, measure_limit
from benchmarks.loaders import LOADERS, Loader
from benchmarks.machine import CpuMeter, open_descriptors
from benchmarks.reading import Period, count_wrong, take_checksum, touch
from benchmarks.records import Measurement, Spec
from benchmarks.startup import measure_startup
from benchmarks.training import measure_training
from benchmarks.workloads import STARTUP, TRAINING, WORKLOADS, Workload

LONGEST_WINDOW = 4
"""A window lasts at most so many times `seconds`, if batches come slowly."""


class PluginError(Exception):
    """A plugin cannot be imported; if its own code failed, the text ends with the traceback."""


def load_plugins(paths: tuple[str, ...]) -> None:
    """Imports files that register workloads or loaders.

    They are imported under their own names, so that spawned workers can import them too.

    Raises:
        PluginError: One cannot be imported.
    """
    for path in map(Path, paths):
        _load_plugin(path)


def _load_plugin(path: Path) -> None:
    if not path.is_file():
        raise PluginError(f"--plugin: no file {path}")
    if path.suffix != ".py" or "." in path.stem:
        raise PluginError(
            f"--plugin: {path} cannot be imported by its name: call it NAME.py, with no other dot"
        )
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))
    try:
        module = importlib.import_module(path.stem)
    except (Exception, SystemExit) as error:
        # The frames of the import are of no interest; a file that cannot be parsed has no frame of its own.
        place = error.__traceback__
        while place is not None and Path(place.tb_frame.f_code.co_filename).name != path.name:
            place = place.tb_next
        text = "".join(traceback.format_exception(type(error), error, place)).rstrip()
        raise PluginError(f"--plugin: {path} failed while it was loaded:\n{text}") from error
    found = getattr(module, "__file__", None)
    if found is None or not path.samefile(found):
        raise PluginError(
            f"--plugin: another module is called {path.stem!r} ({found or 'built in'}): rename {path}"
        )


def measure(spec: Spec) -> Measurement:
    """Measures one contestant on one workload."""
    if spec.contestant == MEMCPY:
        return measure_copying(spec)
    load_plugins(spec.plugins)
    workload = WORKLOADS[spec.workload]
    if spec.quick:
        workload = workload.quick()
    if workload.start_method is not None:  # for loaders that take only the default one
        multiprocessing.set_start_method(workload.start_method, force=True)
    dataset = workload.make_dataset()
    contestant = None if spec.contestant == "limit" else LOADERS[spec.contestant]
    if workload.kind == STARTUP:
        return measure_startup(spec, workload, dataset, contestant)
    if workload.kind == TRAINING:
        return measure_training(spec, workload, dataset, contestant)
    if contestant is None:
        return measure_limit(spec, workload, dataset)
    return measure_loader(spec, workload, dataset, contestant)


def measure_loader(spec: Spec, workload: Workload, dataset: Any, contestant: Loader) -> Measurement:
    """Consumes one long epoch: checked batches, warm-up, timed window, descriptor count."""
    period = Period.of(workload.reference_batches(dataset))
    prefetch_factor = workload.prefetch_factor or spec.prefetch_factor
    loader = contestant.build(
        dataset, workload.batch_size, spec.workers, prefetch_factor, **workload.options()
    )
    batches = iter(loader)
    checksum = take_checksum(batches, CHECKED_BATCHES)
    warm = consume(batches, spec.warmup_s, min_batches=2 * spec.workers * prefetch_factor)
    meter = CpuMeter()
    descriptors = [open_descriptors()]
    start_s = time.perf_counter()
    touched = consume(batches, spec.seconds, spec.min_batches)
    window_s = time.perf_counter() - start_s
    cpu_s, foreign_s = meter.read()
    descriptors += count_descriptors(batches, spec.descriptor_batches, spec.seconds)
    statistics = contestant.statistics(loader) if contestant.statistics else None
    nbytes, count = period.mean_nbytes, len(touched)
    slots = prefetch_factor * spec.workers + 2
    return Measurement(
        contestant=contestant.name,
        batches=count,
        window_s=window_s,
        batches_per_s=count / window_s,
        samples_per_s=count * workload.batch_size / window_s,
        nbytes_per_s=count * nbytes / window_s,
        cpu_s=cpu_s,
        foreign_share=foreign_s / window_s / (os.cpu_count() or 1),
        batch_nbytes=round(nbytes),
        checksum=checksum,
        wrong_batches=count_wrong(warm + touched, period.touched, CHECKED_BATCHES),
        descriptors_min=min(descriptors),
        descriptors_max=max(descriptors),
        reserved_nbytes=(statistics or {}).get("reserved_nbytes"),
        slot_bound_nbytes=slots * period.largest_in_pages_nbytes,
        statistics=statistics,
    )


def consume(batches: Iterator[Any], seconds: float, min_batches: int) -> list[float]:
    """Touches batches for a while, and gives the sum that was read of each.

    The previous batch is held while the next one is fetched, as in a for loop.
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

    It ends after `count` batches, or after `seconds` if they come slowly.
    """
    counts: list[int] = []
    end_s = time.perf_counter() + seconds
    for batch in batches:
        touch(batch)
        counts.append(open_descriptors())
        if len(counts) == count or time.perf_counter() >= end_s:
            break
    return counts


def main() -> None:
    """Runs the measurement on the command line, within its time."""
    spec = Spec.from_json(sys.argv[1])
    faulthandler.dump_traceback_later(spec.timeout_s, exit=True)
    answer = claim_output()
    answer(asdict(measure(spec)))


if __name__ == "__main__":
    main()
