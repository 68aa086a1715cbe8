"""The iterator's segment as worker threads have it."""

from __future__ import annotations

import threading

from shmloader.shared_memory import Extent, Segment


class SegmentGate:
    """The iterator's `Segment` as a worker thread has it, until it is shut.

    A worker process has descriptors of its own. A thread that went on using those of an iterator that was
    closed could meet another file under the same number, or make an object that nobody removes.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._shut = False
        # Reentrant: the iterator may be found to be garbage in the middle of a call, and shuts this.
        self._lock = threading.RLock()

    def reserve(self, slot: int, version: int, held_nbytes: int, nbytes: int) -> tuple[int, int]:
        """See `Segment.reserve`."""
        with self._lock:
            self._check()
            version, reserved_nbytes = self._segment.reserve(slot, version, held_nbytes, nbytes)
            if self._shut:
                self._segment.discard(slot, version, reserved_nbytes)
            self._check()
            return version, reserved_nbytes

    def map(self, slot: int, version: int, nbytes: int) -> Extent:
        """See `Segment.map`."""
        with self._lock:
            self._check()
            return self._segment.map(slot, version, nbytes)

    def discard(self, slot: int, version: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """See `Segment.discard`."""
        with self._lock:
            self._check()
            self._segment.discard(slot, version, nbytes, kept_nbytes)

    def forget_newer(self, slot: int, version: int) -> None:
        """The owner's: it removes what a dead worker made, and threads do not die alone."""
        raise NotImplementedError("only the iterator forgets versions of a slot")

    def close(self, slots: int) -> None:
        """The owner's: a worker that closed the segment would take the slots from all others."""
        raise NotImplementedError("only the iterator closes its segment")

    def shut(self) -> None:
        """From now on refuse everything, as a broken link does; returns when no call is under way."""
        with self._lock:
            self._shut = True

    def _check(self) -> None:
        if self._shut:
            raise BrokenPipeError("the loader was closed")
