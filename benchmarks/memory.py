"""Measures the memory that a dataset of Python records takes with workers, ranks and spawned processes.

Each measurement has a fresh process to itself. `docs/stores-figures.md` explains the measurements.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine, memory_cgroup
from benchmarks.fresh_process import FreshProcess, MeasurementFailedError
from benchmarks.memory_datasets import CONTESTANTS, SHAPES, available
from benchmarks.memory_process import Spec
from benchmarks.memory_samples import MemorySample, sample_until_exit
from benchmarks.options import NOT_WRITTEN, whole_number
from benchmarks.result_files import UnusablePathError, check_drawing, result_file, write_json
from benchmarks.tables import render_table
from benchmarks.verdicts import Verdict, render_verdicts

LIST = "torch, list"
LEAST_ROWS = 10_000
"""Fewer rows take less memory than a process takes and frees by itself."""

MOST_GROWTH, MOST_PSS, MOST_MESSAGE_NBYTES, MOST_SLOWDOWN = 0.01, 1.15, 64_000, 1.20
MOST_LATER_S = 1.0
MB = 1e6


def run(spec: Spec, cgroup: Path | None = None) -> tuple[dict[str, Any], list[MemorySample]]:
    """Runs one measurement in a fresh process; returns its figures and its memory over time.

    Raises:
        MeasurementFailedError: The process failed, was killed, or took too long.
    """
    setup = (lambda: memory_cgroup.join(cgroup)) if cgroup else None
    what = f"{spec.kind}, {spec.contestant}"
    with FreshProcess(what, "benchmarks.memory_process", json.dumps(asdict(spec)), setup=setup) as fresh:
        # Reading the sizes of 1 GB of mapped pages keeps a core busy, which the timed processes then lack.
        memory = [] if spec.kind in {"spawn", "first"} else sample_until_exit(fresh.process, 0.1)
        figures = fresh.answer()
        fresh.finish()
    return figures, memory


def say(what: str) -> None:
    """Prints the name of a measurement to standard error."""
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


def megabytes(nbytes: float) -> str:
    """Formats bytes."""
    return f"{nbytes / MB:,.1f}"


def compare_growth(arguments: argparse.Namespace, report: dict[str, Any]) -> list[Verdict]:
    """Compares the growth of each worker's private memory."""
    table = [["samples", "rows", "list, MB", "growth of a worker, MB", "of the list", "build s", "samples/s"]]
    verdicts = []
    lines: dict[str, list[MemorySample]] = {}
    for rows in arguments.rows:
        list_nbytes = size_of_list(rows)
        for name in arguments.forked:
            say(f"growth, {name}, {rows:,} rows")
            spec = Spec("growth", name, rows, arguments.workers, epochs=2)
            try:
                figures, memory = run(spec)
            except MeasurementFailedError as failure:
                if CONTESTANTS[name].subject:
                    raise
                print(f"left out: {failure}", file=sys.stderr)  # some other library's trouble
                continue
            report["growth"].append({**asdict(spec), **figures, "list_nbytes": list_nbytes})
            growth = max(figures["growth_nbytes"])
            share = growth / list_nbytes
            table.append(
                [
                    name,
                    f"{rows:,}",
                    megabytes(list_nbytes),
                    megabytes(growth),
                    f"{share:.1%}",
                    f"{figures['build_s']:.2f}",
                    f"{figures['samples_per_s']:,.0f}",
                ]
            )
            if rows == arguments.rows[-1]:
                lines[name] = memory
            if CONTESTANTS[name].subject:
                target = f"a worker grows by under {MOST_GROWTH:.0%} of the list"
                verdicts.append(Verdict(f"{rows:,} rows", target, f"{share:.1%}", share < MOST_GROWTH))
    print(f"\nTwo random epochs, {arguments.workers} forked workers\n")
    print(render_table(table, texts=1))
    draw(arguments, lines)
    return verdicts


def draw(arguments: argparse.Namespace, lines: dict[str, list[MemorySample]]) -> None:
    """Draws memory over time, if a picture was asked for."""
    if arguments.picture is None or not all(lines.values()):
        return
    from benchmarks.memory_picture import draw as draw_lines

    title = f"{arguments.rows[-1]:,} records, two random epochs, {arguments.workers} workers"
    try:
        draw_lines(arguments.picture, lines, title)
        print(f"\npicture: {arguments.picture}")
    except OSError as error:
        print(f"\nno picture: {error}")


def compare_ranks(arguments: argparse.Namespace, report: dict[str, Any]) -> list[Verdict]:
    """Compares the memory of ranks with two workers each."""
    rows = arguments.rows[-1]
    table = [["samples", "processes", "summed PSS, MB", "without data, MB", "store, MB"]]
    verdicts = []
    needed: dict[str, int] = {}
    baselines = [CONTESTANTS[name].baseline for name in arguments.forked]
    for name in dict.fromkeys([*baselines, *arguments.forked]):
        say(f"ranks, {name}, {rows:,} rows")
        spec = Spec("ranks", name, rows, workers=2, ranks=arguments.ranks)
        figures, _ = run(spec)
        report["ranks"].append({**asdict(spec), **figures})
        pss, store = figures["pss_nbytes"], figures["store_nbytes"]
        without = needed.setdefault(CONTESTANTS[name].baseline, pss)  # the baselines come first
        table.append(
            [
                name,
                str(figures["processes"]),
                megabytes(pss),
                megabytes(without),
                megabytes(store) if store else "",
            ]
        )
        if CONTESTANTS[name].subject:
            ratio = (pss - without) / store
            target = f"summed PSS at most {MOST_PSS:g} x the store, plus what is needed without data"
            verdicts.append(
                Verdict(f"{arguments.ranks} ranks x 2 workers", target, f"{ratio:.2f} x", ratio <= MOST_PSS)
            )
    print(f"\n{arguments.ranks} ranks x 2 workers, after an epoch; without the pages of program files\n")
    print(render_table(table, texts=1))
    return verdicts


def compare_spawn(arguments: argparse.Namespace, report: dict[str, Any]) -> list[Verdict]:
    """Compares the message to a spawned worker, and the time to the first batch."""
    table = [["samples", "data, MB", "message to a worker, bytes", "first batch, s"]]
    verdicts = []
    for name in arguments.contestant:
        if name not in {LIST, "shmloader, share(list)"}:
            continue
        seconds: list[list[float]] = [[], []]
        message = 0
        for _ in range(arguments.repeats):
            for number, rows in enumerate((1_000, arguments.blocks)):
                say(f"spawn, {name}, {rows:,} KB")
                spec = Spec("spawn", name, rows, workers=1 if arguments.quick else 2)
                figures, _ = run(spec)
                report["spawn"].append({**asdict(spec), **figures})
                seconds[number].append(figures["first_batch_s"])
                message = figures["message_nbytes"]
                if len(seconds[number]) == arguments.repeats:
                    first = min(seconds[number])
                    table.append([name, f"{rows * 1024 / MB:,.0f}", f"{message:,}", f"{first:.2f}"])
        if CONTESTANTS[name].subject:
            ratio = min(seconds[1]) / min(seconds[0])
            what = f"spawn, {arguments.blocks * 1024 / MB:,.0f} MB"
            target = f"message to a worker under {MOST_MESSAGE_NBYTES:,} bytes"
            verdicts.append(Verdict(what, target, f"{message:,}", message < MOST_MESSAGE_NBYTES))
            target = f"first batch at most {MOST_SLOWDOWN - 1:.0%} later than with 1 MB"
            verdicts.append(Verdict(what, target, f"{ratio - 1:+.0%}", ratio <= MOST_SLOWDOWN))
    print(f"\nSpawned workers; the quickest of {arguments.repeats}\n")
    print(render_table(table, texts=1))
    return verdicts


def compare_shapes(arguments: argparse.Namespace, report: dict[str, Any]) -> list[Verdict]:
    """Compares all ways to keep records of several shapes, by start method and number of workers."""
    table = [
        [
            "records",
            "samples",
            "workers",
            "a worker's private MB",
            "PSS of all, MB",
            "build s",
            "first batch s",
        ]
    ]
    for shape in arguments.shape:
        for method in arguments.method:
            for workers in arguments.shape_workers:
                names = [name for name in arguments.contestant if shape in CONTESTANTS[name].shapes]
                for name in dict.fromkeys(["torch, nothing", *names]):
                    if (method == "fork" and not CONTESTANTS[name].forks) or (
                        not workers and method != "fork"
                    ):
                        continue
                    say(f"{shape}, {name}, {workers} workers, {method}")
                    spec = Spec("epochs", name, arguments.shape_rows, workers, 2, shape=shape, method=method)
                    figures, _ = run(spec)
                    report["shapes"].append({**asdict(spec), **figures})
                    how = f"{workers} {method}" if workers else "none"
                    private, pss = figures["worker_private_nbytes"], figures["pss_nbytes"]
                    times = [f"{figures[key]:.2f}" for key in ("build_s", "first_batch_s")]
                    table.append([shape, name, how, megabytes(private), megabytes(pss), *times])
    if arguments.picture is not None:
        from benchmarks.memory_picture import draw_shapes

        draw_shapes(arguments.picture, report["shapes"])
    print(f"\n{arguments.shape_rows:,} records, two random epochs; PSS without pages of program files\n")
    print(render_table(table, texts=3))
    return []


def compare_first_batches(arguments: argparse.Namespace, report: dict[str, Any]) -> list[Verdict]:
    """Compares the time to the first batch of many workers with that of a loader without data."""
    table = [["start method", "samples", "first batch, s", "least", "most"]]
    verdicts = []
    rows, workers = arguments.paths, arguments.start_workers
    for method in [method for method in arguments.method if method != "fork"]:
        names = ("shmloader, nothing", "shmloader, share(list)", "torch, list")
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.repeats):
            for name, times in seconds.items():
                say(f"first batch, {name}, {workers} workers, {method}")
                spec = Spec("first", name, rows, workers, method=method)
                figures, _ = run(spec)
                report["start"].append({**asdict(spec), **figures})
                times.append(figures["first_batch_s"])
        for name, times in seconds.items():
            table.append([method, name, *(f"{how(times):.2f}" for how in (median, min, max))])
        without, shared, _ = (median(times) for times in seconds.values())
        target = f"first batch under {MOST_LATER_S:g} s later than without data"
        later = shared - without
        verdicts.append(Verdict(f"{method}, {rows:,} paths", target, f"{later:+.2f} s", later < MOST_LATER_S))
    print(f"\n{rows:,} paths, {workers} workers; medians of {arguments.repeats}\n")
    print(render_table(table, texts=2))
    return verdicts


def compare_limited(arguments: argparse.Namespace, report: dict[str, Any]) -> list[Verdict]:
    """Runs all under a memory cgroup limit in which the list's copies in the workers do not fit."""
    rows = arguments.rows[-1]
    try:
        limit = arguments.cgroup_limit or find_limit(arguments, rows)
    except memory_cgroup.NoCgroupError as error:
        return skip_limited(error, report)
    table = [["samples", "rows", "limit, MB", "result", "killed processes"]]
    verdicts = []
    for name in arguments.forked:
        say(f"under a limit of {megabytes(limit)} MB, {name}")
        try:
            with memory_cgroup.limited(limit) as folder:
                spec = Spec("growth", name, rows, arguments.workers, epochs=2)
                try:
                    run(spec, folder)
                    result = "finished"
                except MeasurementFailedError as failure:
                    result = "killed" if memory_cgroup.was_killed(folder) else f"failed: {failure}"
                killed = memory_cgroup.was_killed(folder)
        except memory_cgroup.NoCgroupError as error:
            return skip_limited(error, report)
        report["limited"].append({**asdict(spec), "limit": limit, "result": result, "killed": killed})
        table.append([name, f"{rows:,}", megabytes(limit), result, str(killed)])
        if CONTESTANTS[name].subject:
            verdicts.append(Verdict("under a limit", "finishes", result, result == "finished"))
    print(f"\nUnder a memory cgroup limit, {arguments.workers} forked workers, two random epochs\n")
    print(render_table(table, texts=1))
    return verdicts


def size_of_list(rows: int) -> int:
    """Measures the bytes that the list of all records takes."""
    say(f"what the list takes, {rows:,} rows")
    figures, _ = run(Spec("size", LIST, rows, workers=0))
    return int(figures["data_nbytes"])


def find_limit(arguments: argparse.Namespace, rows: int) -> int:
    """The limit: the bytes that the processes need without data, and one and a half times the list."""
    list_nbytes = size_of_list(rows)
    with memory_cgroup.limited(1 << 40) as folder:
        run(Spec("growth", "torch, nothing", rows, arguments.workers, epochs=2), folder)
        return memory_cgroup.peak_nbytes(folder) + int(1.5 * list_nbytes)


def skip_limited(error: Exception, report: dict[str, Any]) -> list[Verdict]:
    """Says that nothing can run under a limit here."""
    print(f"\nskipped the runs under a memory limit: {error}")
    report["limited"] = str(error)
    return []


PARTS: dict[str, Callable[[argparse.Namespace, dict[str, Any]], list[Verdict]]] = {
    "growth": compare_growth,
    "ranks": compare_ranks,
    "spawn": compare_spawn,
    "shapes": compare_shapes,
    "start": compare_first_batches,
    "limited": compare_limited,
}


def parse(command_line: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--part", action="append", choices=list(PARTS), help="only this one; may be repeated")
    add("--contestant", action="append", choices=available(), help="only this one; may be repeated")
    rows, count = whole_number(LEAST_ROWS), whole_number(1)
    add("--rows", type=rows, action="append", help="records; may be repeated (default 500,000 and 2,000,000)")
    add("--workers", type=count, default=4, help="forked workers of the growth and limit parts (default 4)")
    add("--blocks", type=count, default=1_000_000, help="KB of data for spawned workers (default 1,000,000)")
    add(
        "--repeats",
        type=count,
        default=3,
        help="runs with spawned workers, whose quickest counts (default 3)",
    )
    add(
        "--cgroup-limit",
        type=count,
        nargs="?",
        const=0,
        metavar="BYTES",
        help="also run under a memory cgroup limit; without BYTES what the processes need without data, "
        "and one and a half times the list",
    )
    add("--shape", action="append", choices=list(SHAPES), help="of records; may be repeated (default all)")
    methods = multiprocessing.get_all_start_methods()
    add(
        "--method",
        action="append",
        choices=methods,
        help="for shapes and start; may be repeated (default all)",
    )
    add("--shape-rows", type=count, default=100_000, help="records of the shapes (default 100,000)")
    number = whole_number(0)
    add("--shape-workers", type=number, action="append", help="0 and more; may be repeated (default 2)")
    add("--ranks", type=count, default=2, help="ranks with two workers each (default 2)")
    add("--paths", type=count, default=1_000_000, help="records of the start part (default 1,000,000)")
    add("--start-workers", type=count, default=8, help="workers of the start part (default 8)")
    add("--quick", action="store_true", help="few records: a smoke test, its figures mean nothing")
    add("--json", type=result_file, metavar="PATH", help="write everything here")
    add(
        "--picture",
        type=result_file,
        metavar="PATH",
        help="draw memory over time, or of the shapes by number of workers, as a PNG (needs matplotlib)",
    )
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args(command_line)
    if arguments.picture is not None:
        try:
            check_drawing("matplotlib.figure")
        except UnusablePathError as error:
            parser.error(f"argument --picture: {error}")
    if arguments.quick:
        arguments.rows, arguments.blocks, arguments.repeats = arguments.rows or [20_000], 10_000, 1
        arguments.shape_rows, arguments.paths, arguments.start_workers = 2_000, 2_000, 2
    arguments.rows = sorted(arguments.rows or [500_000, 2_000_000])
    # In the order of the table, not of the command line.
    arguments.contestant = [name for name in available() if name in (arguments.contestant or available())]
    arguments.forked = [name for name in arguments.contestant if CONTESTANTS[name].forks]
    arguments.part = arguments.part or [name for name in PARTS if name not in {"limited", "shapes", "start"}]
    arguments.shape = arguments.shape or list(SHAPES)
    arguments.method = arguments.method or methods
    arguments.shape_workers = arguments.shape_workers or [2]
    if arguments.cgroup_limit is not None and "limited" not in arguments.part:
        arguments.part.append("limited")
    return arguments


def main(command_line: list[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
        The exit status: 1 if a target is missed and `--check` was given; 3 if the JSON was not written.
    """
    arguments = parse(command_line)
    report: dict[str, Any] = {"machine": machine.describe(), **{part: [] for part in PARTS}}
    verdicts: list[Verdict] = []
    written = True
    for part in arguments.part:
        verdicts += PARTS[part](arguments, report)
    print(f"\n{render_verdicts(verdicts)}" if verdicts else "")
    if arguments.json:
        report["targets"] = [asdict(verdict) for verdict in verdicts]
        written = write_json(arguments.json, report)
    if arguments.check and not all(verdict.ok for verdict in verdicts):
        return 1
    return 0 if written else NOT_WRITTEN


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MeasurementFailedError as failure:
        sys.exit(f"error: {failure}")
