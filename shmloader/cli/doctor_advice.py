"""Which loader arguments this host has room for. Arithmetic only: what it knows of the host it is given."""

from __future__ import annotations

from dataclasses import dataclass, field

from shmloader.cli.doctor_descriptors import Descriptors
from shmloader.cli.doctor_sizes import format_nbytes
from shmloader.shared_memory import PAGE_NBYTES, whole_pages

_SLOTS_BESIDES_TASKS = 2  # for the batch being returned and the one before it, see `SlotPool`


@dataclass(frozen=True)
class Room:
    """What the host has to offer a loader.

    Attributes:
        cores: Cores that can be kept busy.
        available_nbytes: Memory that can still be taken.
        descriptors: Descriptors that can still be opened, and what a loader takes of them.
        other_start_method: One that works, where the platform's default does not; else empty.
    """

    cores: int
    available_nbytes: int
    descriptors: Descriptors = field(default_factory=Descriptors)
    other_start_method: str = ""


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
        fits: Whether the memory for slots and samples can be had. Where not, the arguments are the smallest
            that there are, and nothing is advised.
        largest_batch_nbytes: Up to this size half of the available memory holds the slots of those.
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
    largest_batch_nbytes: int
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
    enough_for = room.descriptors.most_workers
    if enough_for is not None and enough_for < workers:
        reasons.append(f"{room.descriptors.left} free descriptors are enough for {enough_for} workers")
        workers = max(1, enough_for)
    prefetch, fits, slots_nbytes, budget_nbytes = 2, True, None, None
    half_nbytes = room.available_nbytes // 2
    if batch_nbytes is not None:
        slot_nbytes = whole_pages(batch_nbytes)
        asked = workers
        workers, prefetch = _reduce(workers, slot_nbytes, half_nbytes)
        if (workers, prefetch) != (asked, 2):
            needed = slots_of(asked, 2) * slot_nbytes
            reasons.append(
                f"{asked} workers with prefetch_factor 2 need {format_nbytes(needed)} for slots, more than "
                f"half of the {format_nbytes(room.available_nbytes)} available"
            )
        slots_nbytes = slots_of(workers, prefetch) * slot_nbytes
        # The loader refuses to begin without room for the samples of a batch in each worker too.
        fits = slots_nbytes + workers * slot_nbytes <= room.available_nbytes
        # Room for batches that turn out larger than was said. It bounds, and reserves nothing.
        budget_nbytes = max(slots_nbytes, min(4 * slots_nbytes, half_nbytes)) if fits else None
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
        largest_batch_nbytes=half_nbytes // slots_of(1, 1) // PAGE_NBYTES * PAGE_NBYTES,
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
    if not advice.fits:
        return [f"none: {describe_lack(advice)}", *(f"note: {reason}" for reason in advice.reasons)]
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


def describe_lack(advice: Advice) -> str:
    """What the smallest loader needs where that does not fit, and what to change."""
    batches = advice.slots + advice.num_workers  # the slots, and what each worker collates
    needed_nbytes = batches * whole_pages(advice.batch_nbytes or 0)
    return (
        f"such batches do not fit. Even num_workers=1 with prefetch_factor=1 has {advice.slots} slots, and "
        f"the samples of a batch in its worker: {batches} x {format_nbytes(advice.batch_nbytes)} = "
        f"{format_nbytes(needed_nbytes)}. {describe_remedy(advice)}"
    )


def describe_remedy(advice: Advice) -> str:
    """What to change where slots take too much memory."""
    most_nbytes = advice.largest_batch_nbytes
    return (
        f"Use a smaller batch_size: batches of at most {most_nbytes:,} bytes ({format_nbytes(most_nbytes)}) "
        "fit in half of what is available. Or raise the memory limit"
    )
