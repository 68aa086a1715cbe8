"""Chunks that differ in their types as columns of one type.

Integers get the width that all need, and nulls are taken over. Dictionaries are joined. Where chunks hold
different things, these values are read and encoded together, mostly as a dense union of what they are.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.store.columns.buffers import mask_of, numbers_to_arrow
from shmloader.store.columns.encode import ColumnEncoder, with_nulls
from shmloader.store.columns.kind import (
    Origin,
    PythonType,
    UnfitError,
    dictionary_inside,
    dictionary_outside,
    form_of_type,
    kind_of,
    reader_of,
    types_in,
)
from shmloader.store.columns.lists import Lists, list_over
from shmloader.store.columns.values import Octets, Texts


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
        kind = kind_of(filled[0].type)
        is_single = len({form_of_type(part.type) for part in filled}) == 1 and not arrow.is_union(
            filled[0].type
        )
        try:
            if not is_single or (len(filled) < len(parts) and not kind.nullable):
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
    return column.dictionary.take(column.indices) if arrow.is_dictionary(column.type) else column


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
