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
    """A slot and the task in it, as the main process sees them. Only `PlaceTable` writes to it."""

    number: int  # number of the slot in the segment
    state: PlaceState = FREE
    nbytes: int = 0  # bytes reserved for the slot
    limit_nbytes: int = 0  # bytes up to which a worker may grow it
    used_nbytes: int = 0  # bytes of the batch in it, 0 while there is none
    extent: Extent | None = None  # its memory in this process, once it was mapped
    ready: bool = False  # whether `extent` is all of it and was shown to the guard: it may be leased
    lease: Lease | None = None
    # Number of the task over the iterator's life, in the order in which tasks are sent; this and all below
    # have a meaning from ``MAKING`` on.
    seq: int = -1
    epoch: int = 0  # number of the epoch that the batch belongs to
    position: int = 0  # number of the batch in that epoch
    worker_id: int = 0
    # The packed index batch; packed, because a sampler may fill the same list again for the next.
    payload: bytes = b""
    void: bool = False
    deaths: int = 0  # number of workers that have died at it
    pieces: ByteArray | None = None  # private memory for a batch that comes in pieces
    pieces_nbytes: int = 0  # bytes of it that have come
    header_begin: int = 0  # as in the worker's answer, from ``ARRIVED`` on
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
