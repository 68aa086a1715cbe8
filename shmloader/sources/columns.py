"""Batches that come as columns: from ``__getitems__``, from Hugging Face ``datasets``, from Arrow tables."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.sources.base import Make, NotGathered, Rows, Source, within
from shmloader.sources.blocks import joined_dtype
from shmloader.store.arrays import kind_of_tensor

_HF_FORMATS = (None, "numpy", "torch")  # others may be the program's own functions, or draw random numbers


def join_columns(columns: dict[Any, Any], count: int, make: Make) -> dict[Any, Any]:
    """Make the batch that ``default_collate`` would make of these columns' rows as dicts.

    Args:
        columns: Each a tensor, an ndarray or a list with an item for each row.
        count: Rows.
        make: Makes the tensors of leaves.

    Raises:
        NotGathered: If a column is something else, or has not so many rows.
        Exception: Any that ``default_collate`` raises for a column that is a list.
    """
    return {name: _join(column, count, make) for name, column in columns.items()}


def _join(column: Any, count: int, make: Make) -> Any:
    if type(column) not in (torch.Tensor, np.ndarray, list, tuple) or len(column) != count:
        raise NotGathered(f"a {type(column).__qualname__} is no column of {count:,} rows")
    if type(column) is torch.Tensor:
        if kind_of_tensor(column) is not None and (column.dim() < 4 or column.is_contiguous()):
            return make(count, column.shape[1:], column.dtype).copy_(column)
    elif type(column) is np.ndarray:
        dtype = joined_dtype(column)
        if dtype is not None and column.flags.c_contiguous:
            out = make(count, column.shape[1:], dtype)
            out.numpy()[...] = column
            return out
    return default_collate(list(column))


class HuggingFace(Source):
    """A ``datasets.Dataset``, whose own batched access gives columns.

    Its formats give a batch other dtypes than single rows: 0.1 is a float64 alone and a float32 among others,
    and an int beside a None becomes a float.

    Args:
        dataset: The dataset.
        by_row: Whether torch reads it row by row.
    """

    def __init__(self, dataset: Any, *, by_row: bool) -> None:
        kind = dataset.format["type"]
        if kind not in _HF_FORMATS:
            raise NotGathered(
                f"the format {kind!r} of a Hugging Face dataset may make anything of its rows. Use "
                'dataset.with_format(None), "numpy" or "torch"'
            )
        if by_row:
            raise NotGathered(
                "in a ConcatDataset torch reads rows of a Hugging Face dataset by themselves, which may have "
                "other dtypes than in a batch. Use datasets.concatenate_datasets() instead of ConcatDataset"
            )
        self._dataset = dataset

    def gather(self, rows: Rows, make: Make) -> Any:
        """See `Source.gather`."""
        rows = within(rows, len(self._dataset))
        columns = self._dataset[rows.tolist()]
        if not columns or not isinstance(columns, dict):
            raise NotGathered("the Hugging Face dataset has no columns")
        return join_columns(dict(columns), len(rows), make)


def is_hugging_face(dataset: Any) -> bool:
    """Whether a dataset is exactly a ``datasets.Dataset``, without importing that package."""
    package = sys.modules.get("datasets")
    kind = None if package is None else getattr(package, "Dataset", None)
    return kind is not None and type(dataset) is kind and "__getitems__" not in vars(dataset)
