"""Recognising the datasets that batches can be gathered from, and gathering one batch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from shmloader.codec.slot_allocator import current_allocator
from shmloader.indices.packed_indices import PackedInts, Run
from shmloader.sources.base import NOT_GATHERED, NotGathered, Rows, Source, array_of, own_memory
from shmloader.sources.blocks import block_of, is_array
from shmloader.sources.datasets import OWN_METHODS, has_getbatch, plain_ints, source_of
from shmloader.sources.tables import has_columns, hugging_face_rows, store_rows
from shmloader.store_hooks import hooks
from shmloader.torch_private import DATAPIPES, collate_fn_map, is_torchs_collation, unavailable, why_missing

_log = logging.getLogger("shmloader")
_CUSTOM_COLLATE = (
    "collate_fn is not torch's default_collate, so it is given the samples. Leave collate_fn out, and do "
    "what it does in the dataset"
)
_CHANGED_COLLATE = (
    "torch's default_collate_fn_map was changed for a type that shmloader would join itself. Leave it as "
    "torch has it, and pass a collate_fn instead"
)

_DATAPIPE = "the dataset is a DataPipe, which torch's own iterator loads. Write it as a map-style dataset"


def recognise(dataset: Any, *, in_worker: bool) -> Source:
    """The source for a dataset; `NotGathered`, with the reason, if it has none."""
    if has_getbatch(dataset):
        return Source(lambda rows: dataset.__getbatch__(array_of(rows)), users_code=True)
    if type(dataset) in OWN_METHODS:
        return source_of(dataset, functools.partial(recognise, in_worker=in_worker), in_worker=in_worker)
    if is_array(dataset):
        return block_of(dataset, in_worker=in_worker)
    if isinstance(dataset, IterableDataset):
        raise NotGathered(
            "the dataset is iterable-style, and gives its samples one by one. Only a map-style dataset can "
            "give a batch at once"
        )
    if hooks.takes_rows(dataset):
        return store_rows(dataset)
    if has_columns(dataset):
        return hugging_face_rows(dataset)
    name = type(dataset).__qualname__
    if type(dataset) in (list, tuple):
        raise NotGathered(
            f"a {name} holds each sample as an object of its own. Give the loader shmloader.share() of the "
            f"{name}: whole batches are gathered from what that returns"
        )
    raise NotGathered(
        f"shmloader cannot tell how {name} makes its samples, and there is no __getbatch__ beside its "
        "__getitem__. Give it a method __getbatch__(indices) that returns the whole batch"
    )


class Gatherer:
    """Makes batches of one dataset without its samples, if it can; ``collate_fn`` would join these.

    It lives for one epoch: in a worker, in the main process without workers, or in a loader without workers
    that a worker's dataset uses. Only the worker's own batches are made in the slot, with placeholders.

    The dataset is looked at once. Without workers the program may change it between two batches: then the
    next one is made sample by sample, and the dataset is looked at again.
    """

    def __init__(self, dataset: Any, collate_fn: Any, *, in_worker: bool) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._in_worker = in_worker
        self._source: Source | None = None
        self._is_per_sample = False

    def gather(self, index_batch: Any) -> Any:
        """Make a batch, or ``NOT_GATHERED`` if it is to be made sample by sample.

        It is ``NOT_GATHERED`` for indices that are not all ints, and if anything but a ``__getbatch__``
        raises, so that the exception is the dataset's own.
        """
        if self._is_per_sample or (source := self._source or self._recognise()) is None:
            return NOT_GATHERED
        allocator = current_allocator()
        if not self._in_worker and allocator is not None:
            with own_memory():
                return self.gather(index_batch)
        begin = 0 if allocator is None else allocator.cursor
        try:
            if not joins_by_default(self._collate_fn):
                raise NotGathered(_CHANGED_COLLATE)
            batch = source.gather(index_batch if type(index_batch) is Run else _rows_of(index_batch))
        except Exception as error:
            if source.users_code and not isinstance(error, NotGathered):
                raise
            _log.debug("the samples of one index batch are fetched one by one: %s", str(error))
            if allocator is not None and not source.users_code:
                allocator.go_back(begin)
            if not self._in_worker:
                self._source = None  # the program may have changed the dataset
            return NOT_GATHERED
        return batch if allocator is None or source.users_code else allocator.with_placeholders(batch)

    def _recognise(self) -> Source | None:
        """Find the source; a dataset that has none now is not looked at again."""
        # No functools.cached_property: in Python 3.11 that holds a lock, which a fork meanwhile copies taken.
        try:
            source = _source_for(self._dataset, self._collate_fn, in_worker=self._in_worker)
        except Exception as reason:  # noqa: BLE001 - also what odd datasets' attributes raise
            self._is_per_sample = True
            name = type(self._dataset).__qualname__
            # Not the exception itself: a log record that is kept would keep its frames, and so the slot.
            _log.debug("samples of %s are fetched one by one: %s", name, str(reason))
            return None
        self._source = source
        return source


def _rows_of(index_batch: Any) -> Rows:
    """An index batch as an array, if the dataset sees each index as an int."""
    if type(index_batch) is PackedInts:
        rows = np.frombuffer(index_batch, np.int64).copy()
    elif type(index_batch) in (list, tuple):
        rows = plain_ints(list(index_batch))
    elif type(index_batch) in (range, torch.Tensor, np.ndarray):
        rows = np.asarray(index_batch)
    else:
        name = type(index_batch).__qualname__
        raise NotGathered(f"the index batch is a {name}. Let the batch sampler yield lists of ints")
    if rows.dtype != np.int64 or rows.ndim != 1:
        raise NotGathered(f"the index batch is {rows.ndim}-d, of {rows.dtype}. Let it be a list of ints")
    if not len(rows):
        raise NotGathered("the index batch is empty")
    return np.ascontiguousarray(rows)


def why_per_sample(dataset: Any, collate_fn: Any = None) -> str | None:
    """The reason why a loader fetches a dataset's samples one by one instead of gathering whole batches.

    A single batch may still be made sample by sample, for example where an index is out of range. The logger
    ``"shmloader"`` tells of these at DEBUG level, in the workers and in the main process.

    Returns:
        The reason, and what to change; None if batches are gathered with one call per leaf.
    """
    try:
        _source_for(dataset, collate_fn, in_worker=True)
    except Exception as reason:  # noqa: BLE001 - also what odd datasets' attributes raise
        return str(reason) or repr(reason)
    return None


def _source_for(dataset: Any, collate_fn: Any, *, in_worker: bool) -> Source:
    if (lack := why_missing()) is not None:
        raise NotGathered(unavailable("gathering whole batches", lack))
    if isinstance(dataset, DATAPIPES):
        raise NotGathered(_DATAPIPE)
    if collate_fn is not None and not joins_by_default(collate_fn):
        raise NotGathered(_CHANGED_COLLATE if is_default_collate(collate_fn) else _CUSTOM_COLLATE)
    return recognise(dataset, in_worker=in_worker)


# --- whether default_collate is torch's own

SAME_AS_TORCHS: list[Any] = []
"""Functions of `worker.collate` that join samples as torch's own do, and may stand in its map."""

_pristine: dict[Any, Any] | None = None  # the map as it was when it was last found pristine
_KNOWN_KEYS = {torch.Tensor, np.ndarray, (np.bool_, np.number, np.object_), float, int, str, bytes}
_JOINED_HERE = (torch.Tensor, np.ndarray, np.generic, bool, int, float, str, bytes, dict, list, tuple)
"""Types of samples and of their parts that shmloader joins without torch's functions."""


def collate_map_is_pristine() -> bool:
    """Whether ``default_collate`` joins samples of the types that shmloader knows as torch 2.13 does.

    The program may change the map at any time. An entry for a further type does not count, unless it would be
    used for one of these types.
    """
    global _pristine  # noqa: PLW0603 - there is one map
    if collate_fn_map == _pristine:
        return True
    if not collate_fn_map.keys() >= _KNOWN_KEYS:
        return False
    pristine = all(
        is_torchs_collation(function) or function in SAME_AS_TORCHS
        if key in _KNOWN_KEYS
        else not _is_of_known_type(key, by_torch=is_torchs_collation(function))
        for key, function in collate_fn_map.items()
    )
    _pristine = dict(collate_fn_map) if pristine else None
    return pristine


def _is_of_known_type(key: Any, *, by_torch: bool) -> bool:
    """Whether a further key of torch's map is for a type that shmloader joins itself."""
    kinds = key if isinstance(key, tuple) else (key,)
    also = () if by_torch else (np.generic, tuple, list, Mapping)  # stores have records of such classes
    try:
        return any(
            issubclass(kind, also) or any(issubclass(known, kind) for known in _JOINED_HERE) for kind in kinds
        )
    except TypeError:  # not a class
        return True


def is_default_collate(collate_fn: object) -> bool:
    """Whether a collate function is torch's ``default_collate``, or ours in its place."""
    return collate_fn is default_collate or collate_fn in SAME_AS_TORCHS


def joins_by_default(collate_fn: object) -> bool:
    """Whether a collate function does the same as ``default_collate`` in an unmodified torch."""
    return is_default_collate(collate_fn) and collate_map_is_pristine()
