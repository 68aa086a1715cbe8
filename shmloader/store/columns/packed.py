"""Numbers of a record side by side, in shared memory only; files and Arrow's tables have a column for each.

A record with a dozen numbers is then read with one call, and with one miss of the processor's cache, not a
dozen. In a struct of such records the column of each of these numbers is a placeholder without memory, and
one more column has the numbers of each record, as bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types as arrow

from shmloader.store.arrays import Array
from shmloader.store.columns.compiled import NUMBER_CODES, Scope, numbers_of, octets_of
from shmloader.store.columns.types import (
    ArrayType,
    KeysType,
    PackedType,
    PythonType,
    RecordsType,
    storage_of,
)

LEAST_NUMBERS = 3
"""Fewer in a record stay columns."""

_CODES = {**NUMBER_CODES, pa.bool_(): "?"}
"""Types of numbers that are packed, with the codes that `struct` and NumPy have for them."""

_NOTHING = pa.binary(0)
"""Storage of placeholders. Not ``null``: pyarrow before 23 loses its place at extension types over that."""


def fields_of(column: Any) -> dict[str, Any]:
    """The fields of structs that have values, by name: without keys and records of numbers."""
    found = {field.name: column.field(number) for number, field in enumerate(column.type)}
    return {
        name: field for name, field in found.items() if not isinstance(field.type, KeysType | RecordsType)
    }


def structs_of(column: Any) -> Any:
    """The structs that have the fields of a column's rows; None where these are no records."""
    storage = storage_of(column)
    is_records = arrow.is_struct(storage.type) and not isinstance(column.type, ArrayType)
    return storage if is_records else None


def names_of(kind: Any) -> list[str]:
    """The names of these fields."""
    return [field.name for field in kind if not isinstance(field.type, KeysType | RecordsType)]


def _column_of(column: Any, kind: type[PythonType]) -> Any:
    """The column of the keys, or of the records of numbers, of structs; None if they have none."""
    place = column.type.get_field_index(kind.NAME)
    return column.field(place) if place >= 0 and isinstance(column.type.field(place).type, kind) else None


def keys_of(column: Any) -> Any:
    """The column of the keys that each of some structs has; None where all have all."""
    keys = _column_of(column, KeysType)
    return keys if keys is None or "code" not in keys.type.parameters else _over_records(keys, column)


def _over_records(field: Any, column: Any) -> Any:
    """A packed field of structs, over the records that have its numbers."""
    records = _column_of(column, RecordsType).storage
    return field.type.over(records.type).wrap(records)


def absent(keys: Any, name: str) -> Array | None:
    """The rows that lack a key, as an array of bool; None where that cannot be told so."""
    names = keys.type.parameters["names"]
    if len(names) > 64 or name not in names:
        return None
    if "code" in keys.type.parameters:
        bits = numbers(keys)
    else:  # of rows that are None they are anything
        storage = keys.storage
        bits = np.asarray(numbers_of(storage, 1, _CODES.get(storage.type, "Q"), len(keys)))
    found: Array = np.equal(bits & bits.dtype.type(1 << names.index(name)), 0)
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
    if len(chosen) >= LEAST_NUMBERS:
        if (keys := keys_of(column)) is not None and keys.storage.type in _CODES:
            chosen.append(KeysType.NAME)
            fields[KeysType.NAME] = keys.storage
        chosen.sort(key=lambda name: -fields[name].type.bit_width)  # so that each is aligned
        dtype = np.dtype([(str(n), _CODES[fields[name].type]) for n, name in enumerate(chosen)], align=True)
        records = np.zeros(len(column), dtype)
        placeholders = pa.Array.from_buffers(_NOTHING, len(column), [None, pa.py_buffer(b"")])
        for number, name in enumerate(chosen):
            filled = fields[name].fill_null(pa.scalar(0).cast(fields[name].type))
            records[str(number)] = filled.to_numpy(zero_copy_only=False)
            code, offset = _CODES[fields[name].type], dtype.fields[str(number)][1]  # type: ignore[index]
            said = {"code": code, "offset": offset}
            kind = PackedType(_NOTHING, **said)
            if name == KeysType.NAME:
                kind = KeysType(_NOTHING, names=keys.type.parameters["names"], **said)
            fields[name] = kind.wrap(placeholders)
        octets = pa.py_buffer(records.view(np.uint8))
        storage = pa.Array.from_buffers(pa.binary(dtype.itemsize), len(column), [None, octets])
        fields[RecordsType.NAME] = RecordsType(storage.type).wrap(storage)
    return _struct_of(fields, column)


def _is_whole(field: Any, column: Any, name: str) -> bool:
    """Whether a field of structs is None only where the record is, or lacks its key."""
    if not field.null_count:
        return True
    missing = column.is_null().to_numpy(zero_copy_only=False)
    if (keys := keys_of(column)) is not None and (lacking := absent(keys, name)) is not None:
        missing |= lacking
    return bool(field.null_count == np.count_nonzero(missing))


def _struct_of(fields: dict[str, Any], like: Any) -> Any:
    mask = like.is_null() if like.null_count else None
    return pa.StructArray.from_arrays(list(fields.values()), list(fields), mask=mask)


def unpacked(column: Any) -> Any:
    """A column with a column for each number, as `packed` got it."""
    kind = column.type
    if isinstance(kind, PackedType):
        return pa.array(np.ascontiguousarray(numbers(column)))
    if isinstance(kind, PythonType) and arrow.is_struct(kind.storage_type):
        storage = unpacked(column.storage)
        return kind.over(storage.type).wrap(storage)
    if not arrow.is_struct(kind) or not kind.num_fields:
        return column
    fields = {name: unpacked(field_of_struct(column, name)) for name in fields_of(column)}
    if (keys := keys_of(column)) is not None:
        said = keys.type.parameters
        plain = pa.array(np.ascontiguousarray(numbers(keys))) if "code" in said else keys.storage
        fields[KeysType.NAME] = KeysType(plain.type, names=said["names"]).wrap(plain)
    return _struct_of(fields, column)


def field_of_struct(column: Any, name: str) -> Any:
    """A field of structs by its name; a packed one with its numbers."""
    field = column.field(column.type.get_field_index(name))
    if not isinstance(field.type, PackedType):
        return field
    field = _over_records(field, column)
    keys = keys_of(column)
    lacking = absent(keys, name) if keys is not None else None
    return field if lacking is None or not lacking.any() else pa.array(numbers(field), mask=lacking)


def numbers(column: Any) -> Array:
    """The numbers of a packed field, or packed keys: an array with a stride, over the same memory."""
    storage, code, offset = column.storage, column.type.parameters["code"], column.type.parameters["offset"]
    width = storage.type.byte_width
    one = np.dtype({"names": ["n"], "formats": [code], "offsets": [offset], "itemsize": width})
    found: Array = np.frombuffer(octets_of(storage, 1), one, len(storage), storage.offset * width)["n"]
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
    kinds = {name: column.type.field(name).type for name in names}
    found = {name: kind.parameters for name, kind in kinds.items() if isinstance(kind, PackedType)}
    if not found:
        return [], {}
    order = sorted(found, key=lambda name: int(found[name]["offset"]))
    code, end = "=", 0
    for name in order:
        one, offset = found[name]["code"], found[name]["offset"]
        code += f"{offset - end}x{one}"
        end = offset + struct.calcsize(f"={one}")
    storage = _column_of(column, RecordsType).storage
    width = storage.type.byte_width
    octets, begin = scope.bind_octets(storage.buffers()[1])
    place = f"(i + {storage.offset}) * {width}" if storage.offset else f"i * {width}"
    unpack = scope.bind(struct.Struct(code).unpack_from)
    targets = {name: f"{unpack}_{number}" for number, name in enumerate(order)}
    return [f"{', '.join(targets.values())}, = {unpack}({octets}, {begin}{place})"], targets
