"""A store whose rows lie in chunks, each with a reader of its own."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from shmloader.store.base import Store, row_numbers
from shmloader.store.columns import Reader


class ChunkedStore(Store):
    """Finds the chunk of a row and calls its reader.

    A reader is made when a row of its chunk is first read. Readers do not refer to the store, so no cycle
    of references keeps its memory.
    """

    def __init__(self, starts: list[int]) -> None:
        """Prepare for chunks that begin at these row numbers; the last one is the number of rows."""
        self._starts = starts
        # Chunk c's reader is at c + 1, where bisecting the starts leads. Both ends stay None: no such row.
        self._readers: list[Reader | None] = [None] * (len(starts) + 1)

    @property
    def starts(self) -> list[int]:
        """The first row of each chunk, and the number of rows."""
        return self._starts

    @abstractmethod
    def chunk_reader(self, chunk: int) -> Reader:
        """Make the reader of a chunk; it is called with row numbers of the whole store."""

    def _reader(self, place: int) -> Reader:
        reader = self._readers[place] = self.chunk_reader(place - 1)
        return reader

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Any:
        """See `Store.row`."""
        place = bisect_right(self._starts, index)
        return (self._readers[place] or self._reader(place))(index)

    def __getitem__(self, index: Any) -> Any:
        # This is what is called once per sample: no further call where the row's reader exists.
        if index.__class__ is int:
            reader = self._readers[bisect_right(self._starts, index)]
            if reader is not None:
                return reader(index)
        return super().__getitem__(index)

    def __getitems__(self, indices: Any) -> list[Any]:
        starts, readers, make = self._starts, self._readers, self._reader
        numbers = row_numbers(indices, len(self))
        return [(readers[at := bisect_right(starts, n)] or make(at))(n) for n in numbers]

    def __iter__(self) -> Iterator[Any]:
        starts = self._starts
        for place in range(1, len(starts)):
            read = self._readers[place] or self._reader(place)
            yield from map(read, range(starts[place - 1], starts[place]))
