"""Reads objects without running their classes' code.

A search must not open a lazy proxy, read a property or call a method that loads a shard. So a class is the
real type, an attribute is read where it is kept, and a container is read by its base's methods.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

_BASES = frozenset(map(id, (list, tuple, deque, set, frozenset, dict)))  # a class's metaclass may define ==

bases_of: Any = type.__dict__["__bases__"].__get__
"""The bases of a class, whatever its metaclass says."""

mro_of: Any = type.__dict__["__mro__"].__get__
"""A class and all that it inherits from, in the order in which attributes are looked up."""

names_of: Any = type.__dict__["__dict__"].__get__
"""The attributes of a class itself."""

class_name: Any = type.__dict__["__qualname__"].__get__
"""The name of a class, whatever its metaclass says."""

_flags_of: Any = type.__dict__["__flags__"].__get__
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by a C module that says so


def is_a(value: Any, kinds: Any) -> bool:
    """``isinstance`` by the real type; it asks neither a proxy's ``__class__`` nor a metaclass."""
    return issubclass(type(value), kinds)


def type_name(value: Any) -> str:
    """The name of a value's class."""
    return str(class_name(type(value)))


def is_python_class(kind: type) -> bool:
    """Whether a class was made by a class statement, or by a C module in the same way."""
    return bool(_flags_of(kind) & _HEAP_TYPE)


def of_class(kind: type, name: str) -> Any:
    """An attribute of a class or its bases as it is kept, not bound; None if there is none."""
    return next((names[name] for base in mro_of(kind) if name in (names := names_of(base))), None)


def dict_of(value: Any) -> dict[str, Any]:
    """The attributes in an object's dict; empty if it has none."""
    for base in mro_of(type(value)):
        kept = names_of(base).get("__dict__")
        if type(kept) in (types.GetSetDescriptorType, types.MemberDescriptorType):  # not a property
            return kept.__get__(value) or {}
    return {}


def slots_of(value: Any) -> dict[str, Any]:
    """The filled slots of an object; of one that is written in C, what it shows in the same way."""
    found = {}
    for base in mro_of(type(value)):
        names = names_of(base)
        for name, kept in names.items() if "__slots__" in names or not is_python_class(base) else ():
            if type(kept) is types.MemberDescriptorType and name != "__dict__":
                with contextlib.suppress(AttributeError):  # an empty one
                    found[name] = kept.__get__(value)
    return found


def base_of(value: Any) -> Any:
    """The builtin container that a value's class is or inherits from; None if it is no container."""
    return next((base for base in mro_of(type(value)) if id(base) in _BASES), None)


def length(container: Any) -> int:
    """The number of elements of a container, or of an array of objects."""
    base = base_of(container)
    return len(container) if base is None else base.__len__(container)


def elements(container: Any) -> Iterator[Any]:
    """The elements of a container; of a dict the values."""
    base = base_of(container)
    if base is None:
        return iter(container)
    return iter(dict.values(container) if base is dict else base.__iter__(container))


def items(container: Any) -> Iterable[tuple[Any, Any]]:
    """The elements of a container, each with its key or number."""
    return dict.items(container) if is_a(container, dict) else enumerate(elements(container))


def some_items(container: Any, most: int, furthest: int = sys.maxsize) -> Iterator[tuple[Any, Any]]:
    """Items of a container, evenly spaced; of a dict or set only of the ``furthest`` first ones."""
    count = length(container)
    step = max(1, count // most)
    base = base_of(container)
    if base is list or base is tuple or type(container) is np.ndarray:
        part = (base or np.ndarray).__getitem__(container, slice(None, None, step))
        return zip(range(0, count, step), part, strict=True)
    return itertools.islice(items(container), 0, furthest, max(1, min(count, furthest) // most))


def sizeof(value: Any) -> int:
    """``sys.getsizeof``, as the nearest base that is written in C counts."""
    if not is_python_class(type(value)):
        return sys.getsizeof(value, 64)
    sizes = (names_of(base).get("__sizeof__") for base in mro_of(type(value)))
    nbytes: int = next(size for size in sizes if type(size) is types.MethodDescriptorType)(value)
    return nbytes
