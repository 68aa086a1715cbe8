"""Numbers of a record side by side, in shared memory only; files and Arrow's tables have a column for each.

A record with a dozen numbers is then read with one call, and with one miss of the processor's cache, not a
dozen. A struct of such records has one more column, with the numbers of each record as bytes, in place of the
columns of these numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.store.columns.buffers import numbers_to_arrow
from shmloader.store.columns.compiled import NUMBER_CODES, Scope, numbers_of, octets_of
from shmloader.store.columns.types import (
    ArrayType,
    KeysType,
    PackedType,
    PythonType,
    RecordsType,
    mask_of,
    storage_of,
)

LEAST_NUMBERS = 3
"""Fewer in a record stay columns."""

_CODES = {**NUMBER_CODES, pa.bool_(): "?"}
"""Types of numbers that are packed, with the codes that `struct` and NumPy have for them."""

_Array = np.ndarray[Any, Any]


def structs_of(column: Any) -> Any:
    """The structs that have the fields of a column's rows; None if the rows are not records."""
    storage = storage_of(column)
    is_records = arrow.is_struct(storage.type) and not isinstance(column.type, ArrayType)
    return storage if is_records else None


def types_of_fields(kind: Any) -> dict[str, Any]:
    """The types of the fields of structs, by name, in order; of none where names are not unique."""
    found = {field.name: field.type for field in kind}
    if len(found) < kind.num_fields:
        return {}
    records = found.get(RecordsType.NAME)
    if isinstance(records, RecordsType):
        packed = {name: _packed_type(records, name) for name in records.parameters["numbers"]}
        return {name: packed.get(name) or found[name] for name in records.parameters["order"]}
    return {name: one for name, one in found.items() if not isinstance(one, KeysType)}


def _packed_type(records: PythonType, name: str) -> PythonType:
    code, offset = records.parameters["numbers"][name]
    return PackedType(records.storage_type, code=code, offset=offset)


def _child(column: Any, kind: type[PythonType]) -> Any:
    """The column of the keys, or of the records of numbers, of structs; None if they have none."""
    place = column.type.get_field_index(kind.NAME)
    return column.field(place) if place >= 0 and isinstance(column.type.field(place).type, kind) else None


def field_of_struct(column: Any, name: str) -> Any:
    """A field of structs by its name; numbers are copied where some are null, for a key that is lacking."""
    records = _child(column, RecordsType)
    if records is None or name not in records.type.parameters["numbers"]:
        return column.field(column.type.get_field_index(name))
    field = _packed_type(records.type, name).wrap(records.storage)
    keys = keys_of(column)
    lacking = None if keys is None else absent(keys, name)
    return numbers_to_arrow(numbers(field), missing=lacking) if np.any(lacking) else field


def keys_of(column: Any) -> Any:
    """The column of the keys that each of some structs has; None if all have all keys."""
    return _child(column, KeysType)


def absent(keys: Any, name: str) -> _Array | None:
    """The rows that lack a key, as an array of bool; None if an array cannot tell."""
    names, storage = keys.type.parameters["names"], keys.storage
    if len(names) > 64 or name not in names:
        return None
    bits = np.asarray(numbers_of(storage, 1, _CODES.get(storage.type, "Q"), len(keys)))
    found: _Array = np.equal(bits & bits.dtype.type(1 << names.index(name)), 0)
    return found


def packed(column: Any) -> Any:
    """A column with the numbers of its records, and of records in these, side by side; any other as it is."""
    kind = column.type
    if isinstance(kind, PythonType) and arrow.is_struct(kind.storage_type):
        storage = packed(column.storage)
        return kind.over(storage.type).wrap(storage)
    if not arrow.is_struct(kind) or not kind.num_fields:
        return column
    fields = {field.name: packed(column.field(number)) for number, field in enumerate(kind)}
    chosen = [
        name for name, field in fields.items() if field.type in _CODES and _is_whole(field, column, name)
    ]
    if len(chosen) < LEAST_NUMBERS:
        return _struct_of(fields, column)
    order = [name for name in fields if name != KeysType.NAME]
    chosen.sort(key=lambda name: -fields[name].type.bit_width)  # so that each is aligned
    dtype = np.dtype([(str(n), _CODES[fields[name].type]) for n, name in enumerate(chosen)], align=True)
    records = np.zeros(len(column), dtype)
    places = {}
    for number, name in enumerate(chosen):
        field = fields.pop(name)
        zero = numbers_to_arrow(np.zeros(1, _CODES[field.type]), field.type)[0]
        records[str(number)] = _items_of(field.fill_null(zero))
        places[name] = _CODES[field.type], dtype.fields[str(number)][1]  # type: ignore[index]
    storage = numbers_to_arrow(records, pa.binary(dtype.itemsize))
    fields[RecordsType.NAME] = RecordsType(storage.type, order=order, numbers=places).wrap(storage)
    return _struct_of(fields, column)


def _is_whole(field: Any, column: Any, name: str) -> bool:
    """Whether a field of structs is None only if the record is None or lacks its key."""
    if not field.null_count:
        return True
    missing = _items_of(column.is_null())
    if (keys := keys_of(column)) is not None and (lacking := absent(keys, name)) is not None:
        missing |= lacking
    return bool(field.null_count == np.count_nonzero(missing))


def _items_of(column: Any) -> _Array:
    """The numbers or booleans of a column without nulls; Arrow's own ``to_numpy`` imports pandas."""
    if arrow.is_boolean(column.type):
        bits = np.unpackbits(np.frombuffer(octets_of(column, 1), np.uint8), bitorder="little")
        return bits[column.offset : column.offset + len(column)]
    return np.asarray(numbers_of(column, 1, _CODES[column.type], len(column)))


def _struct_of(fields: dict[str, Any], like: Any) -> Any:
    return pa.StructArray.from_arrays(list(fields.values()), list(fields), mask=mask_of(like))


def unpacked(column: Any) -> Any:
    """A column with a column for each number, as `packed` got it."""
    kind = column.type
    if isinstance(kind, PackedType):
        return numbers_to_arrow(numbers(column))
    if isinstance(kind, PythonType) and arrow.is_struct(kind.storage_type):
        storage = unpacked(column.storage)
        return kind.over(storage.type).wrap(storage)
    names = types_of_fields(kind) if arrow.is_struct(kind) else ()
    if not names:  # or names that are not unique, which are never packed
        return column
    fields = {name: unpacked(field_of_struct(column, name)) for name in names}
    if (keys := keys_of(column)) is not None:
        fields[KeysType.NAME] = keys
    return _struct_of(fields, column)


def numbers(column: Any) -> _Array:
    """The numbers of a packed field: an array with a stride, over the same memory."""
    storage, code, offset = column.storage, column.type.parameters["code"], column.type.parameters["offset"]
    width = storage.type.byte_width
    one = np.dtype({"names": ["n"], "formats": [code], "offsets": [offset], "itemsize": width})
    found: _Array = np.frombuffer(octets_of(storage, 1), one, len(storage), storage.offset * width)["n"]
    return found


def unpacking(column: Any, names: Iterable[str], scope: Scope) -> tuple[list[str], dict[str, str]]:
    """Statements that read packed numbers of the struct in row ``i``.

    Args:
        column: The structs.
        names: Fields that are wanted.
        scope: See `compile_reader`.

    Returns:
        The statements, and what they call the number of each packed field among these.
    """
    records = _child(column, RecordsType)
    if records is None:
        return [], {}
    places = records.type.parameters["numbers"]
    order = sorted((name for name in names if name in places), key=lambda name: int(places[name][1]))
    if not order:
        return [], {}
    codes, end = "=", 0
    for code, offset in map(places.__getitem__, order):
        codes += f"{offset - end}x{code}"
        end = offset + struct.calcsize(f"={code}")
    width = records.type.storage_type.byte_width
    octets, begin = scope.bind_octets(records.storage.buffers()[1])
    place = f"(i + {records.storage.offset}) * {width}" if records.storage.offset else f"i * {width}"
    unpack = scope.bind(struct.Struct(codes).unpack_from)
    targets = {name: f"{unpack}_{number}" for number, name in enumerate(order)}
    return [f"{', '.join(targets.values())}, = {unpack}({octets}, {begin}{place})"], targets
