"""``python -m shmloader bench``: compare loaders with each other and with the limit of this machine."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
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

The exit status is 0, or 1 where this project's loader failed, delivered wrong data or (with --check)
missed a target, 2 where the benchmarks or a name cannot be found, 130 after Ctrl-C.
"""
NOT_FOUND, INTERRUPTED = 2, 130

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
        type=_at_least(1, int, "whole number"),
        default=3,
        metavar="N",
        help="turns of which the median is taken (default: %(default)s; 1 with --quick)",
    )
    add(
        "--seconds",
        type=_at_least(0.05, float, "number"),
        metavar="S",
        help="length of one timed window (default: 2; 0.2 with --quick)",
    )
    add(
        "--workers",
        type=_at_least(1, int, "whole number"),
        default=2,
        metavar="N",
        help="worker processes of each loader (default: %(default)s)",
    )
    add(
        "--prefetch-factor",
        type=_at_least(1, int, "whole number"),
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
        type=_at_least(0.0, float, "number"),
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
            "install it editable (pip install -e '.[bench,peers]') and repeat this command.",
            file=sys.stderr,
        )
        return NOT_FOUND
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        print("error: --plot needs matplotlib: pip install 'shmloader[plots]'", file=sys.stderr)
        return NOT_FOUND
    if arguments.quick:
        arguments.repeats = 1
    if arguments.seconds is None:
        arguments.seconds = 0.2 if arguments.quick else 2.0
    sys.path.insert(0, str(root))
    try:
        comparison = importlib.import_module("benchmarks.comparison")
    except ModuleNotFoundError as error:
        print(
            f"error: the benchmarks need {error.name}: pip install -c constraints.txt -e '.[bench]'",
            file=sys.stderr,
        )
        return NOT_FOUND
    try:
        return cast(int, comparison.main(arguments))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _at_least(smallest: float, kind: Callable[[str], float], what: str) -> Callable[[str], float]:
    """Make an argparse type for numbers from a smallest one up."""

    def parse(text: str) -> float:
        problem = f"{text!r} is not a {what} >= {smallest:g}"
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(problem) from None
        if not number >= smallest:  # so that nan is refused too
            raise argparse.ArgumentTypeError(problem)
        return number

    return parse
