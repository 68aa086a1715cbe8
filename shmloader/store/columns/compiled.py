"""Functions that are compiled for the columns of a chunk, and the names that their source may use.

A column gives a Python *expression* of the value in row ``i``. The expressions of a chunk become one
function, since a call per column would cost more than the reading. Numbers are read through memoryviews,
texts as slices of the memory: no scalar of Arrow is made.

The source of such a function is made of this package's own text and of ``repr`` of field names; values reach
it only as arguments. Memoryviews and NumPy check bounds, and `ends_of` those of slices of an mmap. So
buffers of a damaged file can give wrong values or an exception, but no access beyond the memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.memory.mapping import address_of
from shmloader.store.columns.types import ClassFinder
from shmloader.store.sealed_buffer import SharedBuffer

_FOLLOWING = "j = i + 1"

NUMBER_CODES = {
    pa.int8(): "b",
    pa.int16(): "h",
    pa.int32(): "i",
    pa.int64(): "q",
    pa.uint8(): "B",
    pa.uint16(): "H",
    pa.uint32(): "I",
    pa.uint64(): "Q",
    pa.float32(): "f",
    pa.float64(): "d",
}
"""Types of numbers, with the codes that ``memoryview``, ``struct`` and NumPy have for them."""

Reader = Callable[[int], Any]
"""Reads one row of a column, by its number."""


class Scope:
    """The names that an expression may refer to.

    Attributes:
        memory: Where the buffers lie; None for any place.
        finder: Finds the classes that columns name.
        links: Readers of the columns that links lead to.
        copy: Whether arrays and tensors are private copies, which may be changed.
        pickles: Whether pickled values may be read.
        values: The objects that have been given names, in order.
        lines: Statements that come before the expression.
    """

    def __init__(
        self,
        memory: SharedBuffer | None = None,
        finder: ClassFinder | None = None,
        links: Mapping[int, Reader] | None = None,
        *,
        copy: bool = False,
        pickles: bool = True,
    ) -> None:
        self.memory = memory
        self.finder = ClassFinder() if finder is None else finder
        self.links = links or {}
        self.copy = copy
        self.pickles = pickles
        self.values: list[object] = []
        self.lines: list[str] = []

    def bind(self, value: object) -> str:
        """A name for an object."""
        self.values.append(value)
        return f"v{len(self.values) - 1}"

    def bind_octets(self, buffer: Any) -> tuple[str, str]:
        """Names for memory to read a buffer's bytes from, and for the place where they begin there.

        Slices of an mmap are quicker than those of a memoryview, and one of it serves all buffers.
        """
        memory = self.memory
        if buffer is None or memory is None or not 0 <= buffer.address - memory.address < memory.nbytes:
            return self.bind(b"" if buffer is None else memoryview(buffer)), ""
        return self.bind(memory.mapping), f"{self.bind(buffer.address - address_of(memory.mapping))} + "

    def following(self) -> str:
        """A name for the number of the next row."""
        if _FOLLOWING not in self.lines:
            self.lines.append(_FOLLOWING)
        return "j"

    def inner(self) -> Scope:
        """A scope of the same memory, for another function."""
        return Scope(self.memory, self.finder, self.links, copy=self.copy, pickles=self.pickles)

    def copied(self) -> Scope:
        """A scope with the same names, for further functions."""
        scope = self.inner()
        scope.values = [*self.values]
        return scope


def compile_reader(lines: Sequence[str], scope: Scope, first: int = 0) -> Reader:
    """Compile a function of the row ``i``.

    Args:
        lines: Its statements, in terms of names that ``scope`` gave.
        scope: The scope.
        first: Number of its first row.
    """
    if first:
        lines = ["i -= first", *lines]
    reader: Reader = _factory("\n  ".join(lines), len(scope.values))(first, *scope.values)
    return reader


@functools.lru_cache(maxsize=256)  # chunks of one store nearly always have the same source
def _factory(body: str, names: int) -> Callable[..., Reader]:
    arguments = "".join(f", v{n}" for n in range(names))
    # As defaults they lie side by side in memory; the cells of a closure do not.
    used = set(re.findall(r"\b(?:first|v\d+)\b", body)) & {"first", *(f"v{n}" for n in range(names))}
    defaults = "".join(f", {name}={name}" for name in sorted(used))
    source = f"def make(first{arguments}):\n def read(i{defaults}):\n  {body}\n return read"
    namespace: dict[str, Any] = {}
    exec(compile(source, "<reader of a shmloader column>", "exec"), namespace)
    make: Callable[..., Reader] = namespace["make"]
    return make


def octets_of(array: Any, number: int) -> memoryview[Any]:
    """A buffer of an Arrow array as bytes; empty if the array has none."""
    buffer = array.buffers()[number]
    return memoryview(b"" if buffer is None else buffer).cast("B")


def numbers_of(array: Any, buffer: int, code: str, count: int) -> memoryview[Any]:
    """``count`` numbers of a buffer, from the array's first row on."""
    octets, size = octets_of(array, buffer), np.dtype(code).itemsize
    whole: memoryview[Any] = octets[: len(octets) // size * size].cast(code)  # type: ignore[call-overload]
    return whole[array.offset : array.offset + count]


def ends_of(column: Any) -> memoryview[Any]:
    """The offsets at which the texts or lists of a column begin, and the one at which the last ends.

    Memory is sliced by these, so it is an error if they do not ascend. Arrow's ``validate`` sees the
    first and the last; with ``full=True`` it reads the texts too, which may be larger than memory.
    """
    kind = column.type
    is_large = arrow.is_large_list(kind) or arrow.is_large_string(kind) or arrow.is_large_binary(kind)
    ends = numbers_of(column, 1, "q" if is_large else "i", len(column) + 1)
    array = np.asarray(ends)
    if (array[1:] < array[:-1]).any():
        raise ValueError(f"the offsets of a column of {kind} do not ascend")
    return ends
