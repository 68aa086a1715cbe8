"""The batches of a loader that is served, each where it lies: in the slot that its worker wrote.

What is in no slot of the iterator (batches without workers or of torch's own way, spilled ones, exceptions,
states) is written once into a slot of the server's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from shmloader.codec import Encoder
from shmloader.codec.slot_allocator import SlotAllocator
from shmloader.errors import LoaderClosed, ResumeError, SharedMemoryExhausted
from shmloader.failures.exceptions import capture
from shmloader.iterator import SlotIterator
from shmloader.memory import Segment
from shmloader.memory.limits import memory_headroom
from shmloader.serving.records import IN_OWN, RAISES
from shmloader.slots import ByteArray, Place, PlaceState, PlaceTable
from shmloader.without_waiting import NOT_HERE


class Item(NamedTuple):
    """Something in a slot."""

    anchor: ByteArray  # a lease on the slot
    flags: int
    place: Place


class Source:
    """Iterates over a loader, as any program does. Server's process only."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Any = None
        self.returned = 0  # batches that it has returned in this epoch
        nbytes = memory_headroom().available_nbytes // 2
        self._own = PlaceTable(Segment(), 1, nbytes, follows_host=True)
        self.fd = self._own.segment.fileno()
        self._allocator = SlotAllocator(self._own.segment.duplicate())
        self._encoder = Encoder(self._allocator)

    @property
    def epoch_fds(self) -> list[int]:
        """The descriptor of the iterator's segment, if it has one."""
        iterator = self._iterator
        fd = iterator.table.segment.fileno() if isinstance(iterator, SlotIterator) else -1
        return [fd] if fd >= 0 else []

    # --- batches

    def begin(self, epoch: int | None) -> None:
        """Begin the loader's next epoch, after ``loader.set_epoch(epoch)`` if that is given."""
        if epoch is not None:
            self.loader.set_epoch(epoch)
        self._iterator = None  # without persistent workers, the last one's end here
        self._iterator, self.returned = iter(self.loader), 0

    def leave(self) -> None:
        """Leave the epoch: its workers end, unless they are persistent."""
        self._iterator = None

    def next(self) -> Item:
        """The next batch; raises what ``next()`` of the loader's iterator raises."""
        return self._item_of(next(self._iterator))

    def next_if_here(self) -> Item | None:
        """The next batch if it needs no wait."""
        iterator = self._iterator
        batch = iterator.next_if_here() if isinstance(iterator, SlotIterator) else NOT_HERE
        return None if batch is NOT_HERE else self._item_of(batch)

    def _item_of(self, batch: Any) -> Item:
        iterator = self._iterator
        self.returned += 1
        if not isinstance(iterator, SlotIterator):
            return self.store(batch)
        place = iterator.table.taken
        anchor = None if place is None or place.lease is None else place.lease()
        # A batch without views has let its slot go, and one that was spilled never had it.
        return self.store(batch) if place is None or anchor is None else Item(anchor, 0, place)

    # --- anything else

    def store(self, thing: Any) -> Item:
        """Write something into a slot of the server's own. Raises `SharedMemoryExhausted`."""
        table, allocator = self._own, self._allocator
        short = "the process that serves a loader has no shared memory for a batch that is in no slot"
        if not table.can_lease():
            raise SharedMemoryExhausted(f"{short}: readers hold {table.kept} such batches")
        place = table.grant(0, table.epoch, 0, b"")
        try:
            table.reserve(place, 1)
            allocator.begin(place.number, place.nbytes, place.limit_nbytes)
            encoded = self._encoder.encode(thing)
        except BaseException:
            allocator.release()
            table.segment.discard(place.number, place.limit_nbytes, place.nbytes)  # it may have grown
            table.drop(place.seq, place.nbytes)
            raise
        nbytes = allocator.nbytes
        allocator.release()
        if encoded.spilled is not None:
            table.drop(place.seq, nbytes)
            raise SharedMemoryExhausted(f"{short}, of {encoded.header_end:,} bytes")
        table.arrive(place.seq, nbytes, encoded.header_begin, encoded.header_end, 0, 0)
        anchor, _ = table.take(place)
        if place.state is not PlaceState.LEASED:  # it is larger than what there was room for
            raise SharedMemoryExhausted(f"{short}, of {encoded.header_end:,} bytes")
        return Item(anchor, IN_OWN, place)

    def store_error(self, error: BaseException, where: str) -> Item:
        """Write an exception, which readers raise."""
        item = self.store(capture(error, where, "in the process that serves the loader"))
        return item._replace(flags=item.flags | RAISES)

    # --- states

    def state(self, taken: int | None) -> Any:
        """The loader's state, after ``taken`` of the batches since ``iter()`` if that is given."""
        if not hasattr(self.loader, "state_dict"):
            raise ResumeError(f"the loader that is served, a {type(self.loader).__qualname__}, has no states")
        return self.loader.state_dict() if taken is None else self.loader.state_dict(taken=taken)

    def load(self, state: Mapping[str, Any]) -> None:
        """Have the next epoch continue from a state."""
        if not hasattr(self.loader, "load_state_dict"):
            raise ResumeError(f"the loader that is served, a {type(self.loader).__qualname__}, has no states")
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Stop the workers. What readers hold stays as it is."""
        self._iterator = None
        with contextlib.suppress(AttributeError, LoaderClosed):
            self.loader.close()
        self._allocator.close()
        self._own.close()
