"""Rows of ``shmloader.share``'s stores and of Hugging Face ``datasets``, which give a batch as columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.codec.array_kinds import kind_of_tensor
from shmloader.codec.layout import CODE_OF_NUMPY_DTYPE, CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.slot_allocator import SlotAllocator, current_allocator
from shmloader.foreign import is_hugging_face
from shmloader.sources.base import NotGathered, Rows, Source, as_sample_field, make_output, within
from shmloader.sources.blocks import joined_dtype

_SCALARS = {int: torch.int64, float: torch.float64, bool: torch.bool}
_HF_FORMATS = (None, "numpy", "torch")  # others may be the program's own functions, or draw random numbers


_Form = Any
"""The outputs that rows fit in: shape and dtype of one, or a dict of forms. None if a row fits in none; False
if rows have differed, in their shapes for example."""


class StoreRows:
    """Rows of a store of any kind, by its ``take``; see `Source`.

    A row shows what outputs have to be like, and is asked for again only when rows do not fit in them.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._kind: Any = None  # of the row that was looked at
        self._form: _Form = None
        self._fields: list[StoreRows] = []  # of tuples of one class and length

    def gather(self, rows: Rows) -> Any:
        """The batch of these rows; its leaves are in the slot if there is one."""
        rows = within(rows, len(self._store))
        if self._kind is None:
            self._look_at(rows)
        if self._fields:
            return _as_record(self._kind, [field.gather(rows) for field in self._fields])
        # Without a slot there are no outputs: tensors that a store has written to cannot be resized.
        allocator = current_allocator()
        taken = None if allocator is None else self._taken_to(allocator, rows)
        return _join_taken(self._store.take(rows) if taken is None else taken)

    def _taken_to(self, allocator: SlotAllocator, rows: Rows) -> Any:
        """The rows, gathered into outputs in the slot; None if they fit in no outputs."""
        begin, form = allocator.cursor, None
        while form != self._form and (outs := _outputs(self._form, len(rows))) is not None:
            try:
                return self._store.take(rows, outs)
            except TypeError:
                allocator.go_back(begin)
                form = self._form
                self._look_at(rows)
        return None

    def _look_at(self, rows: Rows) -> None:
        """Learn from the first of some rows."""
        sample = self._store.row(int(rows[0]))
        if isinstance(sample, tuple) and hasattr(self._store, "tuple_length"):
            self._fields = [StoreRows(self._store.column(n)) for n in range(self._store.tuple_length())]
        self._kind, self._form = type(sample), _common(self._form, _form_of(sample))


def _form_of(sample: Any) -> _Form:
    kind = type(sample)
    if kind is dict:
        return {name: _form_of(value) for name, value in sample.items()}
    if kind in _SCALARS:
        return (), _SCALARS[kind]
    if kind is torch.Tensor and sample.dtype in CODE_OF_TORCH_DTYPE:
        return tuple(sample.shape), sample.dtype
    if kind is np.ndarray and sample.dtype in CODE_OF_NUMPY_DTYPE and sample.flags.c_contiguous:
        return sample.shape, DTYPES[CODE_OF_NUMPY_DTYPE[sample.dtype]].torch_dtype
    return None


def _common(known: _Form, new: _Form) -> _Form:
    """The form of rows of two forms."""
    if isinstance(known, dict) and isinstance(new, dict) and known.keys() == new.keys():
        return {name: _common(form, new[name]) for name, form in known.items()}
    if isinstance(known, dict) or isinstance(new, dict):
        return new
    if known is None or new is None:
        return new if known is None else known
    return known if known == new else False


def _outputs(form: _Form, count: int) -> Any:
    """Outputs of a form: a tensor, a dict of those that there are, or None."""
    if isinstance(form, dict):
        outs = {name: _outputs(inner, count) for name, inner in form.items()}
        return {name: out for name, out in outs.items() if out is not None} or None
    return make_output(count, *form) if form else None


def _join_taken(taken: Any) -> Any:
    """Make the batch from the result of a store's ``take``."""
    kind = type(taken)
    if kind is torch.Tensor:
        return taken if current_allocator() is not None else taken.clone()
    if kind is np.ndarray:
        if joined_dtype(taken) is None:
            raise NotGathered(f"torch joins single rows of {taken.dtype} to another dtype, or refuses them")
        array = np.ascontiguousarray(taken)
        return torch.from_numpy(array) if current_allocator() is not None else torch.tensor(array)
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
        dtype = joined_dtype(column)
        if dtype is not None and column.flags.c_contiguous:
            if current_allocator() is None:
                return torch.tensor(column)
            out = make_output(count, column.shape[1:], dtype)
            out.numpy()[...] = column
            return out
    return default_collate(list(column))


def has_columns(dataset: Any) -> bool:
    """Whether a dataset is exactly a ``datasets.Dataset``, without importing that package."""
    kind = getattr(sys.modules.get("datasets.arrow_dataset"), "Dataset", None)
    return is_hugging_face(dataset) and type(dataset) is kind and "__getitems__" not in vars(dataset)
