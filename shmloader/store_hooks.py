"""Functions that stores add to loading; `shmloader.store` registers them when it is imported.

The loader's own parts import nothing of the store. Without it no value is a store, and no memory is watched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shmloader.errors import LoaderError


class NoCopies:
    """Watches what the workers of one loader copy of this process's memory by reading it: here nothing."""

    due_ns = math.inf  # when to look again, by ``time.perf_counter_ns()``

    def look(self, workers: Iterable[Any], largest_batch_nbytes: int) -> None:
        """Measure the workers in the middle of an epoch."""

    def measure(self, workers: Iterable[Any], largest_batch_nbytes: int) -> None:
        """Measure the workers when an epoch ends, before they are stopped."""

    def warn(self) -> None:
        """Give a warning if what was measured calls for one."""


def _share_nothing(_: Any) -> Any:
    raise LoaderError("share_dataset=True needs shmloader.store, which was not imported: import shmloader")


@dataclass(slots=True)
class StoreHooks:
    """The functions of the store that loading calls.

    Attributes:
        is_store: Whether a value is a store of any kind.
        takes_rows: Whether a dataset is a store whose batches come from its ``take``.
        share_dataset: Shares a loader's dataset; returns what the loader is to have.
        watch_copies: Begins to watch a loader's workers, given the loader, the workers, its counters, and the
            bytes of the pickle that they were sent.
        advise_sharing: Says which of a dataset's objects workers hold each for itself, and the cure; or "".
        make_array_reducer: Makes a function that gives the pickle of an array for workers that are started
            together, by handle; None for an array that is sent by its contents.
    """

    is_store: Callable[[object], bool] = lambda _: False
    takes_rows: Callable[[object], bool] = lambda _: False
    share_dataset: Callable[[Any], Any] = _share_nothing
    watch_copies: Callable[[Any, Sequence[Any], Any, int], NoCopies] = lambda *_: NoCopies()
    advise_sharing: Callable[[Any], str] = lambda _: ""
    make_array_reducer: Callable[[], Callable[[np.ndarray[Any, Any]], Any]] = lambda: lambda _: None

    def register(self, others: StoreHooks) -> None:
        """Take the functions of the store."""
        for field in fields(self):
            setattr(self, field.name, getattr(others, field.name))


hooks = StoreHooks()
