"""Checks of ``SHMLOADER_DEBUG=1``: free slots are poisoned, and held batches are listed.

These checks are slow: every byte of a slot is written when it becomes free and read when it is granted again.
Main process only.
"""

from __future__ import annotations

import time

import numpy as np

from shmloader.codec import read_leaves
from shmloader.codec.layout import ARRAY, DTYPES, TENSOR, Leaf
from shmloader.errors import SlotCorrupted
from shmloader.memory import Extent
from shmloader.slots.place import LEASED, Place

POISON = 0xDB
"""The value of every byte of a free slot: -0.0016 as bfloat16, -1.2e17 as float32, -36 as int8."""

_MOST_LEAVES, _MOST_LEASES = 4, 5  # named of one batch; named


class Inspection:
    """Checks the slots of a table when they are granted, leased and freed."""

    def __init__(self) -> None:
        self._poisoned: dict[int, int] = {}  # bytes of the slots that are
        self._held: dict[int, tuple[Place, float, str]] = {}  # since when, its leaves; the oldest first

    def freed(self, place: Place, extent: Extent) -> None:
        """Overwrite a slot's last batch, so that code that still reads it shows the error at once."""
        self._held.pop(place.number, None)
        np.frombuffer(extent.buffer, np.uint8)[:] = POISON
        self._poisoned[place.number] = extent.nbytes

    def granted(self, place: Place, extent: Extent) -> None:
        """Refuse a slot that something has written to while it was free."""
        if self._poisoned.pop(place.number, None) != extent.nbytes:
            return
        written = np.flatnonzero(np.frombuffer(extent.buffer, np.uint8) != POISON)
        if len(written):
            raise SlotCorrupted(
                f"slot {place.number} was written to while it was free: {len(written):,} of "
                f"{extent.nbytes:,} bytes changed, the first at offset {written[0]:,}. A pointer to an old "
                "batch is still used by something that holds no reference to it (data_ptr(), DLPack, ctypes, "
                "a C extension)."
            )

    def leased(self, place: Place, header: bytes) -> None:
        """Note the batch in a slot, which is about to be returned."""
        leaves = read_leaves(header)
        text = ", ".join(map(_describe, leaves[:_MOST_LEAVES]))
        more = f" and {len(leaves) - _MOST_LEAVES} more" if len(leaves) > _MOST_LEAVES else ""
        self._held[place.number] = place, time.monotonic(), text + more

    def oldest_leases(self) -> tuple[str, ...]:
        """The batches that the program has held for longest: number, seconds, and their leaves."""
        now_s, held = time.monotonic(), list(self._held.values())
        return tuple(
            f"batch {place.seq} in slot {place.number}, held for {now_s - since_s:.1f} s: {leaves}"
            for place, since_s, leaves in held
            if place.state_now is LEASED
        )[:_MOST_LEASES]


def _describe(leaf: Leaf) -> str:
    kind = {TENSOR: "Tensor", ARRAY: "ndarray"}.get(leaf.kind, "bytes")
    dtype = str(DTYPES[leaf.code].torch_dtype).removeprefix("torch.")
    return f"{kind} {tuple(leaf.shape)} {dtype}"
