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

import enum
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import chain, compress, cycle, pairwise
from operator import is_
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from shmloader.codec.array_kinds import is_plain, kind_of_array, kind_of_tensor
from shmloader.store.columns import types
from shmloader.store.columns.arrays import arrays_to_arrow, lists_to_arrow, scalars_to_arrow
from shmloader.store.columns.buffers import numbers_to_arrow
from shmloader.store.columns.types import is_plain_dataclass, is_plain_namedtuple, name_of_class, state_of
from shmloader.store.columns.values import (
    ENCODERS,
    UnfitError,
    is_unicode,
    pickles_to_arrow,
    refer_to_themselves,
)

_NONE = type(None)
_MOST_KINDS = 127  # as many as Arrow's union has
_MOST_DEPTH = 12  # of containers in containers; also what ends the walk into a cycle that was not found
_MOST_FIELDS = 4096
_LEAST_FILLED = 0.125  # of optional fields: if fewer are there, each dict keeps its own keys
_MOST_TUPLE = 64
_SAMPLED = 64
_LEAST_ROWS, _LARGE_NBYTES = 64, 1 << 12  # of a column, or of a value in it, that may repeat
_OWN_REFERENCES = 3  # of a value that only its list and its record refer to: those two, and the argument

Place = tuple[int, int]
"""A row of a container that was written before: the number of the container, and of the row."""


class ColumnEncoder:
    """Makes columns of values, and of the values inside them.

    Args:
        earlier: Rows of containers that were written before, by the ``id`` of each object.

    Attributes:
        classes: The classes that columns name, by these names.
    """

    def __init__(self, earlier: Mapping[int, Place] | None = None) -> None:
        self.classes: dict[str, type] = {}
        self._earlier = {} if earlier is None else earlier
        self._containers: dict[type, Callable[[list[Any], int], Any]] = {
            dict: self._dicts,
            list: self._lists,
            tuple: self._tuples,
            set: self._sets,
            frozenset: self._sets,
            np.ndarray: lambda values, depth: self._arrays(values, kind_of_array),
            torch.Tensor: lambda values, depth: self._arrays(values, kind_of_tensor),
        }

    def encode(self, values: list[Any], depth: int = 0) -> Any:
        """A column of these values.

        Raises:
            Exception: Any that pickling raises, for a value that fits in no other column.
        """
        kinds = set(map(type, values))
        if kinds <= {_NONE}:
            return pa.nulls(len(values))
        if len(kinds) == 1:
            return self._of_kind(kinds.pop(), values, depth)
        if _NONE in kinds and not 2 < len(kinds) <= _MOST_KINDS:  # else None is one more kind of a union
            filled = np.array([value is not None for value in values])
            return with_nulls(self.encode(list(compress(values, filled)), depth), filled)
        return union(values, list(map(type, values)), lambda _, group: self.encode(group, depth))

    def _of_kind(self, kind: type, values: list[Any], depth: int) -> Any:
        """A column of values that are all exactly of one type."""
        if kind in ENCODERS:
            try:
                return ENCODERS[kind](values)
            except UnfitError as unfit:
                return union(
                    values,
                    list(map(unfit.fits, values)),
                    lambda fits, group: self.encode(group) if fits else pickles_to_arrow(group),
                )
        if issubclass(kind, enum.Enum):
            return self._enums(kind, values)
        if issubclass(kind, np.generic):
            return union(values, [value.dtype for value in values], _scalars)
        linked = [self._earlier.get(id(value)) for value in values] if self._earlier else []
        if any(linked):
            links = [None if place is None else place[0] for place in linked]
            return union(values, links, lambda link, group: self._linked(link, kind, group, depth))
        repeated = _repeated(values)
        if repeated is not None:
            places, different = repeated
            words = self._each(kind, different, depth)
            return types.dictionary_inside(pa.DictionaryArray.from_arrays(places, words))
        return self._each(kind, values, depth)

    def _linked(self, link: int | None, kind: type, values: list[Any], depth: int) -> Any:
        if link is None:
            return self._each(kind, values, depth)
        rows = numbers_to_arrow(np.array([self._earlier[id(value)][1] for value in values], np.uint32))
        return types.LinkType(rows.type, link=link).wrap(rows)

    def _each(self, kind: type, values: list[Any], depth: int) -> Any:
        """A column that has each value where it is."""
        if depth >= _MOST_DEPTH:
            return pickles_to_arrow(values)
        is_record = is_plain_namedtuple(kind) or is_plain_dataclass(kind)
        if (is_record or kind in (list, dict, tuple)) and refer_to_themselves(values):
            return pickles_to_arrow(values)
        if kind in self._containers:
            return self._containers[kind](values, depth)
        name = name_of_class(kind) if is_record else None
        column = None if name is None else self._records(kind, name, values, depth)
        if name is None or column is None:
            return pickles_to_arrow(values)
        self.classes[name] = kind
        return column

    def _enums(self, kind: Any, values: list[Any]) -> Any:
        name = name_of_class(kind)
        members = list(kind.__members__)
        places = {id(kind.__members__[member]): place for place, member in reversed(list(enumerate(members)))}
        numbers = [places.get(id(value), -1) for value in values]
        if name is None or -1 in numbers:  # combined flags
            return pickles_to_arrow(values)
        self.classes[name] = kind
        storage = numbers_to_arrow(np.array(numbers, np.int8 if len(members) < 128 else np.int32))
        return types.EnumType(storage.type, python=name, members=members).wrap(storage)

    def _arrays(self, values: list[Any], kind_of: Callable[[Any], Any]) -> Any:
        return union(
            values,
            list(map(kind_of, values)),
            lambda kind, group: pickles_to_arrow(group) if kind is None else arrays_to_arrow(group, kind),
        )

    def _lists(self, values: list[Any], depth: int) -> Any:
        lengths, items = self._items_of(values, depth)
        if lengths[0] and (lengths == lengths[0]).all():
            return pa.FixedSizeListArray.from_arrays(items, int(lengths[0]))
        return lists_to_arrow(lengths, items)

    def _items_of(self, values: list[Any], depth: int) -> tuple[Any, Any]:
        """The number of items of each value, and a column of the items of all."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        return lengths, self.encode(list(chain.from_iterable(values)), depth + 1)

    def _sets(self, values: list[Any], depth: int) -> Any:
        lists = lists_to_arrow(*self._items_of(values, depth))
        return types.SetType(lists.type, kind=type(values[0]).__name__).wrap(lists)

    def _tuples(self, values: list[Any], depth: int) -> Any:
        lengths = set(map(len, values))
        if len(lengths) == 1 and 0 < max(lengths) <= _MOST_TUPLE:
            storage = self._items(values, [str(n) for n in range(len(values[0]))], depth)
        else:
            storage = lists_to_arrow(*self._items_of(values, depth))
        return types.TupleType(storage.type).wrap(storage)

    def _items(self, values: Iterable[Iterable[Any]], names: Sequence[str], depth: int) -> Any:
        """A struct of the items of values that all have as many, in the order of the names."""
        # One pass over the values, which lie anywhere in memory; their items are only referred to.
        flat = list(chain.from_iterable(values))
        columns = [flat[place :: len(names)] for place in range(len(names))]
        del flat  # objects with more references than their list's and their record's may repeat
        arrays = [self.encode(column, depth + 1) for column in columns]
        return pa.StructArray.from_arrays(arrays, list(names))

    def _records(self, kind: type, name: str, values: list[Any], depth: int) -> Any:
        """A column of namedtuples or dataclasses; None if they have no fields of their own."""
        if issubclass(kind, tuple):
            fields = kind._fields  # type: ignore[attr-defined]
            if not fields or {len(fields)} != set(map(len, values)):
                return None
            storage = self._items(values, fields, depth)
            return types.NamedTupleType(storage.type, python=name).wrap(storage)
        try:
            storage = self._dicts(list(map(state_of, values)), depth)
        except AttributeError:  # an empty slot
            return None
        if not pa.types.is_struct(storage.type):  # Arrow has no extension types over others
            return None
        fields = {*kind.__dataclass_fields__, types.KeysType.NAME}  # type: ignore[attr-defined]
        if not {field.name for field in storage.type} <= fields:
            return None
        return types.DataclassType(storage.type, python=name).wrap(storage)

    def _dicts(self, values: list[Any], depth: int) -> Any:
        """A struct where the keys are texts in one order, else a list of keys and values each."""
        names, keys = tuple(values[0]), None
        if not _all_have_the_keys(values, names):
            keys = list(map(tuple, values))
            if not set(map(type, chain.from_iterable(keys))) <= {str}:  # others may refuse to be compared
                return self._maps(values, depth)
            names = merged_order(dict.fromkeys(keys))
        if not _are_fields(names) or (
            keys is not None and sum(map(len, keys)) < _LEAST_FILLED * len(values) * len(names)
        ):
            return self._maps(values, depth)
        if not names:
            return pa.Array.from_buffers(pa.struct([]), len(values), [None])
        if keys is None or set(keys) == {names}:
            return self._items(map(dict.values, values), names, depth)
        places = {name: place for place, name in enumerate(names)}
        ascends = {some: ascend([places[name] for name in some]) for some in set(keys)}
        if not all(ascends.values()):
            return union(
                values,
                [ascends[some] for some in keys],
                lambda fits, group: self._dicts(group, depth) if fits else self._maps(group, depth),
            )
        columns = [self.encode([value.get(name) for value in values], depth + 1) for name in names]
        bits = {some: sum(1 << places[name] for name in some) for some in ascends}
        columns.append(keys_to_arrow([bits[some] for some in keys], names))
        return pa.StructArray.from_arrays(columns, [*names, types.KeysType.NAME])

    def _maps(self, values: list[Any], depth: int) -> Any:
        """Any dicts: a list of keys and values each."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        keys = self.encode(list(chain.from_iterable(values)), depth + 1)
        items = self.encode([item for value in values for item in value.values()], depth + 1)
        lists = lists_to_arrow(lengths, pa.StructArray.from_arrays([keys, items], ["key", "value"]))
        return types.DictType(lists.type).wrap(lists)


def batch_of(column: Any) -> Any:
    """A record batch of rows: of the fields of records, else of one column."""
    if pa.types.is_struct(column.type) and column.type.num_fields and not column.null_count:
        return pa.RecordBatch.from_struct_array(column)
    return pa.RecordBatch.from_arrays([column], schema=pa.schema([pa.field("", column.type)], COLUMN))


COLUMN = {b"shmloader": b'{"rows": "column", "version": 1}'}
"""Metadata of a schema whose one column has the rows."""


def union(values: list[Any], keys: Sequence[Hashable], encode: Callable[[Any, list[Any]], Any]) -> Any:
    """A column of values of several kinds.

    Args:
        values: The values.
        keys: The kind of each.
        encode: Called with a kind and its values.

    Returns:
        A dense union, or the one kind's column where there is but one; pickles where there are too many.
    """
    tag_of = {key: tag for tag, key in enumerate(dict.fromkeys(keys))}
    if len(tag_of) == 1:
        return encode(keys[0], values)
    if len(tag_of) > _MOST_KINDS:
        return pickles_to_arrow(values)
    tags = np.fromiter(map(tag_of.__getitem__, keys), np.int8, len(keys))
    places = np.empty(len(keys), np.int32)
    children = []
    for key, tag in tag_of.items():
        chosen = tags == tag
        group = list(compress(values, chosen.tolist()))
        places[chosen] = np.arange(len(group), dtype=np.int32)
        children.append(encode(key, group))
    return pa.UnionArray.from_dense(numbers_to_arrow(tags), numbers_to_arrow(places), children)


def with_nulls(column: Any, filled: np.ndarray[Any, np.dtype[np.bool_]]) -> Any:
    """A column with None between its values, where it is not ``filled``."""
    kind = column.type
    if not can_be_null(kind):
        places = np.where(filled, np.cumsum(filled), np.cumsum(~filled)) - 1
        children = [pa.nulls(len(filled) - len(column)), column]
        return pa.UnionArray.from_dense(
            numbers_to_arrow(filled.astype(np.int8)), numbers_to_arrow(places.astype(np.int32)), children
        )
    places = numbers_to_arrow(np.maximum(np.cumsum(filled) - 1, 0), missing=~filled)
    taken = types.storage_of(column).take(places)
    return kind.wrap(taken) if isinstance(kind, types.PythonType) else taken


def can_be_null(kind: Any) -> bool:
    """Whether a column of a type can have nulls beside its values."""
    if isinstance(kind, types.PythonType):
        return can_be_null(kind.storage_type)
    return not (pa.types.is_union(kind) or pa.types.is_null(kind))


def keys_to_arrow(bits: Sequence[int], names: Sequence[str]) -> Any:
    """The column of the keys that dicts have."""
    nbytes = next((size for size in (1, 2, 4, 8) if len(names) <= 8 * size), -(-len(names) // 8))
    if nbytes <= 8:
        storage = numbers_to_arrow(np.array(bits, f"u{nbytes}"))
    else:
        octets = np.array([one.to_bytes(nbytes, "little") for one in bits], f"V{nbytes}")
        storage = numbers_to_arrow(octets, pa.binary(nbytes))
    return types.KeysType(storage.type, names=list(names)).wrap(storage)


def merged_order(name_tuples: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """All names in an order that agrees with every tuple, if there is one; else as they first occur."""
    sorter: TopologicalSorter[Any] = TopologicalSorter()
    found: dict[Any, None] = {}
    for names in name_tuples:
        found.update(dict.fromkeys(names))
        for name in names[:1]:
            sorter.add(name)
        for name, following in pairwise(names):
            sorter.add(following, name)
    try:
        sorter.prepare()
    except CycleError:
        return tuple(found)
    came, ready, order = list(found), list[int](), list[Any]()
    places = {name: place for place, name in enumerate(came)}
    while sorter.is_active():
        for name in sorter.get_ready():
            heappush(ready, places[name])
        order.append(came[heappop(ready)])
        sorter.done(order[-1])
    return tuple(order)


def _scalars(dtype: Any, values: list[Any]) -> Any:
    return scalars_to_arrow(values, dtype) if is_plain(dtype) else pickles_to_arrow(values)


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


def _are_fields(names: Sequence[Any]) -> bool:
    """Whether keys can be the names of a struct's fields."""
    return (
        set(map(type, names)) <= {str}
        and len(names) <= _MOST_FIELDS
        and not {types.KeysType.NAME, types.RecordsType.NAME} & set(names)
        and all(map(is_unicode, names))
    )


def ascend(places: Iterable[int]) -> bool:
    """Whether each number is larger than the one before."""
    return all(one < other for one, other in pairwise(places))


def _all_have_the_keys(values: list[dict[Any, Any]], keys: tuple[Any, ...]) -> bool:
    """Whether all dicts have these very objects as keys, in this order: mostly so, and quick to see."""
    if set(map(len, values)) != {len(keys)}:
        return False
    return all(map(is_, chain.from_iterable(values), cycle(keys)))
