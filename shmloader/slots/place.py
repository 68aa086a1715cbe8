"""One place: a slot, and the task whose batch it takes; and the lease for reading it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shmloader.memory import Extent

ByteArray = npt.NDArray[np.uint8]


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
    """A slot and the task in it, as the main process sees them. Only `PlaceTable` writes to it.

    Attributes:
        number: Number of the slot in the segment.
        state: Its state.
        nbytes: Bytes reserved for the slot.
        limit_nbytes: Bytes up to which a worker may grow it.
        used_nbytes: Bytes of the batch in it, 0 while there is none.
        extent: Its memory in this process, once it was mapped.
        ready: Whether `extent` is all of it and was shown to the guard: it may be leased.
        lease: The lease on it, while there is one.
        seq: Number of the task over the iterator's life, in the order in which tasks are sent. This and all
            below have a meaning from ``MAKING`` on.
        epoch: Number of the epoch that the batch belongs to.
        position: Number of the batch in that epoch.
        worker_id: The worker that has the task.
        payload: The packed index batch. Packed, because a sampler may fill the same list again for the next.
        void: Whether the batch is no longer wanted.
        deaths: Number of workers that have died at it.
        pieces: Private memory for a batch that comes in pieces.
        pieces_nbytes: Bytes of it that have come.
        header_begin, header_end, made_ns, flags: As in the worker's answer, from ``ARRIVED`` on.
    """

    number: int
    state: PlaceState = FREE
    nbytes: int = 0
    limit_nbytes: int = 0
    used_nbytes: int = 0
    extent: Extent | None = None
    ready: bool = False
    lease: Lease | None = None
    seq: int = -1
    epoch: int = 0
    position: int = 0
    worker_id: int = 0
    payload: bytes = b""
    void: bool = False
    deaths: int = 0
    pieces: ByteArray | None = None
    pieces_nbytes: int = 0
    header_begin: int = 0
    header_end: int = 0
    made_ns: int = 0
    flags: int = 0

    @property
    def state_now(self) -> PlaceState:
        """The state; ``FREE`` once the last view has died, even if the table has not noticed it yet."""
        lease = self.lease
        return FREE if lease is not None and lease() is None else self.state


def figures(places: Iterable[Place]) -> dict[str, Any]:
    """The fields of `LoaderStatistics` that tell of slots; any thread may ask."""
    found = [(place.state_now, place) for place in places]
    states = [state for state, _ in found]
    return {state.value: states.count(state) for state in PlaceState} | {
        "reserved_nbytes": sum(place.nbytes for _, place in found),
        "used_nbytes": sum(place.used_nbytes for state, place in found if state is not FREE),
    }
