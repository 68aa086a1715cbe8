"""Settings that workers get when an epoch begins, with the attributes of the dataset that have changed.

A persistent worker has a copy of the dataset from the time when it was started. A later change by the
program, ``dataset.set_epoch(3)`` say, would never reach it. So the main process looks at datasets with a
method ``set_epoch`` when an epoch begins, and sends workers their plain attributes (numbers, strings,
booleans, None) that have changed. For others there is ``loader.set_epoch()``. Datasets without that method
stay as the workers got them: torch's own tests rely on it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.utils.data import Dataset

_PLAIN = (int, float, bool, str, type(None))

Path = tuple[str | int, ...]
"""Names of attributes, and places in lists, that lead from the loader's dataset to one inside it."""

Attributes = Iterable[tuple[str, Any]]


class EpochSettings(NamedTuple):
    """Settings that differ from epoch to epoch; they cross the process boundary.

    Attributes:
        shared_seed: Seed that all workers share (torch's DataPipes), or None.
        set_epoch: The argument of ``loader.set_epoch()``, or None if that was not called.
        changes: Changed attributes of the dataset and of datasets inside it.
    """

    shared_seed: int | None
    set_epoch: int | None
    changes: dict[Path, dict[str, Any]]

    def apply(self, dataset: Any) -> None:
        """Bring a worker's dataset up to date. Runs in the worker.

        If an attribute with "epoch" in its name has changed, the dataset's ``set_epoch``, if there is one, is
        called too: it may derive more from the number.
        """
        found = dict(_walk(dataset, _named_values)) if self.changes else {}
        for path, attributes in self.changes.items():
            one = found.get(path)
            if one is None:
                continue
            for name, value in attributes.items():
                setattr(one, name, value)
            epochs = [value for name, value in attributes.items() if "epoch" in name and type(value) is int]
            if epochs and self.set_epoch is None and _has_set_epoch(one):
                one.set_epoch(epochs[0])
        if self.set_epoch is not None:
            set_epoch_of(dataset, self.set_epoch)


def set_epoch_of(dataset: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a dataset and of those inside it, where they have it."""
    for one in datasets_in(dataset):
        if _has_set_epoch(one):
            one.set_epoch(epoch)


def datasets_in(dataset: Any) -> list[Any]:
    """A dataset and those inside it, in attributes and lists, each once."""
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
        for name, value in attributes_of(one):
            if isinstance(value, Dataset):
                walk(value, (*path, name))
            elif type(value) in (list, tuple) and value and isinstance(value[0], Dataset):
                for place, item in enumerate(value):
                    walk(item, (*path, name, place))

    walk(dataset, ())
    return found


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
    """The plain attributes of datasets with ``set_epoch``, as workers know them. Main process only.

    Attributes:
        set_epoch: The argument of ``loader.set_epoch()``, if that was called since workers got the last one.
    """

    def __init__(self, dataset: Any) -> None:
        self.set_epoch: int | None = None
        self._dataset = dataset
        self._known = self._latest = _plain_attributes(dataset)

    def note_sent(self) -> None:
        """Note that workers have got the settings that were last asked for."""
        self._known = self._latest
        self.set_epoch = None

    def settings(self) -> EpochSettings:
        """Settings with what has changed since workers got them, see `note_sent`; without a shared seed."""
        self._latest = _plain_attributes(self._dataset)
        changes: dict[Path, dict[str, Any]] = {}
        for path, attributes in self._latest.items():
            known = self._known.get(path, {})
            changed = {
                name: value
                for name, value in attributes.items()
                if name not in known or not _same(known[name], value)
            }
            if changed:
                changes[path] = changed
        return EpochSettings(None, self.set_epoch, changes)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)


def _plain_attributes(dataset: Any) -> dict[Path, dict[str, Any]]:
    if not any(map(_has_set_epoch, datasets_in(dataset))):
        return {}
    return {
        path: {name: value for name, value in _named_values(one) if type(value) in _PLAIN}
        for path, one in _walk(dataset, _named_values)
        if _has_set_epoch(one)
    }


def _has_set_epoch(one: Any) -> bool:
    return callable(getattr(one, "set_epoch", None))
