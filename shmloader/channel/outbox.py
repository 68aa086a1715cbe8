"""The writer of objects: small ones go into their record, others into a slot that was granted."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from pickle import PickleBuffer

import numpy as np
import torch

from shmloader.codec import Encoded, Encoder
from shmloader.codec.layout import NO_LEAVES, align
from shmloader.codec.slot_allocator import SlotAllocator
from shmloader.errors import SharedMemoryExhausted
from shmloader.memory import Segment
from shmloader.memory.limits import exhausted
from shmloader.wire.queue_records import Grant, pack_in_slot, pack_inline

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


class Outbox:
    """The slots that the producer may use, and the object that is being put. It is the encoder's `Memory`.

    ``wait_for_slot`` returns once another was added. Up to ``inline_nbytes`` an object lies in its record.
    """

    def __init__(self, segment: Segment, inline_nbytes: int, wait_for_slot: Callable[[], None]) -> None:
        self._segment = segment
        self._allocator = SlotAllocator(segment)
        self._encoder = Encoder(self)
        self._wait_for_slot = wait_for_slot
        self._record = np.empty(inline_nbytes, np.uint8)
        self._cursor = 0  # in the record
        self._slots: list[Grant] = []  # granted, the newest last: its pages are the warmest
        self._open: Grant | None = None  # one of them, while it is written to
        self._given: list[weakref.ref[torch.Tensor]] = []  # made by `new_empty`, in the open one
        self._encoded: Encoded | None = None  # the object that was written
        self._plain = b""  # or the pickle of one that is of plain values alone
        self._leaves: list[tuple[int, int]] = []  # of that: addresses and lengths

    def add(self, slot: Grant) -> None:
        """Take a slot that was granted."""
        self._slots.append(slot)

    def new_empty(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor, in the slot of the next object if there is room."""
        if self._open is None or not self._given:
            nbytes = torch.empty(size, dtype=dtype, device="meta").nbytes  # refuses what torch refuses
            self._give_up()
            self._open_slot(nbytes, of_unknown_size=True)
        tensor = self._allocator.tensor(size, dtype)
        if tensor is None:
            return torch.empty(size, dtype=dtype, device="cpu")
        self._given.append(weakref.ref(tensor))
        return tensor

    def write(self, obj: object) -> None:
        """Write an object, of which nothing is sent yet. If its own code raises, nothing has happened."""
        if not self._given:
            self._give_up()
            kind: type = type(obj)
            if kind in _PLAIN or (kind is tuple and _PLAIN.issuperset(map(type, obj))):  # type: ignore[call-overload]
                header = pickle.dumps(obj, 5) + NO_LEAVES  # in a third of the encoder's time
                if len(header) <= len(self._record):
                    self._plain = header
                    return
        cursor, self._cursor = self._allocator.cursor, 0
        self._leaves = []
        try:
            self._encoded = self._encoder.encode(obj, self._leaves if self._given else None)
        except BaseException:
            if self._given:
                self._allocator.go_back(cursor)
            raise

    def finish(self) -> bytes:
        """The record that sends the object that was written. The slot is the consumer's from then on.

        Tensors of `new_empty` that are in the object lose their memory, and become empty. Views of the slot
        that are left move to private memory, which takes a copy; `SharedMemoryExhausted` if there is none.
        """
        plain, self._plain = self._plain, b""
        if plain:
            return pack_inline(0, plain)
        encoded, slot = self._encoded, self._open
        assert encoded is not None
        begin, end = encoded.header_begin, encoded.header_end
        if slot is None:
            return pack_inline(begin, self._record[:end].tobytes())
        for reference in self._given:
            _empty_if_sent(reference(), self._leaves)
        self._give_up()
        self._slots.remove(slot)
        return pack_in_slot(slot.seq, self._allocator.nbytes, begin, end)

    def close(self) -> None:
        """Unmap all slots, but for those of which views are left."""
        self._give_up()
        self._allocator.close()

    def _open_slot(self, nbytes: int, *, of_unknown_size: bool = False) -> None:
        """Open the newest slot that may have so many bytes; at least so many are reserved for it."""
        while not self._slots:
            self._wait_for_slot()
        fitting = [place for place, slot in enumerate(self._slots) if slot.limit_nbytes >= nbytes]
        if not fitting:
            most_nbytes = max(slot.limit_nbytes for slot in self._slots)
            raise SharedMemoryExhausted(
                f"an object of {nbytes:,} bytes does not fit in a slot of this queue, which may have "
                f"{most_nbytes:,} bytes now. Use a smaller maxsize, a larger memory_budget_nbytes, or keep "
                "fewer objects in the consumer.",
                needed_nbytes=nbytes,
                available_nbytes=most_nbytes,
            )
        slot = self._slots[fitting[-1]]
        wanted = max(nbytes, 1, min(slot.hint_nbytes, slot.limit_nbytes) if of_unknown_size else 0)
        if wanted > slot.nbytes:
            slot = slot._replace(nbytes=self._segment.reserve(slot.slot, slot.nbytes, wanted))
            self._slots[fitting[-1]] = slot
        self._allocator.begin(slot.slot, slot.nbytes, slot.limit_nbytes)
        self._open = slot

    def _give_up(self) -> None:
        """Close the open slot."""
        if self._open is not None:
            self._given.clear()
            self._open = None
            self._allocator.release()

    # --- what the encoder asks

    rows: dict[PickleBuffer, bytes] = {}  # noqa: RUF012 - collation has no part in it
    nbytes = 0  # nothing is spilled

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """The offset of an address within the open slot; None if it is not there."""
        return None if self._open is None else self._allocator.offset_of(address, nbytes)

    def place(self, nbytes: int) -> int:
        """Allocate space, in the open slot or, as it seems so far, in the record."""
        if self._open is not None:
            return self._allocator.place(nbytes)
        offset = self._cursor
        self._cursor = align(offset + nbytes)
        return offset

    def ensure(self, nbytes: int) -> bool:
        """Make room for an object whose size is known now; `SharedMemoryExhausted` if there is none."""
        if self._open is None:
            if nbytes <= len(self._record):
                return True
            self._open_slot(nbytes)
        if not self._allocator.ensure(nbytes):
            assert self._open is not None
            raise exhausted(
                f"an object of {nbytes:,} bytes does not fit in its slot, which may have "
                f"{self._open.limit_nbytes:,} bytes",
                nbytes,
                advice="Use a smaller maxsize, or a larger memory_budget_nbytes.",
            )
        return True

    @property
    def address(self) -> int:
        """The address of what is written to."""
        return self._allocator.address if self._open is not None else self._record.ctypes.data

    def view(self) -> memoryview:
        """The bytes of what is written to."""
        return self._allocator.view() if self._open is not None else self._record.data


def _empty_if_sent(tensor: torch.Tensor | None, leaves: list[tuple[int, int]]) -> None:
    """Take a tensor's memory away if that is one of the leaves: they are the consumer's."""
    if tensor is not None and (tensor.data_ptr(), tensor.nbytes) in leaves:
        with torch.no_grad():
            tensor.set_()  # type: ignore[call-overload]  # torch's types lack the form without arguments
