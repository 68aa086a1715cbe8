"""The slot pool of one iterator, in the main process: slot states, the memory budget, leases.

A slot goes round ``FREE -> GRANTED -> PUBLISHED -> LEASED -> FREE``, and from ``GRANTED`` or ``PUBLISHED``
straight back to ``FREE`` when there is nothing to lease. In a pool of `shmloader.device` it is ``GUARDED``
behind ``LEASED`` for as long as an accelerator may read it. It is in one hand at a time: a worker writes it
while granted; while published or leased nobody does.

A slot is free only if no view of its last batch is alive in this process. What slots may take together is
`Budget`'s one equation.
"""

from shmloader.slots.pool import RETAINED_SLOTS, SlotPool
from shmloader.slots.slot import Slot, SlotState

__all__ = ["RETAINED_SLOTS", "Slot", "SlotPool", "SlotState"]
