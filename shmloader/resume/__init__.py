"""``DataLoader.state_dict()`` and ``load_state_dict()``: the states of a loader.

The loader owns its `States`, which outlive its iterators. An iterator begins each epoch by them, and writes
how far the program has come into the `Progress` that it gets, and with an iterable-style dataset into the
`StreamProgress`. Nothing else is needed for a state: the main process knows the order.
"""

from shmloader.resume.progress import Progress
from shmloader.resume.states import States
from shmloader.resume.stream_progress import StreamProgress

__all__ = ["Progress", "States", "StreamProgress"]
