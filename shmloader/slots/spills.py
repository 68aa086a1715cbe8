"""What is counted, and said once, when slots cannot hold what they should. Main process only."""

from __future__ import annotations

from shmloader.host.limits import memory_headroom
from shmloader.shared_memory import PAGE_NBYTES, whole_pages
from shmloader.slots import SlotPool, SlotState
from shmloader.statistics import Counters

_CAUTION = 4  # a slot may grow at once to a quarter of its share, if to hold a batch much larger than others


class Spills:
    """Counts the batches that are moved to private memory and words the warning; one warning per loader.

    Args:
        pool: The iterator's slots.
        counters: The loader's counters.
    """

    def __init__(self, pool: SlotPool, counters: Counters) -> None:
        self._pool = pool
        self._slots_wanted = pool.base_slots  # the pool may come to have fewer, for want of memory
        self._counters = counters

    def too_large(self, nbytes: int, limit_nbytes: int) -> str:
        """Count a batch of ``nbytes`` that its slot could not hold.

        Args:
            nbytes: Its size.
            limit_nbytes: The size that the slot was allowed to have.

        Returns:
            What to warn of, or "".
        """
        self._count(nbytes)
        if nbytes <= limit_nbytes:
            return self._once(self._refusal(nbytes))
        needed_nbytes = self._needed_nbytes(nbytes)
        if needed_nbytes <= self._pool.budget_nbytes:
            needed_nbytes *= _CAUTION
        why = f"a batch of {nbytes:,} bytes is larger than a slot may be"
        return self._once(self._budget(why, needed_nbytes))

    def kept(self, nbytes: int) -> str:
        """Count a batch of ``nbytes`` that cannot have a slot for as long as the program may keep it.

        Returns:
            What to warn of, or "": that the program keeps very many batches is no reason.
        """
        self._count(nbytes)
        if not self._pool.out_of_budget:
            return ""
        why = f"the program keeps {self._pool.count(SlotState.LEASED)} batches"
        return self._once(self._budget(why, self._needed_nbytes(nbytes)))

    def notice(self) -> str:
        """The pool's notice, the first time."""
        return self._once(self._pool.notice)

    def figures(self) -> str:
        """What the slots take, for the error of a worker that was killed."""
        pool = self._pool
        return (
            f"The loader's slots have {sum(slot.nbytes for slot in pool.slots):,} bytes of shared memory "
            f"(their budget is {pool.budget_nbytes:,}), its largest batch {pool.largest_nbytes:,}."
        )

    def _count(self, nbytes: int) -> None:
        self._counters.spills += 1
        self._counters.spilled_nbytes += nbytes

    def _once(self, warning: str) -> str:
        warned, self._counters.warned_of_spills = self._counters.warned_of_spills, True
        return "" if warned else warning

    def _needed_nbytes(self, nbytes: int) -> int:
        """What the base's slots take if each holds the largest batch."""
        pool = self._pool
        return max(self._slots_wanted, pool.base_slots) * whole_pages(max(nbytes, pool.largest_nbytes))

    def _budget(self, why: str, needed_nbytes: int) -> str:
        pool = self._pool
        # A smaller one the pool has raised to this.
        is_least = pool.budget_nbytes <= self._slots_wanted * PAGE_NBYTES
        least = (
            f" (a page for each of {self._slots_wanted} slots, the least there can be)" if is_least else ""
        )
        return (
            f"{why}, and the slots' memory budget is {pool.budget_nbytes:,} bytes{least}: batches beyond it "
            "are copied to private memory, which is correct but slower. A budget for this loader's slots is "
            f"at least {needed_nbytes:,} bytes (memory_budget_nbytes=...), plus what the program keeps; or "
            "use a smaller batch_size, prefetch_factor or num_workers."
        )

    def _refusal(self, nbytes: int) -> str:
        return (
            f"the host gave a slot less shared memory than its batch of {nbytes:,} bytes needs: batches are "
            "copied to private memory, which is correct but slower. Available are "
            f"{memory_headroom().available_nbytes:,} bytes of memory; address space (ulimit -v) and the size "
            "of files (ulimit -f) may be limited too. `python -m shmloader doctor` shows all of these."
        )
