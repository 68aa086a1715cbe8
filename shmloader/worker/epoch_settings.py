"""Settings that workers get when an epoch begins, with the program's changes to the dataset.

A persistent worker has a copy of the dataset from the time of its start. A later change by the program,
``dataset.set_epoch(3)`` say, would never reach it. So the main process notes calls of ``set_epoch``, and
workers repeat them. Datasets with that method are also sent their plain attributes (numbers, strings,
booleans, None) that have been changed in another way. Datasets without it stay as the workers got them:
torch's own tests rely on it.
"""

from __future__ import annotations

import gc
import itertools
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from shmloader.diagnostics.exceptions import add_note
from shmloader.sampling.samplers import attribute_of
from shmloader.worker.set_epoch_calls import (
    Call,
    CallLog,
    PlainAttributes,
    changed_attributes,
    is_noted,
    plain_attributes,
)

_SHORT = 32  # items of a container that is searched whole, with those in it
_MOST_NESTED = 3  # containers in each other
_LOOKED_AT = 8  # items of a longer container, to tell whether datasets are in it

Path = tuple[str | int, ...]
"""The way from the loader's dataset to one inside it: names of attributes, and places in containers."""

Attributes = Iterable[tuple[str, Any]]


class Changes(NamedTuple):
    """The changes that the program has made to one dataset, in their order; they cross the process boundary.

    Attributes:
        calls: Calls of its ``set_epoch``: the plain attributes that were changed before the call, and the
            pickled arguments.
        attributes: The plain attributes that were changed after the last call.
    """

    calls: list[tuple[PlainAttributes, bytes]]
    attributes: PlainAttributes

    def repeat(self, dataset: Any) -> None:
        """Make the same changes to a worker's dataset."""
        for attributes, arguments in self.calls:
            _set(dataset, attributes)
            args, kwargs = pickle.loads(arguments)
            try:
                dataset.set_epoch(*args, **kwargs)
            except Exception as error:
                add_note(error, "raised by set_epoch(), which a worker calls again as your program did")
                raise
        _set(dataset, self.attributes)


class EpochSettings(NamedTuple):
    """Settings that differ from epoch to epoch; they cross the process boundary.

    Attributes:
        shared_seed: Seed that all workers share (torch's DataPipes), or None.
        set_epoch: The argument of ``loader.set_epoch()``, or None if that was not called.
        changes: The changes that the program has made to the dataset and to datasets inside it.
    """

    shared_seed: int | None
    set_epoch: int | None
    changes: dict[Path, Changes]

    def apply(self, dataset: Any) -> None:
        """Bring a worker's dataset up to date. Runs in the worker.

        A dataset that worker threads share with the program has all changes already.
        """
        found: dict[Path, Any] = {(): dataset}
        if self.changes.keys() - {()}:
            found = dict(_walk(dataset, _named_values))
        called = set()
        for path, changes in self.changes.items():
            one = found.get(path)
            if one is None:
                continue
            if not is_noted(one):
                changes.repeat(one)
            if changes.calls:
                called.add(id(one))
        if self.set_epoch is not None:
            set_epoch_of(dataset, self.set_epoch, called)


def _set(dataset: Any, attributes: PlainAttributes) -> None:
    for name, value in attributes.items():
        setattr(dataset, name, value)


def set_epoch_of(dataset: Any, epoch: int, called: Collection[int] = ()) -> None:
    """Call ``set_epoch`` once for a dataset and each one inside it, if they have it.

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
    """The datasets of `datasets_in`, with their paths if the names of attributes are known."""
    found: list[tuple[Path, Any]] = []
    seen: set[int] = set()
    waiting: list[tuple[Path, Any]] = [((), dataset)]
    while waiting:
        path, one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            found.append((path, one))
            inside = [((*path, *place), value) for place, value in _directly_in(attributes_of(one))]
            waiting.extend(reversed(inside))
    return found


def _directly_in(attributes: Attributes) -> Iterator[tuple[Path, Any]]:
    """The datasets among attributes, and in the lists and dicts among them."""
    for name, value in attributes:
        yield from _in_value((name,), value)


def _in_value(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if _is_dataset(value):
        yield path, value
    elif type(value) in (list, tuple, dict):
        items = value.values() if type(value) is dict else value
        if len(items) <= _SHORT and len(path) <= _MOST_NESTED:
            for place, item in enumerate(items):
                yield from _in_value((*path, place), item)
        elif any(map(_is_dataset, itertools.islice(items, _LOOKED_AT))):
            yield from (((*path, place), item) for place, item in enumerate(items) if _is_dataset(item))


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
    """The state of datasets with ``set_epoch`` as persistent workers know it. Main process only.

    Attributes:
        set_epoch: The argument of ``loader.set_epoch()``, if that was called since workers got the last one.
    """

    def __init__(self, dataset: Any) -> None:
        self.set_epoch: int | None = None
        self._dataset = dataset
        self._log = CallLog()
        self._known: dict[Path, PlainAttributes] = {}
        self.settings()
        self.note_sent()

    def note_sent(self) -> None:
        """Note that workers get the settings that were returned last."""
        self.set_epoch = None
        self._known = self._latest
        for calls, number in self._read:
            del calls[:number]

    def is_changed_by(self, settings: EpochSettings) -> bool:
        """Whether the settings that were returned last change a dataset."""
        is_told = settings.set_epoch is not None and bool(self._latest)
        return is_told or bool(settings.changes)

    def settings(self) -> EpochSettings:
        """Settings with the changes since workers last got some, see `note_sent`; without a shared seed."""
        settings = EpochSettings(None, self.set_epoch, {})
        self._latest: dict[Path, PlainAttributes] = {}
        self._read: list[tuple[list[Call], int]] = []
        for path, one in self._datasets():
            noted, known = self._log.listen(one), self._known.get(path, {})
            changes = Changes([], {})
            self._read.append((noted, len(noted)))
            for call in noted[:]:
                changes.calls.append((changed_attributes(known, call.before), call.arguments))
                known = call.after
            self._latest[path] = plain_attributes(one)
            changes.attributes.update(changed_attributes(known, self._latest[path]))
            if changes != ([], {}):
                settings.changes[path] = changes
        return settings

    def _datasets(self) -> list[tuple[Path, Any]]:
        """The datasets with ``set_epoch``."""
        if not any(map(_has_set_epoch, datasets_in(self._dataset))):
            return []
        return [(path, one) for path, one in _walk(self._dataset, _named_values) if _has_set_epoch(one)]


def _has_set_epoch(one: Any) -> bool:
    return callable(attribute_of(one, "set_epoch"))
