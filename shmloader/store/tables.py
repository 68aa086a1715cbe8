"""``pyarrow`` tables and arrays as stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.arrays import ArrayKind
from shmloader.store.arrow_columns import ArrowColumn
from shmloader.store.base import BufferStore, StoreDescription, Written, row_array
from shmloader.store.chunked import ChunkedStore
from shmloader.store.columns import Reader, make_reader
from shmloader.store.output import output_array, outputs_by_name
from shmloader.store.parts import bytes_at
from shmloader.store.size import SizeEstimate

_SAMPLED_ROWS = 64


class ArrowRows(ChunkedStore):
    """The rows of Arrow data, wherever its buffers lie.

    A row is what ``to_pylist()`` has in its place: for a table a dict, for an array its value.
    """

    def __init__(self, data: Any) -> None:
        """Read the rows of a ``Table`` or a ``ChunkedArray``."""
        self._data = data
        if isinstance(data, pa.Table):
            self._chunks: list[Any] = data.to_batches()
            # An empty table has no batch, and a table without columns no rows in its batches.
        else:
            self._chunks = data.chunks
        self._chunks = [chunk for chunk in self._chunks if len(chunk)]
        starts = [0, *np.cumsum([len(chunk) for chunk in self._chunks]).tolist()]
        super().__init__(starts)

    def chunk_reader(self, chunk: int) -> Reader:
        """See `ChunkedStore.chunk_reader`."""
        data = self._chunks[chunk]
        if isinstance(data, pa.RecordBatch):
            data = data.to_struct_array()
        # No column of Arrow data refers to the memory by offset.
        return make_reader(ArrowColumn(data), NOWHERE, self.starts[chunk])

    def to_arrow(self) -> Any:
        """The ``Table`` or ``ChunkedArray`` itself."""
        return self._data

    def describe(self) -> StoreDescription:
        """See `SharedObject.describe`."""
        rows = len(self)
        step = max(1, rows // _SAMPLED_ROWS)
        sample, estimate = [self.row(index) for index in range(0, rows, step)], SizeEstimate()
        estimate.add(sample, len(sample))
        kind = "table" if isinstance(self._data, pa.Table) else "column"
        python_nbytes = round(estimate.nbytes / max(1, len(sample)) * rows)
        return StoreDescription(kind, rows, self._data.nbytes, python_nbytes)

    def take(self, indices: Any, out: Any = None) -> Any:
        """See `Store.take`: a ``Table`` or ``ChunkedArray``, by Arrow's ``take``."""
        rows = row_array(indices, len(self))
        taken = _taken(self._data, rows)
        if out is None:
            return taken
        if isinstance(taken, pa.Table):
            outs: Mapping[str, Any] = outputs_by_name(out, taken.column_names)
            for name, output in outs.items():
                if output is not None:
                    _fill(output, taken[name])
        else:
            _fill(out, taken)
        return out


def _taken(data: Any, rows: Any) -> Any:
    try:
        return data.take(pa.array(rows))
    except pa.ArrowNotImplementedError:  # of types that Arrow cannot gather (yet): one piece for each row
        pieces = [data.slice(row, 1) for row in rows.tolist()]
    if isinstance(data, pa.Table):
        return pa.concat_tables(pieces or [data.slice(0, 0)])
    return pa.chunked_array([chunk for piece in pieces for chunk in piece.chunks], data.type)


def _fill(out: Any, column: Any) -> None:
    if column.null_count:
        raise TypeError(f"{column.null_count} of the rows are null, which an output cannot hold")
    array = column.to_numpy()
    output_array(out, array.shape, ArrayKind(array.dtype, 0))[...] = array


class ArrowLayout(NamedTuple):
    """Where Arrow's stream lies in a buffer, and whether it is one column that was shared as such."""

    offset: int
    nbytes: int
    is_column: bool


class ArrowStore(BufferStore, ArrowRows):
    """Arrow data in shared memory, as an IPC stream that is read in place."""

    def __init__(self, buffer: SharedBuffer, layout: ArrowLayout) -> None:
        BufferStore.__init__(self, buffer, layout)
        stream = bytes_at(buffer, layout.offset, layout.nbytes)
        with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
            table = reader.read_all()
        ArrowRows.__init__(self, table.column(0) if layout.is_column else table)

    def describe(self) -> StoreDescription:
        """See `SharedObject.describe`."""
        return replace(ArrowRows.describe(self), nbytes=self.buffer.nbytes)


class _Sink:
    """A file for Arrow to write to, which appends to shared memory."""

    closed = False

    def __init__(self, out: BufferBuilder) -> None:
        self._out = out
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self._out.append(data, alignment=1)
        self.nbytes += len(data)
        return len(data)

    def flush(self) -> None:
        pass


def write_arrow(data: Any, out: BufferBuilder) -> Written:
    """Write an ``Array``, ``ChunkedArray``, ``RecordBatch`` or ``Table``."""
    is_column = isinstance(data, pa.Array | pa.ChunkedArray)
    if is_column:
        data = pa.table({"": data})
    elif isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    out.reserve(out.nbytes + data.nbytes)  # before any page is touched
    sink, offset = _Sink(out), out.append(b"")
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), data.schema) as writer:
        writer.write_table(data)
    return ArrowStore, ArrowLayout(offset, sink.nbytes, is_column)


class _Nowhere:
    """Stands for shared memory where a column brings its own."""


NOWHERE: Any = _Nowhere()
