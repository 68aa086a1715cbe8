"""States of loaders of torch's class, under ``install(stateful=True)``, and their epochs.

Frameworks ask every loader that has ``state_dict()`` for its state, whether the program wants it or not. So a
loader that does not know its place gives an empty state. Loading an empty state does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.utils.data

from shmloader.distributed import rank_and_ranks
from shmloader.errors import ResumeError, warn, warn_once
from shmloader.loading import has_states, loading_of
from shmloader.resume.compatibility import ONE_RANK, is_of_one_rank
from shmloader.settings import Settings, threads_of
from shmloader.torch_private import GET_ITERATOR

_TORCHS = torch.utils.data.DataLoader


def states_are_added() -> bool:
    """Whether loaders of torch's class have states: the program asked ``install()`` for them."""
    return hasattr(_TORCHS, "state_dict")


def warn_of_one_rank(loader: Any, state: Mapping[str, Any], framework: str) -> None:
    """Warn once if a framework saves one rank's state for all, and it does not hold for all, or may not."""
    ranks = rank_and_ranks()[1]
    if (
        ranks > 1
        and state
        and (is_of_one_rank(Settings.of(loader), state) or state["sampler_checksum"] is not None)
    ):
        dataset = type(loader.dataset).__qualname__
        warn_once(f"{framework} saves one state of a loader of {dataset} for {ranks} ranks, and {ONE_RANK}.")


def state_dict(loader: Any, *, taken: int | None = None) -> dict[str, Any]:
    """The program's place in the epoch, as `DataLoader.state_dict`; empty, with a warning, if unknown."""
    try:
        own_iterator = getattr(type(loader), GET_ITERATOR) is not getattr(_TORCHS, GET_ITERATOR)
        if own_iterator or threads_of(loader.multiprocessing_context) is not None:
            raise ResumeError(
                "it makes its iterator itself, or its workers are threads that pose as processes"
            )
        return loading_of(loader).state_dict(taken) if has_states(loader) else {}
    except ResumeError as error:
        dataset = type(loader.dataset).__qualname__
        warn(f"the state of a loader of {dataset} is empty, and cannot be resumed: {error}")
        return {}


def set_epoch(loader: Any, epoch: int) -> None:
    """`DataLoader.set_epoch` for any loader of torch's class, which has no such method under `install`.

    Args:
        loader: The loader, or what accelerate or Fabric has made from it.
        epoch: The number.
    """
    for inside, count in (("base_dataloader", "iteration"), ("_dataloader", "_num_iter_calls")):
        if hasattr(loader, inside):
            setattr(loader, count, epoch)  # from which the framework counts on
            loader = getattr(loader, inside)
    loading_of(loader).set_epoch(epoch)
