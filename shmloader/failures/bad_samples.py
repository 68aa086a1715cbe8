"""Bad samples: samples that raise, and without which the loader continues (``on_error``).

The process that fetches leaves them out or replaces them, and reports; the main process counts and warns.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from shmloader.errors import BadSampleWarning, LoaderError, NoGoodSample, warn
from shmloader.failures.exceptions import text_of
from shmloader.messages import shorten, shown
from shmloader.statistics import BadSample, PlacedSite

RAISE, SKIP, REPLACE = "raise", "skip", "replace"
"""Values of ``on_error``."""

MOST_IN_A_ROW = 10_000
"""This many batches in a row without a good sample, or bad samples of a stream in a row, are an error."""

_MOST_LISTED = 1000
_MOST_CHARACTERS = 500
_EXAMPLES = 3
_NOT_A_SAMPLES_FAULT = (MemoryError, torch.OutOfMemoryError, LoaderError)


class LEFT_OUT:  # noqa: N801 - the class itself, which arrives as the same object
    """Stands for a batch that had no good sample."""


class Report(NamedTuple):
    """The record that crosses in a batch's place if there is more to tell than the batch."""

    batch: Any = None  # or `LEFT_OUT`; without meaning beside an error
    error: bytes = b""  # the exception raised in its place, by `exceptions.capture`
    bad_samples: bytes = b""  # a list of `BadSample`, pickled, so that no index holds a slot's memory
    one_by_one: bool = False  # ``__getitems__`` raised, and the samples were fetched one by one
    stream: Any = None  # the place of a stream after the batch (`wire.stream_records.StreamReport`)
    placed: tuple[PlacedSite, ...] = ()  # what has changed in the worker's placement since its last report


@dataclass
class ReportCounts:
    """Counts from one loader's reports; main process. Public names are those of `LoaderStatistics`."""

    bad_samples: int = 0
    bad_sample_list: tuple[BadSample, ...] = ()
    batches_left_out: int = 0
    batches_one_by_one: int = 0
    placed_sites: tuple[PlacedSite, ...] = ()
    _in_a_row: int = 0  # batches left out
    _row_began: int = 0  # behind so many batches
    _warned: bool = False

    def take(self, report: Report, batches: int) -> Any:
        """Count what a report tells, behind so many batches; returns its batch, or ``LEFT_OUT``."""
        bad: list[BadSample] = pickle.loads(report.bad_samples) if report.bad_samples else []
        self.bad_samples += len(bad)
        self.bad_sample_list += tuple(bad[: _MOST_LISTED - len(self.bad_sample_list)])
        self.batches_one_by_one += report.one_by_one
        if report.placed:
            sites = {(site.call, site.where): site for site in (*self.placed_sites, *report.placed)}
            self.placed_sites = tuple(sites.values())
        if report.batch is LEFT_OUT:
            self.batches_left_out += 1
            self._in_a_row = self._in_a_row + 1 if self._row_began == batches else 1
            self._row_began = batches
            if self._in_a_row >= MOST_IN_A_ROW:
                self._in_a_row = 0
                raise NoGoodSample(
                    f"{MOST_IN_A_ROW:,} batches in a row had no good sample; the last bad one was {bad[-1]}"
                )
        return report.batch

    def warn(self, on_error: str) -> None:
        """Sum the bad samples up in one `BadSampleWarning`, once per loader.

        Call it last: the program's filters may make the warning an error.
        """
        if self._warned or not self.bad_samples:
            return
        self._warned = True
        examples = "; ".join(map(str, self.bad_sample_list[:_EXAMPLES]))
        more = f"; and {self.bad_samples - _EXAMPLES:,} more" if self.bad_samples > _EXAMPLES else ""
        what = "left out of their batches" if on_error == SKIP else "replaced by others of their batches"
        left_out = f" {self.batches_left_out:,} batch(es) had no good sample and were left out."
        warn(
            f"{self.bad_samples:,} bad sample(s) raised and were {what} (on_error={on_error!r}): {examples}"
            f"{more}.{left_out if self.batches_left_out else ''} loader.statistics() lists them, and later "
            "ones, which are not warned of again. on_error='raise' stops at the first.",
            BadSampleWarning,
        )


def is_a_samples_fault(error: Exception) -> bool:
    """Whether one sample caused an exception: not if memory ran out or a loader inside the dataset failed."""
    if isinstance(error, ExceptionGroup):
        return all(map(is_a_samples_fault, error.exceptions))
    return not isinstance(error, _NOT_A_SAMPLES_FAULT)


def describe(error: Exception, index: object, *, of_stream: bool) -> BadSample:
    """Describe a bad sample by its index, or its position in a stream, in the process that fetched it."""
    message = shorten(text_of(error), _MOST_CHARACTERS)
    info = get_worker_info() if of_stream else None
    return BadSample(index, type(error).__name__, message, of_stream, None if info is None else info.id)


def pack(bad_samples: Sequence[BadSample]) -> bytes:
    """Pickle bad samples; an index that cannot be pickled becomes its ``repr``. Empty for none."""
    if not bad_samples:
        return b""
    try:
        return pickle.dumps(list(bad_samples), 5)
    except Exception:  # noqa: BLE001 - the user's indices
        return pickle.dumps([dataclasses.replace(bad, index=shown(bad.index)) for bad in bad_samples], 5)
