"""Errors for a program that changes shared data as it would change a list, a dict or a set."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any, NoReturn

_CHANGES = frozenset(name for kind in (list, deque, set, OrderedDict, Counter) for name in dir(kind))
"""Names of methods; those that only read are defined by the kinds of stores that can have them."""

_WAY_BACK = (
    "it is in shared memory, read-only. Change the data before it is shared, or call "
    "shmloader.unshare(dataset), which puts lists, dicts and arrays of this process in its place"
)


class ReadOnly:
    """A value that never changes. A method of lists, dicts or sets that it lacks is an AttributeError."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what libraries ask of any object, for each conversion
            raise AttributeError(name)
        why = f": {_WAY_BACK}" if name in _CHANGES else ""
        said = f"{type(self).__name__!r} object has no attribute {name!r}{why}"
        raise AttributeError(said, name=name, obj=self)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__!r} object does not support item assignment: {_WAY_BACK}")

    def __delitem__(self, key: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__!r} object does not support item deletion: {_WAY_BACK}")

    def __iadd__(self, other: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__!r} object does not support +=: {_WAY_BACK}")
