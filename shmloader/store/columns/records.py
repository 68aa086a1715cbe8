"""Kinds of records: dicts with names as keys, tuples, namedtuples, dataclasses; as structs of their fields.

A record's kind is the set of its names: rows may lack some, and have them in another order. Then one more
column has a number for each row, whose bits tell both (`Keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import chain, cycle, islice, pairwise
from operator import is_
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.codec.array_kinds import Array
from shmloader.store.columns.arrays import Arrays
from shmloader.store.columns.buffers import mask_of, numbers_to_arrow
from shmloader.store.columns.classes import is_plain_dataclass, is_plain_namedtuple, maker_of, state_of
from shmloader.store.columns.kind import (
    Kind,
    Origin,
    PythonType,
    Reader,
    UnfitError,
    United,
    Weights,
    items_of,
    reader_of,
    storage_of,
    type_name,
    weights_of,
)
from shmloader.store.columns.lists import Lists, Maps, any_lists
from shmloader.store.columns.values import FixedOctets, Ints, fixed_to_arrow, is_unicode

_MOST_FIELDS = 4096
_MOST_NAMES, _MOST_NAMES_OF_CONTAINERS = 1024, 64  # of dicts inside of rows
_SAMPLED = 16
_LEAST_FILLED = 0.125  # of optional fields: if fewer are there, each dict keeps its own keys
_MOST_TUPLE = 64
_MOST_FORMS = 64  # of dicts with optional keys whose reader is kept, in each chunk
_MOST_PLACES = 1 << 14  # in the orders of keys that a type names


class Keys(PythonType, name="keys", over=Ints | FixedOctets):
    """The keys that each of some dicts has: bit ``k`` stands for ``names[k]``.

    The bits above are 0 if the keys are in the order of ``names``, else ``n`` for ``orders[n - 1]``.
    """

    @classmethod
    def write_forms(
        cls, rows: list[list[tuple[str, ...]]], forms: Iterable[tuple[str, ...]], names: Sequence[str]
    ) -> list[Any]:
        """Columns of the keys of some rows each, given the form of each row: its keys in order.

        The type has all ``names``, and all ``forms``, also those of other columns of the same type.
        """
        places = {name: place for place, name in enumerate(names)}
        orders: dict[tuple[int, ...], int] = {}
        bits = {}
        for form in dict.fromkeys(forms):
            some = [places[name] for name in form]
            bits[form] = sum(1 << place for place in some)
            if any(one > other for one, other in pairwise(some)):
                whole = (*some, *sorted({*places.values()}.difference(some)))
                bits[form] |= orders.setdefault(whole, len(orders) + 1) << len(names)
                if len(orders) * len(names) > _MOST_PLACES:
                    raise UnfitError
        width = len(names) + len(orders).bit_length()
        nbytes = next((size for size in (1, 2, 4, 8) if width <= 8 * size), -(-width // 8))
        said: dict[str, Any] = {
            "names": list(names),
            **({"orders": list(map(list, orders))} if orders else {}),
        }
        columns = []
        for some_rows in rows:
            numbers = [bits[form] for form in some_rows]
            if nbytes <= 8:
                storage = numbers_to_arrow(np.array(numbers, f"u{nbytes}"))
            else:
                storage = fixed_to_arrow([one.to_bytes(nbytes, "little") for one in numbers], nbytes)
            columns.append(cls.around(storage, **said))
        return columns

    def getter(self, column: Any, origin: Origin) -> Reader:
        read = reader_of(column.storage, origin, nulls=False)
        if arrow.is_fixed_size_binary(self.storage_type):
            return lambda i: int.from_bytes(read(i), "little")
        return read

    def form_of(self, bits: int) -> tuple[str, ...]:
        """The keys of a row, in its order."""
        names = self.parameters["names"]
        number = bits >> len(names)
        order = self.parameters["orders"][number - 1] if number else range(len(names))
        return tuple(names[place] for place in order if bits >> place & 1)

    def absent(self, column: Any, name: str) -> Array | None:
        """The rows that lack a key, as an array of bool; None if an array cannot tell."""
        names = self.parameters["names"]
        if arrow.is_fixed_size_binary(self.storage_type) or name not in names:
            return None
        bits = np.asarray(items_of(column.storage, nulls=False))
        found: Array = np.equal(bits & bits.dtype.type(1 << names.index(name)), 0)
        return found

    def form(self, kind: Any) -> Hashable:
        return self.NAME


def structs_of(column: Any) -> Any:
    """The structs that have the fields of a column's rows; None if the rows are not records."""
    storage = storage_of(column)
    is_records = arrow.is_struct(storage.type) and not isinstance(column.type, Arrays)
    return storage if is_records else None


def types_of_fields(kind: Any) -> dict[str, Any]:
    """The types of the fields of structs, by name, in order; of none where names are not unique."""
    found = {field.name: field.type for field in kind if not isinstance(field.type, Keys)}
    return found if len({field.name for field in kind}) == kind.num_fields else {}


def keys_of(column: Any) -> Any:
    """The column of the keys that each of some structs has; None if all have all keys in one order."""
    place = column.type.get_field_index(Keys.NAME)
    return column.field(place) if place >= 0 and isinstance(column.type.field(place).type, Keys) else None


class Records(Kind, arrow=[pa.struct([])]):
    """Dicts whose keys are texts, as structs; other dicts as `Maps`."""

    takes = (dict,)
    nests = True

    def fits(self, kind: Any) -> bool:
        return bool(len({field.name for field in kind}) == kind.num_fields)

    @classmethod
    def write(cls, values: list[dict[Any, Any]], encoder: Any, depth: int) -> Any:
        names, forms = tuple(values[0]), None
        if not _all_have_the_keys(values, names):
            forms = list(map(tuple, values))
            if not set(map(type, chain.from_iterable(forms))) <= {str}:  # others may refuse to be compared
                return Maps.write(values, encoder, depth)
            names = merged_order(dict.fromkeys(forms))
        if _are_data(values, len(names), depth, is_alike=forms is None):
            return Maps.write(values, encoder, depth)
        is_sparse = forms and sum(map(len, forms)) < _LEAST_FILLED * len(values) * len(names)
        are_short = set(map(type, names)) <= {str} and len(names) <= _MOST_FIELDS
        are_fields = are_short and Keys.NAME not in names and all(map(is_unicode, names))
        if not are_fields or is_sparse:
            return Maps.write(values, encoder, depth)
        if not names:
            return pa.Array.from_buffers(pa.struct([]), len(values), [None])
        if forms is None or set(forms) == {names}:
            return struct_of_items(map(dict.values, values), names, encoder, depth)
        try:
            keys = Keys.write_forms([forms], forms, names)
        except UnfitError:
            return Maps.write(values, encoder, depth)
        columns = [encoder.encode([value.get(name) for value in values], depth + 1) for name in names]
        return pa.StructArray.from_arrays([*columns, *keys], [*names, Keys.NAME])

    def getter(self, column: Any, origin: Origin) -> Reader:
        keys, parts = keys_of(column), {}
        for name in types_of_fields(column.type):
            field = column.field(name)
            nulls = storage_of(field).null_count
            if keys is not None and nulls:
                lacking = keys.type.absent(keys, name)
                nulls = lacking is None or nulls != np.count_nonzero(lacking)
            items = items_of(field, nulls=bool(nulls))
            parts[name] = (
                (items, None) if items is not None else (None, reader_of(field, origin, nulls=bool(nulls)))
            )
        if keys is None:
            return _record_reader(parts, parts)
        forms: dict[int, Reader] = {}
        bits_of, form_of = reader_of(keys, origin), keys.type.form_of

        def read(i: int) -> Any:
            bits = bits_of(i)
            reader = forms.get(bits)
            if reader is None:
                reader = _record_reader([name for name in form_of(bits) if name in parts], parts)
                if len(forms) < _MOST_FORMS:
                    forms[bits] = reader
            return reader(i)

        return read

    def form(self, kind: Any) -> Hashable:
        return "struct"

    def unite(self, parts: list[Any], united: United) -> list[Any]:
        names_of = [tuple(types_of_fields(part.type)) for part in parts]
        names = merged_order(dict.fromkeys(names_of))
        if not names:  # empty dicts: a struct that is made of no columns would have no rows
            return parts
        columns = []
        for name in names:
            found = [
                part.field(name) if name in some else pa.nulls(len(part))
                for part, some in zip(parts, names_of, strict=True)
            ]
            columns.append(united(found))
        if len(set(names_of)) > 1 or any(keys_of(part) is not None for part in parts):
            forms = [_forms_of(part, some) for part, some in zip(parts, names_of, strict=True)]
            columns.append(Keys.write_forms(forms, chain.from_iterable(forms), names))
            names = (*names, Keys.NAME)
        return [
            pa.StructArray.from_arrays(list(some), list(names), mask=mask_of(part))
            for part, *some in zip(parts, *columns, strict=True)
        ]

    def weights(self, column: Any) -> Weights:
        return sum((weights_of(column.field(name)) for name in types_of_fields(column.type)), 128)

    def describe(self, kind: Any) -> str:
        return f"struct of {', '.join(map(type_name, types_of_fields(kind).values()))}"


def _record_reader(names: Collection[str], parts: dict[str, tuple[Any, Any]]) -> Reader:
    """The reader of dicts with these keys, of values to be indexed or of readers."""
    if len(names) == 2:  # the commonest record
        (one, read_one), (two, read_two) = [
            (name, read or items.__getitem__) for name in names for items, read in [parts[name]]
        ]
        return lambda i: {one: read_one(i), two: read_two(i)}
    copy = dict.fromkeys(names).copy
    indexed = [(name, parts[name][0]) for name in names if parts[name][0] is not None]
    others = [(name, parts[name][1]) for name in names if parts[name][1] is not None]

    def read(i: int) -> dict[str, Any]:
        row = copy()
        for name, items in indexed:
            row[name] = items[i]
        for name, read_field in others:
            row[name] = read_field(i)
        return row

    return read


def _forms_of(part: Any, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The keys of each of some structs, in order."""
    keys = keys_of(part)
    if keys is None:
        return [names] * len(part)
    bits = list(map(reader_of(keys, Origin()), range(len(part))))
    forms = {one: keys.type.form_of(one or 0) for one in set(bits)}
    return [forms[one] for one in bits]


def struct_of_items(values: Iterable[Iterable[Any]], names: Sequence[str], encoder: Any, depth: int) -> Any:
    """A struct of the items of values that all have as many, in the order of the names."""
    # One pass over the values, which lie anywhere in memory; their items are only referred to.
    flat = list(chain.from_iterable(values))
    columns = [flat[place :: len(names)] for place in range(len(names))]
    del flat  # objects with more references than their list's and their record's may repeat
    arrays = [encoder.encode(column, depth + 1) for column in columns]
    return pa.StructArray.from_arrays(arrays, list(names))


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


def _are_data(values: list[dict[Any, Any]], names: int, depth: int, *, is_alike: bool) -> bool:
    """Whether the keys of dicts are no fields: those of a trie's nodes, and many that lead to containers.

    Fields of rows that are lists stay fields, however many.
    """
    some = [type(one) for value in values[:_SAMPLED] for one in islice(value.values(), _SAMPLED)]
    containers = sum(kind is dict or (kind in (list, tuple) and depth > 0) for kind in some)
    is_trie = depth > 0 and not is_alike and 2 * some.count(dict) > len(some)
    is_wide = names > _MOST_NAMES_OF_CONTAINERS and 2 * containers > len(some)
    return is_trie or is_wide or (depth > 0 and names > _MOST_NAMES)


def _all_have_the_keys(values: list[dict[Any, Any]], keys: tuple[Any, ...]) -> bool:
    """Whether all dicts have these very objects as keys, in this order: mostly so, and quick to see."""
    if set(map(len, values)) != {len(keys)}:
        return False
    return all(map(is_, chain.from_iterable(values), cycle(keys)))


def _tuple_reader(structs: Any, origin: Origin, kind: type = tuple) -> Reader:
    """The reader of tuples of the fields of structs."""
    readers = [reader_of(structs.field(name), origin) for name in types_of_fields(structs.type)]
    if kind is tuple and len(readers) == 2:  # the commonest sample: a path and a label
        first, second = readers
        return lambda i: (first(i), second(i))
    make = tuple.__new__  # what namedtuple's own _make does; its __new__ may have been overridden to do more

    def read(i: int) -> Any:
        items: list[Any] = []
        for read_item in readers:
            items.append(read_item(i))  # noqa: PERF401 - a comprehension is a call more in Python 3.11
        return make(kind, items)

    return read


class Tuples(PythonType, name="tuple", over=Records | Lists):
    """Tuples: a struct where all have one length, else a list."""

    takes = (tuple,)
    nests = True

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        lengths = set(map(len, values))
        if len(lengths) > 1 or not 0 < max(lengths) <= _MOST_TUPLE:
            return cls.around(any_lists(values, encoder, depth))
        return cls.around(struct_of_items(values, list(map(str, range(*lengths))), encoder, depth))

    def getter(self, column: Any, origin: Origin) -> Reader:
        is_list = not arrow.is_struct(self.storage_type)
        return super().getter(column, origin) if is_list else _tuple_reader(column.storage, origin)

    def form(self, kind: Any) -> Hashable:
        names = tuple(types_of_fields(self.storage_type)) if arrow.is_struct(self.storage_type) else ()
        return super().form(kind), names


class Namedtuples(PythonType, name="namedtuple", over=Records, where=is_plain_namedtuple):
    """namedtuples of the class ``python``, as a struct of their fields."""

    nests = True

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        fields = type(values[0])._fields
        if not fields or {len(fields)} != set(map(len, values)):
            raise UnfitError
        storage = struct_of_items(values, fields, encoder, depth)
        return cls.around(storage, python=encoder.name_of(type(values[0])))

    def is_for(self, found: Any) -> bool:
        """Whether a class that was found is the named tuple that the values were of."""
        kind = self.storage_type
        structs = kind.value_type if arrow.is_dictionary(kind) else kind  # see `dictionary_inside`
        names = [one.name for one in structs] if arrow.is_struct(structs) else None
        return is_plain_namedtuple(found) and list(found._fields) == names

    def getter(self, column: Any, origin: Origin) -> Reader:
        return _tuple_reader(column.storage, origin, origin.finder.find(self))


class Dataclasses(PythonType, name="dataclass", over=Records, where=is_plain_dataclass):
    """Instances of the dataclass ``python``: attributes, as dicts are kept."""

    nests = True

    @classmethod
    def write(cls, values: list[Any], encoder: Any, depth: int) -> Any:
        kind: Any = type(values[0])
        try:
            storage = Records.write(list(map(state_of, values)), encoder, depth)
        except AttributeError:  # an empty slot
            raise UnfitError from None
        # Arrow has no extension types over others.
        if not arrow.is_struct(storage.type) or not {*types_of_fields(storage.type)} <= {
            *kind.__dataclass_fields__
        }:
            raise UnfitError
        return cls.around(storage, python=encoder.name_of(kind))

    def is_for(self, found: Any) -> bool:
        """Whether a class that was found is a dataclass."""
        return "__dataclass_fields__" in vars(found)

    def maker(self, origin: Origin) -> Callable[[Any], Any]:
        return maker_of(origin.finder.find(self), types_of_fields(self.storage_type))
