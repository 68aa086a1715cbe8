"""Bad samples: samples that raise, and without which the loader continues (``on_error``).

The process that fetches leaves a bad sample out, or puts another in its place, and returns the batch as
`Reported`. The main process takes the report off the batch, counts, and warns once.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import get_worker_info

from shmloader.errors import BadSampleWarning, LoaderError, NoGoodSample, warn
from shmloader.failures.exceptions import text_of
from shmloader.messages import shorten, shown
from shmloader.statistics import BadSample, Counters, PlacedSite

RAISE, SKIP, REPLACE = "raise", "skip", "replace"
"""Values of ``on_error``."""

MOST_IN_A_ROW = 10_000
"""This many batches in a row without a good sample, or bad samples of a stream in a row, are an error."""

LEFT_OUT = object()
"""Stands for a batch that had no good sample."""

_MOST_LISTED = 1000
_MOST_CHARACTERS = 500
_EXAMPLES = 3
_NOT_A_SAMPLES_FAULT = (MemoryError, torch.OutOfMemoryError, LoaderError)


class Reported(NamedTuple):
    """A batch with something to report.

    Attributes:
        batch: The batch, or None.
        left_out: Whether there is no batch, because it had no good sample.
        one_by_one: Whether ``__getitems__`` raised and the samples were fetched one by one instead.
        bad_samples: Pickled list of `BadSample`. It is pickled so that no index in it holds a slot's memory.
        stream: For a stream, its place after the batch (`wire.stream_records.StreamReport`); else None.
        placed: What has changed in the worker's placement since its last report.
    """

    batch: Any
    left_out: bool
    one_by_one: bool
    bad_samples: bytes
    stream: Any = None
    placed: tuple[PlacedSite, ...] = ()


def is_a_samples_fault(error: Exception) -> bool:
    """Whether one sample caused an exception: not if memory ran out, or a loader inside the dataset failed.

    ``SystemExit``, ``KeyboardInterrupt`` and groups that hold one are not an ``Exception`` and do not come
    here.
    """
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


def count(bad_samples: bytes, counters: Counters) -> None:
    """Count and list the bad samples of a `pack`. Main process."""
    if bad_samples:
        found: list[BadSample] = pickle.loads(bad_samples)
        counters.bad_samples += len(found)
        counters.bad_sample_list += found[: _MOST_LISTED - len(counters.bad_sample_list)]


def take_report(reported: Reported, counters: Counters) -> Any:
    """Take the report off a batch and count it; returns the batch, or ``LEFT_OUT``. Main process.

    Raises:
        NoGoodSample: If this is the ``MOST_IN_A_ROW``-th batch in a row that is left out.
    """
    count(reported.bad_samples, counters)
    counters.note_placed(reported.placed)
    counters.batches_one_by_one += reported.one_by_one
    if not reported.left_out:
        return reported.batch
    counters.batches_left_out += 1
    if counters.left_out_after != counters.batches:  # batches came between
        counters.left_out_after, counters.left_out_in_a_row = counters.batches, 0
    counters.left_out_in_a_row += 1
    if counters.left_out_in_a_row < MOST_IN_A_ROW:
        return LEFT_OUT
    counters.left_out_in_a_row = 0
    last = pickle.loads(reported.bad_samples)[-1]
    raise NoGoodSample(f"{MOST_IN_A_ROW:,} batches in a row had no good sample; the last bad one was {last}")


def warn_of_bad_samples(counters: Counters, on_error: str) -> None:
    """Sum the bad samples up in one `BadSampleWarning`, once per loader. Main process.

    The program's filters may make the warning an error, so callers call this last.
    """
    if counters.warned_of_bad_samples or not counters.bad_samples:
        return
    counters.warned_of_bad_samples = True
    examples = "; ".join(map(str, counters.bad_sample_list[:_EXAMPLES]))
    more = f"; and {counters.bad_samples - _EXAMPLES:,} more" if counters.bad_samples > _EXAMPLES else ""
    what = "left out of their batches" if on_error == SKIP else "replaced by others of their batches"
    left_out = f" {counters.batches_left_out:,} batch(es) had no good sample and were left out."
    warn(
        f"{counters.bad_samples:,} bad sample(s) raised and were {what} (on_error={on_error!r}): {examples}"
        f"{more}.{left_out if counters.batches_left_out else ''} loader.statistics() lists them, and later "
        "ones, which are not warned of again. on_error='raise' stops at the first.",
        BadSampleWarning,
    )
