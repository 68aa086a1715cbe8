"""Kinds of columns over others: unions of several kinds, values kept once, links; and all other types."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from shmloader.store.columns.buffers import bits_of, numbers_of, numbers_to_arrow
from shmloader.store.columns.kind import (
    Kind,
    Origin,
    PythonType,
    Reader,
    Weights,
    children_of,
    items_of,
    kind_of,
    reader_of,
    type_name,
    weights_at,
    weights_of,
)
from shmloader.store.columns.values import Ints, Octets, Pickles, Texts

MOST_KINDS = 127
"""As many as Arrow's union has."""


_MOST_MADE = 1 << 16  # texts of a dictionary that a process makes when it first reads a row
_UNION = pa.dense_union([pa.field("", pa.null())])


class Others(Kind, arrow=[None]):
    """Values of all other types of Arrow's, as Arrow itself reads them."""

    def check(self, column: Any) -> None:
        column.validate(full=True)  # Arrow itself trusts its buffers

    def getter(self, column: Any, origin: Origin) -> Reader:
        return lambda i: column[i].as_py()


class Unions(Others, arrow=[_UNION, pa.sparse_union([pa.field("", pa.null())])]):
    """Values of several kinds, each in the column of its kind."""

    nullable = False

    def check(self, column: Any) -> None:
        if not self._is_ours(column.type):
            super().check(column)

    @staticmethod
    def _is_ours(kind: Any) -> bool:
        return bool(kind.id == _UNION.id and list(kind.type_codes) == list(range(kind.num_fields)))

    @staticmethod
    def _places(column: Any) -> tuple[memoryview[Any], memoryview[Any]]:
        return numbers_of(column, 1, "b", len(column)), numbers_of(column, 2, "i", len(column))

    def getter(self, column: Any, origin: Origin) -> Reader:
        if not self._is_ours(column.type):
            return super().getter(column, origin)
        tags, places = self._places(column)
        # field() of a slice is the whole child: places count from its begin.
        readers = [reader_of(column.field(number), origin) for number in range(column.type.num_fields)]
        return lambda i: readers[tags[i]](places[i])

    def weights(self, column: Any) -> Weights:
        if not self._is_ours(column.type):
            return super().weights(column)
        tags, places = map(np.asarray, self._places(column))
        found = np.zeros(len(tags), np.int64)
        for tag in range(column.type.num_fields):
            chosen = tags == tag
            found[chosen] = weights_at(weights_of(column.field(tag)), places[chosen])
        return found

    def describe(self, kind: Any) -> str:
        return " or ".join(map(type_name, children_of(kind)))


def union_of(values: list[Any], keys: Sequence[Hashable], encode: Callable[[Any, list[Any]], Any]) -> Any:
    """A column of values of several kinds, the ``keys``: ``encode`` makes that of a kind from its values.

    A dense union, or the one kind's column where there is but one; pickles where there are too many.
    """
    tag_of = {key: tag for tag, key in enumerate(dict.fromkeys(keys))}
    if len(tag_of) == 1:
        return encode(keys[0], values)
    if len(tag_of) > MOST_KINDS:
        return Pickles.write(values)
    tags = np.fromiter(map(tag_of.__getitem__, keys), np.int8, len(keys))
    places = np.empty(len(keys), np.int32)
    children = []
    for key, tag in tag_of.items():
        chosen = tags == tag
        group = list(compress(values, chosen.tolist()))
        places[chosen] = np.arange(len(group), dtype=np.int32)
        children.append(encode(key, group))
    return pa.UnionArray.from_dense(numbers_to_arrow(tags), numbers_to_arrow(places), children)


class Dictionaries(Kind, arrow=[pa.dictionary(pa.int8(), pa.string())]):
    """Values that repeat, each once."""

    def getter(self, column: Any, origin: Origin) -> Reader:
        words = column.dictionary
        place, read = reader_of(column.indices, origin, nulls=False), reader_of(words, origin)
        if isinstance(kind_of(words.type), Texts | Octets) and len(words) <= _MOST_MADE:
            # Made once, and the same objects in all rows: nobody can change them.
            made = list(map(read, range(len(words))))
            return lambda i: made[place(i)]
        return lambda i: read(place(i))

    def weights(self, column: Any) -> Weights:
        indices = column.indices
        weights = weights_at(weights_of(column.dictionary), np.asarray(items_of(indices, nulls=False)))
        if isinstance(weights, int) or not indices.null_count:
            return weights
        bits = np.unpackbits(bits_of(indices, 0), bitorder="little")
        return weights * bits[indices.offset & 7 :][: len(indices)]

    def form(self, kind: Any) -> Hashable:
        return kind_of(kind.value_type).form(kind.value_type)

    def describe(self, kind: Any) -> str:
        return f"{type_name(kind.value_type)}, each once"


class Links(PythonType, name="link", over=Ints):
    """Row numbers in the column ``link`` of the same memory. In no file."""

    is_leaf = False

    @classmethod
    def write_rows(cls, link: int, rows: Any) -> Any:
        """The column of these rows of a container that was written before."""
        return cls.around(numbers_to_arrow(np.array(rows, np.uint32)), link=link)

    def getter(self, column: Any, origin: Origin) -> Reader:
        rows, read = items_of(column.storage, nulls=False), origin.links[self.parameters["link"]]
        return lambda i: read(rows[i])
