"""Compares how fast loaders bring batches from their workers, and how near that is to the limit.

Each measurement has a fresh process to itself; contestants take turns, so that a machine that
changes its speed changes it for all. `docs/benchmarks.md` says what is measured, and why so.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # as a script, only the script's own folder is there
    sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from benchmarks import machine, summary  # noqa: E402
from benchmarks.loaders import LOADERS  # noqa: E402
from benchmarks.measure import LONGEST_WINDOW, PluginError, load_plugins  # noqa: E402
from benchmarks.records import Measurement, Spec  # noqa: E402
from benchmarks.result_files import result_file, write_json  # noqa: E402
from benchmarks.verdicts import Verdict, compare_startups, judge, render_verdicts  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402
from shmloader.cli.bench import NOT_WRITTEN, SHORTEST_WINDOW_S, finite_number, whole_number  # noqa: E402

WINDOW_S, QUICK_WINDOW_S = 3.0, 0.2
LEAST_BATCHES, QUICK_LEAST_BATCHES = 200, 10

START_ALLOWANCE_S = 120.0
"""What a measurement may need beside its windows before it counts as hung."""

KILL_AFTER_S = 15.0
"""How long after that its processes are left to end by themselves."""


class MeasurementFailedError(Exception):
    """A measurement's process ended without a result."""


def run_measurement(spec: Spec) -> Measurement:
    """Runs one measurement in a fresh process.

    Raises:
        MeasurementFailedError: The process failed, or was not done in time.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.measure", spec.to_json()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its workers can be ended with it
    )
    what = f"{spec.contestant} on {spec.workload}"
    try:
        # A process that hangs ends by itself; what it started may outlive it and hold the pipes.
        output, errors = process.communicate(timeout=spec.timeout_s + KILL_AFTER_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        raise MeasurementFailedError(f"{what} hung:\n{errors[-4000:]}") from error
    finally:
        if process.returncode is None:  # this run was interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0 or not output.strip():
        raise MeasurementFailedError(f"{what} ended with {process.returncode}:\n{errors[-4000:]}")
    return Measurement.from_json(output.strip().splitlines()[-1])


def run_undisturbed(spec: Spec, max_foreign: float, attempts: int = 6) -> Measurement:
    """Repeats a measurement until other processes leave it alone; else takes the best of all.

    What others do does not depend on the contestant, so choosing by it favours none.
    """
    best: Measurement | None = None
    for _ in range(attempts):
        measurement = run_measurement(spec)
        if best is None or measurement.foreign_share < best.foreign_share:
            best = measurement
        if best.foreign_share <= max_foreign:
            break
    assert best is not None
    return best


def make_spec(arguments: argparse.Namespace, workload: str, contestant: str) -> Spec:
    """Makes the specification of one measurement."""
    seconds = arguments.seconds
    return Spec(
        workload=workload,
        contestant=contestant,
        workers=arguments.workers,
        prefetch_factor=arguments.prefetch_factor,
        seconds=seconds,
        warmup_s=min(1.0, seconds / 3),
        min_batches=QUICK_LEAST_BATCHES if arguments.quick else LEAST_BATCHES,
        timeout_s=START_ALLOWANCE_S + 2 * LONGEST_WINDOW * seconds,
        descriptor_batches=20 if arguments.quick else 200,
        quick=arguments.quick,
        plugins=tuple(str(Path(path).resolve()) for path in arguments.plugin),
    )


def run_workload(
    arguments: argparse.Namespace, workload: str, contestants: list[str], progress: Any
) -> summary.Runs:
    """Runs all contestants on one workload in turns, as often as asked."""
    runs: summary.Runs = {contestant: [] for contestant in contestants}
    for _ in range(arguments.repeats):
        for contestant in contestants:
            progress.set_description(f"{workload}, {contestant}")
            spec = make_spec(arguments, workload, contestant)
            runs[contestant].append(run_undisturbed(spec, arguments.max_foreign))
            progress.update()
    return runs


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line, and loads what it registers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--workload", action="append", metavar="NAME", help="only this one; may be repeated")
    add("--loader", action="append", metavar="NAME", help="only this one; may be repeated")
    add("--repeats", type=whole_number(1), default=3, help="turns of which the median is taken (default 3)")
    add("--workers", type=whole_number(1), default=2, help="worker processes (default 2)")
    add("--prefetch-factor", type=whole_number(1), default=2, help="batches ahead per worker (default 2)")
    add(
        "--seconds",
        type=finite_number(SHORTEST_WINDOW_S),
        help=f"length of one window in s (default {WINDOW_S:g}, with --quick {QUICK_WINDOW_S:g})",
    )
    add("--quick", action="store_true", help="small batches, short windows, one turn: a smoke test")
    add(
        "--max-foreign",
        type=finite_number(0.0),
        default=1.0,
        metavar="SHARE",
        help="measure again where other processes used more than this share of the cores (1: never)",
    )
    add("--json", type=result_file, metavar="PATH", help="write everything here, with every single run")
    add("--check", action="store_true", help="exit with 1 where a target is missed")
    add("--plugin", action="append", default=[], metavar="PATH", help="a file that registers more")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.repeats = 1
    if parsed.seconds is None:
        parsed.seconds = QUICK_WINDOW_S if parsed.quick else WINDOW_S
    try:
        load_plugins(tuple(parsed.plugin))
    except PluginError as error:
        parser.error(str(error))
    parsed.workload = parsed.workload or [name for name, one in WORKLOADS.items() if one.in_transport]
    parsed.loader = parsed.loader or [name for name, one in LOADERS.items() if one.in_transport]
    for name, registry in [(n, WORKLOADS) for n in parsed.workload] + [(n, LOADERS) for n in parsed.loader]:
        if name not in registry:
            parser.error(f"{name!r} is none of {', '.join(registry)}")
    return parsed


def run_all(
    arguments: argparse.Namespace, report: dict[str, Any]
) -> Iterator[tuple[list[summary.Row], list[Verdict]]]:
    """Runs the workloads one after the other, adds each to the report, and yields its figures."""
    contestants = [*arguments.loader, "limit"]
    total = len(arguments.workload) * len(contestants) * arguments.repeats
    with tqdm(total=total, disable=None, leave=False) as progress:
        for name in arguments.workload:
            runs = run_workload(arguments, name, contestants, progress)
            workload = WORKLOADS[name].quick() if arguments.quick else WORKLOADS[name]
            summary.check_agreement(name, runs)
            rows = summary.make_rows(name, runs)
            verdicts = judge(workload, rows, runs)
            report["workloads"][name] = {
                **summary.to_json(workload, rows, runs),
                "targets": [asdict(verdict) for verdict in verdicts],
            }
            yield rows, verdicts


def main(command_line: list[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
        The exit status: 1 where a target is missed, if that is checked; 3 where the JSON was not written.
    """
    arguments = parse(command_line)
    report: dict[str, Any] = {"machine": machine.describe(), "workloads": {}}
    written = True
    report["options"] = {**vars(arguments), "json": None}
    rows: list[summary.Row] = []
    verdicts: list[Verdict] = []
    by_name: dict[str, list[summary.Row]] = {}
    try:
        for new_rows, new_verdicts in run_all(arguments, report):
            rows += new_rows
            verdicts += new_verdicts
            by_name[new_rows[0].workload] = new_rows
        verdicts += [one for name in by_name for one in compare_startups(WORKLOADS[name], by_name)]
    finally:  # what was measured before a failure is not lost
        if rows:
            print(summary.render_rows(rows))
            print("\nChecksums: all contestants consumed the same.\n")
            print(render_verdicts(verdicts))
        if rows and arguments.json:
            written = write_json(arguments.json, report)
    if arguments.check and not all(verdict.ok for verdict in verdicts):
        return 1
    return 0 if written else NOT_WRITTEN


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (MeasurementFailedError, summary.WrongDataError) as failure:
        sys.exit(f"error: {failure}")
