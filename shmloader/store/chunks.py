"""Chunks: consecutive rows of a store as one record batch each, in memory or in a file.

Each chunk is encoded by itself, by the types that occur in it. So later rows change nothing in earlier
chunks, and memory is only appended to. In memory a chunk is an Arrow IPC stream of one batch, whose head lies
after the bodies of all; in a file it is a batch of that file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

import pyarrow as pa

from shmloader.store.columns.classes import Classes, ClassFinder
from shmloader.store.columns.encode import ColumnEncoder
from shmloader.store.columns.kind import (
    COLUMN,
    Origin,
    Reader,
    dictionary_outside,
    find_types,
    reader_of,
    types_in,
)
from shmloader.store.columns.mixed import Links
from shmloader.store.columns.records import Keys, structs_of
from shmloader.store.handles import reduce_arrow_buffer, register
from shmloader.store.saving import form_of
from shmloader.store.sealed_buffer import SharedBuffer

register(pa.Buffer, reduce_arrow_buffer)  # here, since `handles` does not import pyarrow

Path = tuple[str | int, ...]
"""Fields that lead from a row to a value in it."""


@dataclass(eq=False, repr=False)
class Chunks:
    """The columns of a store."""

    memories: list[SharedBuffer]  # that each chunk lies in
    batches: list[Any]  # each chunk
    nbytes: int  # of memory, or of the files
    classes: InitVar[Classes]  # that are known already
    made_by: tuple[Any, ...]  # how other processes make the chunks: a function, and arguments before classes
    python_nbytes: int = 0  # of the rows as Python objects, estimated; 0 if unknown
    links: Mapping[int, Chunks] = field(default_factory=dict)  # what links in the columns lead to, by number
    pickles: bool = True  # whether pickled values may be read
    sources: Sequence[str] = ()  # the file that each chunk was read from; empty for data of this program

    def __post_init__(self, classes: Classes) -> None:
        self._columns: dict[int, Any] = {}  # made when asked for: a file may have very many batches
        self.starts: list[int] = [0, *accumulate(map(len, self.batches))]  # first rows; the number of all
        self.finder = ClassFinder(classes)  # of the classes that the columns name

    def column(self, chunk: int) -> Any:
        """The rows of a chunk as one array: a struct of the batch's columns, or its only column."""
        column = self._columns.get(chunk)
        if column is None:
            column = self._columns[chunk] = rows_of(self.batches[chunk])
        return column

    def __reduce__(self) -> Any:
        for schema, _ in groupby(batch.schema for batch in self.batches):  # of a file's batches, once
            self.finder.find_all(kind for one in schema for kind in types_in(one.type))
        make, *arguments = self.made_by
        return make, (*arguments, self.finder.given())


def chunks_in_memory(
    buffer: SharedBuffer,
    places: list[tuple[int, ...]],
    python_nbytes: int,
    links: Mapping[int, Chunks],
    pickles: bool,
    sources: Sequence[str],
    classes: Classes,
) -> Chunks:
    """Chunks in shared memory: Arrow IPC streams, whose heads and bodies begin and end at these places."""
    batches = []
    memory = pa.py_buffer(buffer.view)
    for begin, end, begin_of_body, end_of_body in places:
        stream = _ChunkSource(memory[begin:end], memory[begin_of_body:end_of_body])
        with pa.ipc.open_stream(pa.PythonFile(stream, "r")) as reader:
            batches.append(reader.read_next_batch())
    nbytes = sum(sum(place[1::2]) - sum(place[::2]) for place in places)
    told = python_nbytes, links, pickles, sources
    made_by = chunks_in_memory, buffer, places, *told
    return Chunks([buffer] * len(batches), batches, nbytes, classes, made_by, *told)


def items_of_rows(
    items: Any,
    memory: SharedBuffer,
    links: Mapping[int, Chunks],
    pickles: bool,
    source: str,
    classes: Classes,
) -> Chunks:
    """One chunk: the items of containers inside of other rows."""
    batch = pa.RecordBatch.from_arrays([items], schema=pa.schema([pa.field("", items.type)], COLUMN))
    made_by = items_of_rows, items, memory, links, pickles, source
    nbytes, sources = items.get_total_buffer_size(), [source] * bool(source)
    return Chunks([memory], [batch], nbytes, classes, made_by, 0, links, pickles, sources)


class _ChunkSource:
    """A file for Arrow to read a chunk from; reads of its body give views."""

    closed = False

    def __init__(self, head: Any, body: Any) -> None:
        self._left, self._body = head, body

    def read_buffer(self, nbytes: int) -> Any:
        if not self._left.size:
            self._left, self._body = self._body, self._left
        found, self._left = self._left[:nbytes], self._left[nbytes:]
        return found

    def read(self, nbytes: int) -> bytes:
        octets: bytes = self.read_buffer(nbytes).to_pybytes()
        return octets


def rows_of(batch: Any) -> Any:
    """The rows of a batch as one array: a struct of its columns, or its only column."""
    if batch.num_columns == 1 and form_of(batch.schema)["rows"] in ("column", "set"):
        return batch.column(0)
    return batch.to_struct_array()


def field_of(column: Any, name: str | int) -> Any:
    """One field of records; KeyError if not all of them have it."""
    column = dictionary_outside(column)
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, field_of(column.dictionary, name))
    structs = structs_of(column)
    if structs is not None and not structs.null_count:
        if isinstance(name, int) and structs is not column and 0 <= name < structs.type.num_fields:
            name = structs.type.field(name).name
        names = structs.type.names  # types_of_fields would take ten times as long, where there are many
        is_there = name in names and len(set(names)) == len(names)
        if is_there and not isinstance(structs.type.field(name).type, Keys):
            return structs.field(str(name))
    raise KeyError(name)


@dataclass(eq=False, repr=False)
class Column:
    """One field of the rows of all chunks, or the rows themselves; a call with a row's number reads that row.

    A reader is made when a row of its chunk is first read. Readers do not refer to this object, so no cycle
    of references keeps the memory.
    """

    chunks: Chunks
    path: Path = ()  # the field; empty for the rows
    copy: bool = False  # this and the next one: see `Origin`
    views: Any = None

    def __post_init__(self) -> None:
        self.starts = self.chunks.starts
        # Chunk c's reader, of row numbers in the chunk, is at c + 1, the result of bisecting the starts.
        # Both ends stay None: no such row.
        self.readers: list[Reader | None] = [None] * (len(self.starts) + 1)
        links = self.chunks.links.items()
        self._links = {link: replace(self, chunks=linked, path=()) for link, linked in links}

    def __len__(self) -> int:
        return self.starts[-1]

    def __call__(self, number: int) -> Any:
        """Read one row."""
        place = bisect_right(self.starts, number)
        return (self.readers[place] or self.make(place))(number - self.starts[place - 1])

    def make(self, place: int) -> Reader:
        """Make the reader of the chunk before a place."""
        reader = self.readers[place] = reader_of(self.array(place - 1), self.origin(place - 1))
        return reader

    def field(self, name: str | int) -> Column:
        """A field of these rows."""
        return replace(self, path=(*self.path, name))

    def array(self, chunk: int) -> Any:
        """The values of a chunk; KeyError if not all rows have the field."""
        array = self.chunks.column(chunk)
        for name in self.path:
            array = field_of(self._plain(chunk, array) if isinstance(array.type, Links) else array, name)
        return array

    def arrays(self) -> list[Any]:
        """The values of each chunk."""
        return list(map(self.array, range(len(self.starts) - 1)))

    def plain_arrays(self) -> list[Any]:
        """The values of each chunk as other programs read them: rows that links lead to are copied."""
        return [self._plain(chunk, array) for chunk, array in enumerate(self.arrays())]

    def _plain(self, chunk: int, array: Any) -> Any:
        if not find_types(array.type, Links):
            return array
        read = reader_of(array, replace(self, views=None).origin(chunk))
        return ColumnEncoder().encode(list(map(read, range(len(array)))))

    def origin(self, chunk: int) -> Origin:
        """The way to read a chunk."""
        chunks = self.chunks
        source = chunks.sources[chunk] if chunks.sources else ""
        return Origin(
            chunks.memories[chunk], chunks.finder, self._links, self.copy, chunks.pickles, source, self.views
        )
