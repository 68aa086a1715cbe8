"""Batches that come as columns: from ``__getitems__``, from Hugging Face ``datasets``, from Arrow tables."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.codec.layout import CODE_OF_NUMPY_DTYPE, DTYPES
from shmloader.sources.base import Make, NotGathered, Rows, Source, within
from shmloader.sources.blocks import joined_dtype
from shmloader.store.arrays import kind_of_tensor

_HF_FORMATS = (None, "numpy", "torch")  # others may be the program's own functions, or draw random numbers


def join_columns(columns: dict[Any, Any], count: int, make: Make) -> dict[Any, Any]:
    """Make the batch that ``default_collate`` would make of the rows of these columns, as dicts.

    Args:
        columns: Each a tensor, an ndarray or a list with an item for each row.
        count: Rows.
        make: Where leaves come from.

    Raises:
        NotGathered: If a column is something else, or has not so many rows.
        Exception: What ``default_collate`` raises for a column that is a list.
    """
    return {name: _join(column, count, make) for name, column in columns.items()}


def _join(column: Any, count: int, make: Make) -> Any:
    if type(column) not in (torch.Tensor, np.ndarray, list, tuple) or len(column) != count:
        raise NotGathered(f"a {type(column).__qualname__} is no column of {count:,} rows")
    if type(column) is torch.Tensor:
        if kind_of_tensor(column) is not None and (column.dim() < 4 or column.is_contiguous()):
            return make(count, column.shape[1:], column.dtype).copy_(column)
    elif type(column) is np.ndarray:
        code = CODE_OF_NUMPY_DTYPE.get(column.dtype)
        if code is not None and column.flags.c_contiguous:
            dtype = DTYPES[code].torch_dtype
            if column.ndim > 1 or joined_dtype(column.dtype) is dtype:
                out = make(count, column.shape[1:], dtype)
                out.numpy()[...] = column
                return out
    return default_collate(list(column))


class HuggingFace(Source):
    """A ``datasets.Dataset``, whose own batched access gives columns.

    Its formats make other dtypes of a batch than of single rows, by what else is in the column: 0.1 is a
    float64 alone and a float32 among others, an int beside a None becomes a float.

    Args:
        dataset: The dataset.
        by_row: Whether torch reads it row by row.
    """

    def __init__(self, dataset: Any, *, by_row: bool) -> None:
        kind = dataset.format["type"]
        if kind not in _HF_FORMATS:
            raise NotGathered(f"the format {kind!r} of a Hugging Face dataset may be anything")
        if by_row and kind is not None:
            raise NotGathered(
                f"in a ConcatDataset torch reads rows of a Hugging Face dataset by themselves, for which the "
                f"format {kind!r} has other dtypes than for batches"
            )
        if by_row and not _is_read_as_stored(dict(dataset.features)):
            raise NotGathered("in a ConcatDataset a Hugging Face dataset decodes its rows by themselves")
        self._dataset = dataset

    def gather(self, rows: Rows, make: Make) -> Any:
        """See `Source.gather`."""
        rows = within(rows, len(self._dataset))
        columns = self._dataset[rows.tolist()]
        if not columns or not isinstance(columns, dict):
            raise NotGathered("a Hugging Face dataset without columns")
        return join_columns(dict(columns), len(rows), make)


def is_hugging_face(dataset: Any) -> bool:
    """Whether a dataset is exactly a ``datasets.Dataset``, without importing that package."""
    package = sys.modules.get("datasets")
    kind = None if package is None else getattr(package, "Dataset", None)
    return kind is not None and type(dataset) is kind and "__getitems__" not in vars(dataset)


def _is_read_as_stored(feature: Any) -> bool:
    """Whether values of a Hugging Face feature are what Arrow makes of them, in a row as in a batch."""
    if type(feature) in (dict, list):
        return all(map(_is_read_as_stored, feature.values() if type(feature) is dict else feature))
    package = sys.modules["datasets"]
    name = type(feature).__name__
    if type(feature) is not getattr(package, name, None):
        return False
    if name in ("List", "LargeList", "Sequence"):
        return _is_read_as_stored(feature.feature)
    return name in ("Value", "ClassLabel")
