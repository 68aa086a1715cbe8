"""The memory budget of one iterator's slots: arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

from shmloader.memory import PAGE_NBYTES, whole_pages
from shmloader.memory.limits import SURE_NBYTES, memory_headroom, spare_nbytes

SPARE_SLOTS = 2
"""Slots beside those of the tasks: for the batch that is being returned, and the one before it."""

RETAINED_SLOTS = 64
"""Slots that may be made beyond these for batches that the program keeps. A slot costs a mapping and whole
pages; beyond this number, private memory is cheaper for kept batches."""

_BATCHES_IN_A_LIMIT = 4  # a slot may grow in one step to so many times a typical batch
LIMITS_IN_A_SHARE = 4
"""Or to its share divided by this: the rest is for batches that the program keeps."""

RECENT = 32
"""Batches that tell which size is typical."""

_TIMES_TYPICAL = 4  # a slot of more times as many bytes as a typical batch gives the rest back
_LITTLE_NBYTES = 1 << 20  # slots of so few bytes stay as they are


class Budget:
    """The memory budget of one iterator's slots, and the limits and the number of tasks that follow from it.

    Each slot is counted with its limit: while a worker has it, the bytes up to which the worker may grow it,
    else the bytes that it has. Memory of free slots is given back when other slots need it. Each task that
    may be sent next is promised a page, through which a batch of any size can be sent in pieces. The table's
    limits never exceed it, but for one thing: an index batch too long for a record is written to its slot.

    Short memory means fewer tasks, but at least one; then batches that spill to private memory.
    """

    def __init__(
        self,
        nbytes: int,
        most_tasks: int,
        *,
        workers: int = 1,
        follows_host: bool = False,
        even_limits: bool = False,
    ) -> None:
        self.nbytes = max(nbytes, (most_tasks + SPARE_SLOTS) * PAGE_NBYTES)
        self.most_tasks = self.wanted_tasks = most_tasks  # the first is fewer if memory is short
        self.largest_nbytes = 0  # bytes of the largest batch so far
        # Bytes of the second largest of the recent batches: one does not make every slot as large as itself;
        # but none that is more than four times as large as three quarters of them.
        self.typical_nbytes = 0
        self._again_nbytes = 0  # of the second largest recent one: such batches come again and again
        # Batches of fewer bytes, and of more than ``typical_nbytes``, may change what is typical.
        self.small_nbytes = 0
        self._small_batches = 0  # since one was larger than a typical one
        self._workers = workers  # which hold the samples of a batch, in addition to the slots
        self._follows_host = follows_host  # the program gave no budget: it grows if the host has more later
        self._even_limits = even_limits  # a slot may always grow to its share: what does not fit is refused
        self._sure_nbytes = SURE_NBYTES  # more than this is taken only after a new check of the host
        self._set_limits(most_tasks + SPARE_SLOTS)

    @property
    def base_slots(self) -> int:
        """Slots that there are while the program keeps no batches."""
        return self.most_tasks + SPARE_SLOTS

    def next_limit(self, tasks: int, used_nbytes: int) -> int:
        """The limit in bytes for a slot that is granted now; whole pages, at least one."""
        others = max(0, self.most_tasks - tasks - 1)
        room_nbytes = self.nbytes - used_nbytes
        # The others should have room for a typical batch each; if it is not enough for all, this comes first.
        limit_nbytes = room_nbytes - others * self._typical_slot_nbytes
        if limit_nbytes >= self.limit_nbytes:
            return self.limit_nbytes
        sure_nbytes = min(self._typical_slot_nbytes, room_nbytes - others * PAGE_NBYTES)
        return max(limit_nbytes, sure_nbytes, PAGE_NBYTES) // PAGE_NBYTES * PAGE_NBYTES

    def has_room_for_lease(self, tasks: int, used_nbytes: int) -> bool:
        """Whether all tasks find room for a typical batch once a batch that has arrived is kept as it is."""
        promised = max(0, self.most_tasks - tasks + 1)
        return used_nbytes + promised * self._typical_slot_nbytes <= self.nbytes

    def adapt(
        self, nbytes: int, recent: Iterable[int], tasks: int, used_nbytes: int, reserved_nbytes: int
    ) -> None:
        """Adapt to the last of the recent batches: larger than a typical one, or small."""
        self._small_batches = self._small_batches + 1 if nbytes < self.small_nbytes else 0
        if self._small_batches % (RECENT // 4):
            return
        self.largest_nbytes = max(self.largest_nbytes, nbytes)
        sizes = sorted(recent)[:-1]
        if sizes:
            self.typical_nbytes = max(n for n in sizes if n <= _TIMES_TYPICAL * sizes[-1 - len(sizes) // 4])
            self._again_nbytes = sizes[-1]
        needed_nbytes = self.base_slots * whole_pages(self.typical_nbytes)
        if needed_nbytes > self._sure_nbytes:
            self._sure_nbytes = needed_nbytes + needed_nbytes // 4
            self.follow_host(tasks, used_nbytes, reserved_nbytes)
        else:
            self._make_fewer(self.nbytes)

    def follow_host(self, tasks: int, used_nbytes: int, reserved_nbytes: int) -> None:
        """Take no more than the host can spare now; without a budget from the program, half of its memory."""
        # A worker has the samples of a batch and, where they are not joined in the slot, the joined batch and
        # its copy; the program may need as much as a batch.
        besides_nbytes = (3 * self._workers + 1) * self.typical_nbytes
        room = memory_headroom()
        host_nbytes = reserved_nbytes + room.available_nbytes
        wanted_nbytes = max(self.nbytes, host_nbytes // 2) if self._follows_host else self.nbytes
        wanted_nbytes = min(wanted_nbytes, host_nbytes - spare_nbytes(room) - besides_nbytes)
        # Slots that are granted keep their limits, which may exceed this.
        promised = max(0, self.most_tasks - tasks)
        self.nbytes = max(wanted_nbytes, used_nbytes + promised * PAGE_NBYTES)
        self._make_fewer(wanted_nbytes)

    def resize(self, most_tasks: int, tasks: int, used_nbytes: int) -> bool:
        """Change the number of tasks, if there is room; returns whether that was possible.

        If not, slots granted from now on leave room for the further tasks, so a later call may succeed.
        """
        slots = most_tasks + SPARE_SLOTS
        if most_tasks > self.most_tasks:
            slot_nbytes = whole_pages(self.hint_nbytes)
            if slots * slot_nbytes > self.nbytes:
                return False
            self._set_limits(slots)
            if used_nbytes + max(0, most_tasks - tasks) * slot_nbytes > self.nbytes:
                return False
        self.most_tasks = most_tasks
        self.wanted_tasks = max(self.wanted_tasks, most_tasks)
        self._set_limits(slots)
        return True

    def _make_fewer(self, nbytes: int) -> None:
        """Reduce the tasks to the number of typical batches that ``nbytes`` hold, but to at least one."""
        fitting, slots = nbytes // whole_pages(self.typical_nbytes) - SPARE_SLOTS, self._share_slots
        if fitting < self.most_tasks:
            self.most_tasks = max(1, fitting)
            slots = self.base_slots
        self._set_limits(slots)

    def _set_limits(self, share_slots: int) -> None:
        """Set what follows from the batches so far, and from so many slots that divide the budget."""
        self._share_slots = share_slots
        share_nbytes = max(self.nbytes // share_slots, PAGE_NBYTES) // PAGE_NBYTES * PAGE_NBYTES
        self.hint_nbytes = self.typical_nbytes or self.largest_nbytes  # that a batch may be expected to take
        self._typical_slot_nbytes = min(whole_pages(self.hint_nbytes), share_nbytes)
        again_nbytes = max(self._again_nbytes, self.hint_nbytes)
        # A free slot with more bytes gives back all but the expected ones.
        self.excess_nbytes = max(_TIMES_TYPICAL * whole_pages(again_nbytes), _LITTLE_NBYTES)
        self.small_nbytes = again_nbytes // _TIMES_TYPICAL if again_nbytes > _LITTLE_NBYTES else 0
        # Of a slot that is granted while there is room enough. The first batches may be of any size.
        self.limit_nbytes = share_nbytes
        if self.largest_nbytes and not self._even_limits:
            grown_nbytes = max(_BATCHES_IN_A_LIMIT * self.hint_nbytes, share_nbytes // LIMITS_IN_A_SHARE)
            self.limit_nbytes = min(share_nbytes, whole_pages(max(grown_nbytes, self.largest_nbytes)))
        # While all limits together are no more, `next_limit` and `has_room_for_lease` need not be called.
        self.ample_nbytes = (
            self.nbytes - self.limit_nbytes - (self.most_tasks + 1) * self._typical_slot_nbytes
        )
