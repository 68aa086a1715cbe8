"""States of loaders of torch's class, under ``install()``.

Frameworks ask every loader that has ``state_dict()`` for its state, whether the program wants it or not. So a
loader that does not know its place gives an empty state. Loading an empty state does nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from shmloader.arguments import threads_of
from shmloader.errors import ResumeError, warn
from shmloader.slot_loading import loading_of
from shmloader.torch_fallback import check_resumable
from shmloader.torch_private import GET_ITERATOR

_TORCHS = torch.utils.data.DataLoader
_unwanted = contextvars.ContextVar("unwanted", default=False)  # the state that was requested


def state_dict(loader: Any) -> dict[str, Any]:
    """The program's place in the epoch; see `DataLoader.state_dict`.

    The state is empty if the place is unknown. A warning says so, unless the state is unwanted.
    """
    try:
        own_iterator = getattr(type(loader), GET_ITERATOR) is not getattr(_TORCHS, GET_ITERATOR)
        if own_iterator or threads_of(loader.multiprocessing_context) is not None:
            raise ResumeError(
                "it makes its iterator itself, or its workers are threads that pose as processes"
            )
        check_resumable(loader)
        return loading_of(loader).states.state(loader)
    except ResumeError as error:
        if not _unwanted.get():
            dataset = type(loader.dataset).__qualname__
            warn(f"the state of a loader of {dataset} is empty, and cannot be resumed: {error}")
        return {}


@contextlib.contextmanager
def states_unwanted(unwanted: bool) -> Iterator[None]:
    """With ``unwanted``, make states that cannot be made empty, without an error or a warning."""
    before = _unwanted.set(unwanted)
    try:
        yield
    except ResumeError:
        if not unwanted:
            raise
    finally:
        _unwanted.reset(before)
