"""The slot pool of one iterator, in the main process: slot states, the memory budget, leases.

A slot goes round ``FREE -> GRANTED -> PUBLISHED -> LEASED -> FREE``, and from ``GRANTED`` or ``PUBLISHED``
straight back to ``FREE`` when there is nothing to lease. In a pool of `shmloader.device` it is ``GUARDED``
after ``LEASED`` for as long as an accelerator may read it. A worker may write to it only while it is granted.

A slot is free only if no view of its last batch is alive in this process. `Budget` limits the memory of all
slots together.
"""

from shmloader.slots.pool import RETAINED_SLOTS, SlotPool
from shmloader.slots.slot import Slot, SlotState

__all__ = ["RETAINED_SLOTS", "Slot", "SlotPool", "SlotState"]
