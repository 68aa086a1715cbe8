"""Errors for a program that changes shared data as it would change a list, a dict or a set."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NoReturn

_CHANGES = frozenset(name for kind in (list, deque, set, OrderedDict, Counter) for name in dir(kind))
"""Names of methods; those that only read are defined by the kinds of stores that can have them."""

_WAY_BACK = (
    "it is in shared memory, read-only. Change the data before it is shared, or call "
    "shmloader.unshare(dataset), which puts lists, dicts and arrays of this process in its place"
)


def _refused(what: str) -> Callable[..., NoReturn]:
    """A method that would change a list, a dict or a set."""

    def method(self: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__!r} object does not support {what}: {_WAY_BACK}")

    return method


class ReadOnly:
    """A value that never changes. A method of lists, dicts or sets that it lacks is an AttributeError."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what libraries ask of any object, for each conversion
            raise AttributeError(name)
        why = f": {_WAY_BACK}" if name in _CHANGES else ""
        said = f"{type(self).__name__!r} object has no attribute {name!r}{why}"
        raise AttributeError(said, name=name, obj=self)

    __setitem__, __delitem__ = map(_refused, ("item assignment", "item deletion"))
    __iadd__, __imul__ = map(_refused, ("+=", "*="))
    __ior__, __iand__, __isub__, __ixor__ = map(_refused, ("|=", "&=", "-=", "^="))
