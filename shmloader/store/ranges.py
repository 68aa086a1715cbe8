"""Finding the chunks, or row groups, that many rows lie in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.int64]]

_MOST_SECTIONS = 1 << 14


class RangeFinder:
    """Finds in which of some consecutive ranges rows lie, given the first row of each, and their number.

    Rows are divided into sections, which begin at multiples of a power of two. Each lies in one range, or has
    rows of two at most, since it is not longer than the shortest. Looking it up is quicker than a search.
    """

    def __init__(self, starts: Sequence[int]) -> None:
        self._starts = np.array(starts, np.int64)
        inside, total = math.gcd(*starts[1:-1]), starts[-1]
        whole = (inside & -inside).bit_length() - 1 if inside else 62
        shortest = int(np.diff(self._starts).min(initial=total)).bit_length() - 1
        self._shift = whole if total >> whole < _MOST_SECTIONS else shortest
        self._is_whole = self._shift == whole
        self._first_of: Rows | None = None  # the range in which each section begins
        if self._shift >= 0 and total >> self._shift < _MOST_SECTIONS:
            self._first_of = self._search(np.arange((total >> self._shift) + 1) << self._shift)

    def __call__(self, rows: Rows) -> Rows:
        """The number of the range of each row."""
        if self._first_of is None:
            return self._search(rows)
        found = self._first_of.take(rows >> self._shift)
        if not self._is_whole:
            found += rows >= self._starts.take(found + 1)
        return found

    def _search(self, rows: Rows) -> Rows:
        return self._starts.searchsorted(rows, "right") - 1
