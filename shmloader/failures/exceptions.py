"""Exceptions on their way from a worker to the main process.

An exception arrives with its class, arguments, attributes, notes, cause and context, and with the text of the
worker's traceback as a note. The constructor of the class is not called again, because it may take other
arguments than those in ``args``. What cannot be pickled arrives as its ``repr``. A class that cannot be
imported, and an exception that cannot be sent, are replaced by a stand-in: a new class of the same name and
text, derived from the nearest base that can be imported.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import pickle
import pkgutil
import re
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from shmloader.messages import LINE, shorten

_MOST_IN_A_CHAIN = 32
_MOST_LINES = 400  # of a traceback
_PICKLING_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
_FIELDS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def capture(error: BaseException, where: str, there: str = "in the worker") -> bytes:
    """Pack an exception; ``where`` names the process and what it did. Raises nothing itself."""
    try:
        formatted = traceback.TracebackException.from_exception(error, compact=True)
        formatted.__notes__ = None  # they are sent with the exception
        lines = "".join(formatted.format()).rstrip().split("\n")
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES // 2 : -_MOST_LINES // 2] = ["..."]
        trace = "\n".join(shorten(line, 2 * LINE) for line in lines)
    except BaseException as reason:  # noqa: BLE001 - formatting runs the user's code
        trace = f"{type(error).__name__}: its traceback could not be formatted ({type(reason).__name__})"
    note = f"{where}\nTraceback {there}:\n{trace}"
    return pickle.dumps((_checked(_dump, error), _names_of(type(error)), text_of(error), note), 5)


def restore(packed: bytes) -> BaseException:
    """Rebuild an exception in the main process, ready to be raised. Raises nothing itself."""
    pickled, names, text, note = pickle.loads(packed)
    try:
        error: BaseException = pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - there is none, or it needs a module that only the worker has
        error = _make(names, text, (text,), stand_in=True)
    if isinstance(error, _StandIn):
        name, base = names[0].replace(":", "."), type(error).__mro__[1].__qualname__
        add_note(error, f"{name} could not be sent to this process: this is a stand-in, derived from {base}.")
    add_note(error, note)
    return error


class _Note(str):
    """A note of the loader's, with the time when it was added. Pickled, it is any text."""

    __slots__ = ("added_ns",)
    added_ns: int

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an exception, unless its ``__notes__`` is not a list."""
    note = _Note(text)
    note.added_ns = time.perf_counter_ns()
    with contextlib.suppress(Exception):
        try:
            BaseException.add_note(error, note)
        except AttributeError:  # a frozen dataclass, say
            error.__dict__.setdefault("__notes__", []).append(note)


def drop_notes(error: BaseException, before_ns: int) -> None:
    """Drop the notes that the same object got when it was raised for an earlier batch."""
    with contextlib.suppress(Exception):
        error.__notes__[:] = [
            note for note in error.__notes__ if not (isinstance(note, _Note) and note.added_ns < before_ns)
        ]


def text_of(error: BaseException) -> str:
    """``str(error)``, or a replacement if that raises."""
    try:
        return str(error)
    except BaseException as reason:  # noqa: BLE001 - the user's code
        return f"<str() of this {type(error).__name__} raises {type(reason).__name__}>"


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an exception and of all it refers to: their frames hold samples and leaves."""
    todo, seen = [error], set()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen.add(id(one))
            object.__setattr__(one, "__traceback__", None)  # a frozen class refuses other ways
            todo += [other for other in (one.__cause__, one.__context__) if other is not None]
            todo += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


# --- in the worker


class _Repr(str):
    """The ``repr`` of a value that cannot be pickled; its own ``repr`` is the same text."""

    __slots__ = ()
    __repr__ = str.__str__


class _ErrorPickler(pickle.Pickler):
    """Reduces exceptions to calls of `_make` and `_fill`. The pickle's memo takes care of circles."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self._depths: dict[int, int] = {}  # by identity: place in a chain of causes and contexts

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an exception; leave all else to pickle."""
        if not isinstance(obj, BaseException):
            return NotImplemented
        depth = self._depths.setdefault(id(obj), 0) + 1
        chain = (obj.__cause__, obj.__context__) if depth < _MOST_IN_A_CHAIN else (None, None)
        for other in chain:
            self._depths.setdefault(id(other), depth)
        kind, base = type(obj), _builtin_base(type(obj))
        args, fields, attributes = _contents_of(obj)
        own = any(getattr(kind, name, None) is not getattr(base, name, None) for name in _PICKLING_METHODS)
        whole = _checked(pickle.dumps, obj, in_order=True) if own else b""
        made: tuple[Any, ...] = (_make, (_names_of(kind), text_of(obj), args))
        if whole:
            made, attributes = (pickle.loads, (whole,)), {"__notes__": attributes.get("__notes__", [])}
            fields = {} if any(isinstance(arg, _Repr) for arg in fields["args"]) else {"args": fields["args"]}
        return *made, (fields, attributes, *chain, obj.__suppress_context__), None, None, _fill


def _dump(error: BaseException) -> bytes:
    file = io.BytesIO()
    _ErrorPickler(file).dump(error)
    return file.getvalue()


def _checked(
    dump: Callable[[BaseException], bytes], error: BaseException, *, in_order: bool = False
) -> bytes:
    """Pickle an exception; empty if that fails, or if the copy has another class name or text.

    Unless all is to be ``in_order``, a set in it may be in another order, and a text another each time.
    """
    with contextlib.suppress(BaseException):  # the user's code may raise anything
        pickled = dump(error)
        copy = pickle.loads(pickled)
        if type(copy).__qualname__ == type(error).__qualname__:
            one, other, again = (_ADDRESS.sub("0x", text_of(one)) for one in (copy, error, error))
            if one == other or (not in_order and (sorted(one) == sorted(other) or other != again)):
                return pickled
    return b""


def _names_of(kind: type) -> tuple[str, ...]:
    """Names of a class and those of its bases that are exceptions; the last is that of BaseException."""
    bases = [base for base in kind.__mro__ if issubclass(base, BaseException)]
    return tuple(f"{base.__module__}:{base.__qualname__}" for base in bases)


def _contents_of(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """The arguments, fields and attributes of an exception, as far as they can be pickled."""
    values = {name: value for name, _, value in _fields_of(error)}
    made = (values.pop("message"), values.pop("exceptions")) if isinstance(error, BaseExceptionGroup) else ()
    args = tuple(map(_portable, values.pop("args")))
    fields = {name: _portable(value) for name, value in values.items()} | {"args": args}
    state: Any = object.__getstate__(error)  # attributes; a pair with those in __slots__, if there are such
    states = state if isinstance(state, tuple) else (state,)
    attributes = {name: _portable(value) for found in states if found for name, value in found.items()}
    # An OSError tells a file name of None from none at all, in its text only.
    return args if isinstance(error, OSError) else made, fields, attributes


def _portable(value: Any) -> Any:
    """A value, or its ``repr`` if it cannot be pickled."""
    if all(isinstance(one, BaseException) for one in (value if type(value) in (list, tuple) else [value])):
        return value
    try:
        pickle.loads(pickle.dumps(value, 5))
    except BaseException:  # noqa: BLE001 - the user's code may raise anything
        try:
            return _Repr(repr(value))
        except BaseException as reason:  # noqa: BLE001 - it may here, too
            return _Repr(f"<{type(value).__name__}, whose repr() raises {type(reason).__name__}>")
    return value


# --- in the main process, and in the worker to check that it works


class _StandIn:
    """Base of the classes that stand in for others."""


def _make(
    names: tuple[str, ...], text: str, args: tuple[Any, ...], *, stand_in: bool = False
) -> BaseException:
    """Make an exception of the first class that can be imported, without calling its constructor."""
    for name in names:
        try:
            kind = pkgutil.resolve_name(name)
            if stand_in or name != names[0]:
                module, _, qualname = names[0].partition(":")
                members = {"__module__": module, "__qualname__": qualname, "__str__": lambda _: text}
                kind = type(qualname.rpartition(".")[2], (kind, _StandIn), members)
            base = _builtin_base(kind)
            error: BaseException = base.__new__(kind, *args)
        except Exception:  # noqa: BLE001 - importing and deriving run the user's code
            continue
        with contextlib.suppress(Exception):  # the class may have arguments that its base does not take
            base.__init__(error, *args)
        return error
    raise AssertionError("BaseException takes any arguments")


def _fill(error: BaseException, state: tuple[dict[str, Any], dict[str, Any], Any, Any, bool]) -> None:
    """Give a rebuilt exception its fields, attributes, cause and context."""
    fields, attributes, cause, context, suppress_context = state
    chain = {"__cause__": cause, "__context__": context, "__suppress_context__": suppress_context}
    for name, value in (attributes | chain).items():
        with contextlib.suppress(Exception):  # a property that cannot be set
            object.__setattr__(error, name, value)  # a frozen class refuses other ways
    for name, field, now in _fields_of(error):
        if name in fields and fields[name] is not now:
            field.__delete__(error) if fields[name] is None else field.__set__(error, fields[name])


def _builtin_base(kind: type) -> Any:
    """The built-in class that allocates the exceptions of a class."""
    while vars(builtins).get(kind.__name__) is not kind and kind.__base__ is not None:
        kind = kind.__base__
    return kind


def _fields_of(error: BaseException) -> Iterator[tuple[str, Any, Any]]:
    """Fields of an exception's built-in class, outside of ``__dict__``: name, descriptor, value or None.

    Not ``obj``, the whole object that an AttributeError was raised for: Python does not pickle it either.
    """
    for kind in _builtin_base(type(error)).__mro__:
        for name, field in vars(kind).items():
            if isinstance(field, _FIELDS) and name != "obj" and not name.startswith("__"):
                value = None
                with contextlib.suppress(AttributeError):  # characters_written, where there is none
                    value = field.__get__(error)
                yield name, field, value
