"""The comparison with more and more workers: a table, and a picture.

Run from a checkout, on a machine with as many cores as there are workers, and one more:

    python -m benchmarks.scaling [--workers N]... [--workload NAME]... [--plot FILE] [--json FILE]

Each number of workers is one run of `python -m shmloader bench`, with its checks and turns; the figures are
its medians. Numbers of workers above the number of usable cores are measured too, and marked. After each run
the results so far are printed, and written; a second table tells what shmloader's workers and its main
process did meanwhile. Peers that are not installed are named at the start. Exit status: 0, or that of the run
that failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import peers  # noqa: F401 - registers its loaders
from benchmarks.loaders import LOADERS
from benchmarks.machine import describe, describe_in_words
from benchmarks.options import NOT_WRITTEN, finite_number, whole_number
from benchmarks.result_files import noted, result_file, write_json
from benchmarks.tables import or_empty, render_table

WORKERS = (1, 2, 4, 8, 15)
OWN_COLLATE = ("own-stack", "own-boxes", "own-zeros", "own-padded", "own-whole", "own-encoded")
WORKLOADS = ("images", "rows", "png", *OWN_COLLATE)
CONTESTANTS = ("shmloader", "torch-*", "spdl-arena", "seqtools")

Rates = dict[str, dict[str, dict[int, float]]]  # samples per second by workload, loader and workers


def measure(workers: int, given: argparse.Namespace) -> dict[str, Any] | int:
    """One comparison: its JSON, or its exit status if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        words = ["--workers", str(workers), "--json", str(path), "--seconds", str(given.seconds)]
        words += ["--repeats", str(given.repeats), *(["--quick"] if given.quick else [])]
        for name, values in (("--workload", given.workload), ("--loader", given.loader)):
            for value in values:
                words += [name, value]
        done = subprocess.run([sys.executable, "-m", "shmloader", "bench", *words], check=False)
        if done.returncode:
            return done.returncode
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result


def rates_of(results: dict[int, dict[str, Any]]) -> Rates:
    """The rates of all comparisons, by their number of workers."""
    rates: Rates = {}
    for workers, result in results.items():
        for workload, outcome in result["workloads"].items():
            for name, row in outcome["contestants"].items():
                rates.setdefault(workload, {}).setdefault(name, {})[workers] = row["samples_per_s"]
    return rates


def table(rates: Rates, workers: Sequence[int], usable: int) -> str:
    """A row for each loader and workload, a column for each number of workers."""
    heads = [f"{count}{' *' if count >= usable else ''}" for count in workers]
    rows = [
        [workload, name, *(or_empty(found.get(count), ",.0f") for count in workers)]
        for workload, loaders in rates.items()
        for name, found in loaders.items()
    ]
    text = render_table([["workload", "samples/s", *heads], *rows], 2)
    return f"{text}\n\n\\* more processes than the {usable} usable cores\n" if "*" in "".join(heads) else text


def shares_of(found: dict[str, Any]) -> list[float]:
    """The shares of time of one run of shmloader's, in %: see the heads of `shares_table`."""
    passed_s = found["iterating_s"]
    workers_s = passed_s * found["num_workers"]
    made_s, slots_s = found["workers_made_s"], found["workers_wait_for_slots_s"]
    waits_s = found["wait_for_workers_s"]
    parts = made_s / workers_s, slots_s / workers_s, 1 - (made_s + slots_s) / workers_s, waits_s / passed_s
    return [100 * part for part in (*parts, 1 - waits_s / passed_s)]


def shares_table(results: dict[int, dict[str, Any]]) -> str:
    """What workers and the main process did, medians of the runs; a row for each number of workers."""
    heads = [
        "workers make batches, %",
        "wait for a slot",
        "for a task",
        "main process waits, %",
        "reads and sends",
    ]
    rows = []
    for workers, result in results.items():
        for workload, outcome in result["workloads"].items():
            row = outcome["contestants"].get("shmloader")
            runs = [shares_of(run["statistics"]) for run in row["runs"] if run["statistics"]] if row else []
            if runs:
                medians = [f"{statistics.median(part):.0f}" for part in zip(*runs, strict=True)]
                rows.append([workload, str(workers), *medians])
    return render_table([["workload", "workers", *heads], *rows], 2) if rows else ""


def missing(names: Sequence[str]) -> list[str]:
    """The peers among loaders that are not installed, with the reason; names may be patterns."""
    chosen = [one for one in LOADERS.values() if any(fnmatch.fnmatch(one.name, name) for name in names)]
    return [f"{one.name} is left out: {reason}" for one in chosen if (reason := one.missing())]


def draw(path: Path, rates: Rates) -> None:
    """Draws the rates over the workers, one field for each workload, three in a row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, rows = min(3, len(rates)), -(-len(rates) // 3)
    figure = Figure(figsize=(4.5 * columns, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (workload, loaders) in enumerate(rates.items()):
        axes = figure.add_subplot(rows, columns, place + 1, title=workload, xlabel="workers")
        for name, found in loaders.items():
            style = "--" if name == "limit" else "-"
            axes.plot(list(found), list(found.values()), style, marker="o", label=name)
        axes.set_ylabel("samples/s")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measure, and print a table; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", action="append", type=whole_number(1), metavar="N")
    parser.add_argument("--workload", action="append", metavar="NAME")
    parser.add_argument("--loader", action="append", metavar="NAME")
    parser.add_argument("--seconds", type=finite_number(0.05), default=2.0, metavar="S")
    parser.add_argument("--repeats", type=whole_number(1), default=3, metavar="N")
    parser.add_argument("--quick", action="store_true", help="small batches: its figures mean nothing")
    parser.add_argument("--plot", type=result_file, metavar="FILE")
    parser.add_argument("--json", type=result_file, metavar="FILE")
    given = parser.parse_args()
    given.workers = given.workers or list(WORKERS)
    given.workload = given.workload or list(WORKLOADS)
    given.loader = given.loader or list(CONTESTANTS)
    machine, results = describe(), dict[int, dict[str, Any]]()
    print(describe_in_words(machine), *missing(given.loader), sep="\n", flush=True)
    failures: list[str] = []
    for workers in given.workers:
        result = measure(workers, given)
        if isinstance(result, int):
            return result
        results[workers] = result
        rates = rates_of(results)
        print(table(rates, list(results), len(os.sched_getaffinity(0))))
        print(shares_table(results), flush=True)
        if given.plot is not None:
            with noted(str(given.plot), failures):
                draw(given.plot, rates)
        if given.json is not None and not write_json(given.json, {"machine": machine, "rates": rates}):
            return NOT_WRITTEN
    return NOT_WRITTEN if failures else 0


if __name__ == "__main__":
    sys.exit(main())
