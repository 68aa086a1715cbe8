"""Values that occur several times in what is shared: kept once, and referred to by row number.

One dictionary leads from the identity of an object to its row. It has the rows of every container that was
written before (COCO's annotations are in a list, in a dict by id, and in a dict of lists by image), and what
has repeated inside of rows. Every object in it is kept alive, so that its identity stays its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shmloader.store.columns.types import LinkType

_SAMPLED = 64
_LEAST_ROWS, _LARGE_NBYTES = 64, 1 << 12  # of a column, or of a value in it, that is worth looking at
_OWN_REFERENCES = 3  # of a value that only its list and its record refer to: those two, and the argument
POOL = 0
"""The link to values that have repeated; others are those of the containers written before, in order."""


class Links:
    """Where objects are that have been written, or will be with the next chunk.

    Args:
        earlier: Rows of containers that were written before: the link and the row of each object, by ``id``.

    Attributes:
        new: Repeated values that the next chunk of the pool is to hold.
        pooled: Values in the pool, these included.
    """

    def __init__(self, earlier: dict[int, tuple[int, int]] | None = None) -> None:
        self.new: list[Any] = []
        self.pooled = 0
        self._earlier = {} if earlier is None else earlier
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []

    def forget(self) -> None:
        """Forget what is in the pool: of a stream nobody keeps the objects, nor as they are."""
        self._places.clear()
        self._alive.clear()

    def column(self, values: list[Any], depth: int, encode: Callable[[list[Any], int], Any]) -> Any:
        """A column of links, where values have been written elsewhere or repeat.

        Args:
            values: Of one type.
            depth: In how many containers they are.
            encode: Makes a column of some of the values.

        Returns:
            The column; None if the values are to be written in place.
        """
        if self._earlier:
            column = self._of_earlier(values, depth, encode)
            if column is not None:
                return column
        if (len(values) < _LEAST_ROWS and not _is_large(values[0])) or not _are_referred_to(values):
            return None
        numbers = list(map(id, values))
        distinct = dict.fromkeys(numbers)
        if 2 * sum([number not in self._places for number in distinct]) > len(values):
            return None
        for number, value in dict(zip(numbers, values, strict=True)).items():
            if number not in self._places:
                self._places[number] = self.pooled
                self.pooled += 1
                self.new.append(value)
                self._alive.append(value)
        return _column(POOL, [self._places[number] for number in numbers])

    def _of_earlier(self, values: list[Any], depth: int, encode: Callable[[list[Any], int], Any]) -> Any:
        found = list(map(self._earlier.get, map(id, values)))
        links = {None if place is None else place[0] for place in found}
        if links == {None}:
            return None
        if len(links) == 1:
            return _column(links.pop(), [place[1] for place in found])  # type: ignore[index,arg-type]
        return _union_of_links(values, found, lambda group: encode(group, depth))


def _union_of_links(values: list[Any], found: Sequence[Any], encode: Callable[[list[Any]], Any]) -> Any:
    tags = np.array([-1 if place is None else place[0] for place in found])
    kinds = np.unique(tags)
    places = np.empty(len(values), np.int32)
    children = []
    for kind in kinds.tolist():
        chosen = np.flatnonzero(tags == kind).tolist()
        places[chosen] = np.arange(len(chosen), dtype=np.int32)
        group = [values[at] for at in chosen]
        children.append(encode(group) if kind < 0 else _column(kind, [found[at][1] for at in chosen]))
    codes = np.searchsorted(kinds, tags).astype(np.int8)
    return pa.UnionArray.from_dense(pa.array(codes), pa.array(places), children)


def _column(link: int, places: list[int]) -> Any:
    numbers = pa.array(np.array(places, np.int32 if max(places) < 1 << 31 else np.int64))
    return LinkType(numbers.type, link=link).wrap(numbers)


def _are_referred_to(values: list[Any]) -> bool:
    """Whether any of a sample of the values has more references than those of its own place."""
    sample = {*range(min(_SAMPLED, len(values))), *range(0, len(values), max(1, len(values) // _SAMPLED))}
    return any(sys.getrefcount(values[number]) > _OWN_REFERENCES for number in sample)


def _is_large(value: Any) -> bool:
    """Whether a value is worth keeping once where only few rows refer to it."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() >= _LARGE_NBYTES
    return (value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value, 0)) >= _LARGE_NBYTES
