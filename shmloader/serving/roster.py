"""The readers of a server, and how far each one is: when an epoch begins, a batch is made, one is let go.

Pure bookkeeping: no sockets, no slots. Batches of an epoch go to all readers that are in it, so a reader is
behind by what was made and it has not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

from shmloader.slots import ByteArray

Policy = Literal["wait", "drop"]
Join = Literal["now", "next"]


class Reader:
    """One reader, as the server knows it. `Roster` alone changes how far it is."""

    def __init__(self, join: Join = "next") -> None:
        self.join = join
        self.epoch = -1  # the last one that it was in
        self.waits = False  # whether it has asked for an epoch that has not begun
        self.wants: int | None = None  # the number for ``set_epoch()`` with that
        self.asked = 0  # the number of the last batch of its epoch that it has asked for
        self.held: dict[int, ByteArray] = {}  # what it has not let go: leases on slots, by ``seq``

    def wait(self, wants: int | None) -> None:
        """Wait for an epoch."""
        self.waits, self.wants = True, wants

    def wait_no_more(self) -> None:
        """Wait for no epoch."""
        self.waits = False

    def begin(self, epoch: int, asked: int) -> None:
        """Enter an epoch, of which so many batches were before."""
        self.waits, self.epoch, self.asked = False, epoch, asked

    def ask_up_to(self, number: int) -> None:
        """Ask for batches up to a number."""
        self.asked = number

    def let_go(self, seqs: tuple[int, ...]) -> None:
        """Hold some things no longer. The last reader's lease on a slot frees it."""
        for seq in seqs:
            self.held.pop(seq, None)

    def let_all_go(self) -> None:
        """Hold nothing: it has ended."""
        self.held.clear()


AnyReader = TypeVar("AnyReader", bound=Reader)


class Roster(Generic[AnyReader]):
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
        self.made = 0  # batches of it so far
        self.active: list[AnyReader] = []  # those that are in it
        self._all: list[AnyReader] = []
        self._complete = readers is None  # whether as many were there once

    def __iter__(self) -> Iterator[AnyReader]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_over(self) -> bool:
        """Whether all readers that there may be have come, and left."""
        return self.readers is not None and self._complete and not self._all

    def add(self, reader: AnyReader) -> bool:
        """Add a reader; False if there are as many as there may be."""
        if self.readers is not None and len(self._all) >= self.readers:
            return False
        self._all.append(reader)
        self._complete = self._complete or len(self._all) == self.readers
        return True

    def remove(self, reader: AnyReader) -> None:
        """Remove a reader, which has ended or is let go."""
        self.leave(reader)
        if reader in self._all:
            self._all.remove(reader)

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
        if reader.join == "now" and self.active and reader.epoch != self.epoch:
            reader.begin(self.epoch, self.made)
            self.active.append(reader)
            return True
        reader.wait(wants)
        return False

    def leave(self, reader: AnyReader) -> None:
        """Be in no epoch, and wait for none."""
        reader.wait_no_more()
        if reader in self.active:
            self.active.remove(reader)

    def epoch_is_due(self) -> bool:
        """Whether the next epoch begins: nobody is in one, and all that took part before ask for it."""
        if self.active or not self._complete or not any(reader.waits for reader in self._all):
            return False
        if self.readers is not None and self.epoch < 0:
            return all(reader.waits for reader in self._all)
        return self.policy == "drop" or all(reader.waits for reader in self._all if reader.epoch >= 0)

    def waiting(self) -> list[AnyReader]:
        """Those that wait for the next epoch."""
        return [reader for reader in self._all if reader.waits]

    def begin_epoch(self) -> None:
        """Begin it, with all that wait for it."""
        self.epoch, self.running, self.made = self.epoch + 1, True, 0
        self.active = self.waiting()
        for reader in self.active:
            reader.begin(self.epoch, 0)

    def end_epoch(self) -> list[AnyReader]:
        """End the epoch, which has no more batches; returns the readers that were in it to the end."""
        ended, self.active, self.running = self.active, [], False
        return ended

    # --- batches

    def ask_next(self, reader: AnyReader, number: int) -> bool:
        """Ask for batches up to a number; False if that is less than before, or more than follows."""
        if reader not in self.active:  # the epoch has ended meanwhile
            return True
        fits = reader.asked <= number <= self.made + 1
        reader.ask_up_to(number)
        return fits

    def batch_is_due(self) -> bool:
        """Whether a batch is to be made: some are in the epoch, and all of them have room for it."""
        full = self.made - self.window
        for reader in self.active:
            if reader.asked <= full:
                return False
        return bool(self.active)

    def add_batch(self) -> int:
        """Note that a batch was made for those in the epoch; returns its number."""
        self.made += 1
        return self.made

    def too_slow(self) -> list[AnyReader]:
        """Those that are let go: they have no room, and a reader waits for the next batch."""
        if self.policy == "wait" or not any(reader.asked > self.made for reader in self.active):
            return []
        return [reader for reader in self.active if self.made - reader.asked >= self.window]
