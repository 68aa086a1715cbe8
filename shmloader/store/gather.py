"""Gathering rows of a `RowStore` by columns, with one call for each chunk of a column."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shmloader.codec.leaves import wrap_tensor
from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.arrays import (
    Array,
    ArrayKind,
    Stacked,
    array_of_tensor,
    kind_of_array,
    kind_of_tensor,
)
from shmloader.store.columns import Column, items, make_reader
from shmloader.store.fields import values_of
from shmloader.store.output import output_array, outputs_by_name
from shmloader.store.records import Dicts, Tuples, is_plain_namedtuple
from shmloader.store.scalars import Numbers

Rows = np.ndarray[Any, np.dtype[np.int64]]

_ROWS_WORTH_A_CALL = 16  # NumPy's calls for a chunk cost about as much as reading so many rows
_INTS, _FLOATS = ArrayKind(np.dtype(np.int64), 0), ArrayKind(np.dtype(np.float64), 0)
_KIND_OF_SCALAR = {int: _INTS, float: _FLOATS, bool: ArrayKind(np.dtype(np.bool_), 0)}


class ChunkedRows(Protocol):
    """What is needed of a `RowStore`."""

    @property
    def buffer(self) -> SharedBuffer:
        """Its memory."""

    @property
    def starts(self) -> list[int]:
        """The first row of each chunk, and the number of rows."""

    def column_of(self, chunk: int) -> Column:
        """The column that holds a chunk."""

    def __getitems__(self, indices: Any) -> list[Any]: ...


class _Part(NamedTuple):
    """What one chunk contributes: rows of its column, and where in the result they go."""

    column: Any
    rows: Any
    positions: Any


def take(store: ChunkedRows, rows: Rows, out: Any = None) -> Any:
    """Gather rows, numbered from 0 on; see `Store.take`."""
    starts = np.asarray(store.starts)
    chunks = np.searchsorted(starts, rows, "right") - 1
    present = np.unique(chunks)
    if not len(rows) and len(starts) > 1:
        present = np.zeros(1, np.int64)  # nothing of the first chunk: of the right type
    if not len(present):
        return [] if out is None else out
    if 0 < len(rows) < _ROWS_WORTH_A_CALL * len(present):
        return join(store.__getitems__(rows), out)
    parts = []
    for chunk in present.tolist():
        positions = np.flatnonzero(chunks == chunk)
        parts.append(_Part(store.column_of(chunk), rows[positions] - starts[chunk], positions))
    return _gather(parts, len(rows), store.buffer, out)


def _gather(parts: list[_Part], count: int, memory: SharedBuffer, out: Any) -> Any:
    """Gather ``count`` rows out of chunks that hold the same data in, perhaps, different columns."""
    parts = [_Part(*found) for part in parts for found in values_of(*part, memory)]
    first = parts[0].column
    if isinstance(first, Dicts) and _agree(parts, Dicts, "names"):
        outs = outputs_by_name(out, first.names)
        return {
            name: _gather(_fields(parts, number), count, memory, outs[name])
            for number, name in enumerate(first.names)
        }
    if isinstance(first, Tuples) and _agree(parts, Tuples, "shape") and out is None:
        fields = range(len(first.fields))
        return tuple.__new__(first.kind, [_gather(_fields(parts, n), count, memory, None) for n in fields])
    blocks, kind = _blocks(parts, memory)
    if blocks:
        return _gather_blocks(parts, blocks, kind, count, out)
    samples: list[Any] = [None] * count
    for part in parts:
        read = make_reader(part.column, memory, most_graphs=None)
        for position, row in zip(part.positions.tolist(), part.rows.tolist(), strict=True):
            samples[position] = read(row)
    return join(samples, out)


def _agree(parts: list[_Part], column: type, attribute: str) -> bool:
    """Whether all parts have this kind of column, and the same attribute."""
    if not all(isinstance(part.column, column) for part in parts):
        return False
    return len({getattr(part.column, attribute) for part in parts}) == 1


def _fields(parts: list[_Part], number: int) -> list[_Part]:
    return [part._replace(column=part.column.fields[number]) for part in parts]


def _blocks(parts: list[_Part], memory: SharedBuffer) -> tuple[list[Array], ArrayKind]:
    """Each part's column as one array and what the rows are; no arrays where a column cannot be one."""
    first = parts[0].column
    if isinstance(first, Numbers) and _agree(parts, Numbers, "without_none") and first.without_none:
        codes = {part.column.code == "d" for part in parts}
        if len(codes) == 1:
            columns = [part.column for part in parts]
            arrays = [np.asarray(items(memory, one.offset, one.rows, one.code)) for one in columns]
            return arrays, _FLOATS if codes.pop() else _INTS
    if _agree(parts, Stacked, "kind") and _agree(parts, Stacked, "shape") and not first.kind.fortran:
        return [part.column.block(memory) for part in parts], first.kind
    return [], _INTS


def _gather_blocks(parts: list[_Part], blocks: list[Array], kind: ArrayKind, count: int, out: Any) -> Any:
    shape = (count, *blocks[0].shape[1:])
    target = np.empty(shape, kind.dtype) if out is None else output_array(out, shape, kind)
    if len(parts) == 1 and blocks[0].dtype == kind.dtype:
        blocks[0].take(parts[0].rows, axis=0, out=target, mode="clip")  # "raise" would buffer; checked before
    else:
        for part, block in zip(parts, blocks, strict=True):
            target[part.positions] = block.take(part.rows, axis=0)
    return _finished(target, kind) if out is None else out


def _finished(array: Array, kind: ArrayKind) -> Any:
    return array if kind.torch_dtype is None else wrap_tensor(array, kind.torch_dtype)


def join(samples: list[Any], out: Any) -> Any:
    """Turn rows that were read one by one into columns."""
    if len(set(map(type, samples))) == 1:
        first = samples[0]
        # Of a subclass (an OrderedDict, a defaultdict) columns would not say that the rows are of it.
        if type(first) is dict and len({tuple(sample) for sample in samples}) == 1:
            outs = outputs_by_name(out, first)
            return {name: join([sample[name] for sample in samples], outs[name]) for name in first}
        plain = out is None and (type(first) is tuple or is_plain_namedtuple(type(first)))
        if plain and len(set(map(len, samples))) == 1:
            columns = [join(list(column), None) for column in zip(*samples, strict=True)]
            return tuple.__new__(type(first), columns)
        array, kind = _stack(samples, first)
        if array is not None:
            if out is None:
                return _finished(array, kind)
            output_array(out, array.shape, kind)[...] = array
            return out
    if out is not None:
        raise TypeError(f"rows such as {samples[:1]!r:.200} cannot be gathered into an output")
    return samples


def _stack(samples: list[Any], first: Any) -> tuple[Array | None, ArrayKind]:
    """Samples of one type as one array and what its rows are; None where they are not to be joined."""
    kind = _KIND_OF_SCALAR.get(type(first))
    if kind is not None:
        try:
            return np.array(samples, kind.dtype), kind
        except OverflowError:
            return None, kind
    if type(first) not in (np.ndarray, torch.Tensor):
        return None, _INTS
    kind_of: Any = kind_of_array if type(first) is np.ndarray else kind_of_tensor
    kinds = {(kind_of(sample), sample.shape) for sample in samples}
    kind, _ = kinds.pop()
    if kinds or kind is None:
        return None, _INTS
    if kind.torch_dtype is not None:
        return array_of_tensor(torch.stack(samples), kind.dtype), kind
    return np.stack(samples, dtype=kind.dtype), kind  # by itself it would choose the machine's byte order
