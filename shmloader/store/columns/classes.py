"""Classes that columns name: which can be named, and how a name is looked up without running code."""

from __future__ import annotations

import collections
import enum
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from shmloader.store.columns import types
from shmloader.store.columns.types import find_types

Classes = Mapping[str, type]
"""Classes by the names that columns have them under."""

_MAKES_AND_PICKLES = "__new__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __getnewargs_ex__".split()
_MAKES_AND_PICKLES += ["__getnewargs__"]


def name_of_class(kind: type) -> str | None:
    """Module and name of a class; None if it is not found there."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if loaded_class(name) is kind else None


def loaded_class(name: str) -> type | None:
    """The class of a name in a module that is loaded; nothing is imported, and no module's own code runs."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def is_plain_namedtuple(kind: type) -> bool:
    """Whether ``kind`` is a namedtuple class whose instances are nothing but their items."""
    return (
        issubclass(kind, tuple)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and not kind.__dictoffset__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
    )


def is_plain_dataclass(kind: type) -> bool:
    """Whether ``kind`` is a dataclass whose instances are nothing but their ``__dict__``, or their slots."""
    if "__dataclass_fields__" not in vars(kind):
        return False
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ())]
    if slots and (kind.__dictoffset__ or sorted(slots) != sorted(vars(kind)["__dataclass_fields__"])):
        return False
    return all(_is_own(getattr(kind, name, None), getattr(object, name, None)) for name in _MAKES_AND_PICKLES)


def _is_own(found: Any, usual: Any) -> bool:
    """Whether a method is Python's: also that which ``dataclass`` writes for frozen classes with slots."""
    return found is usual or getattr(found, "__module__", None) == "dataclasses"


def state_of(value: Any) -> dict[str, Any]:
    """The values that a plain dataclass is restored from; AttributeError where a slot is empty."""
    kind: Any = type(value)
    if kind.__dictoffset__:
        state: dict[str, Any] = vars(value)
        return state
    return {name: getattr(value, name) for name in kind.__dataclass_fields__}


def maker_of(kind: type) -> Callable[[dict[str, Any]], Any]:
    """The function that makes an instance of a plain dataclass of its state, as pickle does it."""
    make_empty: Any = kind.__new__
    set_slot = object.__setattr__  # frozen dataclasses let nothing else through

    def make(state: dict[str, Any]) -> Any:
        instance: Any = make_empty(kind)
        instance.__dict__.update(state)
        return instance

    def make_with_slots(state: dict[str, Any]) -> Any:
        instance: Any = make_empty(kind)
        for name, value in state.items():
            set_slot(instance, name, value)
        return instance

    return make if kind.__dictoffset__ else make_with_slots


class ClassFinder:
    """Finds the classes that columns name.

    Args:
        given: Classes that came with the memory, from a process that knows them.
    """

    def __init__(self, given: Classes | None = None) -> None:
        self.found: dict[str, type] = dict(given or {})

    def _find(self, name: str, fits: Callable[[type], bool], make: Callable[[str], type]) -> type:
        found = self.found.get(name)
        if found is None:
            loaded = loaded_class(name)
            # A file may be older than its classes: then a class of the same name is made up.
            found = loaded if loaded is not None and fits(loaded) else make(name.rpartition(":")[2])
            self.found[name] = found
        return found

    def namedtuple(self, name: str, fields: Sequence[str]) -> type:
        """A namedtuple class with these fields."""

        def fits(kind: type) -> bool:
            return is_plain_namedtuple(kind) and tuple(kind._fields) == tuple(fields)  # type: ignore[attr-defined]

        return self._find(name, fits, lambda path: _made_namedtuple(_plain(path), fields))

    def dataclass(self, name: str) -> type:
        """A dataclass; if it is not there any more, a namespace for its attributes."""
        return self._find(name, is_plain_dataclass, lambda _: SimpleNamespace)

    def enum(self, name: str, members: Sequence[str]) -> list[Any]:
        """Members of an enum."""

        def fits(kind: type) -> bool:
            return issubclass(kind, enum.Enum) and set(members) <= kind.__members__.keys()

        kind: Any = self._find(name, fits, lambda path: _made_enum(_plain(path), tuple(members)))
        return [kind.__members__[member] for member in members]

    def given(self) -> dict[str, type]:
        """The classes that other processes find by their names too; not those that were made up."""
        return {name: kind for name, kind in self.found.items() if loaded_class(name) is kind}

    def find_all(self, schema: Any) -> None:
        """Find the classes that a schema's columns name."""
        for field in schema:
            for _, kind in find_types(field.type, types.NamedTupleType):
                self.namedtuple(kind.parameters["python"], [one.name for one in kind.storage_type])
            for _, kind in find_types(field.type, types.DataclassType):
                self.dataclass(kind.parameters["python"])
            for _, kind in find_types(field.type, types.EnumType):
                self.enum(kind.parameters["python"], kind.parameters["members"])


def _plain(path: str) -> str:
    """A class's own name, or one in its place if it is none."""
    name = path.rpartition(".")[2]
    return name if name.isidentifier() else "Unknown"


def _made_namedtuple(name: str, fields: Sequence[str]) -> type:
    """A namedtuple class whose instances can be pickled without it."""
    make: Any = collections.namedtuple  # noqa: PYI024 - its fields are those of a file
    kind: type = make(name, fields, rename=True)
    return type(name, (kind,), {"__slots__": (), "__reduce__": _reduce_tuple})


def _reduce_tuple(made: Any) -> Any:
    return _remake_tuple, (type(made).__name__, made._fields, tuple(made))


def _remake_tuple(name: str, fields: tuple[str, ...], items: tuple[Any, ...]) -> Any:
    return tuple.__new__(_made_namedtuple(name, fields), items)


@functools.cache
def _made_enum(name: str, members: tuple[str, ...]) -> Any:
    """An enum whose members can be pickled without it."""
    make: Any = enum.Enum
    kind = make(name, members)
    kind.__reduce_ex__ = lambda member, _: (_member_of, (name, members, member.name))
    return kind


def _member_of(name: str, members: tuple[str, ...], member: str) -> Any:
    return _made_enum(name, members)[member]
