"""Numbers and sizes as people write them on the command line."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

MOST_PID = (1 << 31) - 1
"""The largest number that may be a process id."""

_FACTORS = {
    "": 1,
    **{unit + "B": 1000**power for power, unit in enumerate("KMGT", 1)},
    **{unit + "IB": 1024**power for power, unit in enumerate("KMGT", 1)},
    **{unit: 1024**power for power, unit in enumerate("KMGT", 1)},
    "B": 1,
}


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Make an argparse type for whole numbers from ``least`` up, to ``most`` if that is not None."""
    bounds = f">= {least}" if most is None else f"from {least} to {most:,}"

    def parse(text: str) -> int:
        number = int(text) if text.isdecimal() else least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return number

    return parse


def parse_nbytes(text: str) -> int:
    """Read a size, as an argparse type: whole bytes, at least 1.

    It has a unit or none: ``500000``, ``38MB`` (38,000,000), ``38MiB`` or ``38M`` (38 times 1,048,576),
    ``1.5 GB``; upper or lower case.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    factor = _FACTORS.get(match[2].upper()) if match else None
    nbytes = round(float(match[1]) * factor) if match and factor else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500000, 38MB, 36.5MiB or 1G")
    return nbytes


def format_nbytes(nbytes: int | None) -> str:
    """Write a number of bytes with three or four digits and a binary unit; ``no limit`` for None."""
    if nbytes is None:
        return "no limit"
    if nbytes < 1024:
        return f"{nbytes} bytes"
    power = min(4, int(math.log(nbytes, 1000)))
    size, unit = nbytes / 1024**power, " KMGT"[power] + "iB"
    return f"{size:,.1f} {unit}" if size < 100 else f"{size:,.0f} {unit}"
