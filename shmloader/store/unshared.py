"""Detects memory that forked workers copy merely by reading it, and advises a fix.

A page of Python objects is copied into a forked worker when it reads one of them, since that writes the
reference count. So what grows is measured, whatever it is; an owner is searched for only when that is much.
Advice runs no code of the program's, and what fails here is silent.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch.multiprocessing

from shmloader.errors import NotSharedWarning, warn
from shmloader.memory.limits import memory_headroom
from shmloader.settings import THREAD, option_of
from shmloader.statistics import Counters
from shmloader.store import objects, static
from shmloader.store.graph import Graph, Node
from shmloader.store_hooks import NoCopies

LEAST_NBYTES = 32 << 20
"""Bytes that one worker has to copy, beyond a few batches, before a warning is given."""

_LAZY = f"{__package__}.lazy"
_BATCHES = 4  # a worker may make so many of the largest in memory that this process has freed
_LEAST_OWNED = 0.25  # of what was copied, by what is called its owner
_MUCH = 0.2  # of this process's memory, after which the program is told at once
_EVERY_NS = 200_000_000  # how often to look
_MOST_OF = 0.5  # its holder's bytes, by what is named in its holder's place
_MOST_SIZED = 2000  # objects, those next to the dataset, whose sizes are estimated


class CopiedMemory:
    """The memory of its parent that a forked process copies, without its own and without shared memory.

    A process that gives inherited memory back, as when it collects its parent's garbage, and also allocates
    may seem to have copied as many bytes more.

    Attributes:
        inherited_nbytes: Bytes that it began with, and so the most that it can copy.

    Raises:
        psutil.Error, OSError: In every method, if the process is gone.
    """

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc", str(pid))
        # It may have allocated by now: it began with no more than its parent has.
        memories = (psutil.Process(pid).memory_info(), psutil.Process().memory_info())
        self.inherited_nbytes: int = min(memory.rss - memory.shared for memory in memories)

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
        allocated = max(0, sum(anonymous) - self.inherited_nbytes)
        return min(self.most_nbytes(), sum(map(min, private, anonymous))) - allocated


class CopyWatch(NoCopies):
    """Measures what forked workers copy of this process's memory, and looks for the owner in the dataset.

    Costs microseconds when they start. It looks at page faults every 0.2 seconds, and measures one worker if
    it had enough of them; each time in vain makes it look less often. So the program is warned in the middle
    of an epoch, once a fifth is copied or the rest would not fit; else at the epoch's end.

    Attributes:
        due_ns: When to `look` again, by ``time.perf_counter_ns()``.
    """

    def __init__(self, dataset: Any, workers: Iterable[Any], counters: Counters, *, is_shared: bool) -> None:
        self.due_ns: float = 0
        self._dataset, self._counters, self._is_shared = dataset, counters, is_shared
        self._said, self._epochs = "", 0
        self._patience = 10  # how many times as long as looking took passes until the next look
        self._copied: dict[int, CopiedMemory] = {}
        with contextlib.suppress(Exception):
            self._copied = {worker.pid: CopiedMemory(worker.pid) for worker in workers}

    def look(self, workers: Iterable[Any], largest_batch_nbytes: int) -> None:
        """Measure the workers in the middle of an epoch."""
        began_ns = time.perf_counter_ns()
        with contextlib.suppress(Exception):
            known = self._known(workers)
            copied = _most_copied(known, largest_batch_nbytes)
            all_nbytes = max(one.inherited_nbytes for one in known)
            room = memory_headroom()
            needed = (all_nbytes - copied) * len(known)
            if copied and (copied >= _MUCH * all_nbytes or needed > room.available_nbytes):
                left = f" {room.available_nbytes:,} bytes are left in {room.source}." if needed > 0 else ""
                self._said = self._describe(copied, len(known), left)
        now_ns = time.perf_counter_ns()
        is_done = self._said or self._counters.warned_of_copies or not self._copied
        wait_ns = self._patience * (now_ns - began_ns)
        if wait_ns > _EVERY_NS:  # it was measured, in vain
            self._patience *= 2
        self.due_ns = math.inf if is_done else now_ns + max(_EVERY_NS, wait_ns)

    def measure(self, workers: Iterable[Any], largest_batch_nbytes: int) -> None:
        """Measure the workers when an epoch ends, before they are stopped."""
        self._epochs += 1
        if self._epochs & (self._epochs - 1):  # of persistent workers after 1, 2, 4, 8 epochs
            return
        with contextlib.suppress(Exception):
            known = self._known(workers)
            if copied := _most_copied(known, largest_batch_nbytes):
                self._said = self._describe(copied, len(known))

    def _known(self, workers: Iterable[Any]) -> list[CopiedMemory]:
        return [self._copied[worker.pid] for worker in workers if worker.pid in self._copied]

    def warn(self) -> None:
        """Warn if the workers have copied much; once for each loader."""
        if self._said and self._counters.warns_first("warned_of_copies"):
            warn(self._said, NotSharedWarning)

    def _describe(self, copied: int, num_workers: int, left: str = "") -> str:
        graph = Graph(self._dataset)
        nbytes, owner = largest_holder(graph)
        said = (
            f"each of {num_workers} workers has copied up to {copied:,} bytes of this process's memory: "
            f"reading Python objects writes their reference counts.{left}"
        )
        if nbytes >= _LEAST_OWNED * copied:
            return f"{said} {_owner_and_cure(graph, is_shared=self._is_shared)}"
        # It may be what this process has written to, as in training on the CPU; workers read row groups into
        # memory that a lazily opened store has used here.
        if num_workers == 1 or any(type(one.value).__module__ == _LAZY for one in graph.nodes.values()):
            return ""
        stopped = f" until it stopped at {graph.stopped.path}" if graph.stopped else ""
        return (
            f"{said} No owner of so many was found: of {len(graph.nodes):,} objects that a search in the "
            f"dataset's attributes saw{stopped}, {owner.path} holds most, about {nbytes:,} bytes. Look "
            "at globals, class attributes, default arguments and closures that the dataset's code uses"
        )


def _most_copied(known: list[CopiedMemory], largest_batch_nbytes: int) -> int:
    """Bytes that one of the workers has copied; 0 if that is too little to speak of."""
    least = LEAST_NBYTES + _BATCHES * largest_batch_nbytes
    worst = max(known, key=CopiedMemory.most_nbytes)
    copied = worst.nbytes() if worst.most_nbytes() >= least else 0
    return copied if copied >= least else 0


def _owner_and_cure(graph: Graph, *, is_shared: bool) -> str:
    """Sentences on the largest holder of Python objects, and on how to have them in memory once."""
    nbytes, owner = largest_holder(graph)
    said = f"{owner.path}, of type {static.name_of(type(owner.value))}, has about {nbytes:,} bytes of them."
    if not is_shared and any(one.plan and owner in (one, one.holder) for one in graph.nodes.values()):
        return f"{said} DataLoader(..., share_dataset=True) keeps them in memory once, for all workers"
    return (
        f"{said} share_dataset=True does not move them from there: keep numbers, texts, lists and dicts "
        "in one plain list or dict, or arrays, whose contents are not copied"
    )


def _cure_of(dataset: Any, *, is_shared: bool) -> str:
    """See `_owner_and_cure`; "" for a dataset that holds few Python objects."""
    with contextlib.suppress(Exception):
        graph = Graph(dataset)
        if largest_holder(graph)[0] >= LEAST_NBYTES:
            return _owner_and_cure(graph, is_shared=is_shared)
    return ""


def advise_sharing(dataset: Any) -> str:
    """Sentences on a dataset whose workers had too little memory; "" if it holds few Python objects."""
    cure = _cure_of(dataset, is_shared=False)
    return cure and f"Each worker may hold the dataset's Python objects. {cure}."


def _warn_of_rebuilding(loader: Any, num_workers: int, counters: Counters, pickled_nbytes: int) -> None:
    """Warn that started processes rebuild the dataset's objects, each for itself."""
    if said := _cure_of(loader.dataset, is_shared=option_of(loader, "share_dataset")):
        counters.warns_first("warned_of_copies")
        warn(
            f"each of {num_workers} workers rebuilds the dataset's Python objects from a pickle of "
            f"{pickled_nbytes:,} bytes, and holds them for itself (start method spawn or forkserver). {said}",
            NotSharedWarning,
        )


def largest_holder(graph: Graph) -> tuple[int, Node]:
    """The largest holder of objects and their bytes; or, of holders in each other, the innermost of most."""
    nodes = itertools.islice(graph.nodes.values(), _MOST_SIZED)
    sizes = [(objects.estimate_nbytes(node.value, arrays=False), node) for node in nodes]
    nbytes, largest = max(sizes, key=lambda pair: pair[0])
    for held, node in sizes:  # holders come before what they hold
        if node.holder is largest and held >= _MOST_OF * nbytes:
            nbytes, largest = held, node
    return nbytes, largest


def watch_copies(loader: Any, workers: Sequence[Any], counters: Counters, pickled_nbytes: int) -> NoCopies:
    """Begin to watch a loader's workers, which were just started, if they are forked.

    Only forked workers share objects with this process until they read them. Others were sent a pickle: one
    of many objects is warned of at once.
    """
    if option_of(loader, "worker_type") == THREAD or counters.warned_of_copies:
        return NoCopies()
    context = loader.multiprocessing_context or torch.multiprocessing
    if context.get_start_method() == "fork":
        return CopyWatch(loader.dataset, workers, counters, is_shared=option_of(loader, "share_dataset"))
    if pickled_nbytes >= LEAST_NBYTES // 4:  # of which Python objects take several times as many
        _warn_of_rebuilding(loader, len(workers), counters, pickled_nbytes)
    return NoCopies()
