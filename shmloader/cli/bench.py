"""``python -m shmloader bench``: compare loaders with each other and with the limit of this machine."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import shmloader

DESCRIPTION = """\
Run the benchmarks of a checkout of shmloader: torch's loader, this one and other projects' on many kinds
of work, each measurement in a fresh process, in turns, with the same batches from all of them. Beside
the loaders stand the limit (the same work in as many processes, without any loader) and the rate at
which this machine copies memory.

Names may be patterns such as 'startup-*'; --list says which there are. Everything takes an hour or
two, one workload a minute or two. docs/performance.md explains the tables.

The exit status is 0, or
  1    where this project's loader failed, delivered wrong data or (with --check) missed a target
  2    where nothing was measured: the benchmarks, a name or a plugin cannot be found or loaded, a
       number makes no sense, or nothing could be written to the path of --json or --plot
  3    where all is well but the tables, the JSON or a picture could not be written at the end
  130  after Ctrl-C
"""
NOT_MEASURED, NOT_WRITTEN, INTERRUPTED = 2, 3, 130

WINDOW_S, QUICK_WINDOW_S = 2.0, 0.2
SHORTEST_WINDOW_S = 0.05

_ENTRY = Path("benchmarks", "comparison.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's description and options to its parser."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("--workload", action="append", metavar="NAME", help="only these (default: all); may be repeated")
    add("--loader", action="append", metavar="NAME", help="only these (default: all); may be repeated")
    add("--list", action="store_true", help="say which workloads and loaders there are, and end")
    add(
        "--repeats",
        type=whole_number(1),
        default=3,
        metavar="N",
        help="turns of which the median is taken (default: %(default)s; 1 with --quick)",
    )
    add(
        "--seconds",
        type=finite_number(SHORTEST_WINDOW_S),
        metavar="S",
        help=f"length of one timed window (default: {WINDOW_S:g}; {QUICK_WINDOW_S:g} with --quick)",
    )
    add(
        "--workers",
        type=whole_number(1),
        default=2,
        metavar="N",
        help="worker processes of each loader (default: %(default)s)",
    )
    add(
        "--prefetch-factor",
        type=whole_number(1),
        default=2,
        metavar="N",
        help="batches ahead per worker (default: %(default)s)",
    )
    add(
        "--quick",
        action="store_true",
        help="small batches, one turn: a smoke test whose figures mean nothing",
    )
    add(
        "--max-foreign",
        type=finite_number(0.0),
        default=1.0,
        metavar="SHARE",
        help="measure again, up to six times, where others used more than this share of the cores",
    )
    add("--json", type=Path, metavar="PATH", help="write every single measurement, and the machine")
    add(
        "--plot",
        type=Path,
        metavar="DIR",
        help="draw each workload as a PNG in this folder; needs matplotlib",
    )
    add("--check", action="store_true", help="exit with 1 where a target is missed")
    add("--plugin", action="append", default=[], metavar="PATH", help="a Python file that registers more")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmarks of the checkout that this package lies in.

    Args:
        arguments: Parsed options, see :func:`add_arguments`.

    Returns:
        The exit status, see :data:`DESCRIPTION`.
    """
    root = Path(shmloader.__file__).resolve().parent.parent
    if not (root / _ENTRY).is_file():
        print(
            f"error: the benchmarks are not here: {root / _ENTRY} does not exist. They come with the source "
            "tree and not with an installed package: clone the repository and run `make bench` there, or "
            "install it editable (pip install -c constraints.txt -e '.[bench]') and repeat this command.",
            file=sys.stderr,
        )
        return NOT_MEASURED
    if arguments.quick:
        arguments.repeats = 1
    if arguments.seconds is None:
        arguments.seconds = QUICK_WINDOW_S if arguments.quick else WINDOW_S
    sys.path.insert(0, str(root))
    try:
        comparison = importlib.import_module("benchmarks.comparison")
    except ModuleNotFoundError as error:
        print(
            f"error: the benchmarks need {error.name}: pip install -c constraints.txt -e '.[bench]'",
            file=sys.stderr,
        )
        return NOT_MEASURED
    try:
        return cast(int, comparison.main(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def whole_number(smallest: int) -> Callable[[str], int]:
    """Make an argparse type for whole numbers from a smallest one up; all benchmarks read theirs with it."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {smallest:,}")
        return value

    return parse


def finite_number(smallest: float) -> Callable[[str], float]:
    """Make an argparse type for finite numbers from a smallest one up; all benchmarks read theirs with it."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not smallest <= value < math.inf:  # so that nan is refused too
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number >= {smallest:g}")
        return value

    return parse
