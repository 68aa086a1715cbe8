"""Iterable-style datasets: a worker's part of one, and its state.

Without ``shard="auto"`` a worker's part is the whole dataset, as in torch. With it, the dataset makes a shard
of itself, or the worker takes its share of every group of samples of the whole stream (`stream_fetchers`).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import get_worker_info

from shmloader.errors import ResumeError
from shmloader.failures.bad_samples import MOST_IN_A_ROW
from shmloader.failures.exceptions import add_note
from shmloader.foreign import is_hugging_face
from shmloader.indices.samplers import attribute_of, has_place, load_own_state
from shmloader.torch_private import only_worker_info, refusing_worker_info, show_worker_info
from shmloader.wire.stream_records import OWN, SHARD, STRIDE, StreamRules


class Stream:
    """The samples of a dataset, or of its shard: an iterator.

    Args:
        dataset: The dataset.
        rules: How to divide it, and where an earlier program left it.
        part: The part to play, out of ``parts`` on each rank.
        tolerant: Whether samples may raise.
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
            self._samples = chain([*islice(self, 1)], self._samples)
            dataset.load_state_dict({})  # with its first row it has begun; the next epoch would, there, too
        self._is_stateful = has_place(dataset) or has_place(self._iterator)
        raised = cursor.raised - cursor.state_raised
        tolerant = tolerant or rules.layout == STRIDE  # which counts no draws that raised; they may again
        self._skip(cursor.drawn - cursor.state_drawn - raised, raised, rules.of_a_batch, tolerant)

    def __iter__(self) -> Iterator[Any]:
        return self  # for islice(); the __iter__ of a dataset that is its own iterator would begin anew

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
            except Exception as error:
                in_a_row += 1
                if not raised and (not tolerant or in_a_row >= MOST_IN_A_ROW):
                    add_note(error, "raised while samples that the program has had were drawn again")
                    raise
                raised, failed = max(raised - 1, 0), error
            else:
                if not left:
                    self._samples = chain([sample], self._samples)
                    break
                left, in_a_row = left - 1, 0
        if left >= of_a_batch:
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
    if not callable(attribute_of(dataset, "shard")):
        dataset.sharding_settings(shards, index)
        return dataset
    shard = dataset.shard(shards, index)
    epoch = getattr(dataset, "epoch", None)
    if isinstance(epoch, int) and callable(attribute_of(shard, "set_epoch")):
        shard.set_epoch(epoch)  # a new dataset of Hugging Face's begins with epoch 0
    return shard
