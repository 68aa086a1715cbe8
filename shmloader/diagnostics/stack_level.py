"""The line of the program that a warning points to."""

from __future__ import annotations

import inspect

_OF_THE_LOADER = ("shmloader.", "torch.utils.data.")


def level_of_the_program() -> int:
    """The ``stacklevel`` of the program's call of the loader, for a warning of the calling function."""
    level, frame = 0, inspect.currentframe()
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OF_THE_LOADER):
            break
        level, frame = level + 1, frame.f_back
    return level
