"""The readers of a server, and how far each one is: when an epoch begins, a batch is made, one is let go.

Pure bookkeeping: no sockets, no slots. Batches of an epoch go to all readers that are in it, so a reader is
behind by what was made and it has not asked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, Literal, TypeVar

Policy = Literal["wait", "drop"]
Join = Literal["now", "next"]
AnyReader = TypeVar("AnyReader", bound=Hashable)


class Roster(Generic[AnyReader]):
    """The readers that are attached.

    Args:
        readers: Number of readers that the first epoch waits for, and the most there may be; None for any.
        window: Most batches that a reader may be behind the fastest one.
        policy: What happens to a reader that is so far behind while the fastest waits for a batch, or that
            others wait for at an epoch's end, see `late`: ``"wait"`` for it, or ``"drop"`` it.

    Attributes:
        epoch: The epoch that is running, or was the last.
        made: Batches of it so far.
        active: The readers that are in it, each with the number of the last batch that it has asked for.
        waiting: Those that have asked for the next one, each with a number for ``set_epoch()`` or None.
        epochs: All readers, each with the last epoch that it was in.
    """

    def __init__(self, readers: int | None, window: int, policy: Policy) -> None:
        self.readers, self.window, self.policy = readers, window, policy
        self.epoch, self.running, self.made = -1, False, 0
        self.active: dict[AnyReader, int] = {}
        self.waiting: dict[AnyReader, int | None] = {}
        self.epochs: dict[AnyReader, int] = {}
        self._joins: dict[AnyReader, Join] = {}
        self._complete = readers is None  # whether as many were there once

    def __iter__(self) -> Iterator[AnyReader]:
        return iter(self.epochs)

    def __len__(self) -> int:
        return len(self.epochs)

    @property
    def is_over(self) -> bool:
        """Whether all readers that there may be have come, and left."""
        return self.readers is not None and self._complete and not self.epochs

    def add(self, reader: AnyReader, join: Join) -> bool:
        """Add a reader; False if there are as many as there may be. For ``join`` see `ask`."""
        if self.readers is not None and len(self) >= self.readers:
            return False
        self.epochs[reader], self._joins[reader] = -1, join
        self._complete = self._complete or len(self) == self.readers
        return True

    def remove(self, reader: AnyReader) -> None:
        """Remove a reader, which has ended or is let go."""
        self.leave(reader)
        self.epochs.pop(reader, None)
        self._joins.pop(reader, None)

    @property
    def tell_every(self) -> int:
        """Readers say how far they are with every so many batches; there are more in their window."""
        return 1 if self.policy == "drop" else max(1, self.window // 2)

    # --- epochs

    def ask(self, reader: AnyReader, wants: int | None) -> bool:
        """Ask for an epoch, and leave the present one; whether the reader enters it at once.

        It does with ``join="now"``, with the next batch, unless it has left this epoch.
        """
        self.leave(reader)
        if self._joins[reader] == "now" and self.active and self.epochs[reader] != self.epoch:
            self.epochs[reader], self.active[reader] = self.epoch, self.made
            return True
        self.waiting[reader] = wants
        return False

    def leave(self, reader: AnyReader) -> None:
        """Be in no epoch, and wait for none."""
        self.waiting.pop(reader, None)
        self.active.pop(reader, None)

    def epoch_is_due(self) -> bool:
        """Whether the next epoch begins: nobody is in one, and all that took part before ask for it."""
        if self.active or not self._complete or not self.waiting:
            return False
        if self.readers is not None and self.epoch < 0:
            return len(self.waiting) == len(self)
        return not self._missing()

    def _missing(self) -> list[AnyReader]:
        """Those that took part in the last epoch and do not ask for the next one."""
        return [reader for reader in self if self.epochs[reader] >= 0 and reader not in self.waiting]

    def late(self) -> list[AnyReader]:
        """Those that are let go if nothing happens for long: others wait for the next epoch, and for them."""
        return self._missing() if self.waiting and self.policy == "drop" else []

    def begin_epoch(self) -> None:
        """Begin it, with all that wait for it."""
        self.epoch, self.running, self.made = self.epoch + 1, True, 0
        self.active, self.waiting = dict.fromkeys(self.waiting, 0), {}
        self.epochs |= dict.fromkeys(self.active, self.epoch)

    def end_epoch(self) -> list[AnyReader]:
        """End the epoch, which has no more batches; returns the readers that were in it to the end."""
        ended, self.active, self.running = list(self.active), {}, False
        return ended

    # --- batches

    def ask_next(self, reader: AnyReader, number: int) -> bool:
        """Ask for batches up to a number; False if that is less than before, or more than follows."""
        if reader not in self.active:  # the epoch has ended meanwhile
            return True
        fits = self.active[reader] <= number <= self.made + 1
        self.active[reader] = number
        return fits

    def batch_is_due(self) -> bool:
        """Whether a batch is to be made: some are in the epoch, and all of them have room for it."""
        return bool(self.active) and min(self.active.values()) > self.made - self.window

    def add_batch(self) -> int:
        """Note that a batch was made for those in the epoch; returns its number."""
        self.made += 1
        return self.made

    def too_slow(self) -> list[AnyReader]:
        """Those that are let go: they have no room, and a reader waits for the next batch."""
        if self.policy == "wait" or max(self.active.values(), default=0) <= self.made:
            return []
        return [reader for reader, asked in self.active.items() if self.made - asked >= self.window]
