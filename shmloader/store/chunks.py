"""Chunks: consecutive rows of a store as one record batch each, in memory or in a file.

Each chunk is encoded by itself, by the types that occur in it: nothing that comes late changes what is there,
and memory is only ever appended to. In memory a chunk is an Arrow IPC stream of one batch, in a file a batch
of that file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.columns.compiled import Reader, Scope
from shmloader.store.columns.encode import Encoder
from shmloader.store.columns.packed import field_of_struct, structs_of, types_of_fields, unpacked
from shmloader.store.columns.read import make_reader
from shmloader.store.columns.types import (
    Classes,
    ClassFinder,
    LinkType,
    dictionary_outside,
    find_types,
)
from shmloader.store.handles import reduce_arrow_buffer, register

register(pa.Buffer, reduce_arrow_buffer)  # here, since handles does without pyarrow

Path = tuple[str | int, ...]
"""Fields that lead from a row to a value in it."""


class Chunks(ABC):
    """The columns of a store.

    Attributes:
        buffer: The memory that they lie in.
        starts: The first row of each chunk, and the number of rows.
        nbytes: Bytes of memory, or of the files.
        python_nbytes: Estimate of what the rows take as Python objects; 0 where unknown.
        finder: Finds the classes that they name.
        links: The chunks that links of theirs lead to, by number.
        pickles: Whether pickled values may be read.
    """

    def __init__(
        self, buffer: SharedBuffer, starts: list[int], nbytes: int, classes: Classes | None = None
    ) -> None:
        self.buffer = buffer
        self.starts = starts
        self.nbytes = nbytes
        self.python_nbytes = 0
        self.finder = ClassFinder(classes)
        self.links: Mapping[int, Chunks] = {}
        self.pickles = True
        self._columns: dict[int, Any] = {}

    @abstractmethod
    def batch(self, chunk: int) -> Any:
        """A chunk as a record batch."""

    def memory(self, chunk: int) -> SharedBuffer:
        """The memory that a chunk lies in."""
        return self.buffer

    def column(self, chunk: int) -> Any:
        """The rows of a chunk as one array: a struct of the batch's columns, or its only column."""
        column = self._columns.get(chunk)
        if column is None:
            column = self._columns[chunk] = rows_of(self.batch(chunk))
        return column

    def field(self, chunk: int, path: Path) -> Any:
        """The values in some field of the rows of a chunk; KeyError if not all rows have it."""
        column = self.column(chunk)
        for name in path:
            is_link = isinstance(column.type, LinkType)
            column = field_of(self.plain(chunk, column) if is_link else column, name)
        return column

    def readers_of_links(self, *, copy: bool = False) -> dict[int, Reader]:
        """Readers of the rows that links of these columns lead to."""
        return {link: ChunkReaders(chunks, copy=copy) for link, chunks in self.links.items()}

    def scope(self, chunk: int, links: Mapping[int, Reader], *, copy: bool = False) -> Scope:
        """A new scope for expressions of a chunk's columns."""
        return Scope(self.memory(chunk), self.finder, links, copy=copy, pickles=self.pickles)

    def plain(self, chunk: int, column: Any) -> Any:
        """A column of a chunk as other programs read it: rows that links lead to are copied."""
        if not find_types(column.type, LinkType):
            return unpacked(column)
        read = make_reader(column, self.scope(chunk, self.readers_of_links()))
        return Encoder().encode(list(map(read, range(len(column)))))


def rows_of(batch: Any) -> Any:
    """The rows of a batch as one array: a struct of its columns, or its only column."""
    said = (batch.schema.metadata or {}).get(b"shmloader", b"")
    if batch.num_columns == 1 and any(rows in said for rows in (b'"rows": "column"', b'"rows": "set"')):
        return batch.column(0)
    if batch.num_columns:
        return pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
    return pa.array([{}] * batch.num_rows, pa.struct([]))


def field_of(column: Any, name: str | int) -> Any:
    """One field of records; KeyError if not all of them have it."""
    column = dictionary_outside(column)
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, field_of(column.dictionary, name))
    structs = structs_of(column)
    if structs is not None and not structs.null_count:
        names = [*types_of_fields(structs.type)]
        if isinstance(name, int) and structs is not column and 0 <= name < len(names):
            name = names[name]
        if name in names:
            return field_of_struct(structs, str(name))
    raise KeyError(name)


class MemoryChunks(Chunks):
    """Chunks in shared memory.

    Attributes:
        places: Where each chunk begins and ends.
    """

    def __init__(
        self,
        buffer: SharedBuffer,
        starts: list[int],
        places: list[int],
        nbytes: int,
        python_nbytes: int,
        classes: Classes,
        links: Mapping[int, Chunks],
    ) -> None:
        super().__init__(buffer, starts, nbytes, classes)
        self.places = places
        self.python_nbytes = python_nbytes
        self.links = links

    def batch(self, chunk: int) -> Any:
        """See `Chunks.batch`."""
        begin, end = self.places[2 * chunk : 2 * chunk + 2]
        with pa.ipc.open_stream(pa.py_buffer(self.buffer.view[begin:end])) as reader:
            return reader.read_next_batch()

    def __reduce__(self) -> Any:
        table = self.starts, self.places, self.nbytes, self.python_nbytes
        return MemoryChunks, (self.buffer, *table, self.finder.found, self.links)


class ChunkReaders:
    """Reads rows by number: finds the chunk of a row and calls its reader.

    A reader is made when a row of its chunk is first read. Readers do not refer to this object, so no cycle
    of references keeps the memory.

    Attributes:
        starts: See `Chunks`.
        readers: Chunk ``c``'s reader is at ``c + 1``, where bisecting the starts leads. Both ends stay None:
            no such row.
        copy: Whether arrays and tensors are private copies.
    """

    def __init__(self, chunks: Chunks, path: Path = (), *, copy: bool = False) -> None:
        self.starts = chunks.starts
        self.readers: list[Reader | None] = [None] * (len(self.starts) + 1)
        self._chunks = chunks
        self._path = path
        self.copy = copy
        self._links = chunks.readers_of_links(copy=copy)

    def __call__(self, number: int) -> Any:
        """Read one row."""
        place = bisect_right(self.starts, number)
        return (self.readers[place] or self.make(place))(number)

    def make(self, place: int) -> Reader:
        """Make the reader of the chunk before a place."""
        column = self._chunks.field(place - 1, self._path)
        scope = self._chunks.scope(place - 1, self._links, copy=self.copy)
        reader = self.readers[place] = make_reader(column, scope, self.starts[place - 1])
        return reader
