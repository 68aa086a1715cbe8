"""Objects that stand for names of torch's and NumPy's while a program's function runs; see `placement`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shmloader.worker.placed_calls import CALLS, PlacedCall, own_call


class StandIn:
    """Stands for a name while the program's function runs."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._before = vars(owner).get(name)  # None for what a class inherits
        self._own = getattr(owner, name)
        self.__doc__, self.__module__ = self._own.__doc__, getattr(self._own, "__module__", "")

    def replace(self) -> None:
        """Take the name, unless the program has given it a function of its own."""
        if vars(self._owner).get(self._name) is self._before:
            setattr(self._owner, self._name, self)

    def put_back(self) -> None:
        """Put the former function back, unless the program has put another one there."""
        if vars(self._owner).get(self._name) is not self:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)

    # Torch's compiler looks at names of functions; a program may print or pickle one.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __repr__(self) -> str:
        return repr(self._own)

    # A program may look it up in a dict that has the function for its key.

    def __eq__(self, other: object) -> bool:
        return self is other or self._own == other

    def __hash__(self) -> int:
        return hash(self._own)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)


class Replacement(StandIn):
    """Stands for one of the calls; a program that keeps it has the original call at any other time."""

    def __init__(self, call: PlacedCall, make: Callable[..., Any]) -> None:
        super().__init__(call.owner, call.name)
        self.call = call
        self._make = make
        if call.of_class:
            self._own = self._own.__func__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Make the call: in the slot, or by the original function."""
        return self._make(self.call, self._own, arguments, named)

    def __get__(self, instance: Any, owner: Any) -> Any:
        if self.call.of_class:
            return functools.partial(self, owner)
        binds = instance is not None and hasattr(type(self._own), "__get__")
        return functools.partial(self, instance) if binds else self

    def __reduce__(self) -> Any:
        return own_call, (CALLS.index(self.call),)

    def is_own(self, value: object) -> bool:
        """Whether a value is the original function."""
        return value is self._own


class Before(StandIn):
    """Stands for a call before which something is done: ``act`` gets the call's arguments."""

    def __init__(self, act: Callable[..., None], owner: Any, name: str) -> None:
        super().__init__(owner, name)
        self._act = act
        self._stays = False

    def stay(self) -> None:
        """Take the name for good."""
        self._stays = True
        self.replace()

    def put_back(self) -> None:
        """Put the former function back, unless this one stays."""
        if not self._stays:
            super().put_back()

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Do what is to be done, and make the call."""
        self._act(*arguments)
        return self._own(*arguments, **named)
