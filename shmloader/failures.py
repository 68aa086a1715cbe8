"""How an exception of a worker reaches the main process as itself.

The exception travels with its type, arguments and attributes; the worker's traceback, which cannot
travel, is attached as a note. Classes whose constructor does not take what ``args`` holds are rebuilt
without calling it; those that cannot be pickled at all arrive as a stand-in that says so.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """An exception on its way to the main process.

    Attributes:
        pickled: The exception, pickled in whichever way survives.
        note: Where it was raised: worker, indices, the worker's traceback.
    """

    pickled: bytes
    note: str


def capture(error: BaseException, where: str) -> Failure:
    """Pack an exception in the worker.

    Args:
        error: The exception, with its traceback.
        where: One line that says which worker and which samples.
    """
    text = "".join(traceback.format_exception(error))
    return Failure(_pickle_exception(error), f"{where}\nTraceback in the worker:\n{text.rstrip()}")


def restore(failure: Failure) -> BaseException:
    """Rebuild the exception in the main process, ready to be raised."""
    error: BaseException = pickle.loads(failure.pickled)
    error.add_note(failure.note)
    return error


def _pickle_exception(error: BaseException) -> bytes:
    attributes = {k: v for k, v in vars(error).items() if k != "__notes__"}
    notes = list(getattr(error, "__notes__", []))
    for attempt in (
        error,
        _Rebuilt(type(error), error.args, attributes, notes),
        _Rebuilt(type(error), tuple(map(_picklable, error.args)), {}, notes),
    ):
        try:
            pickled = pickle.dumps(attempt, 5)
            copy = pickle.loads(pickled)
            if type(copy) is type(error) and repr(copy.args) == repr(attempt.args):
                return pickled
        except Exception:  # noqa: BLE001 - pickling runs the user's code, which may raise anything
            continue
    return pickle.dumps(_stand_in(error), 5)


def _picklable(value: Any) -> Any:
    try:
        pickle.loads(pickle.dumps(value, 5))
    except Exception:  # noqa: BLE001 - as above
        return repr(value)
    return value


class _Rebuilt:
    """Pickles to an exception made without calling the constructor of its own class."""

    def __init__(
        self,
        kind: type[BaseException],
        args: tuple[Any, ...],
        attributes: dict[str, Any],
        notes: list[str],
    ) -> None:
        self.kind, self.args, self.attributes, self.notes = kind, args, attributes, notes

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _rebuild, (self.kind, self.args, self.attributes, self.notes)


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any], notes: list[str]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    for note in notes:
        error.add_note(note)
    return error


def _stand_in(error: BaseException) -> BaseException:
    """The nearest built-in class, naming the one that could not be pickled."""
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins" and issubclass(kind, BaseException):
            text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
            try:
                return kind(f"{text} (its class could not be sent from the worker)")
            except TypeError:
                continue
    return RuntimeError(repr(error))
