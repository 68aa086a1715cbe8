"""``DataLoader.state_dict()`` and ``load_state_dict()``: the states of a loader.

The loader owns its `States`, which outlive its iterators. An iterator begins each epoch with them, and gets a
`Progress`, in which it records how far the program has come; for an iterable-style dataset also a
`StreamProgress`. A state needs nothing else: the main process knows the order.
"""

from shmloader.resume.progress import Progress
from shmloader.resume.states import States
from shmloader.resume.stream_progress import StreamProgress

__all__ = ["Progress", "States", "StreamProgress"]
