"""Reads objects without running their classes' code, as ``inspect.getattr_static`` does.

A search must not open a lazy proxy, read a property, or call a method that loads a shard.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

_BASES = (list, tuple, deque, set, frozenset, OrderedDict, dict)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by a C module that says so

# What a class is, whatever its metaclass says.
mro_of: Any = type.__dict__["__mro__"].__get__
names_of: Any = type.__dict__["__dict__"].__get__
bases_of: Any = type.__dict__["__bases__"].__get__
name_of: Any = type.__dict__["__qualname__"].__get__
_flags_of: Any = type.__dict__["__flags__"].__get__


def is_a(value: Any, kinds: Any) -> bool:
    """``isinstance`` by the real type, which a proxy's ``__class__`` hides; not for abstract base classes."""
    return issubclass(type(value), kinds)


def is_python_class(kind: type) -> bool:
    """Whether a class was made by a class statement, or by a C module in the same way."""
    return bool(_flags_of(kind) & _HEAP_TYPE)


def of_class(kind: type, name: str) -> Any:
    """An attribute of a class as it is kept, not bound; None if there is none."""
    return next((names_of(base)[name] for base in mro_of(kind) if name in names_of(base)), None)


def dict_of(value: Any) -> dict[str, Any]:
    """The attributes in an object's dict; empty if it has none."""
    for base in mro_of(type(value)):
        kept = names_of(base).get("__dict__")
        if type(kept) in (types.GetSetDescriptorType, types.MemberDescriptorType):  # not a property
            return kept.__get__(value) or {}
    return {}


def slots_of(value: Any) -> dict[str, Any]:
    """The filled slots of an object; a method and a partial keep what they hold in the same way."""
    found = {}
    for base in mro_of(type(value))[:-1]:
        for name, kept in names_of(base).items():
            if type(kept) is types.MemberDescriptorType and name != "__dict__":
                with contextlib.suppress(AttributeError):  # an empty one
                    found[name] = kept.__get__(value)
    return found


def base_of(value: Any) -> Any:
    """The builtin container that a value is, or is a subclass's instance of; None if it is none."""
    return next((base for base in _BASES if is_a(value, base)), None)


def length(container: Any) -> int:
    """The number of elements of a container, or of an array."""
    return int((base_of(container) or type(container)).__len__(container))


def items(container: Any) -> Iterable[tuple[Any, Any]]:
    """The elements of a container, each with its key or number."""
    base = base_of(container) or type(container)
    if is_a(container, dict):
        return base.items(container)  # type: ignore[no-any-return]
    if not hasattr(base, "__iter__"):  # pyarrow's tables, which Python iterates over by their items
        return enumerate(iter(container))
    return enumerate(base.__iter__(container))


def sizeof(value: Any) -> int:
    """``sys.getsizeof``, as the nearest base that is written in C counts."""
    if not is_python_class(type(value)):
        return sys.getsizeof(value, 64)
    sizes = (names_of(base).get("__sizeof__") for base in mro_of(type(value)))
    return int(next(size for size in sizes if type(size) is types.MethodDescriptorType)(value))
