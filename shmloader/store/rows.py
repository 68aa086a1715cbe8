"""A sequence of Python objects as a store: chunks of consecutive rows, each encoded by itself."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store import arrow_view, gather
from shmloader.store.base import BufferStore, StoreDescription, finish, row_array, row_numbers
from shmloader.store.chunked import ChunkedStore
from shmloader.store.columns import Column, Reader, Readers, items, make_reader
from shmloader.store.encode import ValueEncoder
from shmloader.store.exact_dtypes import dumps
from shmloader.store.fields import field_of, tuple_shapes
from shmloader.store.graphs import has_members
from shmloader.store.kept import Kept
from shmloader.store.one_buffer import new_builder
from shmloader.store.parts import bytes_at
from shmloader.store.size import SizeEstimate

_FIRST_ROWS = 16  # of a stream's first chunk, when nothing is known of its rows
_LEAST_ROWS, _MOST_ROWS = 1 << 14, 1 << 20
_LEAST_STREAMED_ROWS = 1 << 12
_MOST_GRAPHS = 16  # of which rows are parts, that are remembered while rows are copied
_LEAST_CHUNK_NBYTES, _MOST_CHUNK_NBYTES = 4 << 20, 64 << 20  # in shared memory, about


class RowLayout(NamedTuple):
    """Where the parts of a `RowStore` lie.

    Attributes:
        rows: Rows in all chunks.
        chunks: How many.
        starts: Offset of ``chunks + 1`` row numbers, 64 bits: where each chunk starts.
        columns: Offset of ``chunks + 1`` offsets, 64 bits: where each chunk's pickled column lies.
        kind: As in `StoreDescription`.
        python_nbytes: As in `StoreDescription`.
        has_graphs: Whether rows, or values inside of them, are parts of larger values.
    """

    rows: int
    chunks: int
    starts: int
    columns: int
    kind: str
    python_nbytes: int
    has_graphs: bool = False


class RowWriter:
    """Appends rows to shared memory, chunk by chunk.

    Args:
        out: Where to.
        row_nbytes: About how large a row is; None for a stream, of which nothing is known.
        expected_rows: How many there will be, where that is known.
        streamed: Whether nobody keeps what is in the rows while they are appended; None: where
            ``row_nbytes`` is None.
        kept: What was encoded before, for rows that are not streamed; None for nothing.

    Attributes:
        rows: Rows so far.
    """

    def __init__(
        self,
        out: BufferBuilder,
        row_nbytes: float | None = None,
        expected_rows: int = 0,
        streamed: bool | None = None,
        kept: Kept | None = None,
    ) -> None:
        self._out = out
        self._streamed = row_nbytes is None
        self._row_nbytes = row_nbytes or 0
        self._expected_rows = expected_rows
        streamed = self._streamed if streamed is None else streamed
        self._kept = Kept(out, streamed) if kept is None or streamed else kept
        self._encoder = ValueEncoder(out, self._kept, are_held=not self._streamed)
        self._starts = [0]
        self._columns = [out.nbytes]
        self._kinds: Counter[str] = Counter()
        self._estimate = SizeEstimate()
        self._begin_nbytes = out.nbytes
        self._has_graphs = False
        self.rows = 0

    def chunk_rows(self) -> int:
        """How many rows the next chunk should have.

        A chunk's rows exist once more while it is encoded, and those of a stream exist for nothing else:
        so they must be few beside what is there already. The number of chunks grows with the logarithm of
        the number of rows.
        """
        wanted = max(self.rows // 96 if self._streamed else self._expected_rows // 16, 1)
        # A power of two: freed memory fits the next chunk, and is not left as holes that are too small.
        wanted = 1 << (wanted.bit_length() - 1)
        least = _LEAST_STREAMED_ROWS if self._streamed else _LEAST_ROWS
        wanted = min(max(wanted, least), _MOST_ROWS)
        written = self._out.nbytes - self._begin_nbytes
        most_nbytes = min(max(written // 16, _LEAST_CHUNK_NBYTES), _MOST_CHUNK_NBYTES)
        # What all rows share is written once, however many there are.
        own_nbytes = written - self._kept.once_nbytes
        row_nbytes = own_nbytes / self.rows if self.rows else self._row_nbytes
        wanted = max(1, min(wanted, int(most_nbytes / max(row_nbytes, 1))))
        return min(wanted, 4 * self.rows or _FIRST_ROWS) if self._streamed else wanted

    def append(self, values: list[Any]) -> None:
        """Append one chunk.

        Raises:
            SharedMemoryExhausted: If the host has not enough memory left.
        """
        # Before they are encoded: what is kept by now has been counted.
        self._estimate.add(values, known=self._kept)
        column = self._encoder.encode(values)
        self._columns[-1] = self._out.append(dumps(column), alignment=8)
        self._columns.append(self._out.nbytes)
        self.rows += len(values)
        self._starts.append(self.rows)
        self._kinds[kind_of(column)] += len(values)
        self._has_graphs = self._has_graphs or has_members(column)

    def finish(self) -> RowLayout:
        """Append the tables of the chunks; nothing may be appended after it."""
        starts = self._out.append(np.array(self._starts, np.int64))
        columns = self._out.append(np.array(self._columns, np.int64))
        return RowLayout(
            self.rows,
            len(self._starts) - 1,
            starts,
            columns,
            _common_kind(self._kinds),
            self._estimate.nbytes,
            self._has_graphs,
        )


def _common_kind(kinds: Collection[str]) -> str:
    """The word that describes chunks of these kinds: rows of None fit any; ``objects`` where no rows are."""
    found = set(kinds) - {"nones"} or ({"numbers"} if kinds else {"objects"})
    return found.pop() if len(found) == 1 else "mixed"


def kind_of(column: Column) -> str:
    """The word that describes a chunk."""
    name = type(column).__name__
    if name == "Strings":
        return "strings" if column.text else "bytes"  # type: ignore[attr-defined]
    if name in ("Union", "Repeated"):
        parts = column.kinds if name == "Union" else column.of  # type: ignore[attr-defined]
        kinds = set(map(kind_of, parts)) - {"nones"}
        return kinds.pop() if len(kinds) == 1 else "mixed"
    return _KINDS[name]


_KINDS = {
    "Nones": "nones",
    "Numbers": "numbers",
    "Bools": "numbers",
    "NumpyScalars": "numbers",
    "Dicts": "records",
    "Tuples": "records",
    "Objects": "records",
    "Maps": "records",
    "Lists": "lists",
    "Stacked": "arrays",
    "Ragged": "arrays",
    "Pickles": "objects",
    "Members": "objects",
}


class _Rows(ChunkedStore):
    """What the stores of rows and of a field of these have in common."""

    buffer: SharedBuffer

    @property
    @abstractmethod
    def has_graphs(self) -> bool:
        """Whether rows may be parts of larger values, of which each is read as a whole."""

    @abstractmethod
    def column_of(self, chunk: int) -> Column:
        """The column that holds a chunk."""

    def chunk_reader(self, chunk: int) -> Reader:
        """See `ChunkedStore.chunk_reader`."""
        return make_reader(self.column_of(chunk), self.buffer, self.starts[chunk])

    def __getitems__(self, indices: Any) -> list[Any]:
        if not self.has_graphs:
            return super().__getitems__(indices)
        return list(map(self._reading(None), row_numbers(indices, len(self))))

    def read_in_order(self, numbers: Iterable[int]) -> Iterator[Any]:
        """See `Store.read_in_order`."""
        return map(self._reading(1), numbers) if self.has_graphs else super().read_in_order(numbers)

    def __iter__(self) -> Iterator[Any]:
        return self.read_in_order(range(len(self))) if self.has_graphs else super().__iter__()

    def _reading(self, most_graphs: int | None, readers: Readers | None = None) -> Reader:
        """Make a function that reads rows, and what several of them are parts of (or share) once."""
        chunk_readers: dict[int, Reader] = {}

        def read(number: int) -> Any:
            chunk = bisect_right(self.starts, number) - 1
            if chunk not in chunk_readers:
                column, first = self.column_of(chunk), self.starts[chunk]
                chunk_readers[chunk] = make_reader(column, self.buffer, first, readers, most_graphs)
            return chunk_readers[chunk](number)

        return read

    def reading_shared(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Read rows; those that share a value have the same object, as long as that is remembered."""
        return map(self._reading(_MOST_GRAPHS, {}), numbers)

    def alone(self, rows: Sequence[int]) -> RowStore:
        """See `Store.alone`; what the rows share they share there too."""
        with new_builder() as out:
            writer, values = RowWriter(out), self.reading_shared(rows)
            while values_of_chunk := list(islice(values, writer.chunk_rows())):
                writer.append(values_of_chunk)
            copy: RowStore = finish(out, (RowStore, writer.finish()))
            return copy

    def to_arrow(self) -> Any:
        """See `SharedObject.to_arrow`: a ``Table`` of dict records, a ``ChunkedArray`` of anything else."""
        return arrow_view.to_arrow(self)

    def take(self, indices: Any, out: Any = None) -> Any:
        """See `Store.take`."""
        return gather.take(self, row_array(indices, len(self)), out)


class RowStore(BufferStore, _Rows):
    """Rows of any Python objects.

    What is read equals what was given, with the same types. Objects that were one and the same in
    several places are equal afterwards, but no longer the same one.
    """

    def __init__(self, buffer: SharedBuffer, layout: RowLayout) -> None:
        BufferStore.__init__(self, buffer, layout)
        ChunkedStore.__init__(self, items(buffer, layout.starts, layout.chunks + 1, "q").tolist())
        self._layout = layout
        self._places = items(buffer, layout.columns, layout.chunks + 1, "q")
        self._columns: dict[int, Column] = {}

    @property
    def has_graphs(self) -> bool:
        """See `_Rows.has_graphs`."""
        return self._layout.has_graphs

    def column_of(self, chunk: int) -> Column:
        """The column that holds a chunk."""
        column = self._columns.get(chunk)
        if column is None:
            begin, end = self._places[chunk : chunk + 2]
            column = self._columns[chunk] = pickle.loads(bytes_at(self.buffer, begin, end - begin))
        return column

    def column(self, field: str | int) -> FieldStore:
        """One field of all records, as a store over the same memory.

        Args:
            field: A key of the dicts, or a position in the tuples.

        Raises:
            KeyError: If not all rows are records that have it.
        """
        return FieldStore(self, field)

    def tuple_shape(self) -> tuple[type, int] | None:
        """The class and length of the rows where all are tuples that agree in these, else None."""
        columns = map(self.column_of, range(self._layout.chunks))
        shapes = set().union(*map(tuple_shapes, columns))
        return shapes.pop() if len(shapes) == 1 else None

    def describe(self) -> StoreDescription:
        """See `SharedObject.describe`."""
        layout = self._layout
        return StoreDescription(layout.kind, layout.rows, self.buffer.nbytes, layout.python_nbytes)


class FieldStore(_Rows):
    """One field of the records of a `RowStore`."""

    def __init__(self, store: RowStore, field: str | int) -> None:
        super().__init__(store.starts)
        self._store = store
        self._field = field
        for chunk in range(len(store.starts) - 1):
            self.column_of(chunk)

    @property
    def buffer(self) -> SharedBuffer:  # type: ignore[override]
        """The store's memory."""
        return self._store.buffer

    @property
    def has_graphs(self) -> bool:
        """See `_Rows.has_graphs`."""
        return self._store.has_graphs

    def column_of(self, chunk: int) -> Column:
        """The column that holds a chunk's field."""
        column = field_of(self._store.column_of(chunk), self._field)
        if column is None:
            raise KeyError(self._field)
        return column

    def describe(self) -> StoreDescription:
        """See `SharedObject.describe`; the bytes are those of the whole store."""
        whole = self._store.describe()
        kinds = {kind_of(self.column_of(chunk)) for chunk in range(len(self.starts) - 1)}
        return replace(whole, kind=_common_kind(kinds))

    def __reduce__(self) -> Any:
        return FieldStore, (self._store, self._field)
