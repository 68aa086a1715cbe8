"""Columns: how the rows of a chunk lie in shared memory, and how one row is read back.

A chunk is some consecutive rows. Its rows are encoded into one column, which may have columns inside, by
the types that occur in it; so a chunk never depends on the rows before it. A column is a small tuple of
offsets. It reads a row by giving a Python *expression*: the expressions of a whole chunk become one
function, since a call per column would cost more than the reading does.

The source of that function is made of column classes' own text and of ``repr`` of record keys that are
exactly ``str``; values reach it only as arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.parts import bytes_at

Reader = Callable[[int], Any]
"""Reads one row of a column, by its number within the chunk."""

Readers = dict["Column", Reader]
"""Readers that give the same object for the same value, in as many chunks as refer to it."""

_MOST_READ = 1 << 14


class Column(Protocol):
    """The rows of one chunk; picklable, and a few dozen bytes."""

    @property
    def rows(self) -> int:
        """How many there are."""

    def expression(self, scope: Scope) -> str:
        """Python source of the value in row ``i``, in terms of names that ``scope`` gives."""

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """A ``pyarrow.Array`` over the same memory; `NoArrowTypeError` if there is none."""


class NoArrowTypeError(TypeError):
    """The values have no Arrow type that would give them back as they are."""


class Scope:
    """What an expression may refer to.

    Attributes:
        memory: The shared memory of the chunk.
        readers: Of columns whose values are to be read once and to be the same objects in all rows; None
            where each row's are its own.
        most_graphs: How many graphs, of which rows are parts, are read once: the last ones, or None for all.
        values: The objects that have been given names, in order.
    """

    def __init__(
        self, memory: SharedBuffer, readers: Readers | None = None, most_graphs: int | None = 0
    ) -> None:
        self.memory = memory
        self.readers = readers
        self.most_graphs = most_graphs
        self.values: list[object] = []

    def bind(self, value: object) -> str:
        """A name for an object."""
        self.values.append(value)
        return f"v{len(self.values) - 1}"

    def items(self, offset: int, count: int, code: str) -> str:
        """A name for ``count`` numbers in shared memory, of a type as in the ``struct`` module."""
        return self.bind(items(self.memory, offset, count, code))

    def reader(self, column: Column) -> str:
        """A name for a function that reads another column, for rows other than ``i``."""
        return self.bind(self._make_reader(column))

    def reader_of_graphs(self, column: Column) -> str:
        """The same for a column of graphs, several rows' each."""
        read = self._make_reader(column)
        return self.bind(read if self.most_graphs == 0 else functools.lru_cache(self.most_graphs)(read))

    def reader_of_shared(self, column: Column) -> Reader:
        """The same for a column whose values several rows refer to."""
        if self.readers is None:
            return self._make_reader(column)
        reader = self.readers.get(column)
        if reader is None:
            read = self._make_reader(column)
            reader = self.readers[column] = functools.lru_cache(_MOST_READ)(read)
        return reader

    def _make_reader(self, column: Column) -> Reader:
        return make_reader(column, self.memory, 0, self.readers, self.most_graphs)


def items(memory: SharedBuffer, offset: int, count: int, code: str) -> memoryview[Any]:
    """Numbers in shared memory, as a memoryview."""
    nbytes = count * np.dtype(code).itemsize
    view: memoryview[Any] = bytes_at(memory, offset, nbytes).cast(code)  # type: ignore[call-overload]
    return view


def arrow_buffer(memory: SharedBuffer, offset: int, nbytes: int) -> Any:
    """A part of shared memory as a ``pyarrow.Buffer``; None where ``offset`` is negative."""
    import pyarrow as pa

    return None if offset < 0 else pa.py_buffer(bytes_at(memory, offset, nbytes))


def make_reader(
    column: Column,
    memory: SharedBuffer,
    first: int = 0,
    readers: Readers | None = None,
    most_graphs: int | None = 0,
) -> Reader:
    """Compile the function that reads a row of a column.

    Args:
        column: The column.
        memory: Where it lies.
        first: Number of its first row.
        readers: As in `Scope`.
        most_graphs: As in `Scope`.
    """
    scope = Scope(memory, readers, most_graphs)
    body = column.expression(scope)
    reader: Reader = _factory(body, len(scope.values))(first, *scope.values)
    return reader


@functools.lru_cache(maxsize=256)  # chunks of one store nearly always have the same source
def _factory(body: str, names: int) -> Callable[..., Reader]:
    arguments = "".join(f", v{n}" for n in range(names))
    source = f"def make(first{arguments}):\n def read(i):\n  i -= first\n  return {body}\n return read"
    namespace: dict[str, Any] = {}
    exec(compile(source, "<reader of a shmloader column>", "exec"), namespace)
    make: Callable[..., Reader] = namespace["make"]
    return make


def if_valid(scope: Scope, validity: int, rows: int, value: str) -> str:
    """``value``, or None in rows that the bitmap at offset ``validity`` excludes; no bitmap if negative."""
    if validity < 0:
        return value
    bits = scope.items(validity, (rows + 7) // 8, "B")
    return f"({value} if {bits}[i >> 3] >> (i & 7) & 1 else None)"


class Encoder(Protocol):
    """Encodes the values inside of values."""

    @property
    def out(self) -> BufferBuilder:
        """Where buffers are appended."""

    def encode(self, values: list[Any]) -> Column:
        """Append the buffers of a column of these values and describe it."""
