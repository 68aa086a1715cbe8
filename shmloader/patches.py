"""Attributes of other libraries' classes and modules that are replaced for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_ABSENT: Any = object()


class Patches:
    """Replaced attributes, with their former values."""

    def __init__(self) -> None:
        self._before: dict[tuple[Any, str], tuple[Any, Any]] = {}

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module, and remember its former value."""
        self._before[owner, name] = vars(owner).get(name, _ABSENT), value
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a method, once, by ``around``, which is called with the method and with its arguments."""
        if (owner, name) not in self._before:
            method = getattr(owner, name)
            wrapped = functools.wraps(method)(lambda *args, **kwargs: around(method, *args, **kwargs))
            self.replace(owner, name, wrapped)

    def undo(self) -> None:
        """Restore all attributes except those that other code has replaced since."""
        for (owner, name), (before, ours) in self._before.items():
            if vars(owner).get(name) is not ours:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._before.clear()
