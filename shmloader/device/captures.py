"""The captures of CUDA graphs that are open in this process. Any thread may ask.

torch begins and ends a capture in two methods of its graphs, for programs as for its compiler, so that is
where captures are counted. Those of other packages can only be found by asking all streams, which takes a
hundred microseconds beside running work.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from shmloader.patches import Patches

_OTHERS = frozenset(("cupy", "warp"))  # packages that use torch's streams

_MOST_WAIT_S = 1.0
"""Time for which a capture waits for a call that waits itself, perhaps for what the capturing thread does."""


class Captures:
    """Counts the graphs that torch captures, and tells whether others may be captured."""

    def __init__(self) -> None:
        self._locks: dict[int, threading.RLock] = {}  # by thread
        self._open: set[weakref.ref[Any]] = set()  # graphs
        self._met = False
        self._patches = Patches()

    def count(self, kind: Any) -> None:
        """Count the captures of a class of graphs: two of its methods are replaced."""
        self._patches.wrap(kind, "capture_begin", self._begin)
        self._patches.wrap(kind, "capture_end", self._end)

    @property
    def lock(self) -> AbstractContextManager[bool]:
        """To be held for calls that no capture may meet: one of torch's that begins waits for it.

        It is for the caller's own ``with`` statement, where a kept traceback does not keep it. Each thread
        has its own: a call may wait for work that another thread queues after its own calls.
        """
        thread = threading.get_ident()
        return self._locks.get(thread) or self._locks.setdefault(thread, threading.RLock())

    def _begin(self, begin: Callable[..., Any], graph: Any, *arguments: Any, **options: Any) -> Any:
        opened = weakref.ref(graph, self._open.discard)
        self._open.add(opened)  # for calls from now on, so what is left are those that are being made
        try:
            for lock in list(self._locks.values()):
                try:
                    lock.acquire(timeout=_MOST_WAIT_S)
                finally:
                    with contextlib.suppress(RuntimeError):  # it was not to be had
                        lock.release()
            return begin(graph, *arguments, **options)
        except BaseException:
            self._open.discard(opened)
            raise

    def _end(self, end: Callable[..., Any], graph: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return end(graph, *arguments, **options)
        finally:
            self._open.discard(weakref.ref(graph))

    def is_begun(self) -> bool:
        """Whether torch captures a graph, in any thread."""
        return bool(self._open)

    def note_other(self) -> None:
        """Note that a capture was found that torch has not begun since this object counts."""
        self._met = True

    def may_be_others(self) -> bool:
        """Whether streams have to be asked: one was met, or a package that uses torch's streams is here."""
        return self._met or not sys.modules.keys().isdisjoint(_OTHERS)

    def may_be_open(self) -> bool:
        """Whether any is: of torch's, or one that is not counted."""
        return bool(self._open or self._met or not sys.modules.keys().isdisjoint(_OTHERS))


@functools.cache
def counted() -> Captures:
    """The captures of this process, which are counted from the first call on."""
    captures = Captures()
    for owner, name in ((torch.cuda, "CUDAGraph"), (torch.accelerator, "Graph")):
        if hasattr(owner, name):  # the second is newer
            captures.count(getattr(owner, name))
    return captures
