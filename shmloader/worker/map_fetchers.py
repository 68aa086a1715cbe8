"""Batches for index batches: of map-style datasets, and of those with ``__getitems__``.

The rules are those of torch's fetchers (``torch/utils/data/_utils/fetch.py``). If a dataset's rows can be
gathered, no samples are made (see `sources`). Runs in the worker, or without workers in the main process.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from shmloader.failures.bad_samples import LEFT_OUT, RAISE, REPLACE, Report, describe, is_a_samples_fault
from shmloader.failures.exceptions import add_note, forget_frames
from shmloader.failures.mismatches import explain_collation
from shmloader.indices.packed_indices import PackedInts, Run
from shmloader.messages import shown
from shmloader.sources import NOT_GATHERED, Gatherer, why_per_sample
from shmloader.worker.fetcher import Fetcher, FetchRules
from shmloader.worker.placement import Placement
from shmloader.worker.probe import BatchProbe
from shmloader.worker.streams import PartsFetcher


def make_fetcher(dataset: Any, rules: FetchRules, worker_id: int = 0, num_workers: int = 1) -> Fetcher:
    """The fetcher for a dataset; for an iterable one this calls ``iter(dataset)``."""
    if rules.iterable:
        return PartsFetcher(dataset, rules, worker_id, num_workers)
    return _MapFetcher(dataset, rules) if rules.on_error == RAISE else _TolerantMapFetcher(dataset, rules)


def before_each_sample(dataset: Any, rules: FetchRules, call: Callable[[], None]) -> Any:
    """A dataset that makes a call before each sample; itself if samples are not fetched one by one."""
    if rules.iterable or not rules.auto_collation or getattr(dataset, "__getitems__", None):
        return dataset
    if why_per_sample(dataset, rules.collate_fn) is None:
        return dataset

    def get(index: Any) -> Any:
        call()
        return dataset[index]

    return _Samples(get)


def around_each_batch(dataset: Any, rules: FetchRules, placement: Placement) -> Any:
    """A dataset whose whole batches are made with placement; itself if it is asked for samples."""
    if rules.iterable or rules.auto_collation:
        return dataset
    own = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    if own is Dataset.__getitem__:
        return dataset
    return _Samples(placement.around(functools.partial(operator.getitem, dataset), of_batches=True))


class _Samples:
    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get

    def __getitem__(self, index: Any) -> Any:
        return self._get(index)


class _MapFetcher(Fetcher):
    def __init__(self, dataset: Any, rules: FetchRules) -> None:
        super().__init__(rules)
        self._dataset = dataset
        self._gatherer: Gatherer | None = None
        if rules.auto_collation:
            self._gatherer = Gatherer(dataset, rules.collate_fn, in_worker=rules.in_worker)

    def measure(self, probe: BatchProbe | None) -> None:
        """Measure the fetching too."""
        super().measure(probe)
        self._fetch_each = _fetch_each if probe is None else probe.around_fetch(_fetch_each)

    def fetch(self, index_batch: Any) -> Any:
        dataset = self._dataset
        if self._gatherer is None:
            index = _unpacked(index_batch)  # a sampler of index batches gives lists
            return self._join(_fetch_each(dataset, [index]), [index])
        batch = self._gatherer.gather(index_batch)
        if batch is not NOT_GATHERED:
            return batch
        index_batch = _unpacked(index_batch)
        if getattr(dataset, "__getitems__", None):
            samples = dataset.__getitems__(index_batch)
        else:
            samples = self._fetch_each(dataset, index_batch)
        return self._join(samples, index_batch)

    def _join(self, samples: Any, indices: Any) -> Any:
        try:
            return self._collate_fn(samples if self._rules.auto_collation else samples[0])
        except Exception as error:
            explain_collation(error, samples, indices)
            raise


def _unpacked(index_batch: Any) -> Any:
    """The index batch as the sampler gave it."""
    return index_batch.tolist() if type(index_batch) in (PackedInts, Run) else index_batch


def _fetch_each(dataset: Any, index_batch: Any) -> list[Any]:
    remaining = iter(index_batch)
    try:
        return [dataset[index] for index in remaining]
    except BaseException as error:
        # The iterator's place identifies the sample that failed, without a cost per sample.
        if type(index_batch) in (list, tuple, range):
            position = len(index_batch) - operator.length_hint(remaining) - 1
            add_note(error, f"raised by dataset[{shown(index_batch[position])}]")
        raise


_BAD = object()
"""Stands for a sample that raised."""


class _TolerantMapFetcher(_MapFetcher):
    """Continues if a sample raises: leaves it out, or puts the next good one of the batch in its place."""

    def __init__(self, dataset: Any, rules: FetchRules) -> None:
        super().__init__(dataset, rules)
        self._replaces = rules.on_error == REPLACE
        # Dataset's own __getitem__ only raises NotImplementedError.
        own = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
        self._get_one: Callable[[Any], Any] = functools.partial(operator.getitem, dataset)
        if own is Dataset.__getitem__:
            self._get_one = lambda index: dataset.__getitems__([index])[0]

    def fetch(self, index_batch: Any) -> Any:
        self._bad = []
        get_all = getattr(self._dataset, "__getitems__", None) if self._rules.auto_collation else None
        try:
            batch = NOT_GATHERED if self._gatherer is None else self._gatherer.gather(index_batch)
            if batch is not NOT_GATHERED:
                return batch
            index_batch = _unpacked(index_batch)
            samples = get_all(index_batch) if get_all else None
        except Exception as error:
            if not is_a_samples_fault(error):
                raise
            index_batch, get_all = _unpacked(index_batch), True
            forget_frames(error)
        else:
            if get_all:
                return self._join(samples, index_batch)
        indices = list(index_batch) if self._rules.auto_collation else [index_batch]
        samples = self._fetch_good(indices)
        if self._bad:
            samples, indices = _without_bad(samples, indices, self._replaces and self._rules.auto_collation)
            if not samples:
                return Report(LEFT_OUT, bad_samples=self.take_bad_samples(), one_by_one=bool(get_all))
        batch = self._join(samples, indices)
        if not self._bad and not get_all:
            return batch
        return Report(batch, bad_samples=self.take_bad_samples(), one_by_one=bool(get_all))

    def _fetch_good(self, indices: list[Any]) -> list[Any]:
        """The samples, with ``_BAD`` where one raised."""
        samples: list[Any] = []
        append, get_one = samples.append, self._get_one
        remaining = iter(indices)
        while len(samples) < len(indices):
            try:
                for index in remaining:
                    append(get_one(index))
            except BaseException as error:
                index = indices[len(samples)]
                if not isinstance(error, Exception) or not is_a_samples_fault(error):
                    add_note(error, f"raised by dataset[{shown(index)}]")
                    raise
                self._bad.append(describe(error, index, of_stream=False))
                forget_frames(error)
                append(_BAD)
        return samples


def _without_bad(samples: list[Any], indices: list[Any], replace: bool) -> tuple[list[Any], list[Any]]:
    """The good samples and their indices; with ``replace``, copies in place of the bad ones."""
    # The next good one stands for a bad one; after the last one comes the first again.
    places = good = [place for place, sample in enumerate(samples) if sample is not _BAD]
    if replace and good:
        places = [good[bisect.bisect_left(good, place) % len(good)] for place in range(len(samples))]
    taken = [samples[place] for place in places]
    if len(taken) > len(good):
        for place, sample in enumerate(samples):
            if sample is _BAD:
                # A collate function may change samples; without a copy the same object is there twice.
                with contextlib.suppress(Exception):
                    taken[place] = copy.deepcopy(taken[place])
    return taken, [indices[place] for place in places]
