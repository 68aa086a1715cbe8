"""Messages for too little memory: the one warning that a loader gives."""

from __future__ import annotations

from shmloader.memory import PAGE_NBYTES, whole_pages
from shmloader.memory.limits import memory_headroom
from shmloader.slots.budget import LIMITS_IN_A_SHARE, SPARE_SLOTS, Budget

_COPIED = "are copied to private memory, which is correct but slower"


def fewer_ahead(budget: Budget) -> str:
    """The warning that fewer batches are made in advance than were asked for."""
    slots, batch_nbytes = budget.wanted_tasks + SPARE_SLOTS, budget.typical_nbytes
    return (
        f"the slots' memory budget of {budget.nbytes:,} bytes has no room for the {slots} batches "
        f"(prefetch_factor x num_workers + {SPARE_SLOTS}) of {batch_nbytes:,} bytes that this loader may "
        f"have at once: {budget.most_tasks} instead of {budget.wanted_tasks} batches are made in advance. "
        f"Batches that it does not hold then {_COPIED}. "
        f"Pass memory_budget_nbytes={slots * whole_pages(batch_nbytes)} or more, or a smaller batch_size, "
        "prefetch_factor or num_workers."
    )


def larger_than_a_slot(budget: Budget, nbytes: int) -> str:
    """The warning that a batch of ``nbytes`` did not fit in a slot."""
    needed_nbytes = _needed_nbytes(budget, nbytes)
    if needed_nbytes <= budget.nbytes:
        needed_nbytes *= LIMITS_IN_A_SHARE
    why = f"a batch of {nbytes:,} bytes is larger than a slot may be"
    return _beyond_budget(why, budget, needed_nbytes)


def kept_beyond_budget(budget: Budget, nbytes: int, kept: int) -> str:
    """The warning that the budget has no room for a batch of ``nbytes`` beside ``kept`` batches."""
    needed_nbytes = _needed_nbytes(budget, nbytes)
    return _beyond_budget(f"the program keeps {kept} batches", budget, needed_nbytes)


def kept_beyond_slots(nbytes: int, kept: int) -> str:
    """The warning that no slot is made for a batch of ``nbytes`` beside ``kept`` batches."""
    return (
        f"the program keeps {kept} batches, the most that slots are made for: further ones, this one of "
        f"{nbytes:,} bytes, {_COPIED}. Keep fewer batches at a time (`del` those that you no longer need), "
        "or only what is needed of each, copied (`tensor.clone()`, `.item()`)."
    )


def kept_by_device(budget: Budget, nbytes: int, kept: int) -> str:
    """The warning that no slot is free for a batch of ``nbytes``, because an accelerator is behind."""
    needed_nbytes = _needed_nbytes(budget, nbytes) + kept * whole_pages(nbytes)
    why = f"the accelerator has yet to read {kept} batches that the program has dropped"
    return _beyond_budget(why, budget, needed_nbytes)


def refused_by_host(nbytes: int) -> str:
    """The warning that the host gave less shared memory than a batch of ``nbytes`` needs."""
    return (
        f"the host gave a slot less shared memory than its batch of {nbytes:,} bytes needs: batches "
        f"{_COPIED}. Available are {memory_headroom().available_nbytes:,} bytes of memory; address space "
        "(ulimit -v) and the size of files (ulimit -f) may be limited too."
    )


def _needed_nbytes(budget: Budget, nbytes: int) -> int:
    """Bytes for slots that each hold the largest batch."""
    return (budget.wanted_tasks + SPARE_SLOTS) * whole_pages(max(nbytes, budget.largest_nbytes))


def _beyond_budget(why: str, budget: Budget, needed_nbytes: int) -> str:
    slots = budget.wanted_tasks + SPARE_SLOTS
    # A smaller budget was raised to this.
    is_least = budget.nbytes <= slots * PAGE_NBYTES
    least = f" (a page for each of {slots} slots, the least there can be)" if is_least else ""
    fewer = ""
    if _needed_nbytes(budget, 0) > budget.nbytes:
        fewer = f" If most are as large, fewer than {budget.wanted_tasks} are made in advance."
    return (
        f"{why}, and the slots' memory budget is {budget.nbytes:,} bytes{least}: batches beyond it "
        f"{_COPIED}.{fewer} A budget for this loader's slots is at least {needed_nbytes:,} bytes "
        "(memory_budget_nbytes=...), plus what the program keeps; or use a smaller batch_size, "
        "prefetch_factor or num_workers."
    )
