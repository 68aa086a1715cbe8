"""Writers of values, by type: what each has written becomes the shared value once the memory is sealed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store import foreign, kinds
from shmloader.store.mapping import KeyHashes, KeyIndex, MappingStore, SetStore, pickled_missing
from shmloader.store.memory import (
    Make,
    MemoryWriter,
    Table,
    write_items,
    write_sequence,
    write_stream,
)
from shmloader.store.rows import RowStore

Write = Callable[[MemoryWriter], Make]
_PANDAS_ROWS = 1 << 14


def array_writer(value: Any) -> Write:
    """The writer of an ndarray or a tensor.

    Raises:
        TypeError: If it has no dimensions, or is a tensor that cannot be shared.
    """
    if isinstance(value, torch.Tensor):
        resolved = value.resolve_conj().resolve_neg() if not value.requires_grad else value
        if not kinds.is_shareable_tensor(resolved) or not value.dim():
            raise TypeError(
                "only dense CPU tensors without gradients, of at least one dimension, can be shared; this "
                f"one has {value.dim()} dimensions, {value.dtype}, {value.layout}, device {value.device}, "
                f"requires_grad={value.requires_grad}. See Tensor.detach(), Tensor.cpu(), Tensor.to_dense() "
                "and Tensor.reshape(1)."
            )
        return lambda writer: writer.tensor(resolved)
    if not value.ndim:
        raise TypeError(
            f"an array without dimensions is one value ({value!r:.80}), not rows: nothing in it would be "
            "worth sharing. Share array.reshape(1), or leave it as it is"
        )
    if value.dtype.hasobject:
        raise TypeError(f"an array of Python objects with {value.ndim} dimensions: share a list of its rows")
    return lambda writer: writer.array(value)


def rows_writer(value: Any, copy: bool, progress: bool | None) -> Write:
    """The writer of what becomes a store: containers of objects, iterators, Arrow and pandas data."""
    if foreign.is_arrow(value):
        return lambda writer: _store(writer, _write_arrow(value, writer), copy)
    if foreign.is_pandas(value):
        return lambda writer: _store(writer, write_stream(_pandas_rows(value), writer, progress), copy)
    if isinstance(value, Iterator):
        return lambda writer: _store(writer, write_stream(value, writer, progress), copy)
    if kinds.container_kind(value) is set:
        return lambda writer: _write_set(value, writer, progress)
    if isinstance(value, Mapping):
        return lambda writer: _write_mapping(value, writer, copy, progress)
    return lambda writer: _write_rows(value, writer, copy, progress)


def _store(writer: MemoryWriter, table: Table, copy: bool) -> Make:
    return lambda buffer: RowStore(writer.chunks(table, buffer), (), copy)


def _write_rows(value: Any, writer: MemoryWriter, copy: bool, progress: bool | None) -> Make:
    table = write_sequence(value, writer, progress)
    if isinstance(value, list | tuple):
        writer.remember(value, table)
    return _store(writer, table, copy)


def _write_mapping(value: Any, writer: MemoryWriter, copy: bool, progress: bool | None) -> Make:
    missing, hashes = pickled_missing(value), KeyHashes()
    table = write_items(value.items(), len(value), writer, progress, hashes.add)
    layout = hashes.write(writer.out)

    def make(buffer: SharedBuffer) -> MappingStore:
        store = RowStore(writer.chunks(table, buffer), (), copy)
        return MappingStore(
            store, KeyIndex(store.column("key") if len(store) else store, buffer, layout), missing
        )

    return make


def _write_set(value: Any, writer: MemoryWriter, progress: bool | None) -> Make:
    members, hashes = list(value), KeyHashes()
    hashes.add(members)
    table = write_sequence(members, writer, progress)
    layout = hashes.write(writer.out)

    def make(buffer: SharedBuffer) -> SetStore:
        store = RowStore(writer.chunks(table, buffer))
        return SetStore(store, KeyIndex(store, buffer, layout))

    return make


def _write_arrow(data: Any, writer: MemoryWriter) -> Table:
    """Write an ``Array``, ``ChunkedArray``, ``RecordBatch`` or ``Table``."""
    from shmloader.store.columns.encode import COLUMN

    if isinstance(data, pa.Array):
        data = pa.chunked_array([data])
    if isinstance(data, pa.ChunkedArray):
        data = pa.Table.from_arrays([data], schema=pa.schema([pa.field("", data.type)], COLUMN))
    writer.out.reserve(writer.out.nbytes + data.nbytes)  # before any page is touched
    table = writer.table()
    for batch in [data] if isinstance(data, pa.RecordBatch) else data.to_batches():
        if len(batch):
            table.append_batch(batch)
    return table


def _pandas_rows(data: Any) -> Iterator[Any]:
    parts = (data.iloc[begin : begin + _PANDAS_ROWS] for begin in range(0, len(data), _PANDAS_ROWS))
    if data.ndim == 1:
        return chain.from_iterable(part.tolist() for part in parts)
    return chain.from_iterable(part.to_dict("records") for part in parts)


def foreign_writer(value: Any) -> Write | None:
    """The writer of Arrow data, a pandas frame or a Hugging Face dataset, which keeps its class.

    Returns:
        None where its data is mapped from a file already.
    """
    if foreign.is_arrow(value):
        return lambda writer: _write_in_place(value, writer)
    if foreign.is_pandas(value):
        return lambda writer: _write_frame(value, writer)
    table = foreign.table_in_memory(value)
    if table is None:
        return None

    def write(writer: MemoryWriter) -> Make:
        make = _write_in_place(table, writer)
        return lambda buffer: foreign.with_table(value, make(buffer))

    return write


def _write_in_place(data: Any, writer: MemoryWriter) -> Make:
    """Write Arrow data; what is made is of the same class, over shared memory."""
    table = _write_arrow(data, writer)

    def make(buffer: SharedBuffer) -> Any:
        chunks = writer.chunks(table, buffer)
        batches = [chunks.batch(number) for number in range(len(chunks.starts) - 1)]
        if isinstance(data, pa.RecordBatch):
            return batches[0] if batches else data
        if isinstance(data, pa.Table):
            return pa.Table.from_batches(batches, data.schema)
        columns = pa.chunked_array([batch.column(0) for batch in batches], data.type)
        return (
            columns
            if isinstance(data, pa.ChunkedArray)
            else columns.combine_chunks()
            if not batches
            else batches[0].column(0)
        )

    return make


def _write_frame(frame: Any, writer: MemoryWriter) -> Make:
    """Write a pandas Series or DataFrame: numbers as arrays, texts and other objects as Arrow has them."""
    columns = [frame] if frame.ndim == 1 else [frame.iloc[:, number] for number in range(frame.shape[1])]
    makes = [_write_series(column, writer) for column in columns]

    def make(buffer: SharedBuffer) -> Any:
        made = [one(buffer) for one in makes]
        if frame.ndim == 1:
            return made[0]
        import pandas as pd

        shared = pd.DataFrame(dict(enumerate(made)), index=frame.index, copy=False)
        shared.columns = frame.columns
        return shared

    return make


def _write_series(series: Any, writer: MemoryWriter) -> Make:
    import pandas as pd

    if isinstance(series.dtype, np.dtype) and not series.dtype.hasobject:
        array = writer.array(series.to_numpy())
        return lambda buffer: pd.Series(array(buffer), index=series.index, name=series.name, copy=False)
    try:
        arrow = pa.chunked_array([pa.array(series, from_pandas=True)])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return lambda buffer: series  # values of no common type
    column = _write_in_place(arrow, writer)

    def make(buffer: SharedBuffer) -> Any:
        values = pd.arrays.ArrowExtensionArray(column(buffer))
        return pd.Series(values, index=series.index, name=series.name, copy=False)

    return make
