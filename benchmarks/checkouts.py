"""Two checkouts of this project beside each other: what a change does to the speed of its loader.

``python -m benchmarks.checkouts ../before --workload tiny --workload rows`` loads with the loader of this
checkout and with that of another one, say ``git worktree add ../before HEAD~1``. Each has a process of its
own and loads for a second in turn, while the other one sleeps; which of the two begins changes from turn to
turn. A machine's speed drifts by more than most changes bring, and two loads a second apart have it nearly
the same: so what counts is the ratio within a turn, and its median over all turns. Where its memory lies
makes one process quicker than another for as long as it lives, so there are several rounds of fresh ones.
Workloads and consumer are those of this checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.checkout_process import Turn
from benchmarks.real_files import FOLDER
from benchmarks.summary import render_table
from benchmarks.workloads import STARTUP, WORKLOADS
from shmloader.cli.bench import SHORTEST_WINDOW_S, finite_number, whole_number

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).with_name("checkout_process.py")

TITLES = {
    "batches_per_s": "batches/s",
    "next_us": "us in next()",
    "main_cpu_us": "CPU us, main process",
    "workers_cpu_us": "CPU us, workers",
}


def ratios(turns: list[tuple[Turn, Turn]]) -> dict[str, tuple[float, float, float]]:
    """Compares this checkout with the other one.

    Args:
        turns: What the two did in each turn, this checkout's first.

    Returns:
        For each figure its median here, its median there, and the median of what one is to the other within
        a turn; of processor time what one is to the other over all turns.
    """
    answer = {}
    for field in TITLES:
        pairs = [(getattr(here, field), getattr(there, field)) for here, there in turns]
        heres, theres = zip(*pairs, strict=True)
        if field.endswith("cpu_us"):  # comes in ticks, of which a turn may have few or none
            ratio = sum(heres) / sum(theres) if sum(theres) else math.nan
        else:
            ratio = median(here / there for here, there in pairs)
        answer[field] = median(heres), median(theres), ratio
    return answer


class Side:
    """One checkout's process."""

    def __init__(self, checkout: Path, name: str, arguments: argparse.Namespace, folder: str) -> None:
        self.checkout = checkout
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(checkout), name, str(arguments.workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(checkout), FOLDER: folder},
        )
        self._ask("")

    def load(self, seconds: float) -> Turn:
        """Lets it load for so long."""
        return Turn(**json.loads(self._ask(str(seconds))))

    def _ask(self, question: str) -> str:
        asked, answers = self.process.stdin, self.process.stdout
        assert asked is not None
        assert answers is not None
        with contextlib.suppress(BrokenPipeError):  # it says nothing then
            asked.write(f"{question}\n")
            asked.flush()
        if not (answer := answers.readline()):
            sys.exit(f"error: the process of {self.checkout} ended with {self.process.wait()}")
        return answer

    def close(self) -> None:
        """Ends it."""
        self.process.communicate()


def compare(name: str, arguments: argparse.Namespace) -> None:
    """Runs one workload with both checkouts in turn and prints what it was."""
    turns = []
    for number in range(arguments.rounds):
        turns += _round(name, arguments, number)
    table = [
        [TITLES[field], f"{here:,.1f}", f"{there:,.1f}", f"{ratio:.3f}"]
        for field, (here, there, ratio) in ratios(turns).items()
    ]
    print(f"{name}, medians of {len(turns)} turns in {arguments.rounds} rounds\n")
    print(f"{render_table([['', 'this checkout', 'the other', 'ratio'], *table], texts=1)}\n", flush=True)


def _round(name: str, arguments: argparse.Namespace, number: int) -> list[tuple[Turn, Turn]]:
    """Some turns of two fresh processes; over all rounds each is started, and loads, first in every other."""
    with tempfile.TemporaryDirectory(prefix="shmloader-bench-") as folder, ExitStack() as ends:
        sides = {}
        for checkout in (arguments.other, ROOT) if number % 2 else (ROOT, arguments.other):
            sides[checkout] = Side(checkout, name, arguments, folder)
            ends.callback(sides[checkout].close)
        turns = []
        for turn in range(arguments.turns):
            order = sorted(sides, key=lambda checkout: (checkout == ROOT) == bool((number + turn) % 2))
            loaded = {checkout: sides[checkout].load(arguments.seconds) for checkout in order}
            turns.append((loaded[ROOT], loaded[arguments.other]))
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, workload in WORKLOADS.items() if workload.kind != STARTUP]
    add = parser.add_argument
    add("other", type=lambda text: Path(text).resolve(), help="folder of the other checkout")
    add("--workload", action="append", choices=names, help="what to load; may be repeated (default: tiny)")
    count, seconds = whole_number(1), finite_number(SHORTEST_WINDOW_S)
    add("--rounds", type=count, default=4, help="how often fresh processes are started (%(default)s)")
    add("--turns", type=count, default=5, help="how often each of them loads (%(default)s)")
    add("--seconds", type=seconds, default=1.0, help="how long in each turn (%(default)s)")
    add("--workers", type=count, default=2, help="worker processes (%(default)s)")
    arguments = parser.parse_args()
    if not (arguments.other / "shmloader" / "__init__.py").is_file():
        parser.error(f"{arguments.other} is no checkout: it has no shmloader/__init__.py")
    if arguments.other == ROOT:
        parser.error("that is this checkout: copy it, to see by how much one differs from itself")
    for name in arguments.workload or ["tiny"]:
        compare(name, arguments)


if __name__ == "__main__":
    main()
