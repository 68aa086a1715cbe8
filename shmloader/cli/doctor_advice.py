"""Which loader arguments this host has room for. Arithmetic only: what it knows of the host it is given."""

from __future__ import annotations

from dataclasses import dataclass

from shmloader.cli.doctor_sizes import format_nbytes
from shmloader.segment import whole_pages

DESCRIPTORS_PER_WORKER = 8
"""What a worker costs the main process at most; used where it could not be measured."""
_DESCRIPTORS_TO_START = 8  # open for a moment while a worker is started

_SLOTS_BESIDES_TASKS = 2  # for the batch being returned and the one before it, see `SlotPool`


@dataclass(frozen=True)
class Room:
    """What the host has to offer a loader.

    Attributes:
        cores: Cores that can be kept busy.
        available_nbytes: Memory that can still be taken.
        descriptors: Descriptors that can still be opened; None for no limit.
        descriptors_per_worker: What a worker costs the main process.
        start_method: The platform's default.
        other_start_method: One that works, where the default does not; else empty.
    """

    cores: int
    available_nbytes: int
    descriptors: int | None = None
    descriptors_per_worker: int = DESCRIPTORS_PER_WORKER
    start_method: str = "fork"
    other_start_method: str = ""

    @property
    def most_workers(self) -> int | None:
        """Workers that the descriptors are enough for; None for no limit."""
        if self.descriptors is None:
            return None
        return max(0, self.descriptors - _DESCRIPTORS_TO_START) // self.descriptors_per_worker


@dataclass(frozen=True)
class Advice:
    """Arguments for ``DataLoader``, and what they cost.

    Attributes:
        num_workers: Worker processes.
        prefetch_factor: Batches made in advance per worker.
        multiprocessing_context: A start method, where the platform's own does not work; else None.
        batch_nbytes: Bytes of a batch, as asked; None if not said.
        slots: Slots in use while the program keeps no batches.
        slots_nbytes: Shared memory that they take; None without ``batch_nbytes``.
        memory_budget_nbytes: A bound for the slots' memory; None for the loader's own default.
        fits: Whether that memory can be had.
        reasons: Why it is less than asked or usual, for people.
    """

    num_workers: int
    prefetch_factor: int
    multiprocessing_context: str | None
    batch_nbytes: int | None
    slots: int
    slots_nbytes: int | None
    memory_budget_nbytes: int | None
    fits: bool
    reasons: tuple[str, ...]


def slots_of(num_workers: int, prefetch_factor: int) -> int:
    """Slots of a loader whose program keeps no batches: one per task, and two more."""
    return num_workers * prefetch_factor + _SLOTS_BESIDES_TASKS


def advise(room: Room, batch_nbytes: int | None, asked_workers: int | None) -> Advice:
    """Choose workers, prefetch factor and memory budget.

    As many workers as asked, else as there are cores (without one for the main process where there are more
    than two). If their slots do not fit in half of the available memory, which is the loader's own default
    for its budget, less is prefetched first, and then there are fewer workers.

    Args:
        room: What the host has.
        batch_nbytes: Bytes of the largest batch, or None if not known.
        asked_workers: Workers that the user wants, or None to leave it open.
    """
    reasons: list[str] = []
    workers = asked_workers or (room.cores - 1 if room.cores > 2 else room.cores)
    if room.most_workers is not None and room.most_workers < workers:
        reasons.append(f"{room.descriptors} free descriptors are enough for {room.most_workers} workers")
        workers = max(1, room.most_workers)
    prefetch, fits, slots_nbytes, budget_nbytes = 2, True, None, None
    if batch_nbytes is not None:
        slot_nbytes = whole_pages(batch_nbytes)
        half_nbytes = room.available_nbytes // 2
        asked = workers
        workers, prefetch = _reduce(workers, slot_nbytes, half_nbytes)
        if (workers, prefetch) != (asked, 2):
            needed = slots_of(asked, 2) * slot_nbytes
            reasons.append(
                f"{asked} workers with prefetch_factor 2 need {format_nbytes(needed)} for slots, more than "
                f"half of the {format_nbytes(room.available_nbytes)} available"
            )
        slots_nbytes = slots_of(workers, prefetch) * slot_nbytes
        fits = slots_nbytes <= room.available_nbytes
        # Room for batches that turn out larger than was said. It bounds, and reserves nothing.
        budget_nbytes = max(slots_nbytes, min(4 * slots_nbytes, half_nbytes))
    if workers > room.cores:
        reasons.append(
            f"{workers} workers on {room.cores} cores pay only where samples wait for a disk or a network"
        )
    return Advice(
        num_workers=workers,
        prefetch_factor=prefetch,
        multiprocessing_context=room.other_start_method or None,
        batch_nbytes=batch_nbytes,
        slots=slots_of(workers, prefetch),
        slots_nbytes=slots_nbytes,
        memory_budget_nbytes=budget_nbytes,
        fits=fits,
        reasons=tuple(reasons),
    )


def _reduce(workers: int, slot_nbytes: int, most_nbytes: int) -> tuple[int, int]:
    """The most workers, and then the prefetch factor, whose slots fit; one worker in any case."""
    for prefetch in (2, 1):
        if slots_of(workers, prefetch) * slot_nbytes <= most_nbytes:
            return workers, prefetch
    fitting = most_nbytes // slot_nbytes - _SLOTS_BESIDES_TASKS
    return max(1, min(workers, fitting)), 1


def describe_advice(advice: Advice) -> list[str]:
    """The advice as lines of text: a call to copy, what it costs, and why it is not more."""
    arguments = [f"num_workers={advice.num_workers}", f"prefetch_factor={advice.prefetch_factor}"]
    if advice.memory_budget_nbytes is not None:
        arguments.append(f"memory_budget_nbytes={advice.memory_budget_nbytes:_}")
    if advice.multiprocessing_context:
        arguments.append(f"multiprocessing_context={advice.multiprocessing_context!r}")
    lines = [f"DataLoader(dataset, ..., {', '.join(arguments)})"]
    count = f"({advice.prefetch_factor} x {advice.num_workers} + {_SLOTS_BESIDES_TASKS})"
    if advice.slots_nbytes is None:
        lines.append(f"shared memory: {count} = {advice.slots} slots, each as large as the largest batch")
        lines.append("with --batch-bytes (38MB, say) this is checked against the memory that there is")
    else:
        each = format_nbytes(advice.batch_nbytes)
        lines.append(
            f"shared memory: {count} = {advice.slots} slots x {each} = {format_nbytes(advice.slots_nbytes)}"
        )
    return [*lines, *(f"note: {reason}" for reason in advice.reasons)]
