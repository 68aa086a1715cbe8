"""What is said where slots cannot all have what the batches need."""

from __future__ import annotations

from shmloader.errors import SharedMemoryExhausted
from shmloader.host.limits import Headroom
from shmloader.shared_memory import whole_pages


def host_is_too_small(
    room: Headroom, reserved_nbytes: int, base_slots: int, batch_nbytes: int, workers: int
) -> SharedMemoryExhausted:
    """The error for a host that cannot give all slots of the base what they need.

    Args:
        room: What the host can give.
        reserved_nbytes: What the slots have already.
        base_slots: How many there are.
        batch_nbytes: What each needs.
        workers: How many processes hold the samples of a batch besides.
    """
    needed_nbytes = base_slots * whole_pages(batch_nbytes)
    return SharedMemoryExhausted(
        f"the loader's {base_slots} slots (prefetch_factor x num_workers + 2) for batches of "
        f"{batch_nbytes:,} bytes need {needed_nbytes:,} bytes of shared memory, and the "
        f"samples of a batch in each of {workers} workers {workers * batch_nbytes:,} more, but of "
        f"{room.limit_nbytes:,} only {room.available_nbytes + reserved_nbytes:,} bytes are available "
        f"in {room.source}. Use fewer workers, a smaller prefetch_factor or batch_size, raise the "
        "limit, or pass memory_budget_nbytes to have fewer batches made in advance.",
        needed_nbytes=needed_nbytes,
        available_nbytes=room.available_nbytes + reserved_nbytes,
    )


def fewer_are_made(tasks: int, wanted_tasks: int, batch_nbytes: int, budget_nbytes: int) -> str:
    """What the user is told when fewer batches are made in advance than were asked for.

    Args:
        tasks: How many there are.
        wanted_tasks: How many were asked for.
        batch_nbytes: What a batch takes.
        budget_nbytes: What all slots may take.
    """
    slots = wanted_tasks + 2
    return (
        f"the slots' memory budget of {budget_nbytes:,} bytes has no room for the {slots} "
        f"batches (prefetch_factor x num_workers + 2) of {batch_nbytes:,} bytes that this loader "
        f"may have at once: {tasks} instead of {wanted_tasks} batches are made in advance. Pass "
        f"memory_budget_nbytes={slots * whole_pages(batch_nbytes)} or more, or a "
        "smaller batch_size, prefetch_factor or num_workers."
    )
