"""Values of Python as Arrow arrays.

Columns are chosen from the exact types of the values, so that reading gives equal values.

Each type has one column. Values of several types are a dense union of these; None is Arrow's null. Subclasses
of the types that columns know (an ``OrderedDict``, a ``str`` subclass) are pickled, and so is everything else
that no column restores exactly.

An object that occurs several times is kept once: in a dictionary if it repeats in a column of a chunk (at
least half of the values), and as a link if it is a row of a container that was written before (COCO's
annotations are in a list, in a dict by id, and in a dict of lists by image).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from itertools import accumulate, compress
from types import FunctionType, ModuleType, NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import types as arrow

from shmloader.codec.array_kinds import Array
from shmloader.store.columns.buffers import mask_of, numbers_to_arrow
from shmloader.store.columns.classes import name_of_class
from shmloader.store.columns.kind import (
    COLUMN,
    Kind,
    Origin,
    PythonType,
    UnfitError,
    dictionary_inside,
    dictionary_outside,
    kind_of,
    kind_of_class,
    reader_of,
    storage_of,
    types_in,
)
from shmloader.store.columns.lists import Lists, list_over
from shmloader.store.columns.mixed import MOST_KINDS, Links, Unions, union_of
from shmloader.store.columns.values import Octets, Pickles, Texts

_MOST_DEPTH = 12  # of containers in containers; also what ends the walk into a cycle that was not found
_MOST_DEPTH_OF_ROWS = 4  # of rows in rows: each step may lead to several, as in a graph of nodes
_SAMPLED = 64
_LEAST_ROWS, _LARGE_NBYTES = 64, 1 << 12  # of a column, or of a value in it, that may repeat
_OWN_REFERENCES = 3  # of a value that only its list and its record refer to: those two, and the argument
_SAMPLED_VALUES = 4
_MOST_REFERENCES = 1000  # that are followed from a value before it counts as free of cycles
_CODE = (type, ModuleType, FunctionType)  # whose references lead to the whole program

Place = tuple[int, int]
"""A row of a container that was written before: the number of the container, and of the row."""


class ColumnEncoder:
    """Makes columns of values, and of those inside them; links stand for rows that were written before."""

    def __init__(self, earlier: Mapping[int, Place] | None = None) -> None:
        self.classes: dict[str, type] = {}  # that columns name, by these names
        self._earlier = {} if earlier is None else earlier  # by the ``id`` of each object
        self._rows: set[int] = set()  # by ``id``

    def encode(self, values: list[Any], depth: int = 0) -> Any:
        """A column of these values. Pickling may raise any error, for a value that fits in no other one."""
        kinds = set(map(type, values))
        if len(kinds) <= 1:
            return self._of_class(kinds.pop() if kinds else NoneType, values, depth)
        if NoneType in kinds and not 2 < len(kinds) <= MOST_KINDS:  # else None is one more kind of a union
            filled = np.array([value is not None for value in values])
            return with_nulls(self.encode(list(compress(values, filled)), depth), filled)
        return union_of(values, list(map(type, values)), lambda _, group: self.encode(group, depth))

    def encode_rows(self, values: list[Any]) -> Any:
        """A column of a container's rows, which may refer to each other."""
        self._rows = set(map(id, values)) if kind_of_class(type(values[0])).nests else set()
        return self.encode(values)

    def name_of(self, kind: type) -> str:
        """The name by which a column can name a class; UnfitError if the class is not found by it."""
        name = name_of_class(kind)
        if name is None:
            raise UnfitError
        self.classes[name] = kind
        return name

    def _of_class(self, python_class: type, values: list[Any], depth: int) -> Any:
        """A column of values that are all exactly of one type."""
        kind = kind_of_class(python_class)
        if kind.is_leaf:
            return self._each(kind, values, depth)
        linked = [self._earlier.get(id(value)) for value in values] if self._earlier else []
        if any(linked):
            links = [None if place is None else place[0] for place in linked]
            return union_of(values, links, lambda link, group: self._linked(link, kind, group, depth))
        repeated = _repeated(values)
        if repeated is not None:
            places, different = repeated
            words = self._each(kind, different, depth)
            return dictionary_inside(pa.DictionaryArray.from_arrays(places, words))
        return self._each(kind, values, depth)

    def _linked(self, link: int | None, kind: type[Kind], values: list[Any], depth: int) -> Any:
        if link is None:
            return self._each(kind, values, depth)
        return Links.write_rows(link, [self._earlier[id(value)][1] for value in values])

    def _each(self, kind: type[Kind], values: list[Any], depth: int) -> Any:
        """A column that has each value where it is."""
        is_deep = depth >= _MOST_DEPTH_OF_ROWS and any(id(value) in self._rows for value in _few(values))
        is_too_deep = not kind.is_leaf and (is_deep or depth >= _MOST_DEPTH)
        if is_too_deep or (kind.nests and refer_to_themselves(values)):
            return Pickles.write(values)
        try:
            return kind.write(values, self, depth)
        except UnfitError as unfit:
            fits = list(map(unfit.fits, values))
        return union_of(values, fits, lambda fit, group: self.encode(group) if fit else Pickles.write(group))


def batch_of(column: Any) -> Any:
    """A record batch of rows: of the fields of records, else of one column."""
    if pa.types.is_struct(column.type) and column.type.num_fields and not column.null_count:
        return pa.RecordBatch.from_struct_array(column)
    return pa.RecordBatch.from_arrays([column], schema=pa.schema([pa.field("", column.type)], COLUMN))


def with_nulls(column: Any, filled: Array) -> Any:
    """A column with None between its values, where it is not ``filled``."""
    kind = column.type
    if not kind_of(kind).nullable:
        places = np.where(filled, np.cumsum(filled), np.cumsum(~filled)) - 1
        children = [pa.nulls(len(filled) - len(column)), column]
        return pa.UnionArray.from_dense(
            numbers_to_arrow(filled.astype(np.int8)), numbers_to_arrow(places.astype(np.int32)), children
        )
    places = numbers_to_arrow(np.maximum(np.cumsum(filled) - 1, 0), missing=~filled)
    taken = storage_of(column).take(places)
    return kind.wrap_array(taken) if isinstance(kind, PythonType) else taken


def _repeated(values: list[Any]) -> tuple[Any, list[Any]] | None:
    """The place of each value in a list of the different objects; None if less than half of them repeat."""
    if len(values) < _LEAST_ROWS and not _is_large(values[0]):
        return None
    sample = {*range(min(_SAMPLED, len(values))), *range(0, len(values), max(1, len(values) // _SAMPLED))}
    if not any(sys.getrefcount(values[number]) > _OWN_REFERENCES for number in sample):
        return None
    different = {id(value): value for value in values}
    if 2 * len(different) > len(values):
        return None
    place_of = {key: place for place, key in enumerate(different)}
    places = np.array([place_of[id(value)] for value in values], np.int32)
    return numbers_to_arrow(places), list(different.values())


def _is_large(value: Any) -> bool:
    """Whether a value is worth keeping once if only few rows refer to it."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() >= _LARGE_NBYTES
    return (value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value, 0)) >= _LARGE_NBYTES


def refer_to_themselves(values: list[Any]) -> bool:
    """Whether any of a few of the values is reached from itself, through a limited number of references."""
    for value in _few(values):
        todo, seen = [value], {id(value)}
        while todo and len(seen) < _MOST_REFERENCES:
            parts = gc.get_referents(*todo)
            if any(part is value for part in parts):
                return True
            parts = [part for part in parts if gc.is_tracked(part) and not isinstance(part, _CODE)]
            todo = [part for part in parts if id(part) not in seen]
            seen.update(map(id, todo))
    return False


def _few(values: list[Any]) -> list[Any]:
    return values[:: max(1, len(values) // _SAMPLED_VALUES)][:_SAMPLED_VALUES]


# --- chunks that differ in their types, as columns of one type


def joined(columns: list[Any]) -> Any:
    """Chunks of rows as a ``Table``, where all are records with fields, else as a ``ChunkedArray``."""
    columns = united(columns)
    kind = columns[0].type if columns else pa.null()
    if not arrow.is_struct(kind) or not kind.num_fields or any(column.null_count for column in columns):
        return pa.chunked_array(columns, kind)
    batches = [pa.RecordBatch.from_struct_array(column) for column in columns]
    return pa.Table.from_batches(batches, pa.schema(list(kind)))


def united(parts: list[Any]) -> list[Any]:
    """Arrays with the values of these, all of one type."""
    kind = parts[0].type if parts else None
    is_alike = all(part.type == kind for part in parts)
    if len(parts) < 2 or (is_alike and not any(map(arrow.is_dictionary, types_in(kind)))):
        return parts
    parts = list(map(dictionary_outside, parts))
    filled = [part for part in parts if not arrow.is_null(part.type)]
    if all(arrow.is_dictionary(part.type) for part in filled):
        result = _united_dictionaries(filled)
    else:
        filled = list(map(decoded, filled))
        kinds = [kind_of(part.type) for part in filled]
        kind, forms = kinds[0], {kind.form(part.type) for kind, part in zip(kinds, filled, strict=True)}
        try:
            # A union's parts are no column of one kind. Nor has every kind a place for None.
            if len(forms) > 1 or isinstance(kind, Unions) or (len(filled) < len(parts) and not kind.nullable):
                raise UnfitError
            result = kind.unite(filled, united)
        except UnfitError:
            return _encoded_anew(parts)
    rest = iter(result)
    return [
        with_nulls(result[0][:0], np.zeros(len(part), np.bool_)) if arrow.is_null(part.type) else next(rest)
        for part in parts
    ]


def decoded(column: Any) -> Any:
    """A column without a dictionary around its values."""
    return column.dictionary_decode() if arrow.is_dictionary(column.type) else column


def decoded_inside(column: Any) -> Any:
    """A column without dictionaries, at any depth, but for those of texts."""
    column = dictionary_outside(column)
    kind = column.type
    if arrow.is_dictionary(kind):
        is_plain = isinstance(kind_of(kind.value_type), Texts | Octets)
        return column if is_plain else decoded_inside(decoded(column))
    if isinstance(kind, PythonType):
        return kind.rewrap(decoded_inside(column.storage))
    if arrow.is_struct(kind) and kind.num_fields:
        fields = [decoded_inside(column.field(number)) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, [field.name for field in kind], mask=mask_of(column))
    if isinstance(kind_of(kind), Lists):
        size = getattr(kind, "list_size", None)
        return list_over(decoded_inside(column.values), column, size, is_large=arrow.is_large_list(kind))
    return column


def _united_dictionaries(parts: list[Any]) -> list[Any]:
    """Dictionaries as ones over the same values: a file has one for all batches."""
    words = pa.concat_arrays(united([part.dictionary for part in parts]))
    places = numbers_to_arrow(np.arange(len(words), dtype=np.int32))
    if isinstance(kind_of(words.type), Texts | Octets):
        encoded = words.dictionary_encode()
        words, places = encoded.dictionary, encoded.indices
    begin, result = 0, []
    for part in parts:
        found = places.slice(begin, len(part.dictionary)).take(part.indices)
        result.append(dictionary_inside(pa.DictionaryArray.from_arrays(found, words)))
        begin += len(part.dictionary)
    return result


def _encoded_anew(parts: list[Any]) -> list[Any]:
    """Arrays that differ in the kinds of their values, by way of Python objects: parts of one column."""
    values: list[Any] = []
    for part in parts:
        values += map(reader_of(part, Origin(copy=True)), range(len(part)))
    ends = accumulate(map(len, parts))
    whole = ColumnEncoder().encode(values)
    return [whole[end - len(part) : end] for part, end in zip(parts, ends, strict=True)]
