"""Rows of ``shmloader.share``'s stores and of Hugging Face ``datasets``, which give a batch as columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.codec.array_kinds import kind_of_tensor
from shmloader.codec.slot_allocator import current_allocator
from shmloader.foreign import is_hugging_face
from shmloader.sources.base import NotGathered, Rows, Source, as_sample_field, make_output, within
from shmloader.sources.blocks import copied, joined_dtype

_HF_FORMATS = (None, "numpy", "torch")  # others may be the program's own functions, or draw random numbers


def store_rows(store: Any) -> Source:
    """The source for a store of any kind, by its ``take``, which asks for a leaf when it knows its shape."""

    def gather(rows: Rows) -> Any:
        # Without a slot there are no outputs: tensors that a store has written to cannot be resized.
        out = None if current_allocator() is None else _leaf
        return _join_taken(store.take(within(rows, len(store)), out))

    return Source(gather)


def _leaf(shape: Sequence[int], dtype: np.dtype[Any], torch_dtype: torch.dtype | None) -> torch.Tensor | None:
    """An output for rows of a store; None if torch joins rows of this dtype to another one."""
    joined = torch_dtype or joined_dtype(dtype, len(shape))
    return None if joined is None else make_output(shape[0], shape[1:], joined)


def _join_taken(taken: Any) -> Any:
    """Make the batch from the result of a store's ``take``."""
    kind = type(taken)
    if kind is torch.Tensor:
        return (
            taken if current_allocator() is not None else taken.clone(memory_format=torch.contiguous_format)
        )
    if kind is np.ndarray:
        if joined_dtype(taken.dtype, taken.ndim) is None:
            raise NotGathered(f"torch joins single rows of {taken.dtype} to another dtype, or refuses them")
        array = np.ascontiguousarray(taken)
        return torch.from_numpy(array) if current_allocator() is not None else copied(array)
    if kind is dict:
        return {name: _join_taken(column) for name, column in taken.items()}
    if isinstance(taken, tuple):
        return _as_record(kind, [_join_taken(column) for column in taken])
    if kind is list:  # samples that `take` does not join
        return default_collate(taken)
    raise NotGathered(f"a {kind.__qualname__} was taken from a store")


def _as_record(kind: type, joined: Sequence[Any]) -> Any:
    """The batch that ``default_collate`` makes of tuples, or of namedtuples of one class."""
    fields = [as_sample_field(field) for field in joined]
    if kind is tuple:
        return fields
    if getattr(kind, "__iter__", None) is not tuple.__iter__:
        raise NotGathered(
            f"{kind.__qualname__} has an __iter__ of its own, which only single rows can be asked for. Share "
            "plain tuples or namedtuples"
        )
    return kind(*fields)


# --- Hugging Face


def hugging_face_rows(dataset: Any) -> Source:
    """The source for a ``datasets.Dataset``, whose own batched access gives columns.

    Its formats give a batch other dtypes than single rows: 0.1 is a float64 alone and a float32 among others,
    and an int beside a None becomes a float.
    """
    _check_format(dataset)

    def gather(rows: Rows) -> Any:
        _check_format(dataset)
        rows = within(rows, len(dataset))
        columns = dataset[rows.tolist()]
        if not columns or not isinstance(columns, dict):
            raise NotGathered("the Hugging Face dataset has no columns")
        return {name: _join(column, len(rows)) for name, column in columns.items()}

    return Source(gather)


def _check_format(dataset: Any) -> None:
    kind = dataset.format["type"]
    if kind not in _HF_FORMATS:
        raise NotGathered(
            f"the format {kind!r} of a Hugging Face dataset may make anything of its rows. Use "
            'dataset.with_format(None), "numpy" or "torch"'
        )


def _join(column: Any, count: int) -> Any:
    """Join a column as ``default_collate`` joins its items."""
    if type(column) not in (torch.Tensor, np.ndarray, list, tuple) or len(column) != count:
        raise NotGathered(f"a {type(column).__qualname__} is no column of {count:,} rows")
    if type(column) is torch.Tensor:
        if kind_of_tensor(column) is not None and (column.dim() < 4 or column.is_contiguous()):
            return make_output(count, column.shape[1:], column.dtype).copy_(column)
    elif type(column) is np.ndarray:
        dtype = joined_dtype(column.dtype, column.ndim)
        if dtype is not None and column.flags.c_contiguous:
            if current_allocator() is None:
                return copied(column)
            out = make_output(count, column.shape[1:], dtype)
            out.numpy()[...] = column
            return out
    return default_collate(list(column))


def has_columns(dataset: Any) -> bool:
    """Whether a dataset is exactly a ``datasets.Dataset``, without importing that package."""
    kind = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
    return is_hugging_face(dataset) and type(dataset) is kind and "__getitems__" not in vars(dataset)
