"""Arguments of workers that pickle refuses: pickled by value with cloudpickle, or named in the error.

Imported when pickling has failed, and not before. Main process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import sys
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from types import FunctionType, MethodType
from typing import Any

from shmloader.messages import shown
from shmloader.worker.loop import WorkerArguments

_BY_NAME = (
    "pickle finds functions and classes by name, and this one has none in a module. Define it at the top of "
    "a module (functools.partial binds arguments to a function), or install cloudpickle, which needs no name"
)
_LOCK = (
    "it belongs to this process. Leave it out in __getstate__() and make it in __setstate__(), or use that "
    "of multiprocessing, which workers share"
)
_OPEN = (
    "it is open in this process only. Keep its path, and open it in the worker: in the dataset's "
    "worker_setup(info)"
)
_OTHER = (
    "which pickle refuses. Leave it out in __getstate__() and make it in __setstate__(), or in the worker "
    "when it is first used"
)
_LOCK_MODULES = ("_thread", "threading", "_queue", "queue", "asyncio", "concurrent")
_OPEN_MODULES = ("_io", "io", "sqlite3", "h5py", "lmdb", "zipfile", "tarfile", "mmap", "socket", "ssl")


def by_value_pickler(*, main_is_file: bool) -> Any:
    """A class like ``ForkingPickler`` that also sends lambdas and local classes; None without cloudpickle.

    What a worker can import is sent by name, as before: nothing of a ``__main__`` that is no file. Only
    functions and classes are sent by value: an open file, of which cloudpickle would send the contents, is
    refused.
    """
    try:
        cloudpickle: Any = importlib.import_module("cloudpickle")
    except ImportError:
        return None

    class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, file: Any, protocol: int, fix_imports: bool, buffer_callback: Any) -> None:
            table = dict(cloudpickle.Pickler.dispatch_table)
            table.pop(io.TextIOWrapper, None)
            table.update(reduction.ForkingPickler(file, protocol).dispatch_table)
            self.dispatch_table = table  # before the constructor, which reads it
            super().__init__(file, protocol, buffer_callback)

        def reducer_override(self, value: Any) -> Any:
            can_import = isinstance(value, type | FunctionType) and _has_name(value)
            if can_import and (main_is_file or value.__module__ != "__main__"):
                return NotImplemented
            return super().reducer_override(value)

    return ByValuePickler


def _has_name(value: Any) -> bool:
    """Whether a function or class is found by its name in its module."""
    try:
        return (
            functools.reduce(getattr, value.__qualname__.split("."), sys.modules[value.__module__]) is value
        )
    except (AttributeError, KeyError):
        return False


def describe_refused(arguments: WorkerArguments, dump: Callable[[Any], None], *, by_value: bool) -> str:
    """A sentence on what cannot be pickled, with its path and what to change; "" if it is not found.

    ``dump`` pickles an object to nowhere. It is called for the parts of each object on the path, in pickle's
    order, up to the one that it refuses; ``by_value`` tells whether it knows lambdas.
    """

    def refuses(value: Any) -> bool:
        try:
            dump(value)
        except Exception:  # noqa: BLE001 - of the program's classes
            return True
        return False

    given = {
        "dataset": arguments.dataset,
        "collate_fn": arguments.rules.collate_fn,
        "worker_init_fn": arguments.init_fn,
    }
    for name, value in given.items():
        if refuses(value):
            path, culprit = _find(value, name, refuses, {}, by_value) or (name, value)
            return f"{path} is {_describe(culprit)}."
    return ""


def _find(
    value: Any, path: str, refuses: Callable[[Any], bool], seen: dict[int, Any], by_value: bool
) -> tuple[str, Any] | None:
    """The first innermost part of a refused value; None if all of them are in a circle seen before."""
    seen[id(value)] = value
    in_circle = False
    for step, part in _parts(value, by_value):
        if id(part) in seen or refuses(part):
            found = None if id(part) in seen else _find(part, path + step, refuses, seen, by_value)
            if found is not None:
                return found
            in_circle = True
    return None if in_circle else (path, value)


def _parts(value: Any, by_value: bool) -> Iterator[tuple[str, Any]]:
    """The parts that pickle visits inside a value, each with its step in the path."""
    if isinstance(value, dict):
        yield from ((f"[{shown(key)}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType) and by_value:
        yield from ((f" (variable {name})", item) for name, item in _variables(value))
    if not isinstance(value, type | FunctionType | functools.partial | MethodType):
        yield from _attributes(value)


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """The variables from outside that a function uses."""
    code, outside = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield name, cell.cell_contents
    yield from ((name, outside[name]) for name in code.co_names if name in outside)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that are in the pickle of an object, by its ``__getstate__()`` if it has one."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - of the program's classes; a lock has no pickle
        return
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    for named in state if isinstance(state, tuple) else (state,):  # a pair: with those in __slots__
        if isinstance(named, dict):
            yield from ((f".{name}", item) for name, item in named.items())


def _describe(value: Any) -> str:
    """The kind of a value, and the change to make."""
    if isinstance(value, FunctionType):
        code = value.__code__
        where = f" ({code.co_filename}, line {code.co_firstlineno})"
        kind = "a lambda" if value.__name__ == "<lambda>" else f"the function {value.__qualname__!r}"
        return f"{kind}{where}: {_BY_NAME}"
    if isinstance(value, type):
        return f"the class {value.__qualname__!r}: {_BY_NAME}"
    of: Any = type(value)
    name = of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"
    package = of.__module__.partition(".")[0]
    if isinstance(value, io.IOBase) or package in _OPEN_MODULES:
        return f"a {name}: {_OPEN}"
    if package in _LOCK_MODULES:
        return f"a {name}: {_LOCK}"
    if "<locals>" in of.__qualname__:
        return f"of the class {of.__qualname__!r}: {_BY_NAME}"
    return f"a {name}, {_OTHER}"
