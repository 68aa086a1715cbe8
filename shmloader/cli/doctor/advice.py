"""The doctor's advice: loader arguments that this host has room for. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from shmloader.cli.options import format_nbytes
from shmloader.memory import PAGE_NBYTES, whole_pages
from shmloader.slots.budget import SPARE_SLOTS
from shmloader.workers.launch import START_FDS, WORKER_FDS

# Descriptors of the main process beside its workers', see docs/robustness.md; multiprocessing's own processes
# take one each. Tests hold real loaders to them.
_PER_LOADER = {"fork": 3, "spawn": 4, "forkserver": 5}


def slots_of(num_workers: int, prefetch_factor: int) -> int:
    """Slots of a loader whose program keeps no batches."""
    return num_workers * prefetch_factor + SPARE_SLOTS


def descriptors_held(num_workers: int, start_method: str) -> int:
    """Descriptors that a loader takes of the main process while it loads."""
    return _PER_LOADER[start_method] + num_workers * WORKER_FDS


def descriptors_needed(num_workers: int, start_method: str) -> int:
    """Descriptors that must be free for a loader: the last worker's start takes more than it keeps."""
    return descriptors_held(num_workers - 1, start_method) + START_FDS[start_method]


def most_workers(descriptors: int | None, start_method: str) -> int | None:
    """Most workers for which so many free descriptors are enough; None for no limit."""
    if descriptors is None:
        return None
    beyond_one = descriptors - descriptors_needed(1, start_method)
    return 0 if beyond_one < 0 else 1 + beyond_one // WORKER_FDS


@dataclass(frozen=True)
class Room:
    """Resources of the host that a loader can take."""

    cores: int  # that can be kept busy
    available_nbytes: int  # of memory
    descriptors: int | None = None  # that can still be opened; None for no limit
    start_method: str = "fork"  # of workers


@dataclass(frozen=True)
class Advice:
    """Arguments for ``DataLoader``, and what they cost."""

    num_workers: int
    prefetch_factor: int
    multiprocessing_context: str | None  # another start method, if the platform's own does not work
    batch_nbytes: int | None  # as given; None if not given
    slots: int  # in use while the program keeps no batches
    slots_nbytes: int | None  # shared memory that they take; None without ``batch_nbytes``
    memory_budget_nbytes: int | None  # a bound for the slots' memory; None for the loader's own default
    # Whether there is memory for slots and samples. If not, the arguments are the smallest possible ones, and
    # nothing is advised.
    fits: bool
    # The largest batch for which the slots of the smallest arguments take half of the available memory.
    largest_batch_nbytes: int
    reasons: tuple[str, ...]  # why the advice is less than asked or usual, for people


def advise(room: Room, batch_nbytes: int | None, asked_workers: int | None) -> Advice:
    """Choose workers, prefetch factor and memory budget.

    It advises as many workers as asked, but no more than there are cores. If no number is asked, it advises
    one per core; with more than two cores, one core is left for the main process. If the slots do not fit in
    half of the available memory (the loader's default budget), it lowers the prefetch factor first, and then
    the number of workers.
    """
    workers, reasons = _choose_workers(room, asked_workers)
    prefetch, fits, slots_nbytes, budget_nbytes = 2, True, None, None
    half_nbytes = room.available_nbytes // 2
    if batch_nbytes is not None:
        slot_nbytes = whole_pages(batch_nbytes)
        wanted = workers
        workers, prefetch = _reduce(workers, slot_nbytes, half_nbytes)
        if (workers, prefetch) != (wanted, 2):
            needed = slots_of(wanted, 2) * slot_nbytes
            reasons.append(
                f"{wanted} workers with prefetch_factor 2 need {format_nbytes(needed)} for slots, more than "
                f"half of the {format_nbytes(room.available_nbytes)} available"
            )
        slots_nbytes = slots_of(workers, prefetch) * slot_nbytes
        # Each worker has the samples of a batch besides.
        fits = slots_nbytes + workers * slot_nbytes <= room.available_nbytes
        # Room for batches that turn out larger than given. It is a limit and reserves nothing.
        budget_nbytes = max(slots_nbytes, min(4 * slots_nbytes, half_nbytes)) if fits else None
    return Advice(
        num_workers=workers,
        prefetch_factor=prefetch,
        multiprocessing_context=None,
        batch_nbytes=batch_nbytes,
        slots=slots_of(workers, prefetch),
        slots_nbytes=slots_nbytes,
        memory_budget_nbytes=budget_nbytes,
        fits=fits,
        largest_batch_nbytes=half_nbytes // slots_of(1, 1) // PAGE_NBYTES * PAGE_NBYTES,
        reasons=tuple(reasons),
    )


def _choose_workers(room: Room, asked: int | None) -> tuple[int, list[str]]:
    """The number of workers that cores and descriptors allow, and why it is smaller than asked."""
    reasons = []
    workers = asked or (room.cores - 1 if room.cores > 2 else room.cores)
    if workers > room.cores:
        reasons.append(
            f"{workers} workers on {room.cores} core(s) are faster only if samples wait for a disk or a "
            f"network; if yours do, keep num_workers={workers}"
        )
        workers = room.cores
    enough_for = most_workers(room.descriptors, room.start_method)
    if enough_for is not None and enough_for < workers:
        reasons.append(f"{room.descriptors} free descriptors are enough for {enough_for} workers")
        workers = max(1, enough_for)
    return workers, reasons


def _reduce(workers: int, slot_nbytes: int, most_nbytes: int) -> tuple[int, int]:
    """The most workers, and then the largest prefetch factor, whose slots fit; at least one worker."""
    for prefetch in (2, 1):
        if slots_of(workers, prefetch) * slot_nbytes <= most_nbytes:
            return workers, prefetch
    fitting = most_nbytes // slot_nbytes - SPARE_SLOTS
    return max(1, min(workers, fitting)), 1


def describe_advice(advice: Advice) -> list[str]:
    """The advice as lines of text: a call to copy, what it costs, and why it is not more."""
    notes = [f"note: {reason}" for reason in advice.reasons]
    if not advice.fits:
        return [f"none: {describe_lack(advice)}", *notes]
    arguments = [f"num_workers={advice.num_workers}", f"prefetch_factor={advice.prefetch_factor}"]
    if advice.memory_budget_nbytes is not None:
        arguments.append(f"memory_budget_nbytes={advice.memory_budget_nbytes:_}")
    if advice.multiprocessing_context:
        arguments.append(f"multiprocessing_context={advice.multiprocessing_context!r}")
    lines = [f"DataLoader(dataset, ..., {', '.join(arguments)})"]
    count = f"({advice.prefetch_factor} x {advice.num_workers} + {SPARE_SLOTS})"
    if advice.slots_nbytes is None:
        lines.append(f"shared memory: {count} = {advice.slots} slots, each as large as the largest batch")
        lines.append("pass --batch-bytes (38MB, say) to check this against the available memory")
    else:
        each = format_nbytes(advice.batch_nbytes)
        lines.append(
            f"shared memory: {count} = {advice.slots} slots x {each} = {format_nbytes(advice.slots_nbytes)}"
        )
    return [*lines, *notes]


def describe_lack(advice: Advice) -> str:
    """The reason that even the smallest loader does not fit, and a remedy."""
    batches = advice.slots + advice.num_workers  # the slots, and what each worker collates
    needed_nbytes = batches * whole_pages(advice.batch_nbytes or 0)
    return (
        f"such batches do not fit. Even num_workers=1 with prefetch_factor=1 has {advice.slots} slots, and "
        f"the samples of a batch in its worker: {batches} x {format_nbytes(advice.batch_nbytes)} = "
        f"{format_nbytes(needed_nbytes)}. {describe_remedy(advice)}"
    )


def describe_remedy(advice: Advice) -> str:
    """The remedy for slots that take too much memory."""
    most_nbytes = advice.largest_batch_nbytes
    return (
        f"Use a smaller batch_size: batches of at most {most_nbytes:,} bytes ({format_nbytes(most_nbytes)}) "
        "fit in half of what is available. Or raise the memory limit"
    )
