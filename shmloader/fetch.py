"""Samples for one index batch: map-style datasets, ``__getitems__`` and iterable-style datasets.

The rules are those of torch's fetchers (``torch/utils/data/_utils/fetch.py``), so that batches are
identical. Runs in the worker.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol


class FetchRules(NamedTuple):
    """What of a loader's arguments bears on fetching.

    Attributes:
        iterable: Whether the dataset is iterable-style.
        auto_collation: Whether an index batch is a list of indices; else it is one index.
        drop_last: Whether an iterable dataset's last, shorter batch is left out.
        collate_fn: Joins samples (or converts the one sample, without auto collation).
    """

    iterable: bool
    auto_collation: bool
    drop_last: bool
    collate_fn: Callable[[Any], Any]


class Fetcher(Protocol):
    """Makes one batch for one index batch."""

    def fetch(self, index_batch: Any) -> Any:
        """Fetch and collate; StopIteration when an iterable dataset is exhausted."""


def make_fetcher(dataset: Any, rules: FetchRules) -> Fetcher:
    """The fetcher for a dataset; for an iterable one this calls ``iter(dataset)``."""
    if rules.iterable:
        return _IterableFetcher(dataset, rules)
    return _MapFetcher(dataset, rules)


class _MapFetcher:
    def __init__(self, dataset: Any, rules: FetchRules) -> None:
        self._dataset = dataset
        self._auto_collation = rules.auto_collation
        self._collate_fn = rules.collate_fn

    def fetch(self, index_batch: Any) -> Any:
        dataset = self._dataset
        if not self._auto_collation:
            samples = dataset[index_batch]
        elif getattr(dataset, "__getitems__", None):
            samples = dataset.__getitems__(index_batch)
        else:
            samples = _fetch_each(dataset, index_batch)
        return self._collate_fn(samples)


def _fetch_each(dataset: Any, index_batch: Any) -> list[Any]:
    remaining = iter(index_batch)
    try:
        return [dataset[index] for index in remaining]
    except Exception as error:
        # How far a list's iterator got tells which sample failed, without a cost per sample.
        if type(index_batch) in (list, tuple):
            position = len(index_batch) - operator.length_hint(remaining) - 1
            error.add_note(f"raised by dataset[{index_batch[position]!r}]")
        raise


class _IterableFetcher:
    def __init__(self, dataset: Any, rules: FetchRules) -> None:
        self._samples: Iterator[Any] = iter(dataset)
        self._rules = rules
        self._ended = False

    def fetch(self, index_batch: Any) -> Any:
        if self._ended:
            raise StopIteration
        if not self._rules.auto_collation:
            return self._rules.collate_fn(next(self._samples))
        samples = []
        for _ in index_batch:
            try:
                samples.append(next(self._samples))
            except StopIteration:
                self._ended = True
                break
        if not samples or (self._rules.drop_last and len(samples) < len(index_batch)):
            raise StopIteration
        return self._rules.collate_fn(samples)
