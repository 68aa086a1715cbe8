"""Writing containers into one shared buffer: one descriptor and one mapping per call of `share`.

The memory is freed when the last of the stores, and the last array in it, is gone.
"""

from __future__ import annotations

import ctypes
import errno
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence
from itertools import islice
from operator import length_hint
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from shmloader.memory import PAGE_NBYTES
from shmloader.memory.limits import open_files
from shmloader.store import handles
from shmloader.store.chunks import Chunks, chunks_in_memory
from shmloader.store.columns.encode import ColumnEncoder, batch_of
from shmloader.store.columns.kind import find_types
from shmloader.store.columns.mixed import Links
from shmloader.store.objects import nbytes_of_rows
from shmloader.store.sealed_buffer import BufferBuilder, SharedBuffer

_FIRST_ROWS = 16  # of a stream's first chunk, when nothing is known of its rows
_LEAST_ROWS, _MOST_ROWS = 1 << 14, 1 << 20
_LEAST_STREAMED_ROWS = 1 << 12
_LEAST_CHUNK_NBYTES, _MOST_CHUNK_NBYTES = 4 << 20, 64 << 20  # in shared memory, about

_ROWS_AT_ONCE, _MOST_ROWS_NBYTES = 1 << 10, 128 << 20  # of a chunk's rows, as Python objects

Make = Callable[[SharedBuffer], Any]
"""Makes the written value, once the memory is sealed."""

# Here, so that pickling is unchanged in a program without stores.
handles.register(np.ndarray, handles.reduce_array)
handles.register(np.memmap, handles.reduce_array)
handles.register(torch.Tensor, handles.reduce_tensor)


class MemoryWriter:
    """Shared memory while it is written to; a context manager that frees it unless it was sealed."""

    def __init__(self, containers: int = 1) -> None:
        """Make an empty buffer for so many containers; where there is one, nothing has to be remembered.

        OSError if the process may open no more descriptors, with how many it has and what to do.
        """
        try:
            self.out = BufferBuilder()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            _, limit = open_files()
            most = "an unknown number" if limit is None else f"{limit:,}"
            raise OSError(
                error.errno,
                f"a store needs one descriptor, and this process has as many open as it may: {most}. Raise "
                "the limit (ulimit -n), close what is not needed, or share what belongs together in one "
                "call: all attributes of an object that shmloader.share(object) shares take one descriptor",
            ) from error
        self._containers = containers
        self._earlier: dict[int, tuple[int, int]] = {}
        self._arrays: list[tuple[int, int, int]] = []  # addresses, and the place where they were written
        self._alive: list[Any] = []
        self._tables: list[Table] = []
        self._made: dict[int, Chunks] = {}

    def table(self, *, streamed: bool = False) -> Table:
        """Begin the rows of another container; of one that is ``streamed`` no rows are kept meanwhile."""
        table = Table(self.out, ColumnEncoder(self._earlier), streamed=streamed)
        self._tables.append(table)
        return table

    def remember(self, rows: Sequence[Any], table: Table) -> None:
        """Let later containers refer to rows of a list, as a table has them, if others refer to them too."""
        if self._containers < 2:
            return
        link = self._tables.index(table)
        counts = map(sys.getrefcount, rows)
        for number, (count, row) in enumerate(zip(counts, rows, strict=True)):
            # The list, the loop and the calls have five; small immutable values are written as quickly.
            if count > 3 and isinstance(row, dict | list | np.ndarray | torch.Tensor):
                self._earlier.setdefault(id(row), (link, number))
        self._alive.append(rows)

    def chunks(self, table: Table, buffer: SharedBuffer, *, pickles: bool = True) -> Chunks:
        """The chunks of a table, once the memory is sealed; ``pickles`` says whether any may be read."""
        number = self._tables.index(table)
        if number not in self._made:
            links = {link: self.chunks(self._tables[link], buffer) for link in sorted(table.links)}
            told = table.python_nbytes, links, pickles, table.sources, table.encoder.classes
            self._made[number] = chunks_in_memory(buffer, table.places, *told)
        return self._made[number]

    def array(self, value: np.ndarray[Any, Any] | torch.Tensor) -> Make:
        """Write an ndarray without Python objects, or a dense CPU tensor; returns what makes it.

        A view of memory that was written before is made over that again, and memory in which items overlap
        (windows, an expanded tensor) is written once.
        """
        if not value.nbytes:
            return lambda _: value
        low, high = handles.bounds_of(value)
        known = next((one for one in self._arrays if one[0] <= low and high <= one[1]), None)
        make = handles.tensor_over if isinstance(value, torch.Tensor) else handles.array_over
        is_whole = value.is_contiguous() if isinstance(value, torch.Tensor) else value.flags.c_contiguous
        is_dense = is_whole or high - low < value.nbytes
        if known is None and not is_dense:
            value = value.contiguous() if isinstance(value, torch.Tensor) else np.ascontiguousarray(value)
            low, high = handles.bounds_of(value)
        nbytes = high - low
        if known is None:
            self.out.reserve(self.out.nbytes + nbytes)  # before any page is touched
            known = low, high, self.out.append((ctypes.c_ubyte * nbytes).from_address(low))
            if is_dense:  # else it is a copy, which ends with this call
                self._arrays.append(known)
                self._alive.append(value)
        offset, layout = known[2] + low - known[0], handles.layout_of(value, low)
        return lambda buffer: make((buffer, offset, nbytes), *layout)

    @property
    def place(self) -> tuple[int, int]:
        """The end of what is written: bytes and tables so far."""
        return self.out.nbytes, len(self._tables)

    def rewind(self, place: tuple[int, int]) -> None:
        """Give up what was written behind a `place`; the memory is the next one's."""
        self.out.nbytes, tables = place
        del self._tables[tables:]

    def seal(self) -> SharedBuffer:
        """End the writing."""
        for table in self._tables:
            table.end()
        return self.out.seal()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.out.close()
        pa.default_memory_pool().release_unused()  # of the chunks while they were encoded: it may keep that


class Table:
    """The rows of one container, while they are written chunk by chunk."""

    def __init__(self, out: BufferBuilder, encoder: ColumnEncoder, *, streamed: bool = False) -> None:
        self.encoder = encoder
        self.rows = self.nbytes = self.python_nbytes = 0
        self.places: list[tuple[int, ...]] = []  # begin and end of each chunk's head and body, at the end
        self.links: set[int] = set()  # that its columns have
        self.sources: list[str] = []  # the file of each chunk; empty for data of this program
        self._out, self._streamed = out, streamed
        self._written: list[tuple[bytes, int, int]] = []  # the head of each chunk, and the place of its body

    def chunk_rows(self, expected: int, row_nbytes: float) -> int:
        """The number of rows that the next chunk should have; 0 stands for an unknown size of a row.

        A chunk's rows exist once more while it is encoded, and those of a stream exist for nothing else:
        so they must be few beside what is there already. The number of chunks grows with the logarithm of
        the number of rows.
        """
        wanted = max(self.rows // 96 if self._streamed else expected // 16, 1)
        least = _LEAST_STREAMED_ROWS if self._streamed else _LEAST_ROWS
        wanted = min(max(wanted, least), _MOST_ROWS)
        most_nbytes = min(max(self.nbytes // 16, _LEAST_CHUNK_NBYTES), _MOST_CHUNK_NBYTES)
        row_nbytes = self.nbytes / self.rows if self.rows else row_nbytes
        wanted = max(1, min(wanted, int(most_nbytes / max(row_nbytes, 1))))
        # A power of two: freed memory fits the next chunk, and the chunk of a row is found quickly.
        wanted = 1 << (wanted.bit_length() - 1)
        return min(wanted, 4 * self.rows or _FIRST_ROWS) if self._streamed else wanted

    def append(self, values: list[Any]) -> None:
        """Append one chunk of rows."""
        self.python_nbytes += nbytes_of_rows(values)
        self.append_batch(batch_of(self.encoder.encode_rows(values)))

    def append_items(self, items: list[tuple[Any, Any]]) -> None:
        """Append one chunk of a mapping's items."""
        self.python_nbytes += nbytes_of_rows(items)
        columns = [self.encoder.encode([item[n] for item in items], 1) for n in (0, 1)]
        self.append_batch(pa.RecordBatch.from_arrays(columns, ["key", "value"]))

    def append_batch(self, batch: Any) -> None:
        """Append one chunk that is encoded already; Arrow trusts its buffers, so others' must be valid."""
        begin = self._out.append(b"", PAGE_NBYTES)  # rows of 64 bytes, or 256, lie at multiples of that
        stream = _ChunkSink(self._out)
        with pa.ipc.new_stream(pa.PythonFile(stream, "w"), batch.schema) as writer:
            writer.write_batch(batch)
            stream.ended = True
        self._written.append((stream.head, begin, self._out.nbytes))
        self.nbytes += self._out.nbytes - begin
        self.rows += len(batch)
        for field in batch.schema:
            self.links |= {kind.parameters["link"] for _, kind in find_types(field.type, Links)}

    def end(self) -> None:
        """Append the heads of all chunks."""
        for head, *body in self._written:
            begin = self._out.append(head, alignment=8)
            self.places.append((begin, begin + len(head), *body))


class _ChunkSink:
    """A file for Arrow to write a chunk to: its body goes to shared memory, its head is kept apart.

    The head is two pieces of metadata: the schema's, and that of the first message with a body. So bodies of
    whole pages lie one behind the other, and the rows of a single column are one tensor to `Store.take`.
    """

    closed = False

    def __init__(self, out: BufferBuilder) -> None:
        self.head = b""
        self.ended = False  # whether what follows is only the mark of a stream's end
        self._out = out

    def write(self, data: Any) -> int:
        if len(self.head) < _head_nbytes(self.head):
            self.head += bytes(data)
        elif not self.ended:
            self._out.append(data, alignment=1)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def _head_nbytes(begin: bytes) -> int:
    """The length of a head, as far as its beginning tells: each piece follows its own length."""
    end = 0
    for _ in range(2):
        end += 8
        if len(begin) < end:
            break
        end += int.from_bytes(begin[end - 4 : end], "little")
    return end


def write_rows(rows: Iterable[Any], writer: MemoryWriter) -> Table:
    """Write rows, or the items of a mapping, chunk by chunk. An iterator is never held as a whole."""
    expected = length_hint(rows)  # an iterator's len() may raise, as that of torch's loaders does
    row_nbytes = nbytes_of_rows(rows, 64) / max(1, len(rows)) if isinstance(rows, list | tuple) else 0
    table = writer.table(streamed=not isinstance(rows, list | tuple | ItemsView))
    append = table.append_items if isinstance(rows, ItemsView) else table.append
    stream = iter(rows)
    # Nothing here refers to a chunk while the next one is made.
    while chunk := _next_rows(stream, table.chunk_rows(expected, row_nbytes), row_nbytes):
        append(chunk)
        del chunk
        row_nbytes = table.python_nbytes / table.rows
    return table


def _next_rows(stream: Iterator[Any], wanted: int, usual_nbytes: float) -> list[Any]:
    """So many rows; fewer where they turn out to be far larger, as Python objects, than usual."""
    rows: list[Any] = []
    nbytes = 0
    while len(rows) < wanted and nbytes <= max(_MOST_ROWS_NBYTES, 8 * usual_nbytes * len(rows)):
        part = list(islice(stream, min(_ROWS_AT_ONCE, wanted - len(rows))))
        if not part:
            break
        nbytes += nbytes_of_rows(part, 2)  # of two rows, so that what they share counts once
        rows += part
    return rows


def share_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An ndarray without Python objects, in shared memory of its own."""
    with MemoryWriter() as writer:
        make = writer.array(array)
        shared: np.ndarray[Any, Any] = make(writer.seal())
        return shared
