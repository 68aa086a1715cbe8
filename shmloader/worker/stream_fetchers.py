"""Batches of iterable-style datasets, by the rules of torch's fetcher. Runs where `map_fetchers` does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from shmloader.errors import NoGoodSample
from shmloader.failures.bad_samples import (
    LEFT_OUT,
    MOST_IN_A_ROW,
    RAISE,
    REPLACE,
    Report,
    describe,
    is_a_samples_fault,
)
from shmloader.failures.exceptions import add_note, forget_frames
from shmloader.failures.mismatches import explain_collation
from shmloader.wire.stream_records import NOTHING_DRAWN, STRIDE, Cursor, StreamReport
from shmloader.worker.fetcher import Fetcher, FetchRules
from shmloader.worker.streams import Stream


class PartsFetcher(Fetcher):
    """Fetches from a worker's parts of a stream: one or, in a resumed epoch, any number."""

    def __init__(self, dataset: Any, rules: FetchRules, worker_id: int, num_workers: int) -> None:
        super().__init__()
        self._dataset, self._rules = dataset, rules
        self._worker_id, self._num_workers = worker_id, num_workers
        parts = range(worker_id, rules.stream.parts(num_workers), num_workers)
        self._parts = [part for part in parts if not rules.stream.cursor_of(part).ended]
        self._fetcher: _StreamFetcher | None = None  # of the part that is being played
        if self._parts:
            self._begin_part()

    def _begin_part(self) -> None:
        rules, num_workers = self._rules, self._num_workers
        part, self._batches = self._parts.pop(0), 0
        cursor, tolerant = rules.stream.cursor_of(part), rules.on_error != RAISE
        parts = rules.stream.parts(num_workers)
        self._part = part
        stream = Stream(self._dataset, rules.stream, part, parts, tolerant)
        if stream.layout != STRIDE:
            self._fetcher = _IterableFetcher(stream, rules, cursor)
            return
        if tolerant:
            raise ValueError(
                f"on_error={rules.on_error!r} is not possible if shard='auto' deals out the samples of a "
                "stream: ranks would have batches of different sizes. Give the dataset a method "
                "shard(num_shards, index), or leave on_error='raise'"
            )
        self._fetcher = _StrideFetcher(stream, rules, cursor, self._worker_id, num_workers)

    def fetch(self, index_batch: Any) -> Any:
        """See `Fetcher`."""
        while self._fetcher is not None or self._parts:
            if self._fetcher is None:
                self._begin_part()
                continue
            try:
                batch = self._fetcher.fetch(index_batch)
            except StopIteration:
                if not self._parts:
                    raise
                self._fetcher = None
            else:
                return self._with_report(batch, self._fetcher, index_batch)
        raise StopIteration

    def _with_report(self, batch: Any, fetcher: _StreamFetcher, index_batch: Any) -> Any:
        """The batch, with the cursor after it if the main process cannot count that itself."""
        rules = self._rules.stream
        self._batches += 1
        wanted = index_batch[0] if self._rules.auto_collation else index_batch  # see `States.begin_epoch`
        due = self._batches % rules.snapshot_every == 0 if wanted else self._batches == 1
        state = fetcher.stream.state() if due else b""
        reported = type(batch) is Report
        told = reported or state or (self._batches == 1 and (rules.shard or rules.cursors))
        if not told:
            return batch
        report = self._report(fetcher, state)
        return (batch if reported else Report(batch))._replace(stream=report)

    def _report(self, fetcher: _StreamFetcher, state: bytes) -> StreamReport:
        drawn, raised = fetcher.behind, fetcher.raised
        cursor = Cursor(drawn, state, drawn, fetcher.ended, raised, raised)
        return StreamReport(self._part, fetcher.stream.layout, cursor)

    def place(self) -> StreamReport | None:
        """See `Fetcher`."""
        if self._fetcher is None:
            return NOTHING_DRAWN
        return self._report(self._fetcher, b"")

    def take_bad_samples(self) -> bytes:
        """See `Fetcher`."""
        return b"" if self._fetcher is None else self._fetcher.take_bad_samples()


class _StreamFetcher(Fetcher):
    """Fetches from one part of a stream.

    Attributes:
        stream: The samples of the part.
        drawn: Samples that were drawn from the stream.
        ended: Whether the stream is known to have ended.
        raised: Draws that raised.
    """

    def __init__(self, stream: Stream, rules: FetchRules, cursor: Cursor) -> None:
        super().__init__()
        self.stream = stream
        self._rules = rules
        self.drawn, self.raised = cursor.drawn, cursor.raised
        self.ended = False

    @property
    def behind(self) -> int:
        """The number of samples drawn once the batch is done, whether it came or not."""
        return self.drawn

    def _join(self, samples: list[Any], positions: Sequence[int]) -> Any:
        try:
            return self._rules.collate_fn(samples if self._rules.auto_collation else samples[0])
        except Exception as error:
            explain_collation(error, samples, positions, of_stream=True)
            raise


class _StrideFetcher(_StreamFetcher):
    """Fetches a worker's share of a stream that all workers of all ranks see whole.

    The stream is cut into groups, one batch for each rank. A rank's batch ``n`` is made of group ``n``,
    whichever worker makes it, so the batches do not depend on the number of workers, and ranks have equally
    many. Rank ``r`` takes from a group the samples ``r``, ``r + ranks``, and so on. If the stream ends inside
    a group, ``drop_last`` leaves it out; else ranks that lack a sample repeat one of the last ones.

    A draw that raises is not a sample. Its group is lost with it; the next groups stay the same, whichever
    workers the same draw fails for.
    """

    def __init__(
        self, stream: Stream, rules: FetchRules, cursor: Cursor, worker_id: int, num_workers: int
    ) -> None:
        super().__init__(stream, rules, cursor)
        self._batch_size, self._rows_of_all = rules.stream.batch_size, num_workers * rules.stream.batch_size
        self._rows_left = worker_id * self._batch_size  # to draw before this worker's next group
        self._row: list[Any] = []  # a row in which a draw has raised

    @property
    def behind(self) -> int:
        rows = self._rows_left - self._rows_of_all + self._batch_size  # of its group, not drawn yet
        return self.drawn if self.ended else self.drawn + rows * self._rules.stream.ranks

    def fetch(self, index_batch: Any) -> Any:
        rank = self._rules.stream.rank
        self._rows_left += self._rows_of_all
        self._pass_over()
        samples: list[Any] = []
        positions: list[int] = []
        while len(samples) < self._batch_size and (row := self._draw()):
            column = rank % len(row)  # of a row that is not complete some are taken twice
            samples.append(row[column])
            positions.append(self.drawn - len(row) + column)
        self.stream.check_worker_info()
        if not samples or (self.ended and self._rules.drop_last):
            raise StopIteration
        return self._join(samples, positions)

    def _pass_over(self) -> None:
        """Draw other workers' groups, and the rest of this worker's own group if a draw in it has raised."""
        in_a_row = 0
        while self._rows_left > self._rows_of_all and not self.ended:
            try:
                self._draw()
            except Exception:
                in_a_row += 1  # the worker that has the group raises it
                if in_a_row >= MOST_IN_A_ROW:
                    raise
            else:
                in_a_row = 0

    def _draw(self) -> list[Any]:
        """One sample for each rank; fewer, and then none, where the stream ends."""
        if self.ended:
            return []
        row, ranks = self._row, self._rules.stream.ranks
        try:
            row.extend(itertools.islice(self.stream, ranks - len(row)))
        except BaseException as error:
            _say_position(error, self.drawn + len(row))
            raise
        self._row = []
        self._rows_left -= 1
        self.drawn += len(row)
        self.ended = len(row) < ranks
        return row


class _IterableFetcher(_StreamFetcher):
    """Fetches a part by torch's rules.

    If samples may raise, it continues with the stream's next one. A bad sample counts towards its batch,
    unless it is to be replaced.
    """

    def fetch(self, index_batch: Any) -> Any:
        if self.ended:
            raise StopIteration
        auto_collation, begin = self._rules.auto_collation, self.drawn
        bad = self._bad = []
        good_before, in_a_row = 0, 0
        samples: list[Any] = []
        size = len(index_batch) if auto_collation else 1
        while True:
            try:
                samples.extend(itertools.islice(self.stream, size - len(samples)))
                break
            except BaseException as error:
                position = begin + len(samples) + len(bad)
                if not self._note_bad(error, position):
                    _say_position(error, position)
                    raise
                in_a_row = in_a_row + 1 if len(samples) == good_before else 1
                good_before = len(samples)
                if in_a_row >= MOST_IN_A_ROW:
                    raise NoGoodSample(f"{in_a_row:,} samples of a stream in a row raised") from error
                if self._rules.on_error != REPLACE:
                    size -= 1
        self.drawn = begin + len(samples) + len(bad)
        short = len(samples) < size
        # Without auto collation torch asks the iterator again. But after a bad sample the iterator may have
        # ended, and one that then begins anew would never end.
        self.ended = short and (auto_collation or self._rules.on_error != RAISE)
        if not samples or (short and self._rules.drop_last):
            if not bad:
                raise StopIteration
            return Report(LEFT_OUT, bad_samples=self.take_bad_samples())  # the next task reports its end
        positions: Sequence[int] = range(begin, self.drawn)
        if not bad:
            return self._join(samples, positions)
        raised = {each.index for each in bad}
        batch = self._join(samples, [position for position in positions if position not in raised])
        return Report(batch, bad_samples=self.take_bad_samples())

    def _note_bad(self, error: BaseException, position: int) -> bool:
        """Note that a draw raised; return whether it is a bad sample, after which to continue."""
        self.drawn = position + 1
        self.raised += 1
        tolerant = self._rules.on_error != RAISE
        if not tolerant or not isinstance(error, Exception) or not is_a_samples_fault(error):
            return False
        self._bad.append(describe(error, position, of_stream=True))
        forget_frames(error)
        return True


def _say_position(error: BaseException, position: int) -> None:
    """Note on an exception which sample of a stream raised it."""
    add_note(error, f"raised by sample {position} of the stream, counted from 0")
