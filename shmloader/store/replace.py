"""Puts shared values in the place of the objects that they were made from.

Either in a copy, in which every object on the way to a replaced one is copied, shallowly, and all others stay
the same objects; or in place: into the holders themselves, if these belong to the root. Imports no pyarrow.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from shmloader.store import objects, static
from shmloader.store.graph import Node
from shmloader.store.static import is_a

_Put = Callable[[Any], object]
"""Sets one attribute or element of an object."""


class Replacer:
    """Replaces objects of a graph: in copies of their holders, or ``in_place``, in what can be written to.

    It spares holders that are also held ``elsewhere``, outside of the graph.
    """

    def __init__(
        self, nodes: dict[int, Node], *, in_place: bool, elsewhere: AbstractSet[int] = frozenset()
    ) -> None:
        self._nodes = nodes
        holders = {key for node in self._nodes.values() for key in node.parents}
        mutable = {key for key in holders if not _is_immutable(self._nodes[key].value)}
        self._spared = mutable & elsewhere
        self._written = mutable - elsewhere if in_place else set[int]()
        self._changed: set[int] = set()
        self._copies: dict[int, Any] = {}

    def spared_holder(self, node: Node) -> tuple[Node | None, bool]:
        """A holder of an object that stays as it is, and whether another one can have the replacement."""
        keys, can = {id(node.value)}, node.holder is None
        spared, todo = None, [node]
        while todo:
            for key in todo.pop().parents:
                if key in self._spared:
                    spared = self._nodes[key]
                elif key in self._written or self._nodes[key].holder is None:
                    can = True
                elif key not in keys:
                    keys.add(key)
                    todo.append(self._nodes[key])
        return spared, can

    def replace(self, root: Any, replaced: dict[int, Any]) -> Any:
        """Put replacements, by the ``id`` of what they replace; returns the root, or what stands for it.

        Either all holders are written to or, if that fails, none.
        """
        self._changed, self._copies = self._find_changed(replaced), dict(replaced)
        written = [key for key in self._changed if key in self._written]
        self._copies |= {key: self._nodes[key].value for key in written}
        # Mutable objects first, all of them and still empty, so that cycles find them.
        copied = [key for key in self._changed - self._written if not _is_rebuilt(self._nodes[key].value)]
        for key in copied:
            self._copies[key] = _empty_like(self._nodes[key].value)
        for key in copied:
            original, copy = self._nodes[key].value, self._copies[key]
            for put, held in _cells(original, copy):
                put(self._new(held))
            _keep_if_it_matters(original, copy)
        cells = [cell for key in written for cell in _cells(self._nodes[key].value, self._nodes[key].value)]
        _write([(put, held, new) for put, held in cells if (new := self._new(held)) is not held])
        return self._new(root)

    def _find_changed(self, keys: Iterable[int]) -> set[int]:
        found: set[int] = set()
        todo = list(keys)
        while todo:
            for parent in self._nodes[todo.pop()].parents:
                if parent not in found and parent not in self._spared:
                    found.add(parent)
                    if parent not in self._written:
                        todo.append(parent)
        return found

    def _new(self, value: Any) -> Any:
        """The replacement of ``value``."""
        key = id(value)
        if key in self._copies:
            return self._copies[key]
        if key not in self._changed:
            return value
        copy = self._copies[key] = self._with_parts(value)
        if not is_a(value, types.MethodType) and (attributes := static.dict_of(value)):
            # After the copy is known: what an attribute holds may lead back to it.
            copy.__dict__.update((name, self._new(held)) for name, held in attributes.items())
        return copy

    def _with_parts(self, value: Any) -> Any:
        """A copy of an immutable object whose parts are replaced, without its attributes."""
        if is_a(value, types.MethodType):
            return types.MethodType(value.__func__, self._new(value.__self__))
        if is_a(value, functools.partial):
            parts = self._new(value.func), self._new(value.args), self._new(value.keywords)
            return type(value)(parts[0], *parts[1], **parts[2])
        if type(value) is tuple:
            return tuple(map(self._new, value))
        return type(value)._make(map(self._new, value))


def _write(cells: list[tuple[_Put, Any, Any]]) -> None:
    """Set cells, each given with its old and its new value; none if one cannot be set."""
    done = 0
    try:
        for put, _, new in cells:
            done += 1
            put(new)
    except BaseException:
        for put, old, _ in reversed(cells[:done]):
            with contextlib.suppress(Exception):  # the one that failed, perhaps again
                put(old)
        raise


def _cells(value: Any, target: Any) -> Iterator[tuple[_Put, Any]]:
    """The values that an object holds: for each the function that sets it in the like ``target``."""
    base: Any = np.ndarray if type(value) is np.ndarray else static.base_of(value)
    if base is not None:
        for key, held in static.items(value):
            yield functools.partial(base.__setitem__, target, key), held
        return
    # Not setattr: frozen dataclasses and datasets with rules of their own refuse it. Nor the target's
    # __dict__ where it can be helped: attributes would be slower to read (docs/decisions/0033).
    for name, held in static.dict_of(value).items():
        # Where it calls a property or another descriptor of the class, it is not set as an attribute.
        kept = inspect.getattr_static(type(value), name, None) if type(name) is str else property()
        is_plain = not inspect.isdatadescriptor(kept)
        put = functools.partial(object.__setattr__, target) if is_plain else target.__dict__.__setitem__
        yield functools.partial(put, name), held
    for name, held in static.slots_of(value).items():
        yield functools.partial(object.__setattr__, target, name), held


def _is_immutable(value: Any) -> bool:
    if _is_rebuilt(value):
        return True
    dataclass = static.of_class(type(value), "__dataclass_params__")
    return dataclass is not None and dataclass.frozen and not objects.is_dataset(value)


def _is_rebuilt(value: Any) -> bool:
    """Whether a copy is made from its parts, and not filled."""
    return is_a(value, tuple | types.MethodType | functools.partial)


def _empty_like(value: Any) -> Any:
    kind = type(value)
    if is_a(value, deque):
        return kind([None] * len(value), value.maxlen)
    if is_a(value, np.ndarray):
        return np.empty_like(value)
    if is_a(value, list):
        return kind([None] * len(value))
    if is_a(value, defaultdict):
        return kind(value.default_factory)
    return kind() if is_a(value, dict | types.SimpleNamespace) else object.__new__(kind)


def _keep_if_it_matters(original: Any, copy: Any) -> None:
    """Keep an object as long as its copy, if its death would affect objects that both hold.

    That may be by ``__del__`` or ``weakref.finalize``, or because the copy's contents refer to the original
    weakly.
    """
    if weakref.getweakrefs(original) or hasattr(type(original), "__del__"):
        # With slots and none for weak references it is kept for good, as its class is then.
        owner = copy if type(copy).__weakrefoffset__ else type(copy)
        weakref.finalize(owner, lambda _: None, original)  # at exit, too: else neither of them would end
