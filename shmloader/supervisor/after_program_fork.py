"""Processes that the user's program forks: they have none of its workers."""

from __future__ import annotations

import functools
import os
import weakref

from shmloader.supervisor.base import Workers

# Those whose main-side pipe ends, for one, a forked child of this process must not keep open.
_live: weakref.WeakSet[Workers] = weakref.WeakSet()


def begin(workers: Workers) -> None:
    """From now on forked children leave these workers to this process."""
    _register()
    _live.add(workers)


def end(workers: Workers) -> None:
    """These workers were stopped."""
    _live.discard(workers)


@functools.cache
def _register() -> None:
    # A child, of ours or of the user's program, that kept the write end of a task pipe would keep that
    # worker from seeing the main process close it.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    for workers in list(_live):
        workers.leave_to_parent()
    _live.clear()
