"""Readers behind a look-ahead: what came out of it is what the program has had. Main process only.

A prefetcher, or a framework's wrapper, reads batches before the program does. `Readers` knows the epochs of a
loader that are not read to the end. A `Reading` counts the batches that come out of a look-ahead, and the
loader's states are then of that place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shmloader.resume.progress import Follower, Progress
from shmloader.settings import Settings

_T = TypeVar("_T")


@dataclass(eq=False)
class Epoch:
    """An epoch that an iterator has begun."""

    settings: Settings  # the loader's, then
    progress: Progress
    next: Epoch | None = None  # that began after it

    def go_on(self, following: Epoch) -> None:
        """Note that another epoch has begun."""
        self.next = following


class Readers:
    """The epochs of one loader that are not read to the end, and who reads them."""

    def __init__(self) -> None:
        self.latest: Epoch | None = None  # that the loader is in
        self._followed: Epoch | None = None  # that one or an earlier one, read behind a look-ahead
        # In each thread, a weak reference to the epoch that has begun, or has found a reader, there; an epoch
        # that is kept would keep all later ones.
        self._here = threading.local()
        # A reader that has not had its first batch, the epoch in progress when it began, and how many batches
        # that had returned. Another thread may read whole epochs before the reader has it. It is of this
        # epoch, if that goes on, or of the next one: then it is `_found`.
        self._expected: tuple[Callable[[], object], Epoch | None, int] | None = None
        self._found: Epoch | None = None

    @property
    def shown(self) -> Epoch | None:
        """The epoch that a state is of."""
        return self._followed or self.latest

    @property
    def is_followed(self) -> bool:
        """Whether a state is of what came out of a look-ahead."""
        return self.shown is not None and bool(self.shown.progress.followers)

    @property
    def returned(self) -> int:
        """The number of batches returned in the epoch that the loader is in."""
        return 0 if self.latest is None else self.latest.progress.returned

    def forget(self) -> None:
        """Forget the epoch that was read: a state was loaded."""
        self._followed = None

    def go_on(self, epoch: Epoch) -> None:
        """Note that an epoch begins, in this thread."""
        if self._followed is not None:
            followers = self._followed.progress.followers
            for follower in followers:
                # Its own thread begins an epoch without it: it was left, though somebody may still hold it.
                if not (follower.waits or follower.is_elsewhere):
                    follower.end()
            if all(follower.ended and not follower.is_elsewhere for follower in followers):
                self._followed = None  # else it is shown until the next epoch has a reader
        if self.latest is not None:
            self.latest.go_on(epoch)
        self._find(epoch)
        self.latest = epoch
        vars(self._here)["epoch"] = weakref.ref(epoch)

    def _find(self, epoch: Epoch) -> None:
        """Find the epoch of the reader that is expected, when one begins."""
        if self._expected is None:
            return
        reader, before, returned = self._expected
        if reader() is None:
            self._expected = self._found = None
        elif self._found is None:
            goes_on = before is not None and before.progress.returned > returned
            self._found = before if goes_on else epoch

    def expect(self, reader: Callable[[], object]) -> None:
        """Let a reader that begins in this thread follow the epoch that begins with it, if one does."""
        vars(self._here).pop("epoch", None)
        self._expected, self._found = (reader, self.latest, self.returned), None

    def epoch_now(self) -> Epoch | None:
        """The epoch that a reader reads which has had its first batch; None if there is none.

        If none has begun in this thread with the reader, another thread reads for it, maybe several epochs
        ahead. Then it is the one after that which was followed last.
        """
        epoch: Epoch | None = vars(self._here).get("epoch", lambda: None)()
        followed = self._followed
        if epoch is None:
            epoch = (followed and followed.next) or self._found or self.latest
            self._followed = epoch
        elif followed is None:
            self._followed = epoch
        if epoch is not None:
            vars(self._here)["epoch"] = weakref.ref(epoch)
        self._expected = self._found = None  # which would keep all later epochs
        return epoch

    def leave(self, epoch: Epoch, follower: Follower) -> None:
        """Let a reader leave an epoch that it has read, for the next one."""
        epoch.progress.followers.remove(follower)
        if self._followed is epoch and not epoch.progress.followers:
            self._followed = epoch.next


class Reading(Follower):
    """The progress of one reader behind a look-ahead. Make it before the look-ahead begins to read.

    ``reader`` hands out the batches, and is not kept. ``explain`` raises the error for a reader whose batches
    are not of this loader, or returns, if the loader has no states.
    """

    def __init__(self, readers: Readers, reader: object, explain: Callable[[], None]) -> None:
        super().__init__()
        self._readers, self._explain = readers, explain
        self._epoch: Epoch | None = None
        readers.expect(weakref.ref(reader))

    def next(self, give: Callable[[], _T]) -> _T:
        """The look-ahead's next batch, from ``give``; ``StopIteration`` ends the program's epoch."""
        self.waits = True
        try:
            batch = give()
        except StopIteration:
            self.find_epoch()
            self.end()
            raise
        self.find_epoch()
        if self._epoch is None:
            return batch
        # The batch was returned before it came out. So one more than were returned is the next epoch's.
        while self.count >= self._epoch.progress.returned and self._epoch.next is not None:
            self._readers.leave(self._epoch, self)
            self._follow(self._epoch.next)
        self.waits = False
        self.count += 1
        return batch

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
        return self._reading.next(self._iterator.__next__)
