"""The readers of a server, and how far each one is: when an epoch begins, a batch is made, one is let go.

Pure bookkeeping: no sockets, no memory. Batches of an epoch go to all readers that are in it, so a reader is
behind the fastest by what it has not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Policy = Literal["wait", "drop"]
Join = Literal["now", "next"]


class Reader:
    """One reader, as the server knows it. `Roster` alone changes it."""

    def __init__(self, number: int, pid: int, join: Join) -> None:
        self.number, self.pid, self.join = number, pid, join
        self.epoch = -1  # the last one that it was in
        self.active = False  # whether it is in the running epoch
        self.waits = False  # whether it has asked for an epoch that has not begun
        self.wants: int | None = None  # the number for ``set_epoch()`` with that
        self.asked = self.sent = 0  # batches of its epoch

    def ask(self, wants: int | None) -> None:
        """Ask for an epoch, and leave the present one."""
        self.active, self.waits, self.wants = False, True, wants

    def begin(self, epoch: int) -> None:
        """Enter an epoch."""
        self.active, self.waits, self.epoch = True, False, epoch
        self.asked = self.sent = 0

    def leave(self) -> None:
        """Be in no epoch, and wait for none."""
        self.active = self.waits = False

    def ask_next(self, asked: int) -> bool:
        """Ask for batches up to the ``asked``-th; False if that is less than before, or more than follows."""
        fits = not self.active or self.asked <= asked <= self.sent + 1
        self.asked = asked
        return fits

    def send(self) -> None:
        """Note that a batch was sent to it."""
        self.sent += 1


class Roster:
    """The readers that are attached.

    Args:
        readers: Number of readers that the first epoch waits for, and the most there may be; None for any.
        window: Most batches that a reader may be behind the fastest one.
        policy: What happens to a reader that is so far behind while the fastest waits: ``"wait"`` for it, or
            ``"drop"`` it.
    """

    def __init__(self, readers: int | None, window: int, policy: Policy) -> None:
        self.readers, self.window, self.policy = readers, window, policy
        self.epoch = -1  # the one that is running, or was the last
        self.running = False
        self._all: dict[int, Reader] = {}
        self._next = 0
        self._complete = readers is None  # whether as many were there once

    def __iter__(self) -> Iterator[Reader]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_over(self) -> bool:
        """Whether all readers that there may be have come, and left."""
        return self.readers is not None and self._complete and not self._all

    def add(self, pid: int, join: Join) -> Reader | None:
        """A new reader; None if there are as many as there may be."""
        if self.readers is not None and len(self._all) >= self.readers:
            return None
        reader = self._all[self._next] = Reader(self._next, pid, join)
        self._next += 1
        self._complete = self._complete or len(self._all) == self.readers
        return reader

    def remove(self, reader: Reader) -> None:
        """Remove a reader, which has ended or is let go."""
        reader.leave()
        self._all.pop(reader.number, None)

    def active(self) -> list[Reader]:
        """Those in the running epoch."""
        return [reader for reader in self._all.values() if reader.active]

    @property
    def tell_every(self) -> int:
        """Readers say how far they are with every so many batches; there are more in their window."""
        return 1 if self.policy == "drop" else max(1, self.window // 2)

    # --- epochs

    def epoch_is_due(self) -> bool:
        """Whether the next epoch begins: nobody is in one, and all that took part before ask for it."""
        if not self._complete or self.active() or not any(reader.waits for reader in self._all.values()):
            return False
        if self.readers is not None and self.epoch < 0:
            return all(reader.waits for reader in self._all.values())
        before = (reader for reader in self._all.values() if reader.epoch >= 0)
        return self.policy == "drop" or all(reader.waits for reader in before)

    def begin_epoch(self) -> list[Reader]:
        """Begin it; returns the readers that are in it."""
        self.epoch += 1
        self.running = True
        begun = [reader for reader in self._all.values() if reader.waits]
        for reader in begun:
            reader.begin(self.epoch)
        return begun

    def end_epoch(self) -> list[Reader]:
        """End the epoch, which has no more batches; returns the readers that were in it to the end."""
        self.running = False
        ended = self.active()
        for reader in ended:
            reader.leave()
        return ended

    def joins_now(self, reader: Reader) -> bool:
        """Let a reader that waits enter the running epoch with the next batch, if it wants that.

        One that has left this epoch waits for the next one.
        """
        if reader.join != "now" or reader.epoch == self.epoch or not (self.running and self.active()):
            return False
        reader.begin(self.epoch)
        return True

    # --- batches

    def batch_is_due(self) -> bool:
        """Whether a batch is to be made: some are in the epoch, and all of them have room for it."""
        active = self.active()
        return bool(active) and all(reader.sent - reader.asked < self.window for reader in active)

    def too_slow(self) -> list[Reader]:
        """Those that are let go: they have no room, and a reader waits for the next batch."""
        active = self.active()
        if self.policy == "wait" or not any(reader.asked > reader.sent for reader in active):
            return []
        return [reader for reader in active if reader.sent - reader.asked >= self.window]
