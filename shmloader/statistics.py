"""What a loader tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoaderStatistics:
    """A snapshot of one loader, from ``loader.statistics()``.

    Counters run from the loader's creation over all its epochs; slots and bytes are those of its live
    iterators at the moment of the call. All are zero for ``num_workers=0``, which uses no slots.

    Attributes:
        slots_free: Slots that hold nothing.
        slots_granted: Slots that a worker is writing or is about to write.
        slots_published: Slots with a batch that ``next()`` has not returned yet.
        slots_leased: Slots with a batch that the program still holds, in whatever form.
        reserved_nbytes: Bytes of shared memory reserved for slots.
        used_nbytes: Bytes of the batches in published and leased slots.
        largest_batch_nbytes: Bytes of the largest batch so far, header included.
        batches: Batches returned.
        failures: Exceptions of workers that were raised in place of a batch.
        spills: Batches moved to private memory: larger than a slot may be, or kept by the program beyond
            the memory budget or the number of slots.
        spilled_nbytes: Their bytes.
        detached: Batches whose memory a worker went on viewing (a ``collate_fn`` that keeps its results,
            say), which costs the worker a private copy.
        pin_copies: Batches copied into pinned memory.
        wait_for_workers_s: Seconds that ``next()`` waited for a batch.
        workers_wait_for_slots_s: Seconds that workers, summed, waited for a slot to work on: large where
            the program is the slower side.
    """

    slots_free: int = 0
    slots_granted: int = 0
    slots_published: int = 0
    slots_leased: int = 0
    reserved_nbytes: int = 0
    used_nbytes: int = 0
    largest_batch_nbytes: int = 0
    batches: int = 0
    failures: int = 0
    spills: int = 0
    spilled_nbytes: int = 0
    detached: int = 0
    pin_copies: int = 0
    wait_for_workers_s: float = 0.0
    workers_wait_for_slots_s: float = 0.0


@dataclass
class Counters:
    """The counters of one loader, shared by its iterators; main process only. See `LoaderStatistics`."""

    batches: int = 0
    failures: int = 0
    spills: int = 0
    spilled_nbytes: int = 0
    detached: int = 0
    pin_copies: int = 0
    largest_batch_nbytes: int = 0
    wait_for_workers_ns: int = 0
    workers_wait_for_slots_ns: int = 0
    warned_of_spills: bool = False
