"""Settings that workers get when an epoch begins, with what the program has done to the dataset meanwhile.

A persistent worker has a copy of the dataset from the time when it was started. A later change by the
program, ``dataset.set_epoch(3)`` say, would never reach it. So the main process notes calls of ``set_epoch``,
and workers repeat them. Datasets with that method are also sent their plain attributes (numbers, strings,
booleans, None) that have been changed in another way. Datasets without it stay as the workers got them:
torch's own tests rely on it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from shmloader.worker.epoch_calls import Call, changed_attributes, is_noted, note_calls, plain_attributes

Path = tuple[str | int, ...]
"""Names of attributes, and places in containers, that lead from the loader's dataset to one inside it."""

Attributes = Iterable[tuple[str, Any]]


class EpochSettings(NamedTuple):
    """Settings that differ from epoch to epoch; they cross the process boundary.

    Attributes:
        shared_seed: Seed that all workers share (torch's DataPipes), or None.
        set_epoch: The argument of ``loader.set_epoch()``, or None if that was not called.
        calls: Calls of ``set_epoch`` on the dataset and on datasets inside it: positional and keyword
            arguments.
        changes: Changed attributes of the dataset and of datasets inside it, but for those that a repeated
            call changes.
    """

    shared_seed: int | None
    set_epoch: int | None
    calls: dict[Path, list[tuple[tuple[Any, ...], dict[str, Any]]]]
    changes: dict[Path, dict[str, Any]]

    def apply(self, dataset: Any) -> None:
        """Bring a worker's dataset up to date. Runs in the worker.

        A dataset that worker threads share with the program has been called already.
        """
        paths = {*self.calls, *self.changes}
        found = dict(_walk(dataset, _named_values)) if paths - {()} else {(): dataset}
        called = {id(one) for path, one in found.items() if path in self.calls}
        found = {path: one for path, one in found.items() if path in paths and not is_noted(one)}
        for path, one in found.items():
            for args, kwargs in self.calls.get(path, ()):
                one.set_epoch(*args, **kwargs)
        if self.set_epoch is not None:
            set_epoch_of(dataset, self.set_epoch, called)
        for path, one in found.items():
            for name, value in self.changes.get(path, {}).items():
                setattr(one, name, value)


NOTHING_NEW = EpochSettings(None, None, {}, {})


def set_epoch_of(dataset: Any, epoch: int, called: Collection[int] = ()) -> None:
    """Call ``set_epoch`` of a dataset and of those inside it, where they have it, once for each.

    Those whose ``id()`` is in ``called`` are left out.
    """
    done = set(called)
    for one in datasets_in(dataset):
        method = getattr(one, "set_epoch", None)
        owner = id(getattr(method, "__self__", one))  # of a wrapper that passes attributes on, the inner one
        if callable(method) and owner not in done:
            done.add(owner)
            method(epoch)


def datasets_in(dataset: Any) -> list[Any]:
    """A dataset and those inside it, in attributes, lists and dicts, each once."""
    return [one for _, one in _walk(dataset, _values)]


def _walk(dataset: Any, attributes_of: Callable[[Any], Attributes]) -> list[tuple[Path, Any]]:
    """The datasets of `datasets_in`, with their paths as far as attributes come with their names."""
    found: list[tuple[Path, Any]] = []
    seen: set[int] = set()

    def walk(one: Any, path: Path) -> None:
        if id(one) in seen:
            return
        seen.add(id(one))
        found.append((path, one))
        for name, value in list(attributes_of(one)):
            if _is_dataset(value):
                walk(value, (*path, name))
            elif type(value) in (list, tuple, dict):
                items = value.values() if type(value) is dict else value
                if _is_dataset(next(iter(items), None)):
                    for place, item in enumerate(list(items)):
                        walk(item, (*path, name, place))

    walk(dataset, ())
    return found


def _is_dataset(value: Any) -> bool:
    """Whether a value is a dataset: torch's, or one with ``set_epoch`` by its class alone."""
    kind = type(value)
    return isinstance(value, Dataset) or (hasattr(kind, "set_epoch") and hasattr(kind, "__getitem__"))


def _named_values(one: Any) -> Attributes:
    return getattr(one, "__dict__", {}).items()


def _values(one: Any) -> Attributes:
    """The values of an object's attributes, without giving it a ``__dict__`` (docs/decisions/0033).

    An object that has one already shows the garbage collector that dict in place of the values. A dict that
    is merely the value of an attribute looks the same: such an object gets a ``__dict__``.
    """
    held = gc.get_referents(one) if type(one).__dictoffset__ else []
    return _named_values(one) if dict in map(type, held) else (("", value) for value in held)


class DatasetState:
    """What workers know of the datasets with ``set_epoch``. Main process only.

    Attributes:
        set_epoch: The argument of ``loader.set_epoch()``, if that was called since workers got the last one.
    """

    def __init__(self, dataset: Any) -> None:
        self.set_epoch: int | None = None
        self._dataset = dataset
        self._calls = {id(one): note_calls(one) for one in datasets_in(dataset) if _has_set_epoch(one)}
        self._known = self._latest = self._look()

    def note_sent(self) -> None:
        """Note that workers have got the settings that were last asked for."""
        self._known = self._latest
        self.set_epoch = None

    def settings(self) -> EpochSettings:
        """Settings with what has changed since workers got them, see `note_sent`; without a shared seed."""
        settings = EpochSettings(None, self.set_epoch, {}, {})
        self._latest = self._look()
        for path, (calls, attributes) in self._latest.items():
            known_calls, known = self._known.get(path, ([], {}))
            new_calls = calls[len(known_calls) :]
            if new_calls:
                settings.calls[path] = [(call.args, call.kwargs) for call in new_calls]
            for call in new_calls:
                known = known | call.changed
            changed = changed_attributes(known, attributes)
            if changed:
                settings.changes[path] = changed
        return settings

    def _look(self) -> dict[Path, tuple[list[Call], dict[str, Any]]]:
        """The calls so far and the plain attributes of each dataset that has ``set_epoch``."""
        if not self._calls:
            return {}
        return {
            path: (self._calls.get(id(one), [])[:], plain_attributes(one))
            for path, one in _walk(self._dataset, _named_values)
            if _has_set_epoch(one)
        }


def _has_set_epoch(one: Any) -> bool:
    return callable(getattr(one, "set_epoch", None))
