"""Iterable-style datasets: a worker's part of one, and its state.

Without ``shard="auto"`` a worker's part is the whole dataset, as in torch; the dataset itself may leave
samples out. With it, the dataset makes a shard of itself, or the worker takes its share of every group of
samples of the whole stream (`stream_fetchers`). Runs in the worker, or without workers in the main process.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import get_worker_info

from shmloader.errors import ResumeError
from shmloader.failures.bad_samples import MOST_IN_A_ROW
from shmloader.failures.exceptions import add_note
from shmloader.foreign import is_hugging_face
from shmloader.indices.samplers import attribute_of, has_place, load_own_state
from shmloader.torch_private import only_worker_info, show_worker_info, watched_worker_info
from shmloader.wire.stream_records import OWN, SHARD, STRIDE, StreamRules


class Stream:
    """The samples of a dataset, or of its shard: an iterator.

    Args:
        dataset: The dataset.
        rules: How to divide it, and where an earlier program left it.
        part: The part to play, out of ``parts`` on each rank.
        tolerant: Whether samples may raise.

    Attributes:
        layout: How the stream is divided.
    """

    def __init__(self, dataset: Any, rules: StreamRules, part: int, parts: int, tolerant: bool) -> None:
        self.layout = OWN
        self._info: Any = None  # the worker info that the dataset sees; None for the worker's own
        self._reads: list[str] = []  # reads of its number of workers
        if rules.shard:
            # With another number of workers the dataset might have been asked for shards.
            shard = None if rules.layout == STRIDE else shard_of(dataset, rules, part, parts)
            self.layout = STRIDE if shard is None else SHARD
            if shard is None and not _has(dataset, "shard"):
                self._info, self._reads = watched_worker_info(dataset)
            else:
                self._info = only_worker_info()  # it must not divide itself again
            dataset = dataset if shard is None else shard
        cursor = rules.cursor_of(part)
        states = pickle.loads(cursor.state) if cursor.state else {}
        if "dataset" in states:
            _load(dataset, states["dataset"])
        self._dataset = dataset
        self._iterator: Iterator[Any] = self._call(iter, dataset)
        if "iterator" in states:
            _load(self._iterator, states["iterator"])
        self._first: list[Any] = []
        self._failed: Exception | None = None  # in the place of the first
        hugging_face = is_hugging_face(dataset)
        if self.layout == STRIDE or (hugging_face and states):
            try:
                self._first = list(islice(self, 1))
            except Exception as error:  # noqa: BLE001 - for the batch that it belongs to
                self._failed = error
        if self._reads:
            self.layout = OWN
        if hugging_face and states:
            dataset.load_state_dict({})  # with its first row it has begun; the next epoch would, there, too
        self._is_stateful = has_place(dataset) or has_place(self._iterator)
        if rules.layout and rules.layout != self.layout:
            raise ResumeError(
                f"the state was made with a stream that was divided by {_BY[rules.layout]}, and it is "
                f"divided by {_BY[self.layout]} now: resume with the same dataset and the same shard="
            )
        of_a_batch = rules.batch_size * (rules.ranks if self.layout == STRIDE else 1)
        raised = cursor.raised - cursor.state_raised
        tolerant = tolerant or self.layout == STRIDE  # which counts no draws that raised; they may again
        self._skip(cursor.drawn - cursor.state_drawn - raised, raised, of_a_batch, tolerant)

    def __iter__(self) -> Iterator[Any]:
        # islice() calls this. The __iter__ of a dataset that is its own iterator would begin anew.
        return self

    def __next__(self) -> Any:
        if self._first:
            return self._first.pop()
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error
        return next(self._iterator) if self._info is None else self._call(next, self._iterator)

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
        """Draw ``count`` samples that the program has had.

        Among them, ``raised`` draws raised. They raise again, or succeed if the failure was temporary (of a
        network, say). Either way they cost no sample, so only good draws are counted. After the last one a
        permanent failure may follow.
        """
        left, failed, in_a_row = count, None, 0
        while left or raised:
            try:
                if not left:
                    self._first = list(islice(self, 1))
                    break
                for _ in islice(self, left):
                    left, in_a_row = left - 1, 0
                if left:
                    break
            except Exception as error:
                in_a_row += 1
                if not raised and (not tolerant or in_a_row >= MOST_IN_A_ROW):
                    add_note(error, "raised while samples that the program has had were drawn again")
                    raise
                raised, failed = max(raised - 1, 0), error
        if left >= of_a_batch:
            raise ResumeError(
                f"the stream to be resumed ended after {count - left:,} of the {count:,} samples that were "
                "drawn from it before: the dataset has changed, or gives another number of samples each time"
            ) from failed

    def check_worker_info(self) -> None:
        """Raise if the dataset has begun to shard itself after its first sample."""
        if self.layout == STRIDE and self._reads:
            raise RuntimeError(
                f"{type(self._dataset).__name__} read get_worker_info().num_workers after its first sample, "
                "when shard='auto' had begun to deal the samples out: read it before, or leave out shard"
            )

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


_BY = {
    OWN: "the dataset itself alone",
    SHARD: "its shard() or sharding_settings()",
    STRIDE: "shmloader, sample by sample",
}


def _has(one: Any, *methods: str) -> bool:
    return all(callable(attribute_of(one, name)) for name in methods)


def _load(one: Any, state: Any) -> None:
    try:
        load_own_state(one, state)
    except Exception as error:
        raise ResumeError(f"load_state_dict() of {type(one).__name__} raised {error!r:.500}") from error


def shard_of(dataset: Any, rules: StreamRules, part: int, parts: int) -> Any:
    """A shard of a dataset, one of this rank's ``parts``, made by the dataset itself; None if it cannot.

    A dataset that has a number of files, ``num_shards``, as Hugging Face's do, is not asked for more shards
    than files. With several ranks it is not asked for shards of unequally many files.
    """
    shards, index = rules.ranks * parts, rules.rank * parts + part
    if not _has(dataset, "shard"):
        if not (_has(dataset, "is_shardable", "sharding_settings") and dataset.is_shardable()):
            return None
        dataset.sharding_settings(shards, index)
        return dataset
    files = getattr(dataset, "num_shards", None)
    if isinstance(files, int) and (files < shards or (rules.ranks > 1 and files % shards)):
        return None
    shard = dataset.shard(shards, index)
    epoch = getattr(dataset, "epoch", None)
    if isinstance(epoch, int) and _has(shard, "set_epoch"):
        shard.set_epoch(epoch)  # a new dataset of Hugging Face's begins with epoch 0
    return shard
