"""Readers behind a look-ahead: what came out of it is what the program has had. Main process only.

A prefetcher, or a framework's wrapper, reads batches before the program does. A `Reading` counts the batches
that come out of it, and the loader's states are then of that place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from shmloader.resume.progress import Follower
from shmloader.resume.readers import Epoch, Readers

_T = TypeVar("_T")


class Reading(Follower):
    """The progress of one reader behind a look-ahead. Make it before the look-ahead begins to read.

    Args:
        readers: The loader's.
        reader: The object that hands out the batches. It is not kept.
        explain: Raises the error for a reader whose batches are not of this loader; or returns, if the loader
            has no states.
    """

    def __init__(self, readers: Readers, reader: object, explain: Callable[[], None]) -> None:
        super().__init__()
        self._readers, self._explain = readers, explain
        self._epoch: Epoch | None = None
        readers.expect(weakref.ref(reader))

    def ask(self) -> None:
        """Note that the look-ahead is asked for its next batch."""
        self.waits = True

    def take(self) -> None:
        """Note that a batch came out of the look-ahead.

        Raises:
            ResumeError: If the loader has begun no epoch.
        """
        self.find_epoch()
        if self._epoch is None:
            return
        # The batch was returned before it came out. So one more than were returned is the next epoch's.
        while self.count >= self._epoch.progress.returned and self._epoch.next is not None:
            self._readers.leave(self._epoch, self)
            self._follow(self._epoch.next)
        self.waits = False
        self.count += 1

    def end(self) -> None:
        """Note that the look-ahead has ended: the epoch is over for the program."""
        self.find_epoch()
        super().end()

    def find_epoch(self) -> None:
        """Begin with the loader's epoch, if it has not begun; at the latest, the first batch does this."""
        if self._epoch is None:
            epoch = self._readers.epoch_now()
            if epoch is None:
                self._explain()
            else:
                self._follow(epoch)

    def _follow(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self.begin()
        epoch.progress.followers.append(self)


class Followed(Iterable[_T], Generic[_T]):
    """The items of a look-ahead, followed by the loader that it reads: see `DataLoader.follow`."""

    def __init__(self, readers: Readers, batches: Iterable[_T], explain: Callable[[], None]) -> None:
        self._readers, self._batches, self._explain = readers, batches, explain

    def __iter__(self) -> Iterator[_T]:
        """A pass over the look-ahead."""
        return _Reader(self._readers, self._batches, self._explain)

    def __len__(self) -> int:
        """The look-ahead's length; a TypeError if it has none."""
        return len(self._batches)  # type: ignore[arg-type]


class _Reader(Iterator[_T]):
    def __init__(self, readers: Readers, batches: Iterable[_T], explain: Callable[[], None]) -> None:
        self._reading = Reading(readers, self, explain)
        self._iterator = iter(batches)

    def __next__(self) -> _T:
        self._reading.ask()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._reading.end()
            raise
        self._reading.take()
        return batch
