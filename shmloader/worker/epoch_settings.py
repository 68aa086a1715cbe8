"""Settings that workers get when an epoch begins: calls of ``loader.set_epoch()``.

A persistent worker process has a copy of the dataset from its start. It makes the loader's calls; nothing
else that the program does to its dataset reaches it, as with torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from shmloader.distributed import refused_collectives
from shmloader.failures.exceptions import add_note
from shmloader.indices.samplers import attribute_of
from shmloader.worker.random_state import GlobalStates, other_global_states

_SHORT = 32  # items of a container that is searched whole
_LOOKED_AT = 8  # items of a longer one, to tell whether datasets are in it
_IN_WORKERS = (
    "loader.set_epoch() calls it in each persistent worker process too, which lacks what belongs to the main "
    "process (a process group for collectives, say). Call that outside of set_epoch(), or pass "
    "persistent_workers=False: new workers get the dataset as it is when their epoch begins."
)


EpochCall = tuple[int, GlobalStates]
"""The argument of a ``loader.set_epoch()``, and the states that the program's global generators had before
its dataset was called."""


class EpochSettings(NamedTuple):
    """Settings that differ from epoch to epoch; they cross the process boundary."""

    calls: list[EpochCall]  # since the last epoch began

    def make_calls(self, owners: list[Any]) -> None:
        """Call ``set_epoch()`` of a worker's datasets, which draw what the program's have drawn."""
        for epoch, states in self.calls:
            with other_global_states(states), refused_collectives():
                for dataset in owners:
                    try:
                        dataset.set_epoch(epoch)
                    except Exception as error:
                        name = f"{type(dataset).__qualname__}.set_epoch({epoch!r:.100})"
                        add_note(error, f"raised by {name}: {_IN_WORKERS}")
                        raise


def has_set_epoch(one: Any) -> bool:
    """Whether an object has ``set_epoch()``, its own or passed on from another one."""
    return callable(attribute_of(one, "set_epoch"))


def owners_in(dataset: Any, has: Callable[[Any], bool] = has_set_epoch) -> list[Any]:
    """The outermost objects that ``has`` accepts: the dataset, or else the first one on each path into it."""
    return [one for one in datasets_in(dataset, has) if has(one)]


def datasets_in(dataset: Any, is_last: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """A dataset and those inside it, in attributes, lists and dicts, each once; none inside a last one.

    It gives no object a ``__dict__`` (docs/decisions/0033). An object that has one already shows the garbage
    collector that dict in place of its values. A dict that is merely the value of an attribute looks the
    same: such an object gets a ``__dict__``.
    """
    found: list[Any] = []
    seen: set[int] = set()
    is_dataset = cache(_is_dataset)
    values = [dataset]
    for value in values:  # it grows meanwhile
        kind: Any = type(value)
        if not (value is dataset or is_dataset(kind) or kind in (list, tuple, dict)) or id(value) in seen:
            continue
        seen.add(id(value))
        if value is dataset or is_dataset(kind):
            found.append(value)
            if kind.__dictoffset__ and not is_last(value):
                held = gc.get_referents(value)
                values.extend(vars(value).values() if dict in map(type, held) else held)
        else:
            items = value.values() if kind is dict else value
            if len(items) <= _SHORT or any(map(is_dataset, map(type, islice(items, _LOOKED_AT)))):
                values.extend(items)
    return found


def _is_dataset(kind: type) -> bool:
    """Whether a class is of datasets: torch's, or with ``set_epoch``. Proxies stay closed."""
    return issubclass(kind, Dataset) or (hasattr(kind, "set_epoch") and hasattr(kind, "__getitem__"))
