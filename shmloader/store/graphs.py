"""Values that refer to themselves (rings, children with a parent): pickled, as columns would have no end."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from shmloader.shared_memory.sealed_buffer import BufferBuilder, SharedBuffer
from shmloader.store.columns import Column, NoArrowTypeError, Scope
from shmloader.store.records import is_plain_dataclass, is_plain_namedtuple

_SAMPLED = 4
_MOST_REFERENCES = 4000  # that are followed in a column before its values count as free of cycles


def refer_to_themselves(values: list[Any]) -> bool:
    """Whether any of a few of the values is reached from itself, through a limited number of references."""
    sample = values[:: max(1, len(values) // _SAMPLED)][:_SAMPLED]
    return any(_reaches_itself(value, _MOST_REFERENCES // len(sample)) for value in sample)


def _reaches_itself(value: Any, most: int) -> bool:
    seen = {id(value)}
    todo = deque([value])
    while todo:
        for part in _parts(todo.popleft()):
            most -= 1
            if part is value:
                return True
            if most < 0:
                return False
            if id(part) not in seen and _has_parts(part):
                seen.add(id(part))
                todo.append(part)
    return False


def _has_parts(value: Any) -> bool:
    kind: Any = type(value)  # for mypy not hashable
    return _is_kind_with_parts(kind)


@functools.lru_cache(maxsize=1024)
def _is_kind_with_parts(kind: type) -> bool:
    return kind in (list, dict, tuple) or is_plain_dataclass(kind) or is_plain_namedtuple(kind)


def _parts(value: Any) -> Iterable[Any]:
    """What a value that columns would take apart refers to."""
    if isinstance(value, list | tuple):
        return value
    return value.values() if isinstance(value, dict) else vars(value).values()


class Members(NamedTuple):
    """Rows that are parts of larger values: of lists of all that refer to one another.

    Attributes:
        rows: How many.
        places: Offset of the number of each row's list, 32 bits.
        positions: Offset of the row's position in that list, 32 bits.
        of: The lists.
    """

    rows: int
    places: int
    positions: int
    of: Column

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        places = scope.items(self.places, self.rows, "i")
        positions = scope.items(self.positions, self.rows, "i")
        return f"{scope.reader_of_graphs(self.of)}({places}[i])[{positions}[i]]"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        raise NoArrowTypeError("some rows refer to themselves; they are kept pickled")


def has_members(column: Any) -> bool:
    """Whether rows of a column, or values inside of them, are parts of larger values."""
    parts = column if isinstance(column, tuple) else ()
    return isinstance(column, Members) or any(has_members(part) for part in parts)


def encode_graphs(
    values: list[Any], encode_pickles: Callable[[list[Any]], Column], out: BufferBuilder
) -> Column:
    """Encode values that refer to themselves: those that reach one another are in one pickle.

    Args:
        values: The values.
        encode_pickles: Encodes any objects.
        out: Where to.
    """
    row_of = {id(value): row for row, value in enumerate(values)}
    groups: list[list[Any]] = []
    places = np.full(len(values), -1, np.int32)
    positions = np.zeros(len(values), np.int32)
    for row in row_of.values():
        if places[row] < 0:
            members = [other for other in _reached(values[row], row_of) if places[other] < 0]
            places[members] = len(groups)
            positions[members] = range(len(members))
            groups.append([values[other] for other in members])
    if len(groups) == len(values):
        return encode_pickles(values)
    rows = list(map(row_of.__getitem__, map(id, values)))  # the same object may be in several
    return Members(len(values), out.append(places[rows]), out.append(positions[rows]), encode_pickles(groups))


def _reached(value: Any, row_of: dict[int, int]) -> list[int]:
    """The rows that are reached from a value, its own first."""
    seen = {id(value)}
    found = []
    todo = deque([value])
    while todo:
        part = todo.popleft()
        if id(part) in row_of:
            found.append(row_of[id(part)])
        for inner in _parts(part):
            if id(inner) not in seen and _has_parts(inner):
                seen.add(id(inner))
                todo.append(inner)
    return found
