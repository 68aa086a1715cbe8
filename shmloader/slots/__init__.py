"""The table of places of one iterator, in the main process: slots, the tasks in them, memory budget, leases.

A place is a slot and the task whose batch it takes. It goes round::

    FREE -> MAKING -> ARRIVED -> LEASED (-> GUARDED) -> FREE

and from ``MAKING`` or ``ARRIVED`` straight back to ``FREE`` when there is nothing to lease: the batch was
spilled to private memory, is void, or did not come. What is ``GUARDED`` an accelerator may still read. Only
while a place is ``MAKING`` may a worker write to its slot; it is free only if no view of its last batch is
alive in this process. `PlaceTable` alone changes any of it, and `Budget` has the arithmetic.
"""

from shmloader.slots.budget import RETAINED_SLOTS
from shmloader.slots.memory import AskedFor
from shmloader.slots.place import ByteArray, Guard, Place, PlaceState, figures
from shmloader.slots.table import PlaceTable

__all__ = ["RETAINED_SLOTS", "AskedFor", "ByteArray", "Guard", "Place", "PlaceState", "PlaceTable", "figures"]
