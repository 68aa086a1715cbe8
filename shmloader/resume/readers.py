"""The epoch that the program is in, if something reads ahead of it. Main process only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from shmloader.resume.compatibility import State
from shmloader.resume.progress import Follower, Progress
from shmloader.settings import Settings


@dataclass(eq=False)
class Epoch:
    """An epoch that an iterator has begun."""

    settings: Settings  # the loader's, then
    progress: Progress
    constant: State | None = None  # the part of a state that stays the same in it, once one was asked for
    checksum: int | None = None  # of a state in it, if nothing but `Progress.done` changes in them
    next: Epoch | None = None  # that began after it

    def keep_constant(self, constant: State) -> None:
        """Keep the part of a state that stays the same."""
        self.constant = constant

    def note_counted(self, checksum: int) -> None:
        """Note that nothing else changes, and the checksum of a state."""
        self.checksum = checksum

    def go_on(self, following: Epoch) -> None:
        """Note that another epoch has begun; whether this one was over is looked at again."""
        self.next, self.checksum = following, None


class Readers:
    """The epochs of one loader that are not read to the end, and who reads them.

    Attributes:
        latest: The epoch that the loader is in.
    """

    def __init__(self) -> None:
        self.latest: Epoch | None = None
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
