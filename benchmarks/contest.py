"""A contest: loaders take turns on workloads, each measurement in a fresh process."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from benchmarks import peers, summary  # noqa: F401 - peers registers loaders
from benchmarks.copying import MEMCPY
from benchmarks.fresh_process import MeasurementFailedError, run_fresh
from benchmarks.loaders import LOADERS, Loader
from benchmarks.measure import LONGEST_WINDOW
from benchmarks.records import Measurement, Spec
from benchmarks.report import LeftOut, Outcome
from benchmarks.verdicts import compare_startups, judge
from benchmarks.workloads import WORKLOADS, Workload
from shmloader.memory.limits import memory_headroom

LIMIT = "limit"

LEAST_BATCHES = 10
"""Fewest batches of a window."""

START_ALLOWANCE_S, LARGE_ALLOWANCE_S = 120.0, 30.0
"""Time allowed to a measurement beside its windows: to start, and for each GB of its data set."""

KILL_AFTER_S = 15.0
"""Additional time for a measurement to report where it hangs, and to end by itself."""

ATTEMPTS = 6
"""Most attempts at a measurement that other processes disturb."""


@dataclass
class Run:
    """A whole run: its measurements so far, and the contestants left out.

    `wrong` says whether this project's loader failed or was wrong, which makes the run a failure.
    """

    arguments: argparse.Namespace
    machine: dict[str, Any]
    copying: list[Measurement] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    wrong: bool = False

    def leave_out(self, workload: str, contestant: str, reason: str) -> None:
        """Notes that a contestant has no figure, and prints it at once."""
        self.left_out.append(LeftOut(workload, contestant, reason))
        print(f"left out: {contestant} on {workload}: {reason}", file=sys.stderr, flush=True)

    def fail(self, workload: str, contestant: str, reason: str) -> None:
        """Notes that a contestant failed; if it is this project's, the run fails too."""
        self.leave_out(workload, contestant, reason)
        self.wrong |= LOADERS[contestant].is_own


def run_all(run: Run, workloads: list[str], loaders: list[str]) -> None:
    """Runs the workloads one after the other."""
    total = sum(
        run.arguments.repeats * (1 + sum(LOADERS[name].meant_for(WORKLOADS[one]) for name in loaders))
        for one in workloads
    )
    print(
        f"{total} measurements, each in a fresh process: {len(workloads)} workload(s), {len(loaders)} "
        f"loader(s) and the limit, {run.arguments.repeats} turn(s). Ctrl-C ends it and prints what there is.",
        file=sys.stderr,
        flush=True,
    )
    with tqdm(total=total, disable=None, leave=False) as progress:
        progress.set_description(MEMCPY)
        measure_memcpy(run)
        for name in workloads:
            run_workload(run, name, loaders, progress)
    rows = {one.workload.name: one.rows for one in run.outcomes}
    for one in run.outcomes:
        one.verdicts.extend(compare_startups(one.workload, rows))


def run_workload(run: Run, name: str, loaders: list[str], progress: Any) -> None:
    """Runs one workload, and adds its results."""
    workload = WORKLOADS[name].quick() if run.arguments.quick else WORKLOADS[name]
    missing = (workload.missing() if workload.missing else None) or too_large(workload, None, 0)
    if missing:
        run.leave_out(name, "all", missing)
        return
    names = contestants_for(run, workload, loaders)
    runs: summary.Runs = {one: [] for one in [*names, LIMIT]}
    try:
        measure_in_turns(run, workload, runs, progress)
    except MeasurementFailedError as failure:
        run.leave_out(name, "all", last_words(failure))
        run.wrong = True
        runs.clear()
    finally:  # after Ctrl-C too: what was measured is kept
        if runs.get(LIMIT):
            made = {one: measurements for one, measurements in runs.items() if measurements}
            turns = min(map(len, made.values()))
            add_outcome(run, name, workload, {one: made[one][:turns] for one in made})


def add_outcome(run: Run, name: str, workload: Workload, runs: summary.Runs) -> None:
    """Adds the results of a workload."""
    runs = without_wrong_data(run, name, runs)
    rows = summary.make_rows(name, runs)
    run.outcomes.append(Outcome(workload, rows, runs, judge(workload, rows, runs)))


def present(run: Run, names: list[str]) -> list[str]:
    """Gives the loaders that are installed, and notes those that are not."""
    for name in names:
        if missing := LOADERS[name].missing():
            run.leave_out("all", name, missing)
    return [name for name in names if not LOADERS[name].missing()]


def too_large(workload: Workload, loader: Loader | None, workers: int) -> str | None:
    """The reason why memory is too short for a workload with a large data set; None if it is not."""
    if not workload.dataset_nbytes:
        return None
    copies = loader.copies_dataset(workload.start_method, workers) if loader else 1.0
    needed, headroom = workload.dataset_nbytes * copies * 1.1, memory_headroom()
    if needed <= headroom.available_nbytes:
        return None
    return (
        f"needs {needed / 1e9:,.1f} GB ({copies:.1f} times the data set), "
        f"and {headroom.available_nbytes / 1e9:,.1f} GB of {headroom.source} are available"
    )


def contestants_for(run: Run, workload: Workload, names: list[str]) -> list[str]:
    """Chooses the contestants of a workload, and notes those left out."""
    chosen = []
    for name in names:
        loader = LOADERS[name]
        if not loader.meant_for(workload):
            continue
        reason = loader.cannot(workload) or too_large(workload, loader, run.arguments.workers)
        if reason:
            run.leave_out(workload.name, name, reason)
        else:
            chosen.append(name)
    return chosen


def measure_in_turns(run: Run, workload: Workload, runs: summary.Runs, progress: Any) -> None:
    """Measures all contestants on one workload in turns; one that fails is left out from then on.

    Each turn begins with another contestant, so that it is not always the same one that runs when the machine
    has just been idle, or just been busy.
    """
    for turn in range(run.arguments.repeats):
        for name in rotated(list(runs), turn % len(runs)):
            progress.set_description(f"{workload.name}, {name}")
            spec = make_spec(run.arguments, workload, name)
            try:
                runs[name].append(run_undisturbed(spec, run.arguments.max_foreign))
            except MeasurementFailedError as failure:
                if name == LIMIT:  # without it no contestant's data can be judged
                    raise
                run.fail(workload.name, name, last_words(failure))
                del runs[name]
            progress.update()


def make_spec(arguments: argparse.Namespace, workload: Workload | None, contestant: str) -> Spec:
    """Makes the specification of one measurement; copying memory has no workload."""
    seconds = arguments.seconds
    large_gb = workload.dataset_nbytes / 1e9 if workload else 0.0
    return Spec(
        workload=workload.name if workload else "",
        contestant=contestant,
        workers=arguments.workers,
        prefetch_factor=arguments.prefetch_factor,
        seconds=seconds,
        warmup_s=min(1.0, seconds / 3),
        min_batches=LEAST_BATCHES,
        timeout_s=START_ALLOWANCE_S + 2 * LONGEST_WINDOW * seconds + LARGE_ALLOWANCE_S * large_gb,
        descriptor_batches=20 if arguments.quick else 200,
        quick=arguments.quick,
        plugins=tuple(arguments.plugin),
    )


def run_undisturbed(spec: Spec, max_foreign: float) -> Measurement:
    """Repeats a measurement until other processes do not disturb it; else takes the least disturbed one.

    The load of other processes does not depend on the contestant, so this choice favours none.
    """
    best: Measurement | None = None
    for _ in range(ATTEMPTS):
        measurement = run_measurement(spec)
        if best is None or measurement.foreign_share < best.foreign_share:
            best = measurement
        if best.foreign_share <= max_foreign:
            break
    assert best is not None
    return best


def run_measurement(spec: Spec) -> Measurement:
    """Runs one measurement in a fresh process.

    Raises:
        MeasurementFailedError: The process failed, or was not done in time.
    """
    what = f"{spec.contestant} on {spec.workload}"
    timeout_s = spec.timeout_s + KILL_AFTER_S  # a process that hangs ends by itself before, and says where
    return Measurement(**run_fresh(what, "benchmarks.measure", spec.to_json(), timeout_s=timeout_s))


def measure_memcpy(run: Run) -> None:
    """Measures how fast memory is copied, as often as everything else."""
    spec = make_spec(run.arguments, None, MEMCPY)
    run.copying = [run_undisturbed(spec, run.arguments.max_foreign) for _ in range(run.arguments.repeats)]


def rotated(names: list[str], places: int) -> list[str]:
    """Gives the names from a place on, then those before it."""
    return names[places:] + names[:places]


def last_words(failure: Exception) -> str:
    """Gives the first and the last line of a failure: which process ended, and with what error."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0].rstrip(':')}: {lines[-1][:300]}"


def without_wrong_data(run: Run, workload: str, runs: summary.Runs) -> summary.Runs:
    """Leaves out contestants whose data differs from that of a plain fetch and collate."""
    right: summary.Runs = {}
    for name, measurements in runs.items():
        try:
            summary.check_agreement(workload, {LIMIT: runs[LIMIT], name: measurements})
        except summary.WrongDataError as error:
            run.fail(workload, name, str(error))
        else:
            right[name] = measurements
    return right
