"""Checks of ``SHMLOADER_DEBUG=1``: free slots are poisoned, and held batches are listed.

These checks are slow: every byte of a slot is written when it becomes free and read when it is granted again.
Main process only.
"""

from __future__ import annotations

import os
import time

import numpy as np

from shmloader.codec import read_leaves
from shmloader.codec.layout import ARRAY, DTYPES, TENSOR, Leaf
from shmloader.errors import SlotCorrupted
from shmloader.slots import Slot, SlotPool

POISON = 0xDB
"""The value of every byte of a free slot: -0.0016 as bfloat16, -1.2e17 as float32, -36 as int8."""

_MOST_LEAVES, _MOST_LEASES = 4, 5  # named of one batch; named


def wanted() -> bool:
    """Whether ``SHMLOADER_DEBUG`` asks for inspection (set, and neither empty nor ``0``)."""
    return os.environ.get("SHMLOADER_DEBUG", "0") not in ("", "0")


class Inspection:
    """Checks the slots of a pool when they are granted, leased and freed."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._poisoned: dict[int, int] = {}  # bytes of the slots that are
        self._held: dict[int, tuple[float, int, str]] = {}  # since when, batch, leaves; the oldest first
        pool.on_freed = self._freed
        pool.on_granted = self._granted

    def _freed(self, slot: Slot) -> None:
        """Overwrite a slot's last batch, so that code that still reads it shows the error at once."""
        self._held.pop(slot.number, None)
        self._poisoned.pop(slot.number, None)
        if slot.nbytes:
            extent = self._pool.map(slot)
            np.frombuffer(extent.buffer, np.uint8)[:] = POISON
            self._poisoned[slot.number] = slot.nbytes

    def _granted(self, slot: Slot) -> None:
        """Refuse a slot that something has written to while it was free."""
        if self._poisoned.pop(slot.number, None) != slot.nbytes or not slot.nbytes:
            return
        written = np.flatnonzero(np.frombuffer(self._pool.map(slot).buffer, np.uint8) != POISON)
        if len(written):
            raise SlotCorrupted(
                f"slot {slot.number} was written to while it was free: {len(written):,} of {slot.nbytes:,} "
                f"bytes changed, the first at offset {written[0]:,}. A pointer to an old batch is still used "
                "by something that holds no reference to it (data_ptr(), DLPack, ctypes, a C extension)."
            )

    def leased(self, slot: Slot, seq: int, header: bytes) -> None:
        """Note the batch in a slot, which is about to be returned."""
        leaves = read_leaves(header)
        text = ", ".join(map(_describe, leaves[:_MOST_LEAVES]))
        more = f" and {len(leaves) - _MOST_LEAVES} more" if len(leaves) > _MOST_LEAVES else ""
        self._held[slot.number] = time.monotonic(), seq, text + more

    def oldest_leases(self) -> tuple[str, ...]:
        """The batches that the program has held for longest: number, seconds, and their leaves."""
        now_s = time.monotonic()
        found = []
        for number, (since_s, seq, leaves) in list(self._held.items()):
            lease = self._pool.slots[number].lease
            if lease is not None and lease() is not None:
                found.append(f"batch {seq} in slot {number}, held for {now_s - since_s:.1f} s: {leaves}")
        return tuple(found[:_MOST_LEASES])


def _describe(leaf: Leaf) -> str:
    kind = {TENSOR: "Tensor", ARRAY: "ndarray"}.get(leaf.kind, "bytes")
    dtype = str(DTYPES[leaf.code].torch_dtype).removeprefix("torch.")
    return f"{kind} {tuple(leaf.shape)} {dtype}"
