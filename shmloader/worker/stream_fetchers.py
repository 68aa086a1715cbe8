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
        self._all_parts = rules.stream.parts(num_workers)
        parts = range(worker_id, self._all_parts, num_workers)
        self._parts = [part for part in parts if not rules.stream.cursor_of(part).ended]
        self._fetcher: _StreamFetcher | None = None  # of the part that is being played
        if self._parts:
            self._begin_part()

    def _begin_part(self) -> None:
        rules, self._part, self._batches = self._rules, self._parts.pop(0), 0
        tolerant, is_dealt = rules.on_error != RAISE, rules.stream.layout == STRIDE
        if tolerant and is_dealt:
            raise ValueError(
                f"on_error={rules.on_error!r} is not possible if shard='auto' deals out the samples of a "
                "stream: ranks would have batches of different sizes. Give the dataset a method "
                "shard(num_shards, index), or leave on_error='raise'"
            )
        cursor = rules.stream.cursor_of(self._part)
        stream = Stream(self._dataset, rules.stream, self._part, self._all_parts, tolerant)
        if is_dealt:
            self._fetcher = _StrideFetcher(stream, rules, cursor, self._worker_id, self._num_workers)
        else:
            self._fetcher = _IterableFetcher(stream, rules, cursor)

    def fetch(self, index_batch: Any) -> Any:
        """The next batch of the worker's parts, one part after another."""
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
        """The batch, with the place after it if the main process cannot count that itself."""
        rules = self._rules.stream
        self._batches += 1
        wanted = index_batch[0] if self._rules.auto_collation else index_batch  # by the `Pass`
        due = self._batches % rules.snapshot_every == 0 if wanted else self._batches == 1
        state = fetcher.stream.state() if due else b""
        if type(batch) is not Report:
            if not state and (self._batches > 1 or not rules.cursors):
                return batch
            batch = Report(batch)
        return batch._replace(stream=fetcher.report(self._part, state))

    def place(self) -> StreamReport | None:
        """The place after a batch that raised."""
        return NOTHING_DRAWN if self._fetcher is None else self._fetcher.report(self._part)

    def take_bad_samples(self) -> bytes:
        """The bad samples of a batch that raised."""
        return b"" if self._fetcher is None else self._fetcher.take_bad_samples()


class _StreamFetcher(Fetcher):
    """Fetches from one part of a stream; counts as `Cursor` does."""

    def __init__(self, stream: Stream, rules: FetchRules, cursor: Cursor) -> None:
        super().__init__()
        self.stream, self._rules = stream, rules
        probe = rules.probe
        self._collate_fn = rules.collate_fn if probe is None else probe.around_collate(rules.collate_fn)
        self.drawn, self.raised, self.ended = cursor.drawn, cursor.raised, False

    def _behind(self) -> int:
        """Samples drawn before the next batch of the part, also after one that raised."""
        return self.drawn

    def report(self, part: int, state: bytes = b"") -> StreamReport:
        """The place after the batch; with a state of the dataset if one was taken."""
        drawn, raised = self._behind(), self.raised
        return StreamReport(part, Cursor(drawn, state, drawn, self.ended, raised, raised))

    def _join(self, samples: list[Any], positions: Sequence[int]) -> Any:
        try:
            return self._collate_fn(samples if self._rules.auto_collation else samples[0])
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
        self._size = rules.stream.of_a_batch
        self._of_all = num_workers * self._size
        self._next = self.drawn + worker_id * self._size  # samples before this worker's next group

    def _behind(self) -> int:
        return self.drawn if self.ended else self._next - self._of_all + self._size

    def fetch(self, index_batch: Any) -> Any:
        rank, ranks = self._rules.stream.rank, self._rules.stream.ranks
        begin, self._next = self._next, self._next + self._of_all
        self._pass_over(begin)
        samples: list[Any] = []
        positions: list[int] = []
        while self.drawn < begin + self._size and (row := self._draw(ranks)):
            column = rank % len(row)  # of a row that is not complete some are taken twice
            samples.append(row[column])
            positions.append(self.drawn - len(row) + column)
        if not samples or (self.ended and self._rules.drop_last):
            raise StopIteration
        return self._join(samples, positions)

    def _pass_over(self, end: int) -> None:
        """Draw other workers' groups, and the rest of this worker's last one if a draw in it has raised."""
        in_a_row = 0
        while self.drawn < end and not self.ended:
            try:
                self._draw(min(self._rules.stream.ranks, end - self.drawn))
                in_a_row = 0
            except Exception:
                in_a_row += 1  # the worker that has the group raises it
                if in_a_row >= MOST_IN_A_ROW:
                    raise

    def _draw(self, count: int) -> list[Any]:
        """So many samples; fewer, and then none, where the stream ends."""
        row: list[Any] = []
        if self.ended:
            return row
        try:
            row.extend(itertools.islice(self.stream, count))
        except BaseException as error:
            _say_position(error, self.drawn + len(row))
            raise
        finally:
            self.drawn += len(row)
        self.ended = len(row) < count
        return row


class _IterableFetcher(_StreamFetcher):
    """Fetches a part by torch's rules. A bad sample counts towards its batch, unless it is to be replaced."""

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
