"""The writer of objects: small ones go into their record, others into a slot that was granted."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import numpy as np
import torch

from shmloader.channel.roles import Roles
from shmloader.codec import Encoded, Encoder
from shmloader.codec.layout import NO_LEAVES
from shmloader.codec.slot_allocator import SlotAllocator
from shmloader.errors import SharedMemoryExhausted
from shmloader.memory import Segment
from shmloader.memory.limits import exhausted
from shmloader.wire.queue_records import Grant, pack_in_slot, pack_inline

_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


class NoSlot(Exception):
    """The object needs a slot, and none is granted: the call changed nothing, and can be made again."""


class Outbox(SlotAllocator):
    """The slots that the producer may use, and the object that is being put.

    Up to ``inline_nbytes`` an object lies in its record: what the encoder allocates while no slot is open.
    """

    def __init__(self, segment: Segment, inline_nbytes: int, roles: Roles) -> None:
        super().__init__(segment)
        self._memory, self._roles = segment, roles
        self._encoder = Encoder(self)
        self._record = np.empty(inline_nbytes, np.uint8)
        self._slots: list[Grant] = []  # granted, the newest last: its pages are the warmest
        self._open: Grant | None = None  # one of them, while it is written to
        # Made by `new_empty` in the open one, each with its offset there.
        self._given: list[tuple[weakref.ref[torch.Tensor], int]] = []
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
            if self._open_slot(nbytes, of_unknown_size=True):
                self._give_up()
                return torch.empty(size, dtype=dtype, device="cpu")
        offset, tensor = self.cursor, self.tensor(size, dtype)
        if tensor is None:
            return torch.empty(size, dtype=dtype, device="cpu")
        self._given.append((weakref.ref(tensor), offset))
        return tensor

    def write(self, obj: object) -> None:
        """Write an object, of which nothing is sent yet. If its own code raises, nothing has happened."""
        if not self._given:
            self._give_up()
            self.cursor = 0
            kind: type = type(obj)
            if kind in _PLAIN or (kind is tuple and _PLAIN.issuperset(map(type, obj))):  # type: ignore[call-overload]
                header = pickle.dumps(obj, 5) + NO_LEAVES  # in a third of the encoder's time
                if len(header) <= len(self._record):
                    self._plain = header
                    return
        cursor, self._leaves = self.cursor, []
        try:
            self._encoded = self._encoder.encode(obj, self._leaves if self._given else None)
        except BaseException:
            self.go_back(cursor)
            raise

    def finish(self) -> bytes:
        """The record that sends the object that was written. The slot is the consumer's from then on.

        Tensors of `new_empty` that are in the object lose their memory, and become empty. Views of the slot
        that are left move to private memory, which takes a copy. `SharedMemoryExhausted` if there is none:
        then nothing was given away.
        """
        plain, self._plain = self._plain, b""
        if plain:
            return pack_inline(0, plain)
        encoded, slot = self._encoded, self._open
        assert encoded is not None
        begin, end = encoded.header_begin, encoded.header_end
        if slot is None:
            return pack_inline(begin, self._record[:end].tobytes())
        sent = []
        for reference, offset in self._given:
            tensor = reference()
            if tensor is not None and (tensor.data_ptr(), tensor.nbytes) in self._leaves:
                sent.append((tensor, offset, tensor.shape, tensor.dtype))
                _set(tensor)
        try:
            self._give_up()
        except SharedMemoryExhausted:
            cursor = self.cursor
            for tensor, offset, shape, dtype in sent:
                self.go_back(offset)
                _set(tensor, self.tensor(shape, dtype))
            self.go_back(cursor)
            raise
        self._slots.remove(slot)
        return pack_in_slot(slot.seq, self.nbytes, begin, end)

    def close(self) -> None:
        """Unmap all slots; views that are left move to private memory."""
        slot = self._open
        self._give_up()
        if slot is not None:  # the consumer, if it closes later, finds nothing here
            self._memory.discard(slot.slot, self.limit_nbytes)
        super().close()

    def _open_slot(self, nbytes: int, *, of_unknown_size: bool = False) -> bool:
        """Open the newest slot that may have so many bytes; at least so many are reserved for it.

        Returns whether the consumer has closed the queue, and may be giving up this slot.
        """
        if not self._slots:
            raise NoSlot
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
        is_given_up = self._roles.set_open(slot.slot)
        wanted = max(nbytes, 1, min(slot.hint_nbytes, slot.limit_nbytes) if of_unknown_size else 0)
        if wanted > slot.nbytes:
            slot = slot._replace(nbytes=self._memory.reserve(slot.slot, slot.nbytes, wanted))
            self._slots[fitting[-1]] = slot
        self.begin(slot.slot, slot.nbytes, slot.limit_nbytes)
        self._open = slot
        return is_given_up

    def _give_up(self) -> None:
        if self._open is not None:
            self.release()
            self._given.clear()
            self._open = None
            if self._roles.set_open():  # the consumer has left it to this process, and reads it no more
                self._memory.discard(self.slot, self.limit_nbytes)

    # --- what the encoder asks, while no slot is open too

    def ensure(self, nbytes: int) -> memoryview:
        """Make room for an object whose size is known now; `SharedMemoryExhausted` if there is none."""
        if self._open is None:
            if nbytes <= len(self._record):
                return self.view()
            self._open_slot(nbytes)
        view = super().ensure(nbytes)
        if view is None:
            raise exhausted(
                f"an object of {nbytes:,} bytes does not fit in its slot, which may have "
                f"{self.limit_nbytes:,} bytes",
                nbytes,
                advice="Use a smaller maxsize, or a larger memory_budget_nbytes.",
            )
        return view

    @property
    def address(self) -> int:
        """The address of what is written to."""
        return super().address if self._open is not None else self._record.ctypes.data

    def view(self) -> memoryview:
        """The bytes of what is written to."""
        return super().view() if self._open is not None else self._record.data


def _set(tensor: torch.Tensor, *source: Any) -> None:
    """Have a tensor take the memory of another one, or none: then it is empty."""
    with torch.no_grad():
        tensor.set_(*source)
