"""Columns of records: dicts, tuples, namedtuples and dataclasses, each field a column of its own."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from shmloader.shared_memory.sealed_buffer import SharedBuffer
from shmloader.store.columns import Column, Encoder, NoArrowTypeError, Scope


class Dicts(NamedTuple):
    """dicts with the same keys, all exactly str, in the same order."""

    rows: int
    names: tuple[str, ...]
    fields: tuple[Column, ...]

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        fields = zip(self.names, self.fields, strict=True)
        parts = [f"{name!r}: {field.expression(scope)}" for name, field in fields]
        return f"{{{', '.join(parts)}}}"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        if not self.names:  # an array of no fields would have no rows
            raise NoArrowTypeError("dicts without keys have no Arrow type")
        return pa.StructArray.from_arrays([field.to_arrow(memory) for field in self.fields], list(self.names))


def encode_dicts(values: list[dict[str, Any]], names: tuple[str, ...], encoder: Encoder) -> Dicts:
    """Encode dicts that all have these keys in this order."""
    fields = tuple(encoder.encode(list(map(itemgetter(name), values))) for name in names)
    return Dicts(len(values), names, fields)


class Tuples(NamedTuple):
    """tuples of one length, or namedtuples of one class.

    Attributes:
        rows: How many.
        kind: ``tuple`` or the namedtuple's class.
        fields: A column for each position.
    """

    rows: int
    kind: type
    fields: tuple[Column, ...]

    @property
    def shape(self) -> tuple[type, int]:
        """What columns of the same records have in common."""
        return self.kind, len(self.fields)

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        parts = "".join(f"{field.expression(scope)}, " for field in self.fields)
        if self.kind is tuple:
            return f"({parts})"
        # What namedtuple's own _make does; its __new__ may have been overridden to do more.
        return f"{scope.bind(tuple.__new__)}({scope.bind(self.kind)}, ({parts}))"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        import pyarrow as pa

        names = getattr(self.kind, "_fields", None) or [str(n) for n in range(len(self.fields))]
        if not self.fields:
            raise NoArrowTypeError("empty tuples have no Arrow type")
        return pa.StructArray.from_arrays([field.to_arrow(memory) for field in self.fields], list(names))


def encode_tuples(values: list[tuple[Any, ...]], kind: type, encoder: Encoder) -> Tuples:
    """Encode tuples of one class and length."""
    fields = tuple(encoder.encode(list(map(itemgetter(n), values))) for n in range(len(values[0])))
    return Tuples(len(values), kind, fields)


def is_plain_namedtuple(kind: type) -> bool:
    """Whether ``kind`` is a namedtuple class whose instances are nothing but their items."""
    return (
        issubclass(kind, tuple)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and not kind.__dictoffset__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
    )


class Objects(NamedTuple):
    """Instances of one plain class, such as a dataclass, that all have the same attributes.

    Attributes:
        rows: How many.
        kind: The class.
        state: The instances' ``__dict__``.
    """

    rows: int
    kind: type
    state: Column

    def expression(self, scope: Scope) -> str:
        """See `Column.expression`."""
        return f"{scope.bind(_make_maker(self.kind))}({self.state.expression(scope)})"

    def to_arrow(self, memory: SharedBuffer) -> Any:
        """See `Column.to_arrow`."""
        return self.state.to_arrow(memory)


_MAKES_AND_PICKLES = "__new__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __getnewargs_ex__".split()
_MAKES_AND_PICKLES += ["__getnewargs__"]


def _make_maker(kind: type) -> Callable[[dict[str, Any]], Any]:
    new = object.__new__

    def make(state: dict[str, Any]) -> Any:
        instance: Any = new(kind)
        instance.__dict__.update(state)  # as pickle does it: frozen dataclasses let nothing else through
        return instance

    return make


def is_plain_dataclass(kind: type) -> bool:
    """Whether ``kind`` is a dataclass whose instances are nothing but their ``__dict__``."""
    return (
        "__dataclass_fields__" in vars(kind)
        and all(not vars(base).get("__slots__") for base in kind.__mro__)
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _MAKES_AND_PICKLES)
    )


def encode_objects(values: list[Any], kind: type, encoder: Encoder) -> Objects:
    """Encode instances of one plain class."""
    return Objects(len(values), kind, encoder.encode(list(map(vars, values))))
