"""Calls of ``set_epoch`` that the program makes on datasets, noted so that workers can repeat them.

It cannot be seen what such a call has changed in an object: a list, a generator, something in ``__slots__``.
So the method is replaced, in the class that defines it, by one that makes the call and notes it. Calls are
noted only for loaders with persistent workers, while these live, and in the loader's process.
"""

from __future__ import annotations

import functools
import os
import pickle
import threading
import weakref
from typing import Any, NamedTuple

from shmloader.errors import warn

_PLAIN = (int, float, bool, str, type(None))
PlainAttributes = dict[str, Any]


class Call(NamedTuple):
    """One call of a dataset's ``set_epoch``.

    Attributes:
        arguments: The pickled positional and keyword arguments.
        before: The dataset's plain attributes before it.
        after: Those after it.
    """

    arguments: bytes
    before: PlainAttributes
    after: PlainAttributes


class CallLog:
    """Calls on the datasets of one loader.

    Attributes:
        calls: The calls by the dataset's id, the oldest first.
    """

    def __init__(self) -> None:
        self.calls: dict[int, list[Call]] = {}

    def listen(self, dataset: Any) -> list[Call]:
        """Note all further calls on a dataset, if its ``set_epoch`` is a method of its class.

        Returns:
            The calls so far, to which later ones are appended.
        """
        calls = self.calls.setdefault(id(dataset), [])
        owner = next((kind for kind in type(dataset).__mro__ if "set_epoch" in vars(kind)), None)
        method = None if owner is None else vars(owner)["set_epoch"]
        if isinstance(method, (staticmethod, classmethod, property)) or not hasattr(method, "__get__"):
            return calls
        if getattr(method, "__globals__", None) is not globals():  # not replaced yet
            try:
                owner.set_epoch = _noting(method)  # type: ignore[union-attr]
            except Exception:  # noqa: BLE001 - of a class that cannot be changed, or its metaclass's own
                return calls
        for key in [key for key, logs in _logs.items() if not logs]:
            del _logs[key]
        _logs.setdefault((os.getpid(), id(dataset)), weakref.WeakSet()).add(self)
        return calls


_logs: dict[tuple[int, int], weakref.WeakSet[CallLog]] = {}  # by process and id of the dataset
_noted_now: dict[int, set[CallLog]] = {}  # by thread: the logs that note the thread's present call


def is_noted(dataset: Any) -> bool:
    """Whether calls on this object are noted: then it is the program's own, which a thread shares."""
    return bool(_logs.get((os.getpid(), id(dataset))))


def plain_attributes(one: Any) -> PlainAttributes:
    """An object's attributes that are numbers, strings, booleans or None."""
    attributes = getattr(one, "__dict__", {})
    return {name: value for name, value in attributes.items() if type(value) in _PLAIN}


def changed_attributes(before: PlainAttributes, now: PlainAttributes) -> PlainAttributes:
    """The attributes that are new, or differ from those before."""
    return {
        name: value for name, value in now.items() if name not in before or not _same(before[name], value)
    }


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _noting(method: Any) -> Any:
    @functools.wraps(method)
    def set_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = method.__get__(self, type(self))
        thread = threading.get_ident()
        outer = _noted_now.get(thread, set())
        # Logs that note an outer call skip this one, which the outer one repeats: of a base class, of a
        # dataset inside.
        logs = set(_logs.get((os.getpid(), id(self)), ())) - outer
        if not logs:
            return bound(*args, **kwargs)
        arguments, before = _pickled(args, kwargs), plain_attributes(self)
        _noted_now[thread] = outer | logs
        try:
            result = bound(*args, **kwargs)
        finally:
            _noted_now[thread] = outer
            if not outer:
                del _noted_now[thread]
        if arguments is not None:
            for log in logs:
                log.calls[id(self)].append(Call(arguments, before, plain_attributes(self)))
        return result

    return set_epoch


def _pickled(args: Any, kwargs: Any) -> bytes | None:
    try:
        return pickle.dumps((args, kwargs), 5)
    except Exception as error:  # noqa: BLE001 - of the program's arguments
        why = f"its arguments cannot be pickled ({type(error).__name__}: {error})"
        warn(f"persistent workers cannot repeat this call of set_epoch(): {why}", UserWarning)
        return None
