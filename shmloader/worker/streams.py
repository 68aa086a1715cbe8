"""Iterable-style datasets: a worker's parts of one, their states, and batches by torch's rules.

Without ``shard="auto"`` a worker's part is the whole dataset, as in torch. With it, the dataset makes a shard
of itself, or the worker takes its share of every group of samples of the whole stream. Runs where
`map_fetchers` does.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import get_worker_info

from shmloader.errors import NoGoodSample, ResumeError
from shmloader.failures import bad_samples
from shmloader.failures.exceptions import add_note, forget_frames
from shmloader.failures.mismatches import explain_collation
from shmloader.foreign import is_hugging_face
from shmloader.indices.samplers import attribute_of, has_place, load_own_state
from shmloader.torch_private import only_worker_info, refusing_worker_info, show_worker_info
from shmloader.wire.stream_records import NOTHING_DRAWN, OWN, SHARD, STRIDE, Cursor, StreamReport, StreamRules
from shmloader.worker.fetcher import Fetcher, FetchRules


class Stream:
    """The samples of a dataset, or of its shard: an iterator.

    ``rules`` say how to divide it, and where an earlier program left it. It is the part ``part`` of ``parts``
    on each rank. If it is ``tolerant``, samples may raise.
    """

    def __init__(self, dataset: Any, rules: StreamRules, part: int, parts: int, tolerant: bool) -> None:
        self._info: Any = None  # the worker info that the dataset sees; None for the worker's own
        if rules.layout == STRIDE and not callable(attribute_of(dataset, "shard")):
            self._info = refusing_worker_info(dataset, _DIVIDES_ITSELF.format(type(dataset).__name__))
        elif rules.layout != OWN:
            self._info = only_worker_info()  # it must not divide itself again
        if rules.layout == SHARD:
            dataset = _shard_of(dataset, rules, part, parts)
        cursor = rules.cursor_of(part)
        states = pickle.loads(cursor.state) if cursor.state else {}
        if "dataset" in states:
            _load(dataset, states["dataset"])
        self._dataset = dataset
        self._iterator: Iterator[Any] = self._call(iter, dataset)
        if "iterator" in states:
            _load(self._iterator, states["iterator"])
        self._samples: Iterator[Any] = self._iterator
        if states and is_hugging_face(dataset):
            self._samples = itertools.chain([*itertools.islice(self, 1)], self._samples)
            dataset.load_state_dict({})  # with its first row it has begun; the next epoch would, there, too
        self._is_stateful = has_place(dataset) or has_place(self._iterator)
        raised = cursor.raised - cursor.state_raised
        tolerant = tolerant or rules.layout == STRIDE  # which counts no draws that raised; they may again
        self._skip(cursor.drawn - cursor.state_drawn - raised, raised, rules.of_a_batch, tolerant)

    def __iter__(self) -> Iterator[Any]:
        return self  # for islice(): the __iter__ of a dataset that is its own iterator would begin anew

    def __next__(self) -> Any:
        return next(self._samples) if self._info is None else self._call(next, self._samples)

    def _call(self, function: Any, argument: Any) -> Any:
        """Call ``iter`` or ``next`` with the worker info for the dataset in place."""
        if self._info is None:
            return function(argument)
        before = get_worker_info()
        show_worker_info(self._info)
        try:
            return function(argument)
        finally:
            show_worker_info(before)

    def _skip(self, count: int, raised: int, of_a_batch: int, tolerant: bool) -> None:
        """Draw ``count`` samples that the program has had, and among which ``raised`` draws raised.

        These raise again, or succeed if the failure was temporary. Either way they cost no sample, so only
        good draws are counted. After the last one a permanent failure may follow.
        """
        left, failed, in_a_row = count, None, 0
        while left or raised:
            try:
                sample = next(self)
            except StopIteration:
                break
            except BaseException as error:
                if _may_be_ctrl_c(error):
                    raise
                in_a_row += 1
                if not raised and (not tolerant or in_a_row >= bad_samples.MOST_IN_A_ROW):
                    add_note(error, "raised while samples that the program has had were drawn again")
                    raise
                raised, failed = max(raised - 1, 0), error
            else:
                if not left:
                    self._samples = itertools.chain([sample], self._samples)
                    break
                left, in_a_row = left - 1, 0
        if left >= of_a_batch + bool(in_a_row):  # a batch may have had nothing but draws that raised
            raise ResumeError(
                f"the stream to be resumed ended after {count - left:,} of the {count:,} samples that were "
                "drawn from it before: the dataset has changed, or gives another number of samples each time"
            ) from failed

    def state(self) -> bytes:
        """The states of the dataset and of its iterator, pickled; empty if neither has any.

        If they cannot be taken, the main process raises an error when the loader's state is asked for.
        """
        if not self._is_stateful:
            return b""
        states = {}
        try:
            if has_place(self._dataset) and self._dataset is not self._iterator:
                states["dataset"] = self._dataset.state_dict()
            if has_place(self._iterator):
                states["iterator"] = self._iterator.state_dict()  # type: ignore[attr-defined]
            return pickle.dumps(states, 5)
        except Exception as error:  # noqa: BLE001 - a program may never ask
            return pickle.dumps({"failed": f"{error!r:.500}"})


_DIVIDES_ITSELF = (
    "{} reads get_worker_info().num_workers, so it may divide its stream itself, and shard='auto' would "
    "divide that again. Leave out shard if it divides by workers and by ranks; else give it a method "
    "shard(num_shards, index), or let it not read that number"
)


def _load(one: Any, state: Any) -> None:
    try:
        load_own_state(one, state)
    except Exception as error:
        raise ResumeError(f"load_state_dict() of {type(one).__name__} raised {error!r:.500}") from error


def _shard_of(dataset: Any, rules: StreamRules, part: int, parts: int) -> Any:
    """A shard of a dataset, one of this rank's ``parts``, made by the dataset itself."""
    shards, index = rules.ranks * parts, rules.rank * parts + part
    shard = dataset.shard(shards, index)
    epoch = getattr(dataset, "epoch", None)
    if isinstance(epoch, int) and callable(attribute_of(shard, "set_epoch")):
        shard.set_epoch(epoch)  # a new dataset of Hugging Face's begins with epoch 0
    return shard


class PartsFetcher(Fetcher):
    """Fetches from a worker's parts of a stream: one or, in a resumed epoch, any number."""

    def __init__(self, dataset: Any, rules: FetchRules, worker_id: int, num_workers: int) -> None:
        super().__init__(rules)
        self._dataset = dataset
        self._worker_id, self._num_workers = worker_id, num_workers
        self._all_parts = rules.stream.parts(num_workers)
        parts = range(worker_id, self._all_parts, num_workers)
        self._parts = [part for part in parts if not rules.stream.cursor_of(part).ended]
        self._fetcher: _StreamFetcher | None = None  # of the part that is being played
        if self._parts:
            self._begin_part()

    def _begin_part(self) -> None:
        rules, self._part, self._batches = self._rules, self._parts.pop(0), 0
        tolerant = rules.on_error != bad_samples.RAISE
        cursor = rules.stream.cursor_of(self._part)
        stream = Stream(self._dataset, rules.stream, self._part, self._all_parts, tolerant)
        if rules.stream.layout == STRIDE:
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
        if type(batch) is not bad_samples.Report:
            if not state and (self._batches > 1 or not rules.cursors):
                return batch
            batch = bad_samples.Report(batch)
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
        super().__init__(rules)
        self.stream = stream
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
            except BaseException as error:
                in_a_row += 1  # the worker that has the group raises it
                if in_a_row >= bad_samples.MOST_IN_A_ROW or _may_be_ctrl_c(error):
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
                if in_a_row >= bad_samples.MOST_IN_A_ROW:
                    raise NoGoodSample(f"{in_a_row:,} samples of a stream in a row raised") from error
                if self._rules.on_error != bad_samples.REPLACE:
                    size -= 1
        self.drawn = begin + len(samples) + len(bad)
        short = len(samples) < size
        # Without auto collation torch asks the iterator again. But after a bad sample the iterator may have
        # ended, and one that then begins anew would never end.
        self.ended = short and (auto_collation or self._rules.on_error != bad_samples.RAISE)
        if not samples or (short and self._rules.drop_last):
            if not bad:
                raise StopIteration
            # The next task reports its end.
            return bad_samples.Report(bad_samples.LEFT_OUT, bad_samples=self.take_bad_samples())
        positions: Sequence[int] = range(begin, self.drawn)
        if not bad:
            return self._join(samples, positions)
        raised = {each.index for each in bad}
        batch = self._join(samples, [position for position in positions if position not in raised])
        return bad_samples.Report(batch, bad_samples=self.take_bad_samples())

    def _note_bad(self, error: BaseException, position: int) -> bool:
        """Note that a draw raised; return whether it is a bad sample, after which to continue."""
        self.drawn = position + 1
        self.raised += 1
        tolerant = self._rules.on_error != bad_samples.RAISE
        if not tolerant or not isinstance(error, Exception) or not bad_samples.is_a_samples_fault(error):
            return False
        self._bad.append(bad_samples.describe(error, position, of_stream=True))
        forget_frames(error)
        return True


def _may_be_ctrl_c(error: BaseException) -> bool:
    """Whether an exception may be none of the sample: such ones come without workers only."""
    return not isinstance(error, Exception) and get_worker_info() is None


def _say_position(error: BaseException, position: int) -> None:
    """Note on an exception which sample of a stream raised it."""
    add_note(error, f"raised by sample {position} of the stream, counted from 0")
