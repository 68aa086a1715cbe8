"""Batches for index batches: map-style datasets, ``__getitems__`` and iterable-style datasets.

The rules are those of torch's fetchers (``torch/utils/data/_utils/fetch.py``), so that batches are
identical. Where a dataset's rows can be gathered, no samples are made (see `sources`). With ``on_error``
other than ``"raise"`` a fetcher goes on where a sample raises. Runs in the worker, or without workers in
the main process.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from shmloader.diagnostics.bad_samples import (
    MOST_IN_A_ROW,
    RAISE,
    REPLACE,
    Reported,
    describe,
    is_a_samples_fault,
    pack,
)
from shmloader.diagnostics.exceptions import add_note, forget_frames
from shmloader.diagnostics.mismatches import explain_collation
from shmloader.errors import NoGoodSample
from shmloader.sampling.index_batches import PackedInts
from shmloader.sources import NOT_GATHERED, Gatherer
from shmloader.statistics import BadSample
from shmloader.worker.streams import STRIDE, Place, Stream, StreamReport, StreamRules, Stride, say_position


class FetchRules(NamedTuple):
    """The loader's arguments that bear on fetching.

    Attributes:
        iterable: Whether the dataset is iterable-style.
        auto_collation: Whether an index batch is a list of indices; else it is one index.
        drop_last: Whether an iterable dataset's last, shorter batch is left out.
        collate_fn: Joins samples (or converts the one sample, without auto collation).
        on_error: What becomes of a sample that raises: see ``DataLoader``.
        stream: Of an iterable-style dataset: how it is divided, and where it is resumed.
    """

    iterable: bool
    auto_collation: bool
    drop_last: bool
    collate_fn: Callable[[Any], Any]
    on_error: str = RAISE
    stream: StreamRules = StreamRules()


class Fetcher(ABC):
    """Makes one batch for one index batch.

    A list of bad samples is begun anew for each batch, so that none is reported twice.
    """

    def __init__(self) -> None:
        self._bad: list[BadSample] = []

    @abstractmethod
    def fetch(self, index_batch: Any) -> Any:
        """Fetch and collate.

        Returns:
            The batch, for the encoder where there is a slot: with placeholders for the leaves that lie there
            already. `Reported` where there is something to report.

        Raises:
            StopIteration: If an iterable dataset is exhausted.
        """

    def take_bad_samples(self) -> bytes:
        """The bad samples, packed, that no report has told of yet: of a batch for which `fetch` raised."""
        bad, self._bad = self._bad, []
        return pack(bad)


def make_fetcher(dataset: Any, rules: FetchRules, worker_id: int = 0, num_workers: int = 1) -> Fetcher:
    """The fetcher for a dataset; for an iterable one this calls ``iter(dataset)``."""
    if rules.iterable:
        return _PartsFetcher(dataset, rules, worker_id, num_workers)
    return _MapFetcher(dataset, rules) if rules.on_error == RAISE else _TolerantMapFetcher(dataset, rules)


# --- map-style datasets


class _MapFetcher(Fetcher):
    def __init__(self, dataset: Any, rules: FetchRules) -> None:
        super().__init__()
        self._dataset = dataset
        self._auto_collation = rules.auto_collation
        self._collate_fn = rules.collate_fn
        self._gatherer = Gatherer(dataset, rules.collate_fn) if rules.auto_collation else None

    def fetch(self, index_batch: Any) -> Any:
        dataset = self._dataset
        if self._gatherer is None:
            index = _unpacked(index_batch)  # a sampler of index batches gives lists
            return self._join(_fetch_each(dataset, [index])[0], index)
        batch = self._gatherer.gather(index_batch)
        if batch is not NOT_GATHERED:
            return batch
        index_batch = _unpacked(index_batch)
        if getattr(dataset, "__getitems__", None):
            samples = dataset.__getitems__(index_batch)
        else:
            samples = _fetch_each(dataset, index_batch)
        return self._join(samples, index_batch)

    def _join(self, samples: Any, index_batch: Any) -> Any:
        try:
            if type(samples) is dict and self._gatherer is not None:
                batch = self._gatherer.take_columns(samples, len(index_batch))
                if batch is not NOT_GATHERED:
                    return batch
            return self._collate_fn(samples)
        except Exception as error:
            if self._auto_collation:
                explain_collation(error, samples, index_batch)
            else:
                explain_collation(error, [samples], [index_batch])
            raise


def _unpacked(index_batch: Any) -> Any:
    """The index batch as the sampler gave it."""
    return index_batch.tolist() if type(index_batch) is PackedInts else index_batch


def _fetch_each(dataset: Any, index_batch: Any) -> list[Any]:
    remaining = iter(index_batch)
    try:
        return [dataset[index] for index in remaining]
    except BaseException as error:
        # How far the iterator got tells which sample failed, without a cost per sample.
        if type(index_batch) in (list, tuple, range):
            position = len(index_batch) - operator.length_hint(remaining) - 1
            _say_where(error, index_batch[position])
        raise


def _say_where(error: BaseException, index: Any) -> None:
    with contextlib.suppress(Exception):  # an index that cannot be shown
        add_note(error, f"raised by dataset[{index!r}]")


_BAD = object()
"""Stands for a sample that raised."""


class _TolerantMapFetcher(_MapFetcher):
    """Goes on where a sample raises: leaves it out, or puts the next good one of the batch in its place."""

    def __init__(self, dataset: Any, rules: FetchRules) -> None:
        super().__init__(dataset, rules)
        self._replaces = rules.on_error == REPLACE
        # Dataset has a __getitem__ of its own, which only says that there is none.
        own = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
        self._one_by_one = _OneByOne(dataset) if own is Dataset.__getitem__ else dataset

    def fetch(self, index_batch: Any) -> Any:
        self._bad = []
        get_all = getattr(self._dataset, "__getitems__", None) if self._auto_collation else None
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
        indices = list(index_batch) if self._auto_collation else [index_batch]
        samples = self._fetch_good(indices)
        if self._bad:
            places = _places_to_take(samples, replace=self._replaces and self._auto_collation)
            samples, indices = _take(samples, places), [indices[place] for place in places]
            if not samples:
                return Reported(None, True, bool(get_all), self.take_bad_samples())
        batch = self._join(samples, indices) if self._auto_collation else self._join(samples[0], index_batch)
        if not self._bad and not get_all:
            return batch
        return Reported(batch, False, bool(get_all), self.take_bad_samples())

    def _fetch_good(self, indices: list[Any]) -> list[Any]:
        """The samples, with ``_BAD`` where one raised."""
        samples: list[Any] = []
        append, dataset = samples.append, self._one_by_one
        remaining = iter(indices)
        while len(samples) < len(indices):
            try:
                for index in remaining:
                    append(dataset[index])
            except BaseException as error:
                index = indices[len(samples)]
                if not isinstance(error, Exception) or not is_a_samples_fault(error):
                    _say_where(error, index)
                    raise
                self._bad.append(describe(error, index, of_stream=False))
                forget_frames(error)
                append(_BAD)
        return samples


class _OneByOne:
    """Makes a dataset that has only ``__getitems__`` give one sample."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self._dataset.__getitems__([index])[0]


def _places_to_take(samples: Sequence[Any], *, replace: bool) -> list[int]:
    """The places of the good samples; to replace a bad one, that of the next good one, round about."""
    good = [place for place, sample in enumerate(samples) if sample is not _BAD]
    if not replace or not good:
        return good
    return [good[bisect.bisect_left(good, place) % len(good)] for place in range(len(samples))]


def _take(samples: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """The samples at these places; of one that is taken again, a copy: a collate function may change it."""
    taken = []
    seen: set[int] = set()
    for place in places:
        sample = samples[place]
        if place in seen:
            with contextlib.suppress(Exception):  # what cannot be copied is there twice
                sample = copy.deepcopy(sample)
        seen.add(place)
        taken.append(sample)
    return taken


# --- iterable-style datasets


class _PartsFetcher(Fetcher):
    """Fetches from the parts of a stream that a worker has: one or, in a resumed epoch, any number."""

    def __init__(self, dataset: Any, rules: FetchRules, worker_id: int, num_workers: int) -> None:
        super().__init__()
        self._dataset, self._rules = dataset, rules
        self._worker_id, self._num_workers = worker_id, num_workers
        self._parts = rules.stream.parts_of(worker_id, num_workers)
        self._fetcher: _StreamFetcher | None = None
        if self._parts:
            self._begin_part()

    def _begin_part(self) -> None:
        rules, worker_id, num_workers = self._rules, self._worker_id, self._num_workers
        self._part = self._parts.pop(0)
        self._batches = 0
        drawn = rules.stream.place_of(self._part).drawn
        stream = self._stream = Stream(
            self._dataset,
            rules.stream,
            self._part,
            rules.stream.parts(num_workers),
            tolerant=rules.on_error != RAISE,
        )
        if stream.layout != STRIDE:
            kind = _IterableFetcher if rules.on_error == RAISE else _TolerantIterableFetcher
            self._fetcher = kind(stream, rules, drawn)
            return
        if rules.on_error != RAISE:
            raise ValueError(
                f"on_error={rules.on_error!r} cannot be had where shard='auto' deals out the samples of a "
                "stream: ranks would have batches of other sizes. Give the dataset a method "
                "shard(num_shards, index), or leave on_error='raise'"
            )
        stride = Stride(stream, rules.stream, worker_id, num_workers, rules.drop_last, drawn)
        self._fetcher = _StrideFetcher(stride, rules)

    def fetch(self, index_batch: Any) -> Any:
        while self._fetcher is not None:
            try:
                batch = self._fetcher.fetch(index_batch)
            except StopIteration:
                if not self._parts:
                    raise
                self._begin_part()
            else:
                return self._with_place(batch, self._fetcher)
        raise StopIteration

    def _with_place(self, batch: Any, fetcher: _StreamFetcher) -> Any:
        """The batch, with the place behind it if the main process cannot tell that by counting."""
        rules, stream = self._rules.stream, self._stream
        self._batches += 1
        state = stream.state() if self._batches % rules.snapshot_every == 0 else b""
        reported = type(batch) is Reported
        told = reported or state or (self._batches == 1 and (rules.shard or rules.places))
        if not told:
            return batch
        place = Place(fetcher.drawn, state, fetcher.drawn if state else 0, fetcher.ended)
        report = StreamReport(self._part, stream.layout, place)
        return (batch if reported else Reported(batch, False, False, b""))._replace(place=report)

    def take_bad_samples(self) -> bytes:
        return b"" if self._fetcher is None else self._fetcher.take_bad_samples()


class _StreamFetcher(Fetcher):
    """Fetches from one part of a stream.

    Attributes:
        drawn: Samples of the stream that are behind it.
        ended: Whether the stream is known to have ended.
    """

    drawn = 0
    ended = False

    def __init__(self, rules: FetchRules) -> None:
        super().__init__()
        self._rules = rules

    def _join(self, samples: list[Any], positions: Sequence[int]) -> Any:
        try:
            return self._rules.collate_fn(samples if self._rules.auto_collation else samples[0])
        except Exception as error:
            explain_collation(error, samples, positions, of_stream=True)
            raise


class _StrideFetcher(_StreamFetcher):
    def __init__(self, stride: Stride, rules: FetchRules) -> None:
        super().__init__(rules)
        self._stride = stride

    def fetch(self, index_batch: Any) -> Any:
        samples, positions = self._stride.next_batch()
        self.drawn, self.ended = self._stride.drawn, self._stride.ended
        return self._join(samples, positions)


class _IterableFetcher(_StreamFetcher):
    def __init__(self, stream: Stream, rules: FetchRules, drawn: int) -> None:
        super().__init__(rules)
        self._samples = stream
        self.drawn = drawn

    def fetch(self, index_batch: Any) -> Any:
        if self.ended:
            raise StopIteration
        auto_collation, begin = self._rules.auto_collation, self.drawn
        samples: list[Any] = []
        size = len(index_batch) if auto_collation else 1
        try:
            samples.extend(itertools.islice(self._samples, size))
        except BaseException as error:
            self.drawn = begin + len(samples) + 1
            say_position(error, self.drawn - 1)
            raise
        self.drawn = begin + len(samples)
        if len(samples) < size:
            self.ended = auto_collation  # without it, torch asks the iterator again
            if not samples or self._rules.drop_last:
                raise StopIteration
        return self._join(samples, range(begin, self.drawn))


class _TolerantIterableFetcher(_IterableFetcher):
    """Goes on where the stream's iterator raises: with the stream's next sample, if there is one."""

    def fetch(self, index_batch: Any) -> Any:
        self._bad = []
        if self.ended:
            raise StopIteration
        samples: list[Any] = []
        positions: list[int] = []
        ended = self._fill(len(index_batch) if self._rules.auto_collation else 1, samples, positions)
        self.ended = ended
        if not samples or (ended and self._rules.drop_last):
            if not self._bad:
                raise StopIteration
            return Reported(None, True, False, self.take_bad_samples())  # its end is said at the next task
        batch = self._join(samples, positions)
        return Reported(batch, False, False, self.take_bad_samples()) if self._bad else batch

    def _fill(self, size: int, samples: list[Any], positions: list[int]) -> bool:
        """Draw ``size`` samples or, to leave bad ones out, that many times; whether the stream has ended."""
        replaces = self._rules.on_error == REPLACE
        in_a_row = 0
        while size > 0:
            begin = self.drawn
            try:
                samples.extend(itertools.islice(self._samples, size))
            except BaseException as error:
                self.drawn += len(samples) - len(positions)
                positions.extend(range(begin, self.drawn))
                self._note_bad(error)
                drawn = self.drawn - 1 - begin
                in_a_row = 1 if drawn else in_a_row + 1
                if in_a_row >= MOST_IN_A_ROW:
                    raise NoGoodSample(f"{in_a_row:,} samples of a stream in a row raised") from error
                size -= drawn if replaces else drawn + 1
            else:
                self.drawn += len(samples) - len(positions)
                positions.extend(range(begin, self.drawn))
                return self.drawn - begin < size
        return False

    def _note_bad(self, error: BaseException) -> None:
        """Take what an iterator raised for a bad sample, or raise it."""
        position = self.drawn
        self.drawn += 1
        if not isinstance(error, Exception) or not is_a_samples_fault(error):
            say_position(error, position)
            raise error
        self._bad.append(describe(error, position, of_stream=True))
        forget_frames(error)
