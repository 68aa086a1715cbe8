"""Which datasets are gathered from, and the gathering of one batch."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from shmloader.codec.slot_writer import current_writer
from shmloader.sampling.index_batches import PackedInts
from shmloader.sources.base import (
    NOT_GATHERED,
    NotGathered,
    Rows,
    Source,
    joins_by_default,
    make_output,
)
from shmloader.sources.blocks import block_of, is_array
from shmloader.sources.columns import HuggingFace, is_hugging_face, join_columns
from shmloader.sources.datasets import Own, has_getbatch, kind_of_dataset, plain_ints, source_of
from shmloader.sources.stores import is_store, source_of_store

_log = logging.getLogger("shmloader")
_MOST_NESTED = 100
_CUSTOM = "collate_fn is not torch's default_collate, unchanged"


def recognise(dataset: Any, *, keep: bool = False, depth: int = 0, by_row: bool = False) -> Source:
    """The source for a dataset.

    Args:
        dataset: A map-style dataset.
        keep: Whether nobody changes the dataset while the source is used.
        depth: How deep it lies in others.
        by_row: Whether torch asks it for one sample at a time, also where it has a ``__getitems__``.

    Raises:
        NotGathered: If its batches are made sample by sample; says why.
    """
    if depth > _MOST_NESTED:
        raise NotGathered(f"datasets are nested more than {_MOST_NESTED} deep")
    if isinstance(dataset, IterableDataset):
        raise NotGathered("the dataset is iterable-style")
    if has_getbatch(dataset):
        return Own(dataset)
    if is_store(dataset):
        return source_of_store(dataset)
    if is_array(dataset):
        return block_of(dataset)
    kind = kind_of_dataset(dataset)
    if kind is not None:
        # A ConcatDataset has no __getitems__, and so asks for none of what lies in it.
        by_row = by_row or kind is ConcatDataset
        inner = functools.partial(recognise, keep=keep, depth=depth + 1, by_row=by_row)
        return source_of(dataset, kind, inner, keep=keep)
    if is_hugging_face(dataset):
        return HuggingFace(dataset, by_row=by_row)
    raise NotGathered(
        f"{type(dataset).__qualname__} is not known, and has no __getbatch__ beside its samples"
    )


class Gatherer:
    """Makes batches of one dataset where that can be done without its samples.

    Args:
        dataset: The dataset.
        collate_fn: What would join the samples.

    Attributes:
        users_code: Whether what `gather` raises may come from the dataset's ``__getbatch__``.
    """

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._kept: Source | None = None
        self.users_code = False
        self._usable = joins_by_default(collate_fn)
        if not self._usable:
            self._say(_CUSTOM)

    def _say(self, reason: object) -> None:
        name = type(self._dataset).__qualname__
        # Not the exception itself: who keeps the record would keep its frames, and with them the slot.
        _log.debug("samples of %s are fetched one by one: %s", name, str(reason))

    def gather(self, index_batch: Any) -> Any:
        """Make a batch.

        Args:
            index_batch: The indices.

        Returns:
            The batch, or ``NOT_GATHERED`` if it is to be made sample by sample: for indices that are not all
            ints, and where anything fails, so that the exception is the dataset's own.

        Raises:
            Exception: What a ``__getbatch__`` raises.
        """
        if not self._usable:
            return NOT_GATHERED
        writer = current_writer()
        begin = 0 if writer is None else writer.cursor
        source = self._kept or self._recognise(in_worker=writer is not None)
        if source is None:
            return NOT_GATHERED
        try:
            if not joins_by_default(self._collate_fn):
                raise NotGathered("torch's map of collate functions was changed")
            batch = source.gather(_rows_of(index_batch), make_output)
        except Exception as error:
            if source.users_code and not isinstance(error, NotGathered):
                raise
            _log.debug("the samples of one index batch are fetched one by one: %s", str(error))
            if writer is not None and not self.users_code:
                writer.cursor = begin  # nobody has seen the leaves that were made
            return NOT_GATHERED
        if writer is not None and not source.users_code:
            writer.collated = batch
        return batch

    def take_columns(self, columns: dict[Any, Any], count: int) -> Any:
        """Make a batch of columns that a dataset's ``__getitems__`` gave in the place of a list of samples.

        torch's ``default_collate`` has nothing but an error for a dict of columns.

        Args:
            columns: Each with an item for every sample.
            count: Samples.

        Returns:
            The batch, or ``NOT_GATHERED`` if these are no such columns, or another function joins samples.
        """
        if not joins_by_default(self._collate_fn):
            return NOT_GATHERED
        try:
            return join_columns(columns, count, make_output)
        except NotGathered:
            return NOT_GATHERED

    def _recognise(self, *, in_worker: bool) -> Source | None:
        """The source, from now on; None if there is none.

        It lives as long as a worker's epoch. Without workers only the dataset's own ``__getbatch__`` is used:
        there the program may change its datasets and tensors at any time, so that all would have to be looked
        at anew for each batch.
        """
        try:
            if in_worker:
                self._kept = recognise(self._dataset, keep=True)
            else:
                if not _asks_for_batches(self._dataset):
                    raise NotGathered("there are no workers")
                source = recognise(self._dataset)  # for this batch
                self.users_code = source.users_code
                return source
        except Exception as reason:  # noqa: BLE001 - also what odd datasets' attributes raise
            self._usable = False
            self._say(reason)
            return None
        self.users_code = self._kept.users_code
        return self._kept


def _asks_for_batches(dataset: Any) -> bool:
    """Whether this is a dataset with a ``__getbatch__``, or some rows of one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return has_getbatch(dataset)


def _rows_of(index_batch: Any) -> Rows:
    """An index batch as an array, where each index is an int to the dataset."""
    if type(index_batch) is PackedInts:
        rows = index_batch.array()
    elif type(index_batch) in (list, tuple):
        rows = plain_ints(list(index_batch))
    elif type(index_batch) is range:
        rows = np.arange(index_batch.start, index_batch.stop, index_batch.step, dtype=np.int64)
    elif type(index_batch) is torch.Tensor and index_batch.dtype is torch.int64 and index_batch.dim() == 1:
        rows = index_batch.numpy()
    elif type(index_batch) is np.ndarray and index_batch.dtype == np.int64 and index_batch.ndim == 1:
        rows = index_batch
    else:
        raise NotGathered(f"the index batch is a {type(index_batch).__qualname__}, not a list of ints")
    if not len(rows):
        raise NotGathered("the index batch is empty")
    return np.ascontiguousarray(rows)


def why_per_sample(dataset: Any, collate_fn: Any = None) -> str | None:
    """Why a loader fetches a dataset's samples one by one, where it could gather whole batches.

    A single batch may still be made sample by sample, for example where an index is out of range; with
    logging at DEBUG level for ``"shmloader"``, workers and the loader say so.

    Args:
        dataset: The loader's dataset.
        collate_fn: The loader's ``collate_fn``.

    Returns:
        The reason; None if batches are gathered with one call per leaf.
    """
    if collate_fn is not None and not joins_by_default(collate_fn):
        return _CUSTOM
    try:
        recognise(dataset)
    except Exception as reason:  # noqa: BLE001 - also what odd datasets' attributes raise
        return str(reason) or repr(reason)
    return None
