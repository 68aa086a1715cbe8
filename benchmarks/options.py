"""Numbers on the command lines of the benchmarks, and the exit statuses that they share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

NOT_MEASURED, NOT_WRITTEN = 2, 3
"""Exit statuses: an option was refused before anything was measured; results could not be written."""

SHORTEST_WINDOW_S = 0.05


def whole_number(smallest: int) -> Callable[[str], int]:
    """Makes an argparse type for whole numbers from a smallest one up."""

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
    """Makes an argparse type for finite numbers from a smallest one up."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not smallest <= value < math.inf:  # so that nan is refused too
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number >= {smallest:g}")
        return value

    return parse
