"""Runs `python -m shmloader memory` over torch's own loader: how soon it names the cause, and what it costs.

The program keeps a list of dicts and reads it with torch's loader, once for each start method.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch.utils.data

from benchmarks.fresh_process import ROOT
from benchmarks.memory_datasets import Rows, records
from benchmarks.options import whole_number
from benchmarks.result_files import result_file
from benchmarks.tables import render_table
from benchmarks.verdicts import Verdict, render_verdicts

SAID = "shmloader memory: "
MOST_S, MOST_COST = 20.0, 0.02
LOADING = "loading"
BATCH_SIZE = 256
STEP_S = 0.005  # of the program, in each batch


@dataclass(frozen=True)
class Outcome:
    """One run: seconds from the program's first `iter()` to the finding, its text, the cost in cores."""

    method: str
    found_s: float | None
    text: str
    cost: float
    private_mb: int


def be_program(method: str, rows: int, workers: int, seconds: float) -> None:
    """The program: reads random epochs for so many seconds."""
    train = Rows(list(records(rows)))
    loader: Any = torch.utils.data.DataLoader(
        train,  # type: ignore[arg-type]
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    print(LOADING, flush=True)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in loader:
            time.sleep(STEP_S)
            if time.monotonic() > end_s:
                break


def lines_with_times(command: subprocess.Popen[str]) -> Iterator[tuple[float, str]]:
    """The lines of a command's output and errors, with the time at which each came."""
    assert command.stdout is not None
    for line in command.stdout:
        yield time.monotonic(), line.rstrip()


def measure(method: str, arguments: argparse.Namespace) -> Outcome:
    """Runs the command over the program once."""
    program = [method, str(arguments.rows), str(arguments.workers), str(arguments.seconds)]
    words = [
        *(sys.executable, "-m", "shmloader", "memory"),
        *(["--picture", str(arguments.picture)] if arguments.picture else []),
        "--",
        *(sys.executable, "-m", "benchmarks.memory_command", "--program", *program),
    ]
    began_s, found_s, text, cost, private_mb = time.monotonic(), None, "", 0.0, 0
    lines: list[str] = []
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as command:
        measured = psutil.Process(command.pid)
        times = measured.cpu_times()
        for now_s, line in lines_with_times(command):
            lines.append(line)
            if line == LOADING:
                began_s, times = now_s, measured.cpu_times()
            elif line.startswith(SAID) and "share(" in line and not text:
                found_s, text = now_s - began_s, line.removeprefix(SAID)
            elif line.startswith("at its peak"):
                later = measured.cpu_times()
                cost = (later.user + later.system - times.user - times.system) / (now_s - began_s)
            elif line.lstrip().startswith("worker "):
                private_mb = max(private_mb, int(line.split()[5].replace(",", "")))
    if command.returncode != 0:
        raise SystemExit("\n".join([*lines, f"error: the command ended with {command.returncode}"]))
    return Outcome(method, found_s, text, cost, private_mb)


def main(command_line: list[str] | None = None) -> int:
    """Runs the benchmark; 1 if a target is missed and `--check` was given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    count = whole_number(1)
    parser.add_argument("--rows", type=count, default=2_000_000, help="dicts (default 2,000,000)")
    parser.add_argument("--workers", type=count, default=2, help="workers (default 2)")
    parser.add_argument("--seconds", type=count, default=40, help="the program loads so long (default 40)")
    methods = multiprocessing.get_all_start_methods()
    parser.add_argument("--method", action="append", choices=methods, help="only this start method")
    picture = "draw the memory of the last run's program over time (needs matplotlib)"
    parser.add_argument("--picture", type=result_file, metavar="PNG", help=picture)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--program", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(command_line)
    if arguments.program:
        method, rows, workers, seconds = arguments.program
        be_program(method, int(rows), int(workers), float(seconds))
        return 0
    table = [["start method", "named after, s", "a worker's private MB", "cost, % of a core", "words"]]
    verdicts = []
    for method in arguments.method or methods:
        print(f"measuring {method} ...", file=sys.stderr, flush=True)
        outcome = measure(method, arguments)
        named = "never" if outcome.found_s is None else f"{outcome.found_s:.1f}"
        figures = [named, f"{outcome.private_mb:,}", f"{outcome.cost:.2%}"]
        table.append([method, *figures, outcome.text])
        soon = outcome.found_s is not None and outcome.found_s < MOST_S
        verdicts.append(Verdict(method, f"names cause and cure within {MOST_S:g} s", named, soon))
        target = f"costs under {MOST_COST:.0%} of a core"
        verdicts.append(Verdict(method, target, f"{outcome.cost:.2%}", outcome.cost < MOST_COST))
    print(f"\n{arguments.rows:,} dicts, torch's loader, {arguments.workers} workers\n")
    print(render_table(table, texts=1))
    print(f"\n{render_verdicts(verdicts)}")
    return 1 if arguments.check and not all(verdict.ok for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
