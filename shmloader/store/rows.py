"""A sequence of rows as a store; the rows were Python objects or Arrow data, or come from a file."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator
from operator import length_hint
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from shmloader.errors import LoaderError
from shmloader.store.base import Store, row_array, row_numbers
from shmloader.store.chunks import Chunks, Column, Path, items_of_rows
from shmloader.store.columns.encode import joined
from shmloader.store.columns.kind import MOST_BUILT, Block, MakeView, Origin, block_of, find_types
from shmloader.store.columns.values import Pickles
from shmloader.store.description import StoreDescription, describe_columns, listed
from shmloader.store.sealed_buffer import SharedBuffer
from shmloader.store.take import ColumnGatherer
from shmloader.store.views import DictView, ListView, Pairs


class RowViews(NamedTuple):
    """Makes views of large containers in rows: over a store of all items, made with the first one."""

    heaviest_dict: int  # the weight of the heaviest dict that is built

    def of_lists(self, items: Any, origin: Origin) -> MakeView:
        """Views of lists, over the items of all."""
        store = functools.cache(functools.partial(_store_of_items, items, origin, self))
        return lambda begin, end: ListView(store(), _part(begin, end, len(items)))

    def of_dicts(self, pairs: Any, origin: Origin) -> MakeView:
        """Views of dicts, over the structs of a key and a value of all."""
        views = RowViews(_HEAVIEST_INNER_DICT)
        made = functools.cache(lambda: Pairs(_store_of_items(pairs, origin, views)))
        return lambda begin, end: DictView(made(), _part(begin, end, len(pairs)))


_HEAVIEST_INNER_DICT = 1 << 10
"""Of dicts that a view of a dict holds: so a trie is walked without building what is below a node."""

VIEWS = RowViews(MOST_BUILT)


def _part(begin: int, end: int, items: int) -> range:
    """The items of one container, which a damaged file may have elsewhere."""
    if begin < 0 or end > items:
        raise ValueError(f"a container has items {begin:,} to {end:,} of {items:,}")
    return range(begin, end)


def _store_of_items(items: Any, origin: Origin, views: RowViews) -> RowStore:
    columns: Any = origin.links  # those of `Column`
    links = {link: column.chunks for link, column in columns.items()}
    memory: Any = origin.memory
    chunks = items_of_rows(items, memory, links, origin.pickles, origin.source, origin.finder.found)
    return RowStore(chunks, (), origin.copy, views)


class RowStore(Store):
    """Rows in chunks of columns.

    Rows that are read equal the original ones, with the same types. References to one object become
    references to equal objects, which are no longer identical. Arrays are views of shared memory: ndarrays
    read-only, tensors private to the process that writes to them. With ``copy`` they are private copies
    instead.
    """

    def __init__(self, chunks: Chunks, path: Path = (), copy: bool = False, views: Any = VIEWS) -> None:
        """Read some chunks; with a ``path``, one field of records."""
        self.chunks = chunks
        self._column = Column(chunks, path, copy, views)
        self._gather: ColumnGatherer | None = None
        self._blocks: dict[int, Block | None] = {}
        self._fields: dict[str | int, RowStore] = {}
        self._description: StoreDescription | None = None
        self._starts = chunks.starts
        self._readers = self._column.readers

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Any:
        """One row; an error names it, and its file."""
        try:
            return self._column(index)
        except DAMAGES as error:
            self._raise(error, index)

    def __getitem__(self, index: Any) -> Any:
        # This is what is called once per sample: no further call where the row's reader exists.
        if index.__class__ is int:
            place = bisect_right(self._starts, index)
            reader = self._readers[place]
            if reader is not None:
                try:
                    return reader(index - self._starts[place - 1])
                except DAMAGES as error:
                    self._raise(error, index)
        return super().__getitem__(index)

    def __getitems__(self, indices: Any) -> list[Any]:
        starts, readers, make = self._starts, self._readers, self._column.make
        numbers = row_numbers(indices, len(self))
        try:
            return [(readers[at := bisect_right(starts, n)] or make(at))(n - starts[at - 1]) for n in numbers]
        except DAMAGES as error:
            for number in numbers:  # the one that cannot be read
                self.row(number)
            self._raise(error)

    def __iter__(self) -> Iterator[Any]:
        starts, numbers = self._starts, iter(range(0))
        try:
            for place in range(1, len(starts)):
                numbers = iter(range(starts[place] - starts[place - 1]))
                read = self._readers[place] or self._column.make(place)
                yield from map(read, numbers)
        except DAMAGES as error:
            self._raise(error, max(starts[place - 1], starts[place] - length_hint(numbers) - 1))

    def _raise(self, error: Exception, index: int | None = None) -> NoReturn:
        """Raise an error that reading a row raised; for rows from files, one that names the file."""
        sources = self.chunks.sources
        if not sources or isinstance(error, LoaderError):
            raise error
        # Reading pickled values may raise whatever their classes do.
        types = {array.type for array in self._column.arrays()} if self.chunks.pickles else ()
        if any(find_types(kind, Pickles) for kind in types):
            raise error
        file = sources[0] + ", or another file that was opened with it," * (len(set(sources)) > 1)
        if index is not None:
            file = f"row {index:,} of {sources[bisect_right(self._starts, index) - 1]}"
        kind = MemoryError if isinstance(error, MemoryError) else ValueError
        raise kind(
            f"{file} cannot be read, so the file is damaged, or has values that Python lacks, such "
            f"as times after the year 9999: {type(error).__name__}: {error}"
        ) from error

    def field(self, chunk: int) -> Any:
        """The values of a chunk, as an Arrow array."""
        return self._column.array(chunk)

    def column(self, name: str | int) -> RowStore:
        """A field of all rows, as a store; the same one each time, since looking at all chunks takes long."""
        if (known := self._fields.get(name)) is not None:
            return known
        store = RowStore(self.chunks, (*self._column.path, name), self._column.copy, self._column.views)
        try:
            if not len(self):
                raise KeyError(name)
            store._column.arrays()
        except KeyError:
            raise KeyError(f"{name!r}: not all rows have such a field. {self._names()}") from None
        self._fields[name] = store
        return store

    def _names(self) -> str:
        """A sentence on the fields that there are."""
        what = self.describe()
        names = [one.name for one in what.fields if one.name]
        if not names:
            return f"They are of kind {what.kind!r} and have no fields: store[number] is a row"
        return (
            f"The fields: {listed(names)}. Rows that are pickled, or that lack one, keep it from being a "
            "column: store.describe() says which are, and why"
        )

    def plain(self) -> RowStore:
        """The same rows, without views inside of them."""
        return RowStore(self.chunks, self._column.path, self._column.copy, None)

    @property
    def buffer(self) -> SharedBuffer:
        """The memory; of several files that of the first one."""
        return self.chunks.memories[0]

    def take(self, indices: Any, out: Any = None) -> Any:
        """Some rows, gathered by columns where all their fields can be."""
        if self._gather is not None and (taken := self._gather.directly(indices, out)) is not None:
            return taken
        rows = row_array(indices, len(self))
        try:
            if self._gather is None:
                self._gather = ColumnGatherer(self._column)
            return self._gather(rows, out)
        except DAMAGES as error:
            if isinstance(error, TypeError) and out is not None:
                raise
            self._raise(error)

    def items_between(self, begin: int, end: int) -> Block | None:
        """See `ListMethods.items_between`."""
        chunk = bisect_right(self._starts, begin) - 1
        if begin >= end or end > self._starts[chunk + 1]:
            return None
        if chunk not in self._blocks:
            try:
                self._blocks[chunk] = block_of(self._column.array(chunk), self.chunks.memories[chunk])
            except DAMAGES as error:
                self._raise(error)
        block = self._blocks[chunk]
        if block is None or block.bit is not None:
            return None
        first = self._starts[chunk]
        return block._replace(items=block.items[begin - first : end - first])

    def describe(self) -> StoreDescription:
        """The store's size, and the kind of each field."""
        if self._description is None:
            chunks = self.chunks
            arrays = self._column.arrays()
            kind, fields = describe_columns(arrays, lambda link: chunks.links[link].column(0).type)
            what = StoreDescription(kind, len(self), chunks.nbytes, chunks.python_nbytes, fields)
            self._description = what
        return self._description

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory, or of the files."""
        return self.chunks.nbytes

    def to_arrow(self) -> Any:
        """Dict records as a ``pyarrow.Table``, and anything else as a ``ChunkedArray``."""
        try:
            arrays = self._column.plain_arrays()
            if self.chunks.sources:
                for array in arrays:
                    array.validate(full=True)  # Arrow's functions trust their buffers
            return joined(arrays)
        except DAMAGES as error:
            self._raise(error)

    def __reduce__(self) -> Any:
        column = self._column
        return RowStore, (self.chunks, column.path, column.copy, column.views)


DAMAGES: tuple[type[Exception], ...] = (
    IndexError,
    ValueError,
    KeyError,
    ArithmeticError,
    TypeError,
    AttributeError,
    pa.ArrowException,
    OSError,
    RecursionError,
    MemoryError,
    SystemError,  # of NumPy, for texts of its own that are not Unicode
)
"""Errors that reading a damaged column may raise. An IndexError must not pass for the end of the store."""
