"""Columns of one type out of chunks that differ: for Arrow's tables and for files, which have one schema.

Integers get the width that all need, and nulls are taken over. Where chunks hold different things, the common
type is a dense union of what they have, so that no value changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.store.columns.links import POOL
from shmloader.store.columns.types import LinkType, PickleType, PythonType

_SIGNED = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32()]
_LARGE = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}


def joined(columns: list[Any]) -> Any:
    """Chunks of rows as a ``Table``, where all are records with fields, else as a ``ChunkedArray``."""
    kind = common_type([column.type for column in columns])
    is_table = arrow.is_struct(kind) and kind.num_fields and not any(column.null_count for column in columns)
    if len(columns) > 1:
        # A file has one dictionary for all batches, and Arrow joins only those that are a field's own.
        fields = (
            [pa.field(field.name, _with_one_dictionary(field.type)) for field in kind] if is_table else []
        )
        kind = pa.struct(fields) if is_table else _with_one_dictionary(kind)
    arrays = [as_type(column, kind) for column in columns]
    if not is_table:
        return _unified(pa.chunked_array(arrays, kind))
    table = pa.Table.from_batches(list(map(pa.RecordBatch.from_struct_array, arrays)), pa.schema(list(kind)))
    return pa.Table.from_arrays(list(map(_unified, table.columns)), schema=table.schema)


def _unified(column: Any) -> Any:
    """A column whose chunks have one dictionary, where they have dictionaries of texts."""
    return column.unify_dictionaries() if _is_of_texts(column.type) else column


def _is_of_texts(kind: Any) -> bool:
    return bool(arrow.is_dictionary(kind)) and kind.value_type in (pa.string(), pa.binary())


def _with_one_dictionary(kind: Any) -> Any:
    """A column's type with room for the texts of all chunks; dictionaries inside of it are decoded."""
    return pa.dictionary(pa.int32(), kind.value_type) if _is_of_texts(kind) else _decoded(kind)


def _decoded(kind: Any) -> Any:
    """A type without dictionaries of texts."""
    if _is_of_texts(kind):
        return kind.value_type
    if isinstance(kind, PythonType):
        return kind.over(_decoded(kind.storage_type))
    if arrow.is_struct(kind) or arrow.is_union(kind):
        fields = [pa.field(field.name, _decoded(field.type)) for field in kind]
        return pa.struct(fields) if arrow.is_struct(kind) else pa.dense_union(fields)
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        return (pa.list_ if arrow.is_list(kind) else pa.large_list)(_decoded(kind.value_type))
    return kind


def joined_array(columns: list[Any]) -> Any:
    """Chunks of rows as one array."""
    kind = common_type([column.type for column in columns])
    return pa.concat_arrays([as_type(column, kind) for column in columns])


def common_type(kinds: list[Any]) -> Any:
    """The type that can hold the values of several, each as it is."""
    found = list(dict.fromkeys(kinds))
    common = found[0] if found else pa.null()
    for kind in found[1:]:
        common = _common(common, kind)
    return common


def _common(one: Any, other: Any) -> Any:
    """The common type of two: a union of their parts where there is no other."""
    single = _single(one, other)
    if single is not None:
        return single
    found: list[Any] = []
    for child in [child for kind in (one, other) for child in _parts(kind)]:
        for place, known in enumerate(found):
            single = _single(known, child)
            if single is not None:
                found[place] = single
                break
        else:
            found.append(child)
    return pa.dense_union([pa.field(str(number), child) for number, child in enumerate(found)])


def _signed_width(kind: Any) -> int | None:
    """The position of the signed type that holds all integers of a type; None if there is none."""
    if kind in _UNSIGNED:
        return _UNSIGNED.index(kind) + 1
    return _SIGNED.index(kind) if kind in _SIGNED else None


def _parts(kind: Any) -> list[Any]:
    return [field.type for field in kind] if arrow.is_union(kind) else [kind]


def _single(one: Any, other: Any) -> Any:
    """The common type of two, if that is not a union of both; else None."""
    if one == other or (arrow.is_null(other) and not arrow.is_union(one)):
        return one
    if arrow.is_null(one) and not arrow.is_union(other):
        return other
    widths = [width for width in map(_signed_width, (one, other)) if width is not None]
    if len(widths) == 2:
        return _SIGNED[max(widths)]
    if _is_of_texts(one) and _is_of_texts(other) and one.value_type == other.value_type:
        return pa.dictionary(pa.int32(), one.value_type)
    if arrow.is_dictionary(one) or arrow.is_dictionary(other):
        return _single(*(kind.value_type if arrow.is_dictionary(kind) else kind for kind in (one, other)))
    if _LARGE.get(one) == other or _LARGE.get(other) == one:
        return _LARGE.get(one, one)
    return _common_inside(one, other)


def _common_inside(one: Any, other: Any) -> Any:
    """The common type of two of one form; None if they are not."""
    if isinstance(one, PickleType) and isinstance(other, PickleType):
        names = sorted({*one.parameters["types"], *other.parameters["types"]})
        return PickleType(_common(one.storage_type, other.storage_type), types=names)
    if isinstance(one, PythonType) or isinstance(other, PythonType):
        alike = type(one) is type(other) and one.parameters == other.parameters
        if not alike:
            return None
        storage = _common(one.storage_type, other.storage_type)
        return None if arrow.is_union(storage) else one.over(storage)
    if arrow.is_struct(one) and arrow.is_struct(other):
        names = [field.name for field in one]
        if names != [field.name for field in other]:
            return None
        pairs = zip(one, other, strict=True)
        return pa.struct([pa.field(a.name, _common(a.type, b.type)) for a, b in pairs])
    lists = (arrow.is_list, arrow.is_large_list)
    if any(fits(one) for fits in lists) and any(fits(other) for fits in lists):
        make = pa.list_ if arrow.is_list(one) and arrow.is_list(other) else pa.large_list
        return make(_common(one.value_type, other.value_type))
    return None


def as_type(column: Any, kind: Any) -> Any:
    """A column as one of a type that `common_type` gave; the very column where it is of that type."""
    found = column.type
    if found == kind:
        return column
    if arrow.is_null(found):
        return _nulls(len(column), kind)
    if arrow.is_union(kind):
        return _as_union(column, kind)
    if arrow.is_dictionary(found) and arrow.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column.indices.cast(kind.index_type), column.dictionary)
    if arrow.is_dictionary(found):
        return as_type(column.dictionary.take(column.indices), kind)
    if isinstance(kind, PythonType):
        return kind.wrap(as_type(column.storage, kind.storage_type))
    if arrow.is_struct(kind):
        fields = [as_type(column.field(number), field.type) for number, field in enumerate(kind)]
        mask = column.is_null() if column.null_count else None
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=mask)
    if arrow.is_list(kind) or arrow.is_large_list(kind):
        ends = np.asarray(column.offsets)
        items = as_type(column.values, kind.value_type)
        make = pa.ListArray if arrow.is_list(kind) else pa.LargeListArray
        ends = ends.astype(np.int32 if arrow.is_list(kind) else np.int64)
        mask = column.is_null() if column.null_count else None
        return make.from_arrays(pa.array(ends), items, mask=mask)
    return column.cast(kind)


def _nulls(count: int, kind: Any) -> Any:
    """Nothing but None, as a column of a type: of a union with a null of its own kind."""
    if arrow.is_union(kind) or (isinstance(kind, PythonType) and arrow.is_union(kind.storage_type)):
        return _as_union(pa.nulls(count), kind)
    if isinstance(kind, PythonType):
        return kind.wrap(_nulls(count, kind.storage_type))
    return pa.nulls(count, kind)


def _as_union(column: Any, kind: Any) -> Any:
    """A column as a union that has its type, or those of its own kinds, among others."""
    children = [field.type for field in kind]
    if arrow.is_union(column.type):
        parts = [column.field(number) for number in range(column.type.num_fields)]
        tags, places = (np.frombuffer(column.buffers()[n], code) for n, code in ((1, np.int8), (2, np.int32)))
        tags = tags[column.offset : column.offset + len(column)]
        places = places[column.offset : column.offset + len(column)].copy()
    else:
        parts, tags, places = [column], np.zeros(len(column), np.int8), np.arange(len(column), dtype=np.int32)
    arrays: list[list[Any]] = [[] for _ in children]
    codes = np.empty(len(tags), np.int8)
    for number, part in enumerate(parts):
        place = next(n for n, child in enumerate(children) if _single(part.type, child) == child)
        chosen = tags == number
        codes[chosen] = place
        places[chosen] += sum(map(len, arrays[place]))
        arrays[place].append(as_type(part, children[place]))
    inside = [
        pa.concat_arrays(some) if some else _nulls(0, child)
        for some, child in zip(arrays, children, strict=True)
    ]
    names = [field.name for field in kind]
    return pa.UnionArray.from_dense(pa.array(codes), pa.array(places), inside, names)


def unlinked(column: Any, values_of: Callable[[int], Any]) -> Any:
    """A column without links: each is replaced by the values that it leads to.

    Args:
        column: The column.
        values_of: Gives all values that a link leads to.
    """
    kind = column.type
    if isinstance(kind, LinkType):
        link = kind.parameters["link"]
        values = values_of(link)
        # What repeats stays there once; rows of another store are that store's, and are copied.
        return (
            pa.DictionaryArray.from_arrays(column.storage, values)
            if link == POOL
            else values.take(column.storage)
        )
    if not _has_links(kind):
        return column
    if isinstance(kind, PythonType):
        storage = unlinked(column.storage, values_of)
        return kind.over(storage.type).wrap(storage)
    if arrow.is_struct(kind):
        fields = [unlinked(column.field(number), values_of) for number in range(kind.num_fields)]
        mask = column.is_null() if column.null_count else None
        return pa.StructArray.from_arrays(fields, [field.name for field in kind], mask=mask)
    if arrow.is_union(kind):
        children = [unlinked(column.field(number), values_of) for number in range(kind.num_fields)]
        tags, places = (np.frombuffer(column.buffers()[n], code) for n, code in ((1, np.int8), (2, np.int32)))
        names = [field.name for field in kind]
        return pa.UnionArray.from_dense(pa.array(tags), pa.array(places), children, names)
    items = unlinked(column.values, values_of)
    make = pa.ListArray if arrow.is_list(kind) else pa.LargeListArray
    mask = column.is_null() if column.null_count else None
    return make.from_arrays(column.offsets, items, mask=mask)


def _has_links(kind: Any) -> bool:
    if isinstance(kind, LinkType):
        return True
    if isinstance(kind, PythonType):
        return _has_links(kind.storage_type)
    return any(_has_links(kind.field(number).type) for number in range(kind.num_fields))


def rows_of(batch: Any) -> Any:
    """The rows of a batch as one array: a struct of its columns, or its only column."""
    said = (batch.schema.metadata or {}).get(b"shmloader", b"")
    if batch.num_columns == 1 and any(rows in said for rows in (b'"rows": "column"', b'"rows": "set"')):
        return batch.column(0)
    if batch.num_columns:
        return pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
    return pa.array([{}] * batch.num_rows, pa.struct([]))
