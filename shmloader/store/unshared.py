"""Detects memory that forked workers copy merely by reading it, and advises a fix.

A page of Python objects is copied into a forked worker when it reads one of them, since that writes the
reference count. So what grows is measured, whatever it is; an owner is searched for only when that is much.
Advice runs no code of the program's, and what fails here is silent.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch.multiprocessing

from shmloader.errors import NotSharedWarning, warn
from shmloader.settings import THREAD
from shmloader.statistics import Counters
from shmloader.store import kinds, static
from shmloader.store.graph import Graph, Node

LEAST_NBYTES = 32 << 20
"""Bytes that one worker has to copy, beyond a few batches, before a warning is given."""

_BATCHES = 4  # a worker may make so many of the largest in memory that this process has freed
_LEAST_OWNED = 0.25  # of what was copied, by what is called its owner
_MOST_OF = 0.5  # its holder's bytes, by what is named in its holder's place
_MOST_SIZED = 2000  # objects, those next to the dataset, whose sizes are estimated


class CopiedMemory:
    """The memory of its parent that a forked process copies, without its own and without shared memory.

    A process that gives inherited memory back, as when it collects its parent's garbage, and also allocates
    may seem to have copied as many bytes more.

    Raises:
        psutil.Error, OSError: In every method, if the process is gone.
    """

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc", str(pid))
        # It may have allocated by now: it began with no more than its parent has.
        memories = (psutil.Process(pid).memory_info(), psutil.Process().memory_info())
        self._anonymous_nbytes: int = min(memory.rss - memory.shared for memory in memories)

    def most_nbytes(self) -> int:
        """An upper bound, by its page faults; costs nothing."""
        stat = (self._folder / "stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[7]) * mmap.PAGESIZE

    def nbytes(self) -> int:
        """Bytes of pages copied, by either side, and of those that only it still has; 25 ms for each GB."""
        smaps = (self._folder / "smaps").read_text(errors="replace")
        private, anonymous = (
            [int(kb) * 1024 for kb in re.findall(rf"^{name}: +(\d+) kB", smaps, re.MULTILINE)]
            for name in ("Private_Dirty", "Anonymous")
        )
        allocated = max(0, sum(anonymous) - self._anonymous_nbytes)
        return min(self.most_nbytes(), sum(map(min, private, anonymous))) - allocated


class CopyWatch:
    """Measures what forked workers copy of this process's memory, and looks for the owner in the dataset.

    Costs microseconds when they start. When an epoch ends, one worker is measured, and only if it had enough
    page faults; that takes less time than to fork it.
    """

    def __init__(self, dataset: Any, workers: Iterable[Any], counters: Counters, *, is_shared: bool) -> None:
        self._dataset = dataset
        self._counters = counters
        self._said = ""
        self._is_shared = is_shared
        self._epochs = 0
        self._copied: dict[int, CopiedMemory] = {}
        with contextlib.suppress(Exception):
            self._copied = {worker.pid: CopiedMemory(worker.pid) for worker in workers}

    def measure(self, workers: Iterable[Any], largest_batch_nbytes: int) -> None:
        """Measure the workers when an epoch ends, before they are stopped."""
        self._epochs += 1
        if self._epochs & (self._epochs - 1):  # of persistent workers after 1, 2, 4, 8 epochs
            return
        with contextlib.suppress(Exception):
            known = [self._copied[worker.pid] for worker in workers if worker.pid in self._copied]
            worst = max(known, key=CopiedMemory.most_nbytes)
            least = LEAST_NBYTES + _BATCHES * largest_batch_nbytes
            if worst.most_nbytes() >= least and (copied := worst.nbytes()) >= least:
                self._said = self._describe(copied, len(known))

    def warn(self) -> None:
        """Warn if the workers have copied much; once for each loader."""
        if self._said and self._counters.warns_first("warned_of_copies"):
            warn(self._said, NotSharedWarning)

    def _describe(self, copied: int, num_workers: int) -> str:
        graph = Graph(self._dataset)
        nbytes, owner = largest_holder(graph)
        said = (
            f"each of {num_workers} workers has copied up to {copied:,} bytes of this process's memory: "
            "reading Python objects writes their reference counts."
        )
        if nbytes < _LEAST_OWNED * copied:
            if num_workers == 1:  # then it may be what this process has written to, as in training on the CPU
                return ""
            stopped = f" until it stopped at {graph.stopped.path}" if graph.stopped else ""
            return (
                f"{said} No owner of so many was found: of {len(graph.nodes):,} objects that a search in the "
                f"dataset's attributes saw{stopped}, {owner.path} holds most, about {nbytes:,} bytes. Look "
                "at globals, class attributes, default arguments and closures that the dataset's code uses"
            )
        kind = static.name_of(type(owner.value))
        said += f" {owner.path}, of type {kind}, has about {nbytes:,} bytes of them."
        if not self._is_shared and any(
            one.plan and owner in (one, one.holder) for one in graph.nodes.values()
        ):
            return f"{said} DataLoader(..., share_dataset=True) keeps them in memory once, for all workers"
        return (
            f"{said} share_dataset=True does not move them from there: keep numbers, texts, lists and dicts "
            "in one plain list or dict, or arrays, whose contents are not copied"
        )


def largest_holder(graph: Graph) -> tuple[int, Node]:
    """The largest holder of objects and their bytes; or, of holders in each other, the innermost of most."""
    nodes = itertools.islice(graph.nodes.values(), _MOST_SIZED)
    sizes = [(kinds.estimate_nbytes(node.value, arrays=False), node) for node in nodes]
    nbytes, largest = max(sizes, key=lambda pair: pair[0])
    for held, node in sizes:  # holders come before what they hold
        if node.holder is largest and held >= _MOST_OF * nbytes:
            nbytes, largest = held, node
    return nbytes, largest


def watch_copies(loader: Any, workers: Iterable[Any], counters: Counters) -> CopyWatch | None:
    """Begin to watch a loader's workers, which were just started; None if they are not forked.

    Only forked workers share objects with this process until they read them.
    """
    context = loader.multiprocessing_context or torch.multiprocessing
    if loader.worker_type == THREAD or context.get_start_method() != "fork" or counters.warned_of_copies:
        return None
    return CopyWatch(loader.dataset, workers, counters, is_shared=loader.share_dataset)
