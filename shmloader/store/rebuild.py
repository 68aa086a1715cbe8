"""Copies of objects in which some of what they hold is replaced; the originals are not modified."""

from __future__ import annotations

import functools
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np


class Held(Protocol):
    """An object of a graph.

    Attributes:
        value: The object.
        parents: The ids of the objects that hold it.
    """

    value: Any
    parents: list[int]


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The filled slots of an object, by the names that attribute access knows them by."""
    for owner in type(value).__mro__:
        names = owner.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name in ("__dict__", "__weakref__"):
                continue
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{owner.__name__.lstrip('_')}{name}"  # noqa: PLW2901 - as the compiler mangles it
            try:
                yield name, object.__getattribute__(value, name)
            except AttributeError:
                continue


class Rebuilder:
    """Copies what leads to something shared, each object once."""

    def __init__(self, nodes: Mapping[int, Held], replaced: dict[int, Any]) -> None:
        """Prepare.

        Args:
            nodes: The objects that lead to what is replaced, by ``id``.
            replaced: What takes the places of some of them.
        """
        self._nodes = nodes
        self._copies = replaced
        self._changed = self._ancestors(replaced)

    def _ancestors(self, keys: Iterable[int]) -> set[int]:
        found: set[int] = set()
        todo = list(keys)
        while todo:
            for parent in self._nodes[todo.pop()].parents:
                if parent not in found:
                    found.add(parent)
                    todo.append(parent)
        return found

    def rebuild(self, root: Any) -> Any:
        """The replacement of the root."""
        # Mutable objects first, all of them and still empty, so that cycles find them.
        mutable = [key for key in self._changed if not _is_immutable(self._nodes[key].value)]
        for key in mutable:
            self._copies[key] = _empty_like(self._nodes[key].value)
        for key in mutable:
            self._fill(self._nodes[key].value, self._copies[key])
        return self._new(root)

    def _new(self, value: Any) -> Any:
        """The replacement of ``value``."""
        key = id(value)
        if key in self._copies:
            return self._copies[key]
        if key not in self._changed:
            return value
        copy = self._copies[key] = self._with_parts(value)
        if not isinstance(value, types.MethodType) and getattr(value, "__dict__", None):
            # After the copy is known: what an attribute holds may lead back to it.
            copy.__dict__.update((name, self._new(held)) for name, held in value.__dict__.items())
        return copy

    def _with_parts(self, value: Any) -> Any:
        """A copy of an immutable object whose parts are replaced, without its attributes."""
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._new(value.__self__))
        if isinstance(value, functools.partial):
            parts = self._new(value.func), self._new(value.args), self._new(value.keywords)
            return type(value)(parts[0], *parts[1], **parts[2])
        if type(value) is tuple:
            return tuple(map(self._new, value))
        return type(value)._make(map(self._new, value))

    def _fill(self, original: Any, copy: Any) -> None:
        if isinstance(original, list | deque):
            copy.extend(map(self._new, original))
        elif isinstance(original, np.ndarray):
            copy[:] = [self._new(value) for value in original]
        elif isinstance(original, dict):
            copy.update((key, self._new(value)) for key, value in original.items())
        else:
            if hasattr(original, "__dict__"):
                copy.__dict__.update((name, self._new(value)) for name, value in original.__dict__.items())
            for name, value in slots_of(original):
                # Not setattr: frozen dataclasses and datasets with rules of their own refuse it.
                object.__setattr__(copy, name, self._new(value))


def _is_immutable(value: Any) -> bool:
    return isinstance(value, tuple | types.MethodType | functools.partial)


def _empty_like(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, defaultdict):
        return kind(value.default_factory)
    if isinstance(value, deque):
        return kind(maxlen=value.maxlen)
    if isinstance(value, np.ndarray):
        return np.empty_like(value)
    return kind() if isinstance(value, list | dict | types.SimpleNamespace) else object.__new__(kind)
