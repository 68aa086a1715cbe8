"""Reading rows of any ``pyarrow`` array as Python objects, without Arrow's scalars where that is quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import types

from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.columns import Scope

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


class ArrowColumn(NamedTuple):
    """An Arrow array as a column; what is read is what ``to_pylist`` gives."""

    array: Any

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.array)

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        array = self.array
        read = _expression_of(array.type)
        if read is None or not len(array):
            return f"{scope.bind(array)}[i].as_py()"
        if not array.null_count:
            return read(array, scope)
        bits = scope.bind(memoryview(array.buffers()[0]))
        return f"({read(array, scope)} if {_bit(bits, array.offset)} else None)"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        return self.array


def _expression_of(kind: Any) -> Callable[[Any, Scope], str] | None:
    """How to read values of a type that are not null; None for those left to Arrow's scalars."""
    if kind in _CODES:
        return _number
    if types.is_boolean(kind):
        return lambda array, scope: f"({_bit(scope.bind(memoryview(array.buffers()[1])), array.offset)} == 1)"
    if types.is_string(kind) or types.is_binary(kind):
        return lambda array, scope: _string(array, scope, "i")
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return lambda array, scope: _string(array, scope, "q")
    if types.is_struct(kind):
        names = [field.name for field in kind]
        return _struct if names and len(set(names)) == len(names) else None
    if types.is_list(kind) or types.is_large_list(kind):
        return _list
    return None


def _bit(bits: str, offset: int) -> str:
    place = f"(i + {offset})" if offset else "i"
    return f"{bits}[{place} >> 3] >> ({place} & 7) & 1"


def _items(array: Any, buffer: int, code: str, count: int) -> memoryview[Any]:
    """``count`` numbers of a buffer, from the array's first row on."""
    items: memoryview[Any] = memoryview(array.buffers()[buffer])
    whole = items[: len(items) // _SIZES[code] * _SIZES[code]].cast("B").cast(code)  # type: ignore[call-overload]
    numbers: memoryview[Any] = whole[array.offset : array.offset + count]
    return numbers


_SIZES = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "f": 4, "q": 8, "Q": 8, "d": 8}


def _number(array: Any, scope: Scope) -> str:
    return f"{scope.bind(_items(array, 1, _CODES[array.type], len(array)))}[i]"


def _string(array: Any, scope: Scope, code: str) -> str:
    ends = scope.bind(_items(array, 1, code, len(array) + 1))
    data = array.buffers()[2]
    view = scope.bind(memoryview(data if data is not None else b"").cast("B"))
    part = f"{view}[{ends}[i] : {ends}[i + 1]]"
    is_text = types.is_string(array.type) or types.is_large_string(array.type)
    return f"str({part}, 'utf-8')" if is_text else f"{part}.tobytes()"


def _struct(array: Any, scope: Scope) -> str:
    # field() slices the child to the struct's own rows.
    fields = {field.name: ArrowColumn(array.field(number)) for number, field in enumerate(array.type)}
    return f"{{{', '.join(f'{name!r}: {field.expression(scope)}' for name, field in fields.items())}}}"


def _list(array: Any, scope: Scope) -> str:
    ends = scope.bind(_items(array, 1, "i" if types.is_list(array.type) else "q", len(array) + 1))
    items = array.values
    if items.type in _CODES and not items.null_count and len(items):
        numbers = scope.bind(_items(items, 1, _CODES[items.type], len(items)))
        return f"{numbers}[{ends}[i] : {ends}[i + 1]].tolist()"
    return f"[*map({scope.reader(ArrowColumn(items))}, range({ends}[i], {ends}[i + 1]))]"
