"""The arguments that torch's loader does not have: what they may be, and checks of them."""

from __future__ import annotations

import operator
from typing import Any, Literal

from torch.utils.data import IterableDataset

from shmloader.diagnostics.bad_samples import MODES

OnError = Literal["raise", "skip", "replace"]
Dispatch = Literal["static", "dynamic"]
WorkerType = Literal["process", "thread"]


def check_own_arguments(loader: Any, dataset: object, persistent_workers: bool) -> None:
    """Refuse wrong ones; ``dispatch`` and ``worker_type`` are checked where they have an effect.

    Args:
        loader: The loader, which has its own arguments as attributes, and torch's not yet.
        dataset: Its dataset.
        persistent_workers: As the loader was given it.

    Raises:
        TypeError: For what should be a whole number and is none. As everywhere in Python, what has an
            ``__index__`` is one, NumPy's integers too.
        ValueError: For other wrong values.
    """
    if loader.memory_budget_nbytes is not None:
        _check_whole(
            "memory_budget_nbytes",
            loader.memory_budget_nbytes,
            least=1,
            wanted="a whole number of bytes or None",
            such_as="int(1e9)",
        )
    _check_whole("worker_restarts", loader.worker_restarts, least=0, wanted="a whole number", such_as="3")
    if loader.worker_restarts and isinstance(dataset, IterableDataset):
        raise ValueError(
            "worker_restarts needs a map-style dataset: how far an iterable-style one had come only the "
            "dead worker knew, so its batches cannot be made again"
        )
    if loader.on_error not in MODES:
        raise ValueError(f"on_error must be one of {', '.join(map(repr, MODES))}, not {loader.on_error!r}")
    if loader.prefetch_epochs and not persistent_workers:
        raise ValueError("prefetch_epochs=True needs persistent_workers=True: others end with their epoch")


def _check_whole(name: str, value: Any, *, least: int, wanted: str, such_as: str) -> None:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be {wanted}, not {value!r:.100}: pass an int, such as {such_as}"
        ) from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
