"""Compares two checkouts of this project: the effect of a change on the speed of its loader.

`python -m benchmarks.checkouts ../before` loads every workload with the loader of this checkout and with
that of another one, say `git worktree add ../before HEAD~1`. Each has a process of its own. The two load for
half a second in turn, while the other one sleeps; the one that begins changes from turn to turn. A machine's
speed drifts by more than most changes gain, but hardly within a second. So the result is the ratio within a
turn, as a median over all turns. The place of its memory makes one process quicker than another for as long
as it lives, so there are several rounds of fresh processes. For a start-up each turn has fresh processes.
Workloads, consumer and interpreter are those of this checkout.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.checkout_process import Turn
from benchmarks.fresh_process import ROOT, FreshProcess, MeasurementFailedError
from benchmarks.options import SHORTEST_WINDOW_S, finite_number, whole_number
from benchmarks.real_files import FOLDER
from benchmarks.tables import table_of
from benchmarks.workloads import STARTUP, WORKLOADS

LEAST_THROUGHPUT, MOST_PROCESSOR_TIME = 0.97, 1.03
"""Bounds of `--check`, as shares of the other checkout's figures."""

LARGE_NBYTES = 10**8
"""Start-ups with more data are measured only when they are named."""


@dataclass(frozen=True)
class Comparison:
    """One workload with both checkouts: medians of each, and ratios of this one to the other.

    Attributes:
        throughput: Batches per second: the median of the ratios within a turn.
        in_next: Time in `next()`, likewise.
        processor_time: Processor time per batch of all processes, over all turns: the clock ticks every 10
            ms, so one turn may have only a few ticks.
        main_time: Processor time of the main process alone.
        workers_time: Processor time of the workers alone.
    """

    workload: str
    turns: int
    here_per_s: float
    there_per_s: float
    throughput: float
    in_next: float
    here_cpu_us: float
    there_cpu_us: float
    processor_time: float
    main_time: float
    workers_time: float

    @property
    def ok(self) -> bool:
        """Whether this checkout is within the allowed speed and cost."""
        return self.throughput >= LEAST_THROUGHPUT and not self.processor_time > MOST_PROCESSOR_TIME


def compare_turns(workload: str, turns: list[tuple[Turn, Turn]]) -> Comparison:
    """Compares this checkout with the other one.

    Args:
        workload: Its name.
        turns: The results of each turn, this checkout's first.
    """
    heres, theres = zip(*turns, strict=True)
    main = [[turn.main_cpu_us for turn in side] for side in (heres, theres)]
    workers = [[turn.workers_cpu_us for turn in side] for side in (heres, theres)]
    both = [list(map(sum, zip(*side, strict=True))) for side in zip(main, workers, strict=True)]
    return Comparison(
        workload,
        len(turns),
        median(turn.batches_per_s for turn in heres),
        median(turn.batches_per_s for turn in theres),
        median(here.batches_per_s / there.batches_per_s for here, there in turns),
        median(here.next_us / there.next_us for here, there in turns),
        *(median(cpu_us) for cpu_us in both),
        *(sum(here) / sum(there) if sum(there) else math.nan for here, there in (both, main, workers)),
    )


class Side:
    """One checkout's process.

    Its current folder, which is also the first of its path, holds only a link to the checkout's package. So
    workers started by any method import that package, and the benchmarks of this checkout.
    """

    def __init__(self, checkout: Path, name: str, workers: int, written: str, ends: ExitStack) -> None:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="shmloader-bench-")))
        (folder / "shmloader").symlink_to(checkout / "shmloader", target_is_directory=True)
        self._fresh = FreshProcess(
            f"the process of {checkout}",
            "benchmarks.checkout_process",
            *(str(checkout), name, str(workers)),
            environment={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", FOLDER: written},
            folder=folder,
        )
        ends.enter_context(self._fresh)
        self._ask(None)  # all is warm

    def load(self, seconds: float) -> Turn:
        """Lets it load for the given time."""
        return Turn(**self._ask(seconds))

    def finish(self) -> None:
        """Lets it end by itself, so that it removes its temporary files."""
        self._fresh.finish()

    def _ask(self, seconds: float | None) -> dict[str, float]:
        self._fresh.ask(seconds)
        answer: dict[str, float] = self._fresh.answer()
        return answer


def compare(name: str, arguments: argparse.Namespace) -> Comparison:
    """Runs one workload with both checkouts in turn."""
    turns: list[tuple[Turn, Turn]] = []
    if WORKLOADS[name].kind == STARTUP:
        for number in range(arguments.turns):
            turns += play_round(name, arguments, number, 1)
    else:
        for number in range(arguments.rounds):
            turns += play_round(name, arguments, number, arguments.turns)
    return compare_turns(name, turns)


def play_round(name: str, arguments: argparse.Namespace, number: int, turns: int) -> list[tuple[Turn, Turn]]:
    """Plays some turns of two fresh processes. The one that starts and loads first alternates."""
    with tempfile.TemporaryDirectory(prefix="shmloader-bench-") as written, ExitStack() as ends:
        sides = {}
        for checkout in (arguments.other, ROOT) if number % 2 else (ROOT, arguments.other):
            sides[checkout] = Side(checkout, name, arguments.workers, written, ends)
        played = []
        for turn in range(turns):
            order = sorted(sides, key=lambda checkout: (checkout == ROOT) == bool((number + turn) % 2))
            loaded = {checkout: sides[checkout].load(arguments.seconds) for checkout in order}
            played.append((loaded[ROOT], loaded[arguments.other]))
        for side in sides.values():
            side.finish()
        return played


def _rate(per_s: float) -> str:
    """A rate with one decimal; for a start-up, which may take ten seconds, with four."""
    return f"{per_s:,.1f}" if per_s >= 10 else f"{per_s:.4f}"


COLUMNS = (
    ("workload", lambda one: one.workload),
    ("batches/s, here", lambda one: _rate(one.here_per_s)),
    ("there", lambda one: _rate(one.there_per_s)),
    ("throughput", lambda one: f"{one.throughput:.3f}"),
    ("time in next()", lambda one: f"{one.in_next:.3f}"),
    ("CPU us/batch, here", lambda one: f"{one.here_cpu_us:,.0f}"),
    ("there", lambda one: f"{one.there_cpu_us:,.0f}"),
    ("processor time", lambda one: f"{one.processor_time:.3f}"),
    ("of the main process", lambda one: f"{one.main_time:.3f}"),
    ("of workers", lambda one: f"{one.workers_time:.3f}"),
)


def names(asked: list[str] | None) -> list[str]:
    """The workloads to run: those asked for, or all that can run here and are not large."""
    if asked:
        return asked
    return [
        name
        for name, one in WORKLOADS.items()
        if one.dataset_nbytes < LARGE_NBYTES and not (one.missing and one.missing())
    ]


def main() -> int:
    """Compares two checkouts; 1 if one fails, or with `--check` if this one is slower or dearer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, count = parser.add_argument, whole_number(1)
    add("other", type=lambda text: Path(text).resolve(), help="folder of the other checkout")
    add("--workload", action="append", choices=WORKLOADS, help="what to load; may be repeated (default: all)")
    add("--rounds", type=count, default=2, help="how often fresh processes are started (%(default)s)")
    add("--turns", type=count, default=5, help="how often each of them loads (%(default)s)")
    add(
        "--seconds",
        type=finite_number(SHORTEST_WINDOW_S),
        default=0.5,
        help="how long in each turn (%(default)s)",
    )
    add("--workers", type=count, default=2, help="worker processes (%(default)s)")
    add(
        "--check",
        action="store_true",
        help=f"exit with 1 where throughput is under {LEAST_THROUGHPUT} or processor time over "
        f"{MOST_PROCESSOR_TIME}",
    )
    arguments = parser.parse_args()
    if not (arguments.other / "shmloader" / "__init__.py").is_file():
        parser.error(f"{arguments.other} is no checkout: it has no shmloader/__init__.py")
    if arguments.other == ROOT:
        parser.error("that is this checkout: copy it, to see by how much one differs from itself")
    compared = []
    try:
        for name in names(arguments.workload):
            one = compare(name, arguments)
            compared.append(one)
            figures = f"throughput {one.throughput:.3f}, processor time {one.processor_time:.3f}"
            print(f"{name}: {figures} ({one.turns} turns)", file=sys.stderr, flush=True)
    except MeasurementFailedError as failure:
        sys.exit(f"error: {failure}")
    finally:
        if compared:
            print("Ratios are of this checkout to the other one: throughput above 1 is quicker,")
            print("processor time below 1 is cheaper.\n")
            print(table_of(COLUMNS, compared, texts=1))
    return 1 if arguments.check and not all(one.ok for one in compared) else 0


if __name__ == "__main__":
    sys.exit(main())
