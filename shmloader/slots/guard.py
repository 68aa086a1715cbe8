"""The guard of a table of places: none, since only the program reads the slots of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shmloader.memory import Extent
from shmloader.slots.place import Place


class Guard:
    """Keeps places back after their lease: here none. `shmloader.device` has one for accelerators."""

    active = False
    """Whether the table has to ask; else a place is free as soon as its lease ends."""

    def admits_leases(self) -> bool:
        """Whether batches may be read in their slots now."""
        return True

    def wait(self, is_enough: Callable[[], bool]) -> int:
        """Wait a while for places that are kept back, until there are enough; returns nanoseconds."""
        return 0

    def lock(self, extent: Extent) -> str | None:
        """Prepare a mapping that is about to be leased: a warning, or ""; None if it must not be used."""
        return ""

    def unlock(self, extent: Extent) -> None:
        """Undo `lock` of a mapping that nothing reads."""

    def pass_on(self, ended: Sequence[Place]) -> Sequence[Place]:
        """Take over places whose leases have ended; returns those that nothing reads any more."""
        return ended

    def drop_copied(self) -> None:
        """End the leases that are held for copies that are done."""

    def close(self) -> None:
        """Give everything back but what extents hold."""
