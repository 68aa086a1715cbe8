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

    def reserve(self, slot: int, held_nbytes: int, nbytes: int) -> int:
        """See `Segment.reserve`."""
        with self._lock:
            self._check()
            reserved_nbytes = self._segment.reserve(slot, held_nbytes, nbytes)
            if self._shut:
                self._segment.discard(slot, reserved_nbytes)
            self._check()
            return reserved_nbytes

    def map(self, slot: int, nbytes: int) -> Extent:
        """See `Segment.map`."""
        with self._lock:
            self._check()
            return self._segment.map(slot, nbytes)

    def discard(self, slot: int, nbytes: int, kept_nbytes: int = 0) -> None:
        """See `Segment.discard`."""
        with self._lock:
            self._check()
            self._segment.discard(slot, nbytes, kept_nbytes)

    def close(self) -> None:
        """The owner's: a worker that closed the segment would take the slots from all others."""
        raise NotImplementedError("only the iterator closes its segment")

    def shut(self) -> None:
        """From now on refuse everything, as a broken link does; returns when no call is under way."""
        with self._lock:
            self._shut = True

    def _check(self) -> None:
        if self._shut:
            raise BrokenPipeError("the loader was closed")
