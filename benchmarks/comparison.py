"""Compares loaders on all kinds of work: what `python -m shmloader bench` runs.

Like `transport`, it gives each measurement a fresh process to itself and lets the contestants take turns;
a contestant that fails, or delivers something else, is left out with the reason, and the run goes on.
`docs/performance.md` says how each peer is set up, and what came out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks import machine, peers, report, result_files, summary  # noqa: F401 - peers registers loaders
from benchmarks.copying import MEMCPY
from benchmarks.loaders import LOADERS, Loader
from benchmarks.measure import PluginError, load_plugins
from benchmarks.real_files import FOLDER
from benchmarks.records import Measurement
from benchmarks.report import LeftOut, Outcome
from benchmarks.transport import MeasurementFailedError, make_spec, run_undisturbed
from benchmarks.verdicts import compare_startups, judge
from benchmarks.workloads import WORKLOADS, Workload
from shmloader.cli.bench import NOT_MEASURED, NOT_WRITTEN

LIMIT = "limit"

LEAST_BATCHES = 10
"""How many batches a window has at the least."""

LARGE_ALLOWANCE_S = 30.0
"""What a measurement may need in addition for each GB of its data set."""


@dataclass
class Run:
    """A whole run: what was measured so far, and what was not.

    `wrong` says whether this project's loader failed or was wrong, which makes the run a failure.
    """

    arguments: argparse.Namespace
    machine: dict[str, Any]
    copying: list[Measurement] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    wrong: bool = False

    def leave_out(self, workload: str, contestant: str, reason: str) -> None:
        """Notes that a contestant has no figure, and says so at once."""
        self.left_out.append(LeftOut(workload, contestant, reason))
        print(f"left out: {contestant} on {workload}: {reason}", file=sys.stderr, flush=True)

    def fail(self, workload: str, contestant: str, reason: str) -> None:
        """Notes that a contestant failed; where it is this project's, so did the run."""
        self.leave_out(workload, contestant, reason)
        self.wrong |= LOADERS[contestant].is_own


class UnknownNameError(Exception):
    """A pattern on the command line that fits nothing."""


def choose(patterns: Sequence[str] | None, names: Sequence[str], what: str) -> list[str]:
    """Gives the names that fit a pattern, in their order; all where there is none.

    Raises:
        UnknownNameError: A pattern fits none.
    """
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UnknownNameError(f"no {what} is called {pattern!r}; there are: {', '.join(names)}")
    return [name for name in names if not patterns or any(fnmatchcase(name, one) for one in patterns)]


def present(run: Run, names: list[str]) -> list[str]:
    """Gives the loaders that are installed, and notes those that are not."""
    for name in names:
        if missing := LOADERS[name].missing():
            run.leave_out("all", name, missing)
    return [name for name in names if not LOADERS[name].missing()]


def too_large(workload: Workload, loader: Loader | None, workers: int) -> str | None:
    """Says what memory a workload lacks, where its data set is large."""
    from shmloader.host.limits import memory_headroom

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
    """Chooses who takes part in a workload, and notes who does not."""
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


def measure_in_turns(run: Run, workload: Workload, names: list[str], progress: Any) -> summary.Runs:
    """Runs all contestants on one workload in turns; one that fails is out of it from then on.

    Each turn begins with the next one: who runs when the machine has just been idle, or just been busy, is
    not always the same.
    """
    runs: summary.Runs = {name: [] for name in [*names, LIMIT]}
    for turn in range(run.arguments.repeats):
        for name in rotated(list(runs), turn % len(runs)):
            progress.set_description(f"{workload.name}, {name}")
            spec = make_spec(run.arguments, workload.name, name)
            allowance_s = LARGE_ALLOWANCE_S * workload.dataset_nbytes / 1e9
            spec = replace(spec, timeout_s=spec.timeout_s + allowance_s, min_batches=LEAST_BATCHES)
            try:
                runs[name].append(run_undisturbed(spec, run.arguments.max_foreign))
            except MeasurementFailedError as failure:
                if name == LIMIT:  # without it nobody's data can be judged
                    raise
                run.fail(workload.name, name, last_words(failure))
                del runs[name]
            progress.update()
    return runs


def rotated(names: list[str], places: int) -> list[str]:
    """Gives the names from a place on, then those before it."""
    return names[places:] + names[:places]


def last_words(failure: Exception) -> str:
    """Gives the first and the last line of a failure: what ended, and the error it ended with."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0].rstrip(':')}: {lines[-1][:300]}"


def without_wrong_data(run: Run, workload: str, runs: summary.Runs) -> summary.Runs:
    """Leaves out whoever delivered something else than a plain fetch and collate gives."""
    right: summary.Runs = {}
    for name, measurements in runs.items():
        try:
            summary.check_agreement(workload, {LIMIT: runs[LIMIT], name: measurements})
        except summary.WrongDataError as error:
            run.fail(workload, name, str(error))
        else:
            right[name] = measurements
    return right


def run_workload(run: Run, name: str, loaders: list[str], progress: Any) -> None:
    """Runs one workload, and adds what it gave."""
    workload = WORKLOADS[name].quick() if run.arguments.quick else WORKLOADS[name]
    missing = (workload.missing() if workload.missing else None) or too_large(workload, None, 0)
    if missing:
        run.leave_out(name, "all", missing)
        return
    names = contestants_for(run, workload, loaders)
    try:
        runs = without_wrong_data(run, name, measure_in_turns(run, workload, names, progress))
    except MeasurementFailedError as failure:
        run.leave_out(name, "all", last_words(failure))
        run.wrong = True
        return
    rows = summary.make_rows(name, runs)
    run.outcomes.append(Outcome(workload, rows, runs, judge(workload, rows, runs)))


def measure_memcpy(run: Run) -> None:
    """Measures how fast memory is copied, as often as everything else."""
    spec = make_spec(run.arguments, "", MEMCPY)
    run.copying = [run_undisturbed(spec, run.arguments.max_foreign) for _ in range(run.arguments.repeats)]


def to_json(run: Run) -> dict[str, Any]:
    """Gives the whole run as plain data."""
    options = {name: value for name, value in vars(run.arguments).items() if name not in {"json", "plot"}}
    return {
        "machine": run.machine,
        "options": options,
        "memcpy_nbytes_per_s": median(m.nbytes_per_s for m in run.copying) if run.copying else None,
        "workloads": {
            one.workload.name: {
                "about": one.workload.about,
                "kind": one.workload.kind,
                **summary.to_json(one.workload, one.rows, one.runs),
                "targets": [asdict(verdict) for verdict in one.verdicts],
            }
            for one in run.outcomes
        },
        "left_out": [vars(one) for one in run.left_out],
    }


def list_all() -> str:
    """Says which workloads and loaders there are, and what is missing for them."""
    workloads = [["workload", "measures", "batch", "a sample"]]
    workloads += [[one.name, one.kind, str(one.batch_size), one.about] for one in WORKLOADS.values()]
    loaders = [["loader", "here"]]
    loaders += [[one.name, one.missing() or "yes"] for one in LOADERS.values()]
    return f"{summary.render_table(workloads, 4)}\n\n{summary.render_table(loaders, 2)}"


def main(arguments: argparse.Namespace) -> int:
    """Runs the comparison that the options of `python -m shmloader bench` describe.

    Returns:
        The exit status, see `shmloader.cli.bench.DESCRIPTION`.
    """
    try:
        load_plugins(tuple(arguments.plugin))
        if arguments.list:
            print(list_all())
            return 0
        workloads = choose(arguments.workload, list(WORKLOADS), "workload")
        loaders = choose(arguments.loader, list(LOADERS), "loader")
        check_outputs(arguments)
    except (PluginError, UnknownNameError, result_files.UnusablePathError) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_MEASURED
    run = Run(arguments, machine.describe())
    try:
        with tempfile.TemporaryDirectory(prefix="shmloader-bench-") as folder:
            os.environ[FOLDER] = folder
            run_all(run, workloads, present(run, loaders))
    except MeasurementFailedError as failure:
        print(f"error: {failure}", file=sys.stderr)
        run.wrong = True
    finally:  # what was measured before a failure is not lost
        os.environ.pop(FOLDER, None)
        unwritten = publish(run)
    missed = any(not verdict.ok for one in run.outcomes for verdict in one.verdicts)
    if run.wrong or (arguments.check and missed):
        return 1
    return NOT_WRITTEN if unwritten else 0


def check_outputs(arguments: argparse.Namespace) -> None:
    """Tries, before anything is measured, whether what is asked for could be written.

    Raises:
        UnusablePathError: It could not.
    """
    try:
        option = "--json"
        if arguments.json is not None:
            result_files.check_file(arguments.json)
        option = "--plot"
        if arguments.plot is not None:
            result_files.check_folder(arguments.plot)
            result_files.check_drawing("benchmarks.plots")
    except result_files.UnusablePathError as error:
        raise result_files.UnusablePathError(f"{option}: {error}") from error


def run_all(run: Run, workloads: list[str], loaders: list[str]) -> None:
    """Runs the workloads one after the other."""
    total = sum(
        run.arguments.repeats * (1 + sum(LOADERS[name].meant_for(WORKLOADS[one]) for name in loaders))
        for one in workloads
    )
    with tqdm(total=total, disable=None, leave=False) as progress:
        progress.set_description(MEMCPY)
        measure_memcpy(run)
        for name in workloads:
            run_workload(run, name, loaders, progress)
    rows = {one.workload.name: one.rows for one in run.outcomes}
    for one in run.outcomes:
        one.verdicts.extend(compare_startups(one.workload, rows))


def publish(run: Run) -> list[str]:
    """Prints the tables and writes what else was asked for, each of them whatever became of the others.

    Returns:
        What could not be written.
    """
    unwritten: list[str] = []
    written = []
    path, folder = run.arguments.json, run.arguments.plot
    with result_files.noted("the report", unwritten):
        print(report.render(run.machine, run.copying, run.outcomes, run.left_out), flush=True)
    if path is not None:
        with result_files.noted(f"--json {path}", unwritten):
            path.write_text(json.dumps(to_json(run), indent=1, default=str), encoding="utf-8")
            written.append(f"every measurement: {path}")
    if folder is not None:
        from benchmarks.plots import draw_all

        with result_files.noted(f"--plot {folder}", unwritten):
            for picture in draw_all(folder, run.machine, run.outcomes):
                written.append(f"plot: {picture}")  # noqa: PERF401 - what was drawn before a failure counts
    if written:
        with result_files.noted("the list of files", unwritten):
            print("\n".join(written), flush=True)
    return unwritten
