"""Python expressions for the values of Arrow arrays, to be compiled into functions."""

from __future__ import annotations

import datetime as dt
import decimal
import pathlib
import pickle
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.store.columns import types
from shmloader.store.columns.arrays import array_expression, scalars_of
from shmloader.store.columns.compiled import (
    NUMBER_CODES,
    Reader,
    Scope,
    compile_reader,
    ends_of,
    numbers_of,
    octets_of,
)
from shmloader.store.columns.packed import (
    absent,
    field_of_struct,
    keys_of,
    numbers,
    types_of_fields,
    unpacking,
)
from shmloader.store.columns.types import is_list, is_octets, is_text, maker_of

_MOST_FORMS = 64  # of dicts with optional keys that have a function of their own, in each chunk
_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - Arrow's
_SETS: dict[str, type] = {"set": set, "frozenset": frozenset}
_PATHS = {kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}


def make_reader(column: Any, scope: Scope, first: int = 0) -> Reader:
    """Compile the function that reads a row of a column, an Arrow array.

    Args:
        column: The column.
        scope: A new one.
        first: Number of its first row.

    Raises:
        ValueError: If the column cannot be read: its type contradicts itself or its storage.
    """
    value = expression(column, scope)
    return compile_reader([*scope.lines, f"return {value}"], scope, first)


def _reader(column: Any, scope: Scope) -> str:
    """A name for a function that reads another column, for rows other than ``i``."""
    return scope.bind(make_reader(column, scope.inner()))


def expression(column: Any, scope: Scope) -> str:
    """Source of the value in row ``i`` of a column; null is None."""
    column = types.dictionary_outside(column)
    kind = column.type
    read = _value_of(kind)
    if read is None or (not len(column) and not isinstance(kind, types.PythonType)):
        column.validate(full=True)  # Arrow itself trusts its buffers
        return f"{scope.bind(column)}[i].as_py()"
    storage = types.storage_of(column)
    if not storage.null_count or arrow.is_null(storage.type) or arrow.is_union(kind):
        return read(column, scope)
    return f"({read(column, scope)} if {_bit(scope.bind(octets_of(storage, 0)), storage.offset)} else None)"


def _present(column: Any, scope: Scope) -> str:
    """Like `expression`, for a value that is not null."""
    column = types.dictionary_outside(column)
    read = _value_of(column.type)
    return expression(column, scope) if read is None else read(column, scope)


def _value_of(kind: Any) -> Callable[[Any, Scope], str] | None:
    """The reader of a type's values that are not null; None for those left to Arrow's scalars."""
    if kind in NUMBER_CODES:
        return _number
    for fits, read in _READ:
        if fits(kind):
            return read
    if arrow.is_struct(kind):
        names = [field.name for field in kind]
        return _struct if len(set(names)) == len(names) else None
    return _PYTHON.get(type(kind))


def _bit(bits: str, offset: int) -> str:
    place = f"(i + {offset})" if offset else "i"
    return f"{bits}[{place} >> 3] >> ({place} & 7) & 1"


def _number(column: Any, scope: Scope) -> str:
    return f"{_numbers(column, scope)}[i]"


def _numbers(column: Any, scope: Scope) -> str:
    """A name for the numbers of a column."""
    return scope.bind(numbers_of(column, 1, NUMBER_CODES[column.type], len(column)))


def _bool(column: Any, scope: Scope) -> str:
    return f"({_bit(scope.bind(octets_of(column, 1)), column.offset)} == 1)"


def _octets(column: Any, scope: Scope) -> str:
    """Bytes of row ``i``."""
    ends = scope.bind(ends_of(column))
    octets, begin = scope.bind_octets(column.buffers()[2])
    part = f"{octets}[{begin}{ends}[i] : {begin}{ends}[{scope.following()}]]"
    return part if begin else f"bytes({part})"


def _text(column: Any, scope: Scope) -> str:
    return f"{_octets(column, scope)}.decode()"


def _fixed_octets(column: Any, scope: Scope) -> str:
    width = column.type.byte_width
    begin = f"(i + {column.offset}) * {width}"
    return f"{scope.bind(octets_of(column, 1))}[{begin} : {begin} + {width}].tobytes()"


def _dictionary(column: Any, scope: Scope) -> str:
    """Texts are made once, and are the same objects in all rows: nobody can change them."""
    words = column.dictionary
    places = _present(column.indices, scope)
    if arrow.is_string(words.type) or arrow.is_binary(words.type):
        read = make_reader(words, scope.inner())
        return f"{scope.bind([read(number) for number in range(len(words))])}[{places}]"
    return f"{_reader(words, scope)}({places})"


def _struct(column: Any, scope: Scope) -> str:
    keys = keys_of(column)
    if keys is not None:
        return f"{scope.bind(_Forms(column, keys, scope.inner()))}[{expression(keys, scope)}](i)"
    return f"{{{', '.join(f'{name!r}: {value}' for name, value in _fields(column, scope).items())}}}"


def _fields(column: Any, scope: Scope) -> dict[str, str]:
    """Sources of the fields of the struct in row ``i``."""
    names = types_of_fields(column.type)
    lines, found = unpacking(column, names, scope)
    scope.lines += lines
    return {name: found.get(name) or expression(field_of_struct(column, name), scope) for name in names}


class _Forms(dict[int, Reader]):
    """Readers of dicts that lack some keys, by the bits of the present keys: made when first needed."""

    def __init__(self, column: Any, keys: Any, scope: Scope) -> None:
        super().__init__()
        names = keys.type.parameters["names"]
        self._column = column
        self._values: dict[str, tuple[int, str]] = {}
        for name, kind in types_of_fields(column.type).items():
            value = ""
            if not isinstance(kind, types.PackedType):
                field, lacking = field_of_struct(column, name), absent(keys, name)
                nulls = types.storage_of(field).null_count
                is_whole = lacking is not None and nulls == np.count_nonzero(lacking)
                value = (_present if is_whole else expression)(field, scope)
            self._values[name] = 1 << names.index(name), value
        self._bits = expression(keys, scope)
        self._scope = scope
        self._any: Reader | None = None

    def __missing__(self, bits: int) -> Reader:
        if len(self) < _MOST_FORMS:
            names = [name for name, (bit, _) in self._values.items() if bits & bit]
            lines, values = self._sources(names, scope := self._scope.copied())
            parts = [f"{name!r}: {values[name]}" for name in names]
            reader = self[bits] = compile_reader([*lines, f"return {{{', '.join(parts)}}}"], scope)
            return reader
        if self._any is None:
            lines, values = self._sources(list(self._values), scope := self._scope.copied())
            lines.append(f"b, d = {self._bits}, {{}}")
            for name, (bit, _) in self._values.items():
                lines.append(f"if b & {bit}: d[{name!r}] = {values[name]}")
            self._any = compile_reader([*lines, "return d"], scope)
        return self._any

    def _sources(self, names: list[str], scope: Scope) -> tuple[list[str], dict[str, str]]:
        """Statements, and the values that some fields have after them."""
        lines, found = unpacking(self._column, names, scope)
        return [*self._scope.lines, *lines], {
            name: found.get(name) or self._values[name][1] for name in names
        }


def _list(column: Any, scope: Scope) -> str:
    ends = scope.bind(ends_of(column))
    return _items(column.values, f"{ends}[i]", f"{ends}[{scope.following()}]", scope)


def _fixed_list(column: Any, scope: Scope) -> str:
    items, length = column.values, column.type.list_size
    begin = f"(i + {column.offset}) * {length}" if column.offset else f"i * {length}"
    if length == 1 and items.type not in NUMBER_CODES:
        return f"[{_reader(items, scope)}({begin})]"
    return _items(items, begin, f"{begin} + {length}", scope)


def _items(items: Any, begin: str, end: str, scope: Scope) -> str:
    """A list of the items from one place to another."""
    if items.type in NUMBER_CODES and not items.null_count and len(items):
        return f"{_numbers(items, scope)}[{begin} : {end}].tolist()"
    return f"[*map({_reader(items, scope)}, range({begin}, {end}))]"


def _union(column: Any, scope: Scope) -> str:
    if column.type.mode != "dense" or list(column.type.type_codes) != list(range(column.type.num_fields)):
        column.validate(full=True)
        return f"{scope.bind(column)}[i].as_py()"
    tags = scope.bind(numbers_of(column, 1, "b", len(column)))
    places = scope.bind(numbers_of(column, 2, "i", len(column)))
    # field() of a slice is the whole child: places count from its begin.
    children = [column.field(number) for number in range(column.type.num_fields)]
    readers = scope.bind([make_reader(child, scope.inner()) for child in children])
    return f"{readers}[{tags}[i]]({places}[i])"


def _date(column: Any, scope: Scope) -> str:
    days = scope.bind(numbers_of(column, 1, "i", len(column)))
    return f"{scope.bind(dt.date.fromordinal)}({days}[i] + 719163)"


def _microseconds(column: Any, scope: Scope) -> str:
    return f"{scope.bind(dt.timedelta)}(0, 0, {scope.bind(numbers_of(column, 1, 'q', len(column)))}[i])"


def _datetime(column: Any, scope: Scope) -> str:
    return f"({scope.bind(_EPOCH)} + {_microseconds(column, scope)})"


_READ: list[tuple[Callable[[Any], bool], Callable[[Any, Scope], str]]] = [
    (arrow.is_null, lambda column, scope: "None"),
    (arrow.is_boolean, _bool),
    (is_text, _text),
    (is_octets, _octets),
    (arrow.is_fixed_size_binary, _fixed_octets),
    (is_list, _list),
    (arrow.is_fixed_size_list, _fixed_list),
    (arrow.is_dictionary, _dictionary),
    (arrow.is_union, _union),
    (arrow.is_date32, _date),
    (lambda kind: kind == pa.duration("us"), _microseconds),
    (lambda kind: kind == pa.timestamp("us"), _datetime),
]


# Python's types.


def _storage(column: Any, scope: Scope, fits: Callable[[Any], bool]) -> str:
    """The value of the storage, which must be of a type that fits."""
    storage = column.storage
    if not fits(storage.type):
        raise ValueError(f"{column.type.extension_name} over {storage.type} means nothing")
    return _present(storage, scope)


def _called(
    fits: Callable[[Any], bool], function_of: Callable[[Any, Scope], Callable[[Any], Any]]
) -> Callable[[Any, Scope], str]:
    """The reader of values that a function makes of the storage's.

    Args:
        fits: Whether a type can be the storage's.
        function_of: Gives the function for a type.
    """

    def read(column: Any, scope: Scope) -> str:
        return f"{scope.bind(function_of(column.type, scope))}({_storage(column, scope, fits)})"

    return read


def _tuple(column: Any, scope: Scope) -> str:
    storage = column.storage
    if arrow.is_struct(storage.type):
        return f"({''.join(f'{value}, ' for value in _fields(storage, scope).values())})"
    return f"(*{_storage(column, scope, is_list)},)"


def _namedtuple(column: Any, scope: Scope) -> str:
    if not arrow.is_struct(column.storage.type):
        raise ValueError(f"namedtuples over {column.storage.type} mean nothing")
    kind = scope.finder.find(column.type)
    # What namedtuple's own _make does; its __new__ may have been overridden to do more.
    return f"{scope.bind(tuple.__new__)}({scope.bind(kind)}, {_tuple(column, scope)})"


def _enum(column: Any, scope: Scope) -> str:
    members = [scope.finder.find(column.type)[name] for name in column.type.parameters["members"]]
    return f"{scope.bind(members)}[{_storage(column, scope, arrow.is_integer)}]"


def _dict(column: Any, scope: Scope) -> str:
    storage = column.storage
    items = storage.type.value_type if is_list(storage.type) else storage.type
    if items is storage.type or not arrow.is_struct(items) or items.num_fields != 2:
        raise ValueError(f"dicts over {storage.type} mean nothing")
    ends = scope.bind(ends_of(storage))
    keys, values = (_reader(storage.values.field(number), scope) for number in (0, 1))
    part = f"range({ends}[i], {ends}[{scope.following()}])"
    return f"{scope.bind(dict)}({scope.bind(zip)}(map({keys}, {part}), map({values}, {part})))"


def _scalar(column: Any, scope: Scope) -> str:
    return f"{scope.bind(scalars_of(column)[0])}[i]"


def _zoned(column: Any, scope: Scope) -> str:
    parameters = column.type.parameters
    offset = dt.timedelta(seconds=parameters.get("offset_s", 0))
    zone: dt.tzinfo = dt.timezone(offset) if offset else dt.UTC
    if "key" in parameters:
        zone = zoneinfo.ZoneInfo(parameters["key"])
    if column.storage.type != pa.timestamp("us", "UTC"):
        raise ValueError(f"datetimes over {column.storage.type} mean nothing")
    value = f"({scope.bind(_EPOCH.replace(tzinfo=dt.UTC))} + {_microseconds(column.storage, scope)})"
    return value if zone is dt.UTC else f"{value}.astimezone({scope.bind(zone)})"


def _loads(_: Any, scope: Scope) -> Callable[[Any], Any]:
    if not scope.pickles:
        raise pickle.UnpicklingError("pickled values are not read from this file")
    return pickle.loads


def _packed(column: Any, scope: Scope) -> str:
    return f"{scope.bind(memoryview(cast('Any', numbers(column))))}[i]"


def _keys(column: Any, scope: Scope) -> str:
    if arrow.is_fixed_size_binary(column.storage.type):
        return f"int.from_bytes({_fixed_octets(column.storage, scope)}, 'little')"
    return _storage(column, scope, arrow.is_unsigned_integer)


_PYTHON: dict[type, Callable[[Any, Scope], str]] = {
    types.PathType: _called(is_text, lambda kind, scope: _PATHS[kind.parameters["kind"]]),
    types.TupleType: _tuple,
    types.NamedTupleType: _namedtuple,
    types.DataclassType: _called(
        arrow.is_struct,
        lambda kind, scope: maker_of(scope.finder.find(kind), types_of_fields(kind.storage_type)),
    ),
    types.EnumType: _enum,
    types.SetType: _called(is_list, lambda kind, scope: _SETS[kind.parameters["kind"]]),
    types.DictType: _dict,
    types.KeysType: _keys,
    types.PackedType: _packed,
    types.ArrayType: array_expression,
    types.ScalarType: _scalar,
    types.DatetimeType: _zoned,
    types.DecimalType: _called(is_text, lambda kind, scope: decimal.Decimal),
    types.UuidType: _called(
        arrow.is_fixed_size_binary, lambda kind, scope: lambda octets: uuid.UUID(bytes=octets)
    ),
    types.PickleType: _called(is_octets, _loads),
    types.LinkType: _called(arrow.is_integer, lambda kind, scope: scope.links[kind.parameters["link"]]),
}
