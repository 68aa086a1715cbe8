"""One slot as the main process sees it, and the lease for reading it."""

from __future__ import annotations

import enum
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shmloader.memory import Extent


class SlotState(enum.Enum):
    """The states of a slot."""

    FREE = "free"
    GRANTED = "granted"
    PUBLISHED = "published"
    LEASED = "leased"
    GUARDED = "guarded"


class Lease(weakref.ref[npt.NDArray[np.uint8]]):
    """The main process's right to read a slot until its anchor, to which every view leads by ``.base``, dies.

    The callback then appends the lease to a deque and does nothing else: it may run in any thread and inside
    any allocation.
    """

    __slots__ = ("slot",)

    slot: Slot


@dataclass(eq=False, slots=True)
class Slot:
    """One slot as the main process sees it.

    Attributes:
        number: Position in the segment.
        state: Its state.
        nbytes: Bytes reserved for it.
        limit_nbytes: Bytes up to which a worker may grow it.
        used_nbytes: Bytes of the batch in it, 0 while free.
        unguarded: Whether it is free once its lease ends, since that outlives all reads by an accelerator.
        extent: Its memory in this process, once it was mapped.
        lease: The lease on it, while there is one.
    """

    number: int
    state: SlotState = SlotState.FREE
    nbytes: int = 0
    limit_nbytes: int = 0
    used_nbytes: int = 0
    unguarded: bool = False
    extent: Extent | None = None
    lease: Lease | None = None

    @property
    def state_now(self) -> SlotState:
        """The state; ``FREE`` once the last view has died, even if the pool has not collected it yet."""
        lease = self.lease
        return SlotState.FREE if lease is not None and lease() is None else self.state
