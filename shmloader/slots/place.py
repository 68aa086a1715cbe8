"""One place: a slot and the task whose batch it takes; the lease for reading it; the guard after that."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shmloader.memory import Extent
from shmloader.wire.records import SPILLED

ByteArray = npt.NDArray[np.uint8]
_UINT8 = np.dtype(np.uint8)  # quicker to use than the type


class PlaceState(enum.Enum):
    """The states of a place; the values are the names of their counts in `LoaderStatistics`."""

    FREE = "slots_free"
    MAKING = "slots_granted"
    ARRIVED = "slots_published"
    LEASED = "slots_leased"
    GUARDED = "slots_guarded"


FREE, MAKING, ARRIVED, LEASED, GUARDED = PlaceState  # quicker to look up than attributes of the class


class Lease(weakref.ref[ByteArray]):
    """The main process's right to read a slot until its anchor, to which every view leads by ``.base``, dies.

    The callback then appends the lease to a deque and does nothing else: it may run in any thread and inside
    any allocation.
    """

    __slots__ = ("place",)

    place: Place


@dataclass(eq=False, slots=True)
class Place:
    """A slot and the task in it, in the main process. `PlaceTable` alone changes it, but for the deaths."""

    number: int  # of the slot in the segment
    state: PlaceState = FREE
    nbytes: int = 0  # reserved for the slot
    limit_nbytes: int = 0  # up to which a worker may grow it
    used_nbytes: int = 0  # of the batch in it, 0 while there is none
    extent: Extent | None = None  # its memory in this process, once it was mapped
    ready: bool = False  # whether `extent` is all of it and was shown to the guard: it may be leased
    lease: Lease | None = None
    # Number of the task over the iterator's life, in the order in which tasks are sent. This and all below
    # have a meaning from ``MAKING`` on.
    seq: int = -1
    epoch: int = 0  # number of the epoch that the batch belongs to
    position: int = 0  # number of the batch in that epoch
    worker_id: int = 0
    payload: bytes = b""  # the index batch, packed because a sampler may fill the same list again
    void: bool = False  # the batch is no longer wanted
    deaths: int = 0  # workers that have died at it
    pieces: ByteArray | None = None  # private memory for a batch that comes in pieces
    pieces_nbytes: int = 0  # bytes of it that have come
    header_begin: int = 0  # this and all below as in the worker's answer, from ``ARRIVED`` on
    header_end: int = 0
    made_ns: int = 0
    flags: int = 0

    @property
    def state_now(self) -> PlaceState:
        """The state; ``FREE`` once the last view has died, even if the table has not noticed it yet."""
        lease = self.lease
        return FREE if lease is not None and lease() is None else self.state

    # --- the slot

    def set_extent(self, extent: Extent | None, *, ready: bool = False) -> None:
        """Take a mapping in place of the last one."""
        self.extent, self.ready = extent, ready

    def resize(self, nbytes: int, limit_nbytes: int) -> int:
        """Note the bytes that the slot has and may have; returns by how many the limit has grown."""
        grown = limit_nbytes - self.limit_nbytes
        self.nbytes, self.limit_nbytes = nbytes, limit_nbytes
        return grown

    # --- the task

    def begin(
        self, seq: int, epoch: int, position: int, worker_id: int, payload: bytes, limit_nbytes: int
    ) -> None:
        """Take a task: ``FREE -> MAKING``."""
        self.state, self.limit_nbytes = MAKING, limit_nbytes
        self.seq, self.epoch, self.position = seq, epoch, position
        self.worker_id, self.payload = worker_id, payload
        self.void, self.deaths = False, 0

    def add_piece(self, total_nbytes: int, piece: ByteArray) -> None:
        """Copy the next piece of a batch that comes in pieces; `MemoryError` if there is no memory for it."""
        if self.pieces is None:
            self.pieces, self.pieces_nbytes = np.empty(total_nbytes, np.uint8), 0
        begin, self.pieces_nbytes = self.pieces_nbytes, self.pieces_nbytes + len(piece)
        self.pieces[begin : self.pieces_nbytes] = piece

    def lose_pieces(self) -> None:
        """Note that there was no memory for a piece: further ones are not copied."""
        self.pieces = _LOST

    @property
    def has_lost_pieces(self) -> bool:
        """Whether there was no memory for a piece."""
        return self.pieces is _LOST

    def drop_pieces(self, *, void: bool = False) -> None:
        """Forget the pieces: with ``void`` for good, else they come again."""
        self.pieces, self.void = None, void or self.void

    def count_death(self) -> int:
        """Note that a worker has died at the task; returns how many have."""
        self.deaths += 1
        return self.deaths

    def arrive(self, nbytes: int, header_begin: int, header_end: int, made_ns: int, flags: int) -> None:
        """Note the worker's answer: ``MAKING -> ARRIVED``. Its slot has ``nbytes`` now, and keeps them."""
        self.nbytes = self.limit_nbytes = nbytes
        self.used_nbytes = 0 if flags & SPILLED else header_end
        self.header_begin, self.header_end = header_begin, header_end
        self.made_ns, self.flags, self.state = made_ns, flags, ARRIVED

    def lease_to(self, extent: Extent, ended: Callable[[Lease], None]) -> ByteArray:
        """Lease the slot, ``ARRIVED -> LEASED``; returns the anchor, whose death calls ``ended``."""
        anchor = np.ndarray(self.nbytes, _UINT8, extent.buffer)
        lease = Lease(anchor, ended)
        lease.place = self
        self.lease, self.state = lease, LEASED
        return anchor

    def end_lease(self) -> None:
        """Keep it back until no accelerator reads it: ``LEASED -> GUARDED``."""
        self.lease, self.state = None, GUARDED

    def free(self) -> None:
        """End its task: from any state to ``FREE``."""
        self.state, self.used_nbytes, self.pieces, self.lease = FREE, 0, None, None


_LOST: ByteArray = np.empty(0, np.uint8)  # in place of pieces for which there was no memory


class Guard:
    """Keeps places back after their lease: here none. `shmloader.device` has one for accelerators."""

    active = False  # whether the table has to ask; else a place is free as soon as its lease ends
    kept_back = 0  # places that it usually keeps back

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

    def pass_on(self, ended: Sequence[Place], *, at_once: bool) -> Sequence[Place]:
        """Take over places whose leases have ended; returns those that nothing reads any more.

        Unless they are needed ``at_once``, the accelerator is asked for several together.
        """
        return ended

    def drop_copied(self, *, at_once: bool) -> None:
        """End the leases that are held for copies that are done; ``at_once`` as in `pass_on`."""

    def close(self) -> None:
        """Give everything back but what extents hold."""


def figures(places: Iterable[Place]) -> dict[str, Any]:
    """The fields of `LoaderStatistics` that tell of slots; any thread may ask."""
    found = [(place.state_now, place) for place in places]
    states = [state for state, _ in found]
    return {state.value: states.count(state) for state in PlaceState} | {
        "reserved_nbytes": sum(place.nbytes for _, place in found),
        "used_nbytes": sum(place.used_nbytes for state, place in found if state is not FREE),
    }
