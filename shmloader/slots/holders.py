"""Finds the variables of a program that keep batches: which leaf is alive, and where.

Runs in the main process, once, as a `SpillWarning` is given. It looks at the variables of the functions that
are running, and into containers and objects from there; it runs none of the program's code.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.memory import Extent

_MOST_LOOKED_AT = 100_000  # objects; it takes about a tenth of a second
_MOST_ITEMS = 2_000  # of a container: slots have the batches that were kept first
_MOST_NAMED = 3  # variables
_LEAVES = (torch.Tensor, np.ndarray)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN = (str, int, float, bool, bytes)
_NOT_ENTERED = (*_PLAIN, bytearray, complex, type(None), type, ModuleType, FunctionType, np.generic)
_OWN = str(Path(__file__).parents[1])


class _Seen(NamedTuple):
    """An object, the variable that leads to it and where that is, and the expression for the object."""

    value: object
    variable: str
    where: str
    expression: str

    def __str__(self) -> str:
        return f"`{self.expression}` {self.where}"


def holders(extents: Iterable[Extent]) -> str:
    """The variables that keep the batches in the given slots, in a sentence for a warning.

    Those that keep most of them, each with a leaf of a batch by its expression; or, if they lead to less than
    half of the batches, where others may be.
    """
    slots = {extent.address: extent.nbytes for extent in extents}
    begins = sorted(slots)
    # Of each variable that leads to leaves: the first one, and the slot of each.
    found: dict[tuple[str, str], tuple[_Seen, list[int]]] = {}
    graph: _Seen | None = None
    for seen in _objects():
        value = seen.value
        if type(value) is torch.Tensor and value.grad_fn is not None:
            graph = graph or seen
        address = _address(value)
        begin = begins[bisect_right(begins, address) - 1] if begins else 0
        if 0 <= address - begin < slots.get(begin, 0):
            found.setdefault((seen.variable, seen.where), (seen, []))[1].append(begin)
    most = sorted(found.values(), key=lambda one: -len(set(one[1])))[:_MOST_NAMED]
    if 2 * len(set().union(*(leaves for _, leaves in most))) > len(slots):
        named = [_describe(*one) for one in most if len(set(one[1])) > 1 or one is most[0]]
        return f"They are kept by {', '.join(named)}."
    if graph is not None:
        return (
            f"No variable leads to most of them; but {graph} has a graph, which may keep the batches that it "
            "was computed from: keep `.item()` or `.detach()` of it."
        )
    return "No variable of a running function leads to most of them: look at comprehensions and closures."


def _describe(first: _Seen, slots: list[int]) -> str:
    value: Any = first.value
    leaf = f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    return f"{first} ({leaf}; {len(slots)} leaves of {len(set(slots))} batches)"


def _objects() -> Iterator[_Seen]:
    """The objects that the running functions of the program can reach, the nearest first."""
    left = deque(_variables())
    known: set[int] = set()
    kept: list[object] = []  # an object of which only this knows would give its id to another one
    while left and len(known) < _MOST_LOOKED_AT:
        seen = left.popleft()
        if id(seen.value) in known or issubclass(type(seen.value), _NOT_ENTERED):
            continue
        known.add(id(seen.value))
        kept.append(seen.value)
        yield seen
        if len(left) < _MOST_LOOKED_AT:
            for step, part in _parts(seen.value):
                left.append(seen._replace(value=part, expression=seen.expression + step))


def _variables() -> Iterator[_Seen]:
    """The variables of the functions that are running, in all threads, and of their modules."""
    modules: set[int] = set()
    for innermost in sys._current_frames().values():  # noqa: SLF001 - documented, for debugging
        frame: FrameType | None = innermost
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_OWN):
                at = f"in {Path(code.co_filename).name}:{frame.f_lineno}"
                if code.co_flags & inspect.CO_OPTIMIZED:
                    variables = frame.f_locals
                    yield from [_Seen(value, name, at, name) for name, value in variables.items()]
                    if type(variables) is dict:  # a copy, which the frame would keep with all in it
                        variables.clear()
                if id(frame.f_globals) not in modules:
                    modules.add(id(frame.f_globals))
                    at = f"in the module {frame.f_globals.get('__name__')}"
                    yield from [_Seen(value, name, at, name) for name, value in [*frame.f_globals.items()]]
            frame = frame.f_back


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects in a container or a ``__dict__``, each with its step in an expression."""
    kind = type(value)
    if kind in _CONTAINERS:
        yield from ((f"[{number}]", part) for number, part in enumerate(_first(value)))
    elif issubclass(kind, dict):
        yield from ((f"[{key!r:.30}]", part) for key, part in _items(value))
    elif kind not in _LEAVES:
        with contextlib.suppress(AttributeError):
            attributes = object.__getattribute__(value, "__dict__")
            if type(attributes) is dict:
                yield from ((f".{name}", part) for name, part in _items(attributes))


def _items(value: Any) -> list[tuple[Any, Any]]:
    """The items of a dict, with keys that may be shown without the program's code; others by their class."""
    return [(key if type(key) in _PLAIN else type(key), one) for key, one in _first(dict.items(value))]


def _first(items: Iterable[Any]) -> list[Any]:
    """The first items of a container, at once: another thread may change it."""
    with contextlib.suppress(RuntimeError):
        return [*islice(items, _MOST_ITEMS)]
    return []


def _address(value: object) -> int:
    if type(value) is np.ndarray:
        return int(value.ctypes.data)
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        with contextlib.suppress(RuntimeError):  # inside `torch.func` it has no memory of its own
            return value.data_ptr()
    return -1
