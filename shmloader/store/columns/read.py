"""Reading rows of Arrow arrays as Python objects, by functions that are compiled for the columns.

A column gives a Python *expression* of the value in row ``i``. The expressions of a chunk become one
function, since a call per column would cost more than the reading does. Numbers are read through memoryviews,
texts as slices of the memory: no scalar of Arrow is made.

The source of that function is made of this module's own text and of ``repr`` of field names; values reach it
only as arguments. Memoryviews, slices and NumPy check their bounds: buffers of a damaged file can give wrong
values or an exception, but no access beyond the memory.
"""

from __future__ import annotations

import datetime as dt
import decimal
import functools
import pathlib
import pickle
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import types as arrow

from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, DTYPES
from shmloader.codec.leaves import wrap_tensor
from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.arrays import Array, ArrayKind
from shmloader.store.columns import types
from shmloader.store.columns.arrays import dtype_named, is_native, kind_of_type, shape_of_type
from shmloader.store.columns.classes import ClassFinder

Reader = Callable[[int], Any]
"""Reads one row of a column, by its number."""

_CODES = {
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
_SIZES = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "f": 4, "q": 8, "Q": 8, "d": 8}
_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - Arrow's
_PATHS = {kind.__name__: kind for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)}


class Scope:
    """What an expression may refer to.

    Attributes:
        memory: Where the buffers lie; None for any place.
        finder: Finds the classes that columns name.
        links: Readers of the columns that links lead to, in order.
        copy: Whether arrays and tensors are private copies, which may be changed.
        pickles: Whether pickled values may be read.
        values: The objects that have been given names, in order.
    """

    def __init__(
        self,
        memory: SharedBuffer | None = None,
        finder: ClassFinder | None = None,
        links: Sequence[Reader] = (),
        *,
        copy: bool = False,
        pickles: bool = True,
    ) -> None:
        self.memory = memory
        self.finder = ClassFinder() if finder is None else finder
        self.links = links
        self.copy = copy
        self.pickles = pickles
        self.values: list[object] = []

    def bind(self, value: object) -> str:
        """A name for an object."""
        self.values.append(value)
        return f"v{len(self.values) - 1}"

    def inner(self) -> Scope:
        """A scope of the same memory, for another function."""
        return Scope(self.memory, self.finder, self.links, copy=self.copy, pickles=self.pickles)

    def reader(self, column: Any) -> str:
        """A name for a function that reads another column, for rows other than ``i``."""
        return self.bind(make_reader(column, self.inner()))


def make_reader(column: Any, scope: Scope, first: int = 0) -> Reader:
    """Compile the function that reads a row of a column, an Arrow array.

    Args:
        column: The column.
        scope: A new one.
        first: Number of its first row.

    Raises:
        ValueError: If the column is none that can be read: its type contradicts itself or its storage.
    """
    return compile_reader([f"return {expression(column, scope)}"], scope, first)


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
    source = f"def make(first{arguments}):\n def read(i):\n  {body}\n return read"
    namespace: dict[str, Any] = {}
    exec(compile(source, "<reader of a shmloader column>", "exec"), namespace)
    make: Callable[..., Reader] = namespace["make"]
    return make


def expression(column: Any, scope: Scope) -> str:
    """Source of the value in row ``i`` of a column; null is None."""
    kind = column.type
    if isinstance(kind, types.PythonType) and arrow.is_dictionary(kind.storage_type):
        # Arrow writes a dictionary of an extension type as that type over a dictionary.
        words, places = column.storage.dictionary, column.storage.indices
        return f"{scope.reader(kind.over(words.type).wrap(words))}({expression(places, scope)})"
    if isinstance(kind, types.ArrayType):
        return _array(column, scope)
    read = _value_of(kind)
    if read is None or not len(column):
        column.validate(full=True)  # Arrow itself trusts its buffers
        return f"{scope.bind(column)}[i].as_py()"
    if arrow.is_null(kind):
        return "None"
    if not column.null_count or arrow.is_union(kind):
        return read(column, scope)
    return f"({read(column, scope)} if {_is_valid(column, scope)} else None)"


def _is_valid(column: Any, scope: Scope) -> str:
    storage = column.storage if isinstance(column.type, pa.ExtensionType) else column
    return _bit(scope.bind(_memory(storage, 0)), storage.offset)


def _value_of(kind: Any) -> Callable[[Any, Scope], str] | None:
    """How values of a type that are not null are read; None for those left to Arrow's scalars."""
    if kind in _CODES:
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


def _memory(array: Any, number: int) -> memoryview[Any]:
    buffer = array.buffers()[number]
    return memoryview(b"" if buffer is None else buffer).cast("B")


def _items(array: Any, buffer: int, code: str, count: int) -> memoryview[Any]:
    """``count`` numbers of a buffer, from the array's first row on."""
    items = _memory(array, buffer)
    whole: memoryview[Any] = items[: len(items) // _SIZES[code] * _SIZES[code]].cast(code)  # type: ignore[call-overload]
    return whole[array.offset : array.offset + count]


def _number(column: Any, scope: Scope) -> str:
    return f"{scope.bind(_items(column, 1, _CODES[column.type], len(column)))}[i]"


def _bool(column: Any, scope: Scope) -> str:
    return f"({_bit(scope.bind(_memory(column, 1)), column.offset)} == 1)"


def _octets(column: Any, scope: Scope) -> str:
    """Bytes of row ``i``: a slice of the mmap is quicker than one of a memoryview."""
    large = arrow.is_large_string(column.type) or arrow.is_large_binary(column.type)
    ends = scope.bind(_items(column, 1, "q" if large else "i", len(column) + 1))
    data, memory = column.buffers()[2], scope.memory
    if data is not None and memory is not None and 0 <= data.address - memory.address < memory.nbytes:
        begin = scope.bind(data.address - memory.address)
        return f"{scope.bind(memory.mapping)}[{begin} + {ends}[i] : {begin} + {ends}[i + 1]]"
    return f"{scope.bind(_memory(column, 2))}[{ends}[i] : {ends}[i + 1]].tobytes()"


def _text(column: Any, scope: Scope) -> str:
    return f"{_octets(column, scope)}.decode()"


def _fixed_octets(column: Any, scope: Scope) -> str:
    width = column.type.byte_width
    begin = f"(i + {column.offset}) * {width}"
    return f"{scope.bind(_memory(column, 1))}[{begin} : {begin} + {width}].tobytes()"


def _dictionary(column: Any, scope: Scope) -> str:
    """The values are made once, and are the same objects in all rows: nobody can change a text."""
    words = column.dictionary
    places = expression(column.indices.fill_null(0) if column.indices.null_count else column.indices, scope)
    if arrow.is_string(words.type) or arrow.is_binary(words.type):
        read = make_reader(words, scope.inner())
        return f"{scope.bind([read(number) for number in range(len(words))])}[{places}]"
    return f"{scope.reader(words)}({places})"


def _struct(column: Any, scope: Scope) -> str:
    fields = [(field.name, column.field(number)) for number, field in enumerate(column.type)]
    if any(isinstance(field.type, types.OptionalType) for _, field in fields):
        return f"{scope.bind(_optional_reader(fields, scope.inner()))}(i)"
    parts = [f"{name!r}: {expression(field, scope)}" for name, field in fields]
    return f"{{{', '.join(parts)}}}"


def _optional_reader(fields: list[tuple[str, Any]], scope: Scope) -> Reader:
    """Reads dicts that do not have all of the keys."""
    lines = ["d = {}", "b = i >> 3", "m = 1 << (i & 7)"]
    for name, field in fields:
        if not isinstance(field.type, types.OptionalType):
            lines.append(f"d[{name!r}] = {expression(field, scope)}")
            continue
        storage = field.storage
        boxed = field.type.parameters.get("boxed")
        value = expression(storage.field(0), scope) if boxed else _present(storage, scope)
        test = ""
        if storage.null_count:
            bits = scope.bind(_memory(storage, 0))
            test = f"if {_bit(bits, storage.offset)}: " if storage.offset else f"if {bits}[b] & m: "
        lines.append(f"{test}d[{name!r}] = {value}")
    return compile_reader([*lines, "return d"], scope)


def _present(storage: Any, scope: Scope) -> str:
    """The value of a row that is known not to be null."""
    read = _value_of(storage.type)
    return expression(storage, scope) if read is None else read(storage, scope)


def _list(column: Any, scope: Scope) -> str:
    ends = scope.bind(_items(column, 1, "i" if arrow.is_list(column.type) else "q", len(column) + 1))
    items = column.values
    if items.type in _CODES and not items.null_count and len(items):
        numbers = scope.bind(_items(items, 1, _CODES[items.type], len(items)))
        return f"{numbers}[{ends}[i] : {ends}[i + 1]].tolist()"
    return f"[*map({scope.reader(items)}, range({ends}[i], {ends}[i + 1]))]"


def _union(column: Any, scope: Scope) -> str:
    if column.type.mode != "dense" or list(column.type.type_codes) != list(range(column.type.num_fields)):
        column.validate(full=True)
        return f"{scope.bind(column)}[i].as_py()"
    tags = scope.bind(_items(column, 1, "b", len(column)))
    places = scope.bind(_items(column, 2, "i", len(column)))
    # field() of a slice is the whole child: places count from its begin.
    readers = ", ".join(scope.reader(column.field(number)) for number in range(column.type.num_fields))
    return f"({readers},)[{tags}[i]]({places}[i])"


def _date(column: Any, scope: Scope) -> str:
    days = scope.bind(_items(column, 1, "i", len(column)))
    return f"{scope.bind(dt.date.fromordinal)}({days}[i] + 719163)"


def _microseconds(column: Any, scope: Scope) -> str:
    return f"{scope.bind(dt.timedelta)}(0, 0, {scope.bind(_items(column, 1, 'q', len(column)))}[i])"


def _datetime(column: Any, scope: Scope) -> str:
    return f"({scope.bind(_EPOCH)} + {_microseconds(column, scope)})"


_READ: list[tuple[Callable[[Any], bool], Callable[[Any, Scope], str]]] = [
    (arrow.is_null, lambda column, scope: "None"),
    (arrow.is_boolean, _bool),
    (lambda kind: arrow.is_string(kind) or arrow.is_large_string(kind), _text),
    (lambda kind: arrow.is_binary(kind) or arrow.is_large_binary(kind), _octets),
    (arrow.is_fixed_size_binary, _fixed_octets),
    (lambda kind: arrow.is_list(kind) or arrow.is_large_list(kind), _list),
    (arrow.is_dictionary, _dictionary),
    (arrow.is_union, _union),
    (arrow.is_date32, _date),
    (lambda kind: kind == pa.duration("us"), _microseconds),
    (lambda kind: kind == pa.timestamp("us"), _datetime),
]


# Python's types.


def _storage(column: Any, scope: Scope, *fits: Callable[[Any], bool]) -> str:
    """The value of the storage, which must be of a type that fits."""
    storage = column.storage
    if not any(fit(storage.type) for fit in fits):
        raise ValueError(f"{column.type.extension_name} over {storage.type} means nothing")
    return _present(storage, scope)


def _path(column: Any, scope: Scope) -> str:
    kind = _PATHS[column.type.parameters["kind"]]
    return f"{scope.bind(kind)}({_storage(column, scope, arrow.is_string, arrow.is_large_string)})"


def _tuple(column: Any, scope: Scope) -> str:
    storage = column.storage
    if arrow.is_struct(storage.type):
        parts = [expression(storage.field(number), scope) for number in range(storage.type.num_fields)]
        return f"({''.join(f'{part}, ' for part in parts)})"
    return f"(*{_storage(column, scope, arrow.is_list, arrow.is_large_list)},)"


def _namedtuple(column: Any, scope: Scope) -> str:
    storage = column.storage
    if not arrow.is_struct(storage.type):
        raise ValueError(f"namedtuples over {storage.type} mean nothing")
    names = [field.name for field in storage.type]
    kind = scope.finder.namedtuple(column.type.parameters["python"], names)
    # What namedtuple's own _make does; its __new__ may have been overridden to do more.
    return f"{scope.bind(tuple.__new__)}({scope.bind(kind)}, {_tuple(column, scope)})"


def _dataclass(column: Any, scope: Scope) -> str:
    kind = scope.finder.dataclass(column.type.parameters["python"])
    return f"{scope.bind(_maker_of(kind))}({_storage(column, scope, arrow.is_struct)})"


def _maker_of(kind: type) -> Callable[[dict[str, Any]], Any]:
    new = object.__new__

    def make(state: dict[str, Any]) -> Any:
        instance: Any = new(kind)
        instance.__dict__.update(state)  # as pickle does it: frozen dataclasses let nothing else through
        return instance

    return make


def _enum(column: Any, scope: Scope) -> str:
    parameters = column.type.parameters
    members = tuple(scope.finder.enum(parameters["python"], parameters["members"]))
    return f"{scope.bind(members)}[{_storage(column, scope, arrow.is_integer)}]"


def _set(column: Any, scope: Scope) -> str:
    kind = {"set": set, "frozenset": frozenset}[column.type.parameters["kind"]]
    return f"{scope.bind(kind)}({_storage(column, scope, arrow.is_list, arrow.is_large_list)})"


def _dict(column: Any, scope: Scope) -> str:
    storage = column.storage
    if not (arrow.is_list(storage.type) or arrow.is_large_list(storage.type)) or (
        not arrow.is_struct(storage.type.value_type) or storage.type.value_type.num_fields != 2
    ):
        raise ValueError(f"dicts over {storage.type} mean nothing")
    ends = scope.bind(_items(storage, 1, "i" if arrow.is_list(storage.type) else "q", len(storage) + 1))
    keys, items = (scope.reader(storage.values.field(number)) for number in (0, 1))
    part = f"range({ends}[i], {ends}[i + 1])"
    return f"{scope.bind(dict)}({scope.bind(zip)}(map({keys}, {part}), map({items}, {part})))"


def _scalar(column: Any, scope: Scope) -> str:
    dtype = dtype_named(column.type.parameters["dtype"])
    storage = column.storage
    width = storage.type.bit_width // 8
    if width != dtype.itemsize:
        raise ValueError(f"{dtype} over {storage.type} means nothing")
    flat = np.frombuffer(_memory(storage, 1), dtype, len(storage), storage.offset * width)
    return f"{scope.bind(flat)}[i]"


def _zoned(column: Any, scope: Scope) -> str:
    parameters = column.type.parameters
    if "key" in parameters:
        zone: dt.tzinfo = zoneinfo.ZoneInfo(parameters["key"])
    else:
        zone = (
            dt.UTC
            if not parameters["offset_s"]
            else dt.timezone(dt.timedelta(seconds=parameters["offset_s"]))
        )
    if column.storage.type != pa.timestamp("us", "UTC"):
        raise ValueError(f"datetimes over {column.storage.type} mean nothing")
    value = f"({scope.bind(_EPOCH.replace(tzinfo=dt.UTC))} + {_microseconds(column.storage, scope)})"
    return value if zone is dt.UTC else f"{value}.astimezone({scope.bind(zone)})"


def _decimal(column: Any, scope: Scope) -> str:
    return f"{scope.bind(decimal.Decimal)}({_storage(column, scope, arrow.is_string, arrow.is_large_string)})"


def _uuid(column: Any, scope: Scope) -> str:
    return f"{scope.bind(uuid.UUID)}(bytes={_storage(column, scope, arrow.is_fixed_size_binary)})"


def _pickle(column: Any, scope: Scope) -> str:
    if not scope.pickles:
        raise pickle.UnpicklingError("pickled values are not read from this file")
    return f"{scope.bind(pickle.loads)}({_storage(column, scope, arrow.is_binary, arrow.is_large_binary)})"


def _link(column: Any, scope: Scope) -> str:
    read = scope.bind(scope.links[column.type.parameters["link"]])
    return f"{read}({_storage(column, scope, arrow.is_integer)})"


def _optional_alone(column: Any, scope: Scope) -> str:
    """A field by itself, without its dict: absent is None."""
    storage = column.storage
    return _present(storage.field(0) if column.type.parameters.get("boxed") else storage, scope)


_PYTHON: dict[type, Callable[[Any, Scope], str]] = {
    types.PathType: _path,
    types.TupleType: _tuple,
    types.NamedTupleType: _namedtuple,
    types.DataclassType: _dataclass,
    types.EnumType: _enum,
    types.SetType: _set,
    types.DictType: _dict,
    types.OptionalType: _optional_alone,
    types.ScalarType: _scalar,
    types.DatetimeType: _zoned,
    types.DecimalType: _decimal,
    types.UuidType: _uuid,
    types.PickleType: _pickle,
    types.LinkType: _link,
}


# Arrays and tensors.


def block_of(column: Any, memory: SharedBuffer | None = None) -> tuple[Array, ArrayKind] | None:
    """All arrays of a column as one, where they have one shape; None where they differ.

    Raises:
        ValueError: If the type contradicts itself, or the storage is too short.
    """
    kind, shape = kind_of_type(column.type), shape_of_type(column.type)
    if shape is None:
        return None
    storage = column.storage
    if arrow.is_null(storage.type):
        return np.empty((len(storage), *shape), kind.dtype), kind
    if not arrow.is_fixed_size_list(storage.type):
        raise ValueError(f"arrays of shape {shape} over {storage.type} mean nothing")
    width = storage.type.list_size
    size = _size_of(storage.type.value_type, kind)
    flat = _flat(storage.values, kind, memory)
    begin = storage.offset * width // size
    return flat[begin : begin + len(storage) * width // size].reshape(len(storage), *shape), kind


def _size_of(items: Any, kind: ArrayKind) -> int:
    """How many items of Arrow are one of NumPy."""
    if items == (pa.from_numpy_dtype(kind.dtype) if is_native(kind.dtype) else None):
        return 1
    if items == pa.uint8():
        return kind.dtype.itemsize
    raise ValueError(f"arrays of {kind.dtype} over {items} mean nothing")


def _flat(values: Any, kind: ArrayKind, memory: SharedBuffer | None) -> Array:
    """All items of a column; writable for tensors in shared memory."""
    buffer = values.buffers()[1]
    if buffer is None or not buffer.size:
        return np.empty(0, kind.dtype)
    offset = 0
    source: Any = buffer
    if (
        kind.torch_dtype is not None
        and memory is not None
        and 0 <= buffer.address - memory.address < memory.nbytes
    ):
        source, offset = memory.private, buffer.address - memory.address
    nbytes = (len(values) + values.offset) * values.type.bit_width // 8
    # Not np.ndarray(shape, dtype, source): that looks behind a read-only view.
    return np.frombuffer(source, kind.dtype, min(nbytes, buffer.size) // kind.dtype.itemsize, offset)


def _array(column: Any, scope: Scope) -> str:
    found = block_of(column, scope.memory)
    if found is not None:
        block, kind = found
        dots = "" if kind.ndim else ", ..."  # else a scalar
        return _as_rows(f"{scope.bind(block)}[i{dots}]", kind, scope)
    kind = kind_of_type(column.type)
    storage = column.storage
    lists = storage.field(0) if arrow.is_struct(storage.type) else storage
    if not (arrow.is_list(lists.type) or arrow.is_large_list(lists.type)):
        raise ValueError(f"arrays over {storage.type} mean nothing")
    size = _size_of(lists.type.value_type, kind)
    ends: Any = _items(lists, 1, "i" if arrow.is_list(lists.type) else "q", len(lists) + 1)
    if size > 1:
        ends = np.asarray(ends) // size
    named = scope.bind(ends)
    value = f"{scope.bind(_flat(lists.values, kind, scope.memory))}[{named}[i] : {named}[i + 1]]"
    if kind.ndim > 1:
        sizes = storage.field(1)
        flat = np.asarray(_items(sizes.values, 1, "q", len(sizes.values)))
        shapes = flat[sizes.offset * kind.ndim :][: len(sizes) * kind.ndim].reshape(len(sizes), kind.ndim)
        value += f".reshape({scope.bind(shapes)}[i])"
    return _as_rows(value, kind, scope)


def _as_rows(array: str, kind: ArrayKind, scope: Scope) -> str:
    """The expression of what a stored array stands for."""
    if scope.copy:
        array += ".copy()"
    if kind.torch_dtype is None:
        return array
    if DTYPES[CODE_OF_TORCH_DTYPE[kind.torch_dtype]].native:
        return f"{scope.bind(torch.from_numpy)}({array})"
    return f"{scope.bind(wrap_tensor)}({array}, {scope.bind(kind.torch_dtype)})"
