"""Batches of iterable-style datasets, by the rules of torch's fetcher. Runs where `fetch` does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from shmloader.diagnostics.bad_samples import (
    MOST_IN_A_ROW,
    RAISE,
    REPLACE,
    Reported,
    describe,
    is_a_samples_fault,
)
from shmloader.diagnostics.exceptions import forget_frames
from shmloader.diagnostics.mismatches import explain_collation
from shmloader.errors import NoGoodSample
from shmloader.wire.stream_records import NOTHING_DRAWN, STRIDE, Cursor, StreamReport
from shmloader.worker.fetcher import Fetcher, FetchRules
from shmloader.worker.streams import Stream, Stride, say_position


class PartsFetcher(Fetcher):
    """Fetches from the parts of a stream that a worker has: one or, in a resumed epoch, any number."""

    def __init__(self, dataset: Any, rules: FetchRules, worker_id: int, num_workers: int) -> None:
        super().__init__()
        self._dataset, self._rules = dataset, rules
        self._worker_id, self._num_workers = worker_id, num_workers
        parts = range(worker_id, rules.stream.parts(num_workers), num_workers)
        self._parts = [part for part in parts if not rules.stream.cursor_of(part).ended]
        self._fetcher: _StreamFetcher | None = None
        if self._parts:
            self._begin_part()

    def _begin_part(self) -> None:
        rules, num_workers = self._rules, self._num_workers
        part, self._batches = self._parts.pop(0), 0
        cursor, tolerant = rules.stream.cursor_of(part), rules.on_error != RAISE
        parts = rules.stream.parts(num_workers)
        self._part = part
        stream = self._stream = Stream(self._dataset, rules.stream, part, parts, tolerant)
        if stream.layout != STRIDE:
            kind = _TolerantIterableFetcher if tolerant else _IterableFetcher
            self._fetcher = kind(stream, rules, cursor)
            return
        if tolerant:
            raise ValueError(
                f"on_error={rules.on_error!r} cannot be had where shard='auto' deals out the samples of a "
                "stream: ranks would have batches of other sizes. Give the dataset a method "
                "shard(num_shards, index), or leave on_error='raise'"
            )
        stride = Stride(stream, rules.stream, self._worker_id, num_workers, rules.drop_last, cursor.drawn)
        self._fetcher = _StrideFetcher(stride, rules)

    def fetch(self, index_batch: Any) -> Any:
        """See `Fetcher`."""
        self.failed = None
        while self._fetcher is not None:
            try:
                batch = self._fetcher.fetch(index_batch)
            except StopIteration:
                if not self._parts:
                    raise
                self.failed = NOTHING_DRAWN  # should it raise
                self._begin_part()
                self.failed = None
            except Exception:
                self._note_place()
                raise
            else:
                self._note_place()  # should it turn out that the batch cannot be sent
                return self._with_report(batch, self._fetcher)
        raise StopIteration

    def _note_place(self) -> None:
        if self._fetcher is not None and self._stream.layout != STRIDE:
            self.failed = self._report(self._fetcher, b"")

    def _with_report(self, batch: Any, fetcher: _StreamFetcher) -> Any:
        """The batch, with the cursor behind it where the main process cannot count that itself."""
        rules, stream = self._rules.stream, self._stream
        self._batches += 1
        state = stream.state() if self._batches % rules.snapshot_every == 0 else b""
        reported = type(batch) is Reported
        told = reported or state or (self._batches == 1 and (rules.shard or rules.cursors))
        if not told:
            return batch
        report = self._report(fetcher, state)
        return (batch if reported else Reported(batch, False, False, b""))._replace(stream=report)

    def _report(self, fetcher: _StreamFetcher, state: bytes) -> StreamReport:
        drawn, raised = fetcher.drawn, fetcher.raised
        at_state = (drawn, raised) if state else (0, 0)
        cursor = Cursor(drawn, state, at_state[0], fetcher.ended, raised, at_state[1])
        return StreamReport(self._part, self._stream.layout, cursor)

    def take_bad_samples(self) -> bytes:
        """See `Fetcher`."""
        return b"" if self._fetcher is None else self._fetcher.take_bad_samples()


class _StreamFetcher(Fetcher):
    """Fetches from one part of a stream.

    Attributes:
        drawn: Samples of the stream that are behind it.
        ended: Whether the stream is known to have ended.
        raised: Draws that raised.
    """

    drawn = 0
    ended = False
    raised = 0

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
    def __init__(self, stream: Stream, rules: FetchRules, cursor: Cursor) -> None:
        super().__init__(rules)
        self._samples = stream
        self.drawn, self.raised = cursor.drawn, cursor.raised

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
            self.raised += 1
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
        """Draw ``size`` samples, bad ones counted unless they are replaced; True if the stream has ended."""
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
        """Note a bad sample by the exception that an iterator raised, or raise that again."""
        position = self.drawn
        self.drawn += 1
        self.raised += 1
        if not isinstance(error, Exception) or not is_a_samples_fault(error):
            say_position(error, position)
            raise error
        self._bad.append(describe(error, position, of_stream=True))
        forget_frames(error)
