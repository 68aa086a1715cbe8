"""Calls of ``set_epoch`` that the program makes on datasets, noted so that workers can repeat them.

Nothing tells what such a call has changed in an object: a list, a generator, something in ``__slots__``. So
the method is replaced, in the class that defines it, by one that makes the call and notes it. Only calls on
datasets of a loader with persistent workers are noted, and only in the process of that loader.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

_PLAIN = (int, float, bool, str, type(None))


class Call(NamedTuple):
    """One call of a dataset's ``set_epoch``.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        changed: The plain attributes that it has changed, as they are now.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    changed: dict[str, Any]


_noted: dict[tuple[int, int], list[Call]] = {}  # by process and id of the dataset
_calling: set[int] = set()  # threads inside a call that will be noted


def note_calls(dataset: Any) -> list[Call]:
    """Note all further calls of a dataset's ``set_epoch`` in this process.

    Returns:
        The calls so far, to which later ones are appended. It stays empty if the method is no function of the
        dataset's class.
    """
    owner = next((kind for kind in type(dataset).__mro__ if "set_epoch" in vars(kind)), None)
    method = None if owner is None else vars(owner)["set_epoch"]
    if owner is None or type(method) is not FunctionType:
        return []
    if method.__globals__ is not globals():  # not replaced yet
        try:
            owner.set_epoch = _noting(method)  # type: ignore[attr-defined]
        except (TypeError, AttributeError):  # of a class that cannot be changed
            return []
    key = os.getpid(), id(dataset)
    if key not in _noted:
        _noted[key] = []
        with contextlib.suppress(TypeError):  # a class with slots and without weak references
            weakref.finalize(dataset, _noted.pop, key, None).atexit = False
    return _noted[key]


def is_noted(dataset: Any) -> bool:
    """Whether calls on this very object are noted: then it is the program's own, which a thread shares."""
    return (os.getpid(), id(dataset)) in _noted


def plain_attributes(one: Any) -> dict[str, Any]:
    """An object's attributes that are numbers, strings, booleans or None."""
    attributes = getattr(one, "__dict__", {})
    return {name: value for name, value in attributes.items() if type(value) in _PLAIN}


def changed_attributes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The attributes that are new, or differ from those before."""
    return {
        name: value for name, value in now.items() if name not in before or not _same(before[name], value)
    }


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _noting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def set_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls, thread = _noted.get((os.getpid(), id(self))), threading.get_ident()
        # What another set_epoch calls comes again with that one: a base class's, an inner dataset's.
        if calls is None or thread in _calling:
            return method(self, *args, **kwargs)
        before = plain_attributes(self)
        _calling.add(thread)
        try:
            result = method(self, *args, **kwargs)
        finally:
            _calling.discard(thread)
        calls.append(Call(args, kwargs, changed_attributes(before, plain_attributes(self))))
        return result

    return set_epoch
