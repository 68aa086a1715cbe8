"""Detects data that forked workers copy merely by reading it, and advises a fix.

A plain list or dict of Python objects is copied into a forked worker page by page, since reading an object
writes its reference count. The loader starts a `CopyWatch` where its dataset holds a large one, and asks once
per epoch.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable
from typing import Any

import torch.multiprocessing

from shmloader.arguments import THREAD
from shmloader.errors import NotSharedWarning, warn
from shmloader.host.process_memory import read_memory
from shmloader.statistics import Counters
from shmloader.store.graph import Graph
from shmloader.store.kinds import estimate_nbytes

LEAST_NBYTES = 64 << 20
"""Containers smaller than this, in bytes as Python objects, are not watched."""

_LEAST_GROWN = 0.2  # of the container, in one worker: what reading it all copies is more than a half


def largest_unshared(dataset: Any) -> tuple[int, str] | None:
    """Size and path of the largest container of Python objects in a dataset; None if none is worth watching.

    Takes microseconds per attribute: only some elements of a container are checked.
    """
    # The values of its attributes first, since looking at the dataset itself gives it a __dict__
    # (docs/decisions/0033). The garbage collector shows them; of a collection it would show every element.
    if isinstance(dataset, Collection) or any(map(_largest_in, gc.get_referents(dataset))):
        return _largest_in(dataset)
    return None


def _largest_in(value: Any) -> tuple[int, str] | None:
    nodes = [node for node in Graph(value, only_containers=True).nodes.values() if node.plan]
    found = max(((estimate_nbytes(node.value), node.path) for node in nodes), default=(0, ""))
    return found if found[0] >= LEAST_NBYTES else None


class CopyWatch:
    """Compares the private memory of forked workers with what they had when they started.

    Runs in the main process, and reads ``/proc/PID/smaps_rollup`` of each worker twice.

    Attributes:
        unshared: Size and path of the container that is watched; None if there is none.
    """

    def __init__(self, dataset: Any) -> None:
        self.unshared = largest_unshared(dataset)
        self._before: dict[int, int] = {}

    def started(self, workers: Iterable[Any]) -> None:
        """Note the memory of workers, processes of ``multiprocessing``, that were just started."""
        if self.unshared is not None:
            for worker in workers:
                self._before[worker.pid] = private_nbytes(worker.pid)

    def ended(self, workers: Iterable[Any]) -> str:
        """Check workers when an epoch ends, and before they are stopped.

        Returns:
            A warning for the program if they have copied what they read, once; else "".
        """
        if self.unshared is None:
            return ""
        pids = [worker.pid for worker in workers if worker.pid in self._before]
        grown = [private_nbytes(pid) - self._before[pid] for pid in pids]
        nbytes, path = self.unshared
        if not grown or max(grown) < _LEAST_GROWN * nbytes:
            return ""
        self.unshared = None
        return (
            f"each worker has copied up to {max(grown):,} bytes in this epoch ({sum(grown):,} in all): "
            f"reading Python objects writes their reference counts, and {path} has about {nbytes:,} bytes of "
            "them. DataLoader(..., share_dataset=True) keeps them in memory once, for all workers"
        )


def private_nbytes(pid: int) -> int:
    """Bytes of memory that a process has written and no other has; 0 if that cannot be read."""
    return read_memory(pid).get("Private_Dirty", 0)


def watch_copies(loader: Any, workers: Iterable[Any]) -> CopyWatch | None:
    """Begin to watch a loader's workers, which were just started; None if they are not forked.

    Only forked workers share objects with this process until they read them.
    """
    context = loader.multiprocessing_context or torch.multiprocessing
    if loader.worker_type == THREAD or context.get_start_method() != "fork":
        return None
    watch = CopyWatch(loader.dataset)
    watch.started(workers)
    return watch


def warn_of_copies(copied: str, counters: Counters) -> None:
    """Give the warning of `CopyWatch.ended`, if there is one; one for each loader."""
    if copied and not counters.warned_of_copies:
        counters.warned_of_copies = True
        warn(copied, NotSharedWarning)
