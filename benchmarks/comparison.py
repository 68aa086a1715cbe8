"""The comparison of loaders on all kinds of work, run by `python -m shmloader bench`.

Each measurement has a fresh process to itself, and the contestants take turns. A contestant that fails or
delivers wrong data is left out with the reason, and the run continues. `docs/performance.md` says how each
peer is set up, and has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import contest, machine, report, result_files, summary
from benchmarks.contest import Run
from benchmarks.fresh_process import MeasurementFailedError
from benchmarks.loaders import LOADERS
from benchmarks.measure import PluginError, load_plugins
from benchmarks.options import NOT_MEASURED, NOT_WRITTEN, SHORTEST_WINDOW_S, finite_number, whole_number
from benchmarks.real_files import FOLDER
from benchmarks.tables import render_table
from benchmarks.workloads import WORKLOADS

DESCRIPTION = """\
Compare shmloader's loader with torch's and other projects' on many workloads, in a checkout of
shmloader. Each measurement runs in a fresh process, the loaders take turns, and the batches of all are
checked to be the same. Two more figures help to judge the loaders: the limit (the same work in as many
processes, without any loader) and the rate at which this machine copies memory.

Names may be patterns such as 'startup-*'; --list shows all names. Everything takes an hour or two, one
workload a minute or two. docs/performance.md explains the tables.

The exit status is 0, or
  1    if this project's loader failed, delivered wrong data or (with --check) missed a target
  2    if nothing was measured: the benchmarks, a name or a plugin cannot be found or loaded, a number
       makes no sense, or nothing could be written to the path of --json or --plot
  3    if all went well but the tables, the JSON or a picture could not be written at the end
  130  after Ctrl-C
"""

WINDOW_S, QUICK_WINDOW_S = 2.0, 0.2


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m shmloader bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, whole_number(1)
    add("--workload", action="append", metavar="NAME", help="only these (default: all); may be repeated")
    add("--loader", action="append", metavar="NAME", help="only these (default: all); may be repeated")
    add("--list", action="store_true", help="list the workloads and loaders, and end")
    add(
        "--repeats",
        type=count,
        default=3,
        metavar="N",
        help="turns; figures are their median (default: %(default)s; 1 with --quick)",
    )
    add(
        "--seconds",
        type=finite_number(SHORTEST_WINDOW_S),
        metavar="S",
        help=f"length of one timed window (default: {WINDOW_S:g}; {QUICK_WINDOW_S:g} with --quick)",
    )
    add("--workers", type=count, default=2, metavar="N", help="workers of each loader (default: %(default)s)")
    add(
        "--prefetch-factor",
        type=count,
        default=2,
        metavar="N",
        help="batches ahead per worker (default: %(default)s)",
    )
    add(
        "--quick", action="store_true", help="small batches, one turn: a smoke test, its figures mean nothing"
    )
    add(
        "--max-foreign",
        type=finite_number(0.0),
        default=1.0,
        metavar="SHARE",
        help="measure again, up to six times, if other programs used more than this share of the cores",
    )
    add(
        "--json",
        type=Path,
        metavar="PATH",
        help="write every single measurement, and a description of the machine",
    )
    add(
        "--plot",
        type=Path,
        metavar="DIR",
        help="draw each workload as a PNG here; needs matplotlib",
    )
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    add(
        "--plugin",
        action="append",
        default=[],
        metavar="PATH",
        help="a Python file that registers more workloads or loaders",
    )
    arguments = parser.parse_args(words)
    arguments.plugin = [str(Path(path).resolve()) for path in arguments.plugin]
    if arguments.quick:
        arguments.repeats = 1
    if arguments.seconds is None:
        arguments.seconds = QUICK_WINDOW_S if arguments.quick else WINDOW_S
    return arguments


class UnknownNameError(Exception):
    """A pattern on the command line that fits nothing."""


def choose(patterns: Sequence[str] | None, names: Sequence[str], what: str) -> list[str]:
    """Gives the names that fit a pattern, in their order; all if there is no pattern.

    Raises:
        UnknownNameError: A pattern fits none.
    """
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UnknownNameError(f"no {what} is called {pattern!r}; there are: {', '.join(names)}")
    return [name for name in names if not patterns or any(fnmatchcase(name, one) for one in patterns)]


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
    """Lists the workloads and loaders, and what is missing for them."""
    workloads = [["workload", "measures", "batch", "a sample"]]
    workloads += [[one.name, one.kind, str(one.batch_size), one.about] for one in WORKLOADS.values()]
    loaders = [["loader", "installed"]]
    loaders += [[one.name, one.missing() or "yes"] for one in LOADERS.values()]
    return f"{render_table(workloads, 4)}\n\n{render_table(loaders, 2)}"


def main(words: Sequence[str]) -> int:
    """Runs the comparison.

    Args:
        words: Command line after `python -m shmloader bench`.

    Returns:
        The exit status, see `DESCRIPTION`.
    """
    arguments = parse(words)
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
            contest.run_all(run, workloads, contest.present(run, loaders))
    except MeasurementFailedError as failure:
        print(f"error: {failure}", file=sys.stderr)
        run.wrong = True
    finally:  # keeps the measurements made before a failure
        os.environ.pop(FOLDER, None)
        unwritten = publish(run)
    missed = any(not verdict.ok for one in run.outcomes for verdict in one.verdicts)
    if run.wrong or (arguments.check and missed):
        return 1
    return NOT_WRITTEN if unwritten else 0


def check_outputs(arguments: argparse.Namespace) -> None:
    """Checks, before anything is measured, that the files asked for can be written.

    Raises:
        UnusablePathError: One cannot.
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


def publish(run: Run) -> list[str]:
    """Prints the tables and writes the files asked for; if one fails, the others are still written.

    Returns:
        The outputs that could not be written.
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
                written.append(f"plot: {picture}")  # noqa: PERF401 - keeps pictures drawn before a failure
    if written:
        with result_files.noted("the list of files", unwritten):
            print("\n".join(written), flush=True)
    return unwritten
