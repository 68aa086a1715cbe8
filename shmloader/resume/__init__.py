"""``DataLoader.state_dict()`` and ``load_state_dict()``: the states of a loader.

The loader owns a `Resumption`, which outlives its iterators. An iterator begins each epoch by it, and writes
how far the program has come into the `Progress` that it gets. Nothing else is needed for a state: the main
process knows the order.
"""

from shmloader.resume.progress import Progress
from shmloader.resume.resumption import Resumption

__all__ = ["Progress", "Resumption"]
