"""How an exception of a worker reaches the main process as itself.

It arrives with its type, arguments, attributes, notes, cause and context; the worker's traceback, which
cannot travel, is a note on it. For that it is taken apart in the worker into pieces that pickle each by
itself, and put together in the main process without calling the constructor of its class, which may take
other arguments than ``args`` holds. What of it cannot be pickled arrives as its ``repr``; a class that
cannot be found in the main process is stood in for by a new class of the same name, derived from the
nearest of its bases that can.
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import traceback
from typing import Any, NamedTuple

_MOST_NESTED = 32  # causes of causes, groups in groups
_OWN: Any = BaseException.__dict__  # a class may have something else under these names, or refuse to set them
_ARGS, _TRACEBACK = _OWN["args"], _OWN["__traceback__"]
_CAUSE, _CONTEXT, _SUPPRESS = (_OWN[f"__{name}__"] for name in ("cause", "context", "suppress_context"))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was not compiled in


class Failure(NamedTuple):
    """An exception on its way to the main process.

    Attributes:
        pickled: The exception taken apart, pickled.
        note: Where it was raised: worker, indices, the worker's traceback.
        bad_samples: The bad samples of that batch so far, pickled; empty if there are none.
    """

    pickled: bytes
    note: str
    bad_samples: bytes = b""


class _Pieces(NamedTuple):
    """An exception taken apart. Everything in here pickles, whatever the exception was.

    Attributes:
        classes: Its class and its bases up to the first built-in one, each pickled; b"" where that failed.
        name: Qualified name of its class.
        module: Module of its class.
        whole: The exception as its class pickles it, if the class has a way of its own and that works.
        args: ``args``, each pickled.
        built_from: What its built-in base is constructed from, each pickled; None where that is ``args``.
        state: Attributes, each pickled.
        text: ``str()`` of it.
        notes: ``__notes__``.
        cause: ``__cause__``.
        context: ``__context__``.
        suppress_context: ``__suppress_context__``.
    """

    classes: tuple[bytes, ...]
    name: str
    module: str
    whole: bytes
    args: tuple[bytes, ...]
    built_from: tuple[bytes, ...] | None
    state: dict[str, bytes]
    text: str
    notes: tuple[str, ...]
    cause: _Pieces | None
    context: _Pieces | None
    suppress_context: bool


def capture(error: BaseException, where: str, bad_samples: bytes = b"") -> Failure:
    """Pack an exception in the worker. Raises nothing, whatever the exception is.

    Args:
        error: The exception, with its traceback.
        where: One line that says which worker and which samples.
        bad_samples: See `Failure`.
    """
    try:
        formatted = traceback.TracebackException.from_exception(error, compact=True)
        formatted.__notes__ = None  # they arrive as notes
        text = "".join(formatted.format()).rstrip()
    except BaseException as reason:  # noqa: BLE001 - formatting runs the user's code
        text = f"{type(error).__name__}: its traceback could not be formatted ({type(reason).__name__})"
    try:
        pieces = _Taking().take(error)
    except BaseException:  # noqa: BLE001 - a class that overrides what all exceptions have
        pieces = _Taking().take(RuntimeError(f"{type(error).__qualname__}: {text_of(error)}"))
    return Failure(pickle.dumps(pieces, 5), f"{where}\nTraceback in the worker:\n{text}", bad_samples)


def restore(failure: Failure) -> BaseException:
    """Put the exception together in the main process, ready to be raised. Raises nothing itself."""
    error = _put_together(pickle.loads(failure.pickled))
    add_note(error, failure.note)
    return error


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, unless its ``__notes__`` is something that takes none."""
    with contextlib.suppress(Exception):
        try:
            BaseException.add_note(error, note)
        except AttributeError:  # a frozen dataclass, say
            error.__dict__.setdefault("__notes__", []).append(note)


def text_of(error: BaseException) -> str:
    """``str(error)``, also where that raises."""
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
            _TRACEBACK.__set__(one, None)
            others = _CAUSE.__get__(one), _CONTEXT.__get__(one)
            todo += [other for other in others if other is not None]
            todo += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


# --- in the worker: taking apart


class _Taking:
    """Takes one exception apart, and those that it holds."""

    def __init__(self) -> None:
        self._open: set[int] = set()  # by identity: an exception may contain itself

    def take(self, error: BaseException | None) -> _Pieces | None:
        """The pieces of an exception; None for none, and where it lies within itself or too deep."""
        if error is None or id(error) in self._open or len(self._open) >= _MOST_NESTED:
            return None
        self._open.add(id(error))
        try:
            return self._take(error)
        finally:
            self._open.discard(id(error))

    def _take(self, error: BaseException) -> _Pieces:
        kind = type(error)
        base = _compiled_base(kind)
        args = _ARGS.__get__(error)
        built_from, state = _reduce(error, base)
        notes = state.pop("__notes__", ())
        return _Pieces(
            classes=tuple(map(_dump_class, _up_to_builtin(kind))),
            name=kind.__qualname__,
            module=kind.__module__,
            whole=self._dump_whole(error) if _pickles_itself(kind, base) else b"",
            args=tuple(map(self._dump, args)),
            built_from=None if built_from is args else tuple(map(self._dump, built_from)),
            state={str(name): self._dump(value) for name, value in state.items()},
            text=text_of(error),
            notes=tuple(map(str, notes)) if isinstance(notes, list | tuple) else (),
            cause=self.take(_CAUSE.__get__(error)),
            context=self.take(_CONTEXT.__get__(error)),
            suppress_context=_SUPPRESS.__get__(error),
        )

    def _dump(self, value: object) -> bytes:
        """Pickle a value, or its ``repr`` where that fails."""
        try:
            pickled = self._pickle(value, whole=False)
            pickle.loads(pickled)
        except BaseException:  # noqa: BLE001 - pickling runs the user's code, which may raise anything
            return pickle.dumps(_repr(value), 5)
        return pickled

    def _dump_whole(self, error: BaseException) -> bytes:
        """Pickle an exception in its class's own way; b"" where something else would come out."""
        try:
            pickled = self._pickle(error, whole=True)
            copy = pickle.loads(pickled)
        except BaseException:  # noqa: BLE001 - as above
            return b""
        return pickled if type(copy) is type(error) and text_of(copy) == text_of(error) else b""

    def _pickle(self, value: object, *, whole: bool) -> bytes:
        file = io.BytesIO()
        _ErrorPickler(file, self, value if whole else None).dump(value)
        return file.getvalue()


class _ErrorPickler(pickle.Pickler):
    """Takes exceptions apart wherever they sit in what is pickled, except for one."""

    def __init__(self, file: io.BytesIO, taking: _Taking, whole: object) -> None:
        super().__init__(file, 5)
        self._taking, self._whole = taking, whole

    def reducer_override(self, obj: Any) -> Any:
        """See ``pickle.Pickler``."""
        if not isinstance(obj, BaseException) or obj is self._whole:
            return NotImplemented
        pieces = self._taking.take(obj)
        return (str, (_repr(obj),)) if pieces is None else (_put_together, (pieces,))


def _compiled_base(kind: type) -> Any:
    """The class in C whose memory the exceptions of a class have: its constructor can make them."""
    while kind.__flags__ & _HEAP_TYPE and kind.__base__ is not None:
        kind = kind.__base__
    return kind


def _up_to_builtin(kind: type) -> list[type]:
    found = []
    for one in kind.__mro__:
        if issubclass(one, BaseException):
            found.append(one)
            if one.__module__ == "builtins":
                break
    return found


def _reduce(error: BaseException, base: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What an exception's built-in base is constructed from, and its attributes."""
    built_from, state = _ARGS.__get__(error), {}
    with contextlib.suppress(Exception):
        for one in type(error).__mro__:
            slots = one.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(error, name) and name not in {"__dict__", "__weakref__"}:
                    state[name] = getattr(error, name)
    with contextlib.suppress(Exception):
        # Of the base itself, not what the class makes of it: an OSError's file name is in here only.
        _, built_from, *rest = base.__reduce__(error)
        state |= rest[0] if rest and rest[0] else {}
    return built_from, state


def _pickles_itself(kind: type, base: Any) -> bool:
    """Whether a class says itself how it is pickled: it may have state that is not in ``__dict__``."""
    own: Any = kind
    return (
        own.__reduce__ != base.__reduce__
        or own.__reduce_ex__ != object.__reduce_ex__
        or own.__setstate__ != BaseException.__setstate__
        or kind in copyreg.dispatch_table
    )


def _dump_class(kind: type) -> bytes:
    try:
        pickled = pickle.dumps(kind, 5)
        return pickled if pickle.loads(pickled) is kind else b""
    except BaseException:  # noqa: BLE001 - defined in a function, say; metaclasses are the user's code too
        return b""


def _repr(value: object) -> str:
    try:
        return repr(value)
    except BaseException as reason:  # noqa: BLE001 - the user's code
        return f"<{type(value).__name__} whose repr() raises {type(reason).__name__}>"


# --- in the main process: putting together


def _put_together(pieces: _Pieces) -> BaseException:
    error = _whole_of(pieces) or _rebuild(pieces)
    with contextlib.suppress(Exception):
        error.__dict__["__notes__"] = [*pieces.notes, *_notes_of_stand_in(error)]
        if not error.__dict__["__notes__"]:
            del error.__dict__["__notes__"]
        _CAUSE.__set__(error, pieces.cause and _put_together(pieces.cause))
        _CONTEXT.__set__(error, pieces.context and _put_together(pieces.context))
        _SUPPRESS.__set__(error, pieces.suppress_context)
    return error


def _whole_of(pieces: _Pieces) -> BaseException | None:
    if pieces.whole:
        with contextlib.suppress(Exception):
            error = pickle.loads(pieces.whole)
            if isinstance(error, BaseException):
                return error
    return None


def _rebuild(pieces: _Pieces) -> BaseException:
    """Make an exception of the nearest class that can be had, and give it its arguments and attributes."""
    args = tuple(map(_load, pieces.args))
    built_from = args if pieces.built_from is None else tuple(map(_load, pieces.built_from))
    for distance, pickled in enumerate(pieces.classes):
        try:
            kind = pickle.loads(pickled)
            if distance:
                kind = _find_local(kind, pieces) or _stand_in(kind, pieces)
            base = _compiled_base(kind)
            error: BaseException = base.__new__(kind, *built_from)
        except Exception:  # noqa: BLE001 - importing and deriving run the user's code
            continue
        with contextlib.suppress(Exception):  # arguments that are its class's own business, not its base's
            base.__init__(error, *built_from)
        _ARGS.__set__(error, args)
        for name, value in pieces.state.items():
            _set(error, name, _load(value))
        return error
    return _stand_in(RuntimeError, pieces)(*args)


def _set(error: BaseException, name: str, value: object) -> None:
    with contextlib.suppress(Exception):
        try:
            object.__setattr__(error, name, value)
        except AttributeError:  # hidden by a property that cannot be set
            error.__dict__[name] = value


class _StandIn:
    """Base of the classes that stand in for others."""


def _find_local(base: type[BaseException], pieces: _Pieces) -> type[BaseException] | None:
    """The class itself where no import leads to it (defined in a function) but it was made before a fork."""
    found, todo = [], [base]
    while todo:
        below = type.__subclasses__(todo.pop())
        found += [
            kind
            for kind in below
            if not issubclass(kind, _StandIn) and _name_of(kind) == (pieces.name, pieces.module)
        ]
        todo += below
    return found[0] if len(set(found)) == 1 else None


def _name_of(kind: type) -> tuple[str, str]:
    return kind.__qualname__, kind.__module__


def _stand_in(kind: type[BaseException], pieces: _Pieces) -> type[BaseException]:
    def __str__(_: BaseException) -> str:  # noqa: N807 - becomes a method
        return pieces.text

    members = {"__module__": pieces.module, "__qualname__": pieces.name, "__str__": __str__}
    return type(pieces.name.rpartition(".")[2], (kind, _StandIn), members)


def _notes_of_stand_in(error: BaseException) -> list[str]:
    if not isinstance(error, _StandIn):
        return []
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}"
    base = kind.__mro__[1].__qualname__
    return [f"{name} cannot be found in the main process: this is a stand-in, derived from {base}."]


def _load(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as reason:  # noqa: BLE001 - loads in the worker, not here: a module that is not found
        return f"<could not be rebuilt in the main process: {_repr(reason)}>"
