"""Detects memory that forked workers copy merely by reading it, and advises a fix.

A page of Python objects is copied into a forked worker when it reads one of them, since that writes the
reference count. So what grows is measured, whatever it is; an owner is searched for only when that is much.
Advice runs no code of the program's, and what fails here is silent.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch.multiprocessing

from shmloader.arguments import THREAD
from shmloader.errors import NotSharedWarning, warn
from shmloader.host.process_memory import CopiedMemory
from shmloader.statistics import Counters
from shmloader.store import kinds, static
from shmloader.store.graph import Label, Node, is_small
from shmloader.store.static import is_a

LEAST_NBYTES = 32 << 20
"""What one worker has to copy, beyond a few batches, before anything is said."""

_BATCHES = 4  # a worker may make so many of the largest where this process had freed memory
_LEAST_OWNED = 0.25  # of what was copied, by what is called its owner
_INNERMOST = 0.8  # of the bytes of its holder, by what is named in its place
_MOST_NODES = 20_000  # objects that are looked at for an owner
_MOST_SECONDS = 1.0
_SAMPLED, _FURTHEST = 100, 10_000  # elements of a container that are; of a dict only among the first ones


class CopyWatch:
    """Measures what forked workers copy of the memory of this process.

    Costs microseconds when they start. When an epoch ends, one worker is measured, and only if it had enough
    page faults; that takes less time than to fork it.
    """

    def __init__(self, loader: Any, workers: Iterable[Any]) -> None:
        self._roots = loader.dataset, loader.collate_fn
        self._is_shared: bool = loader.share_dataset
        self._epochs = 0
        self._copied: dict[int, CopiedMemory] = {}
        with contextlib.suppress(Exception):
            self._copied = {worker.pid: CopiedMemory(worker.pid) for worker in workers}

    def ended(self, workers: Iterable[Any], largest_batch_nbytes: int) -> str:
        """Measure the workers when an epoch ends, before they are stopped.

        Returns:
            A warning for the program, if they have copied much; else "".
        """
        self._epochs += 1
        if self._epochs & (self._epochs - 1):  # of persistent workers after 1, 2, 4, 8 epochs
            return ""
        with contextlib.suppress(Exception):
            known = [self._copied[worker.pid] for worker in workers if worker.pid in self._copied]
            worst = max(known, key=CopiedMemory.most_nbytes)
            least = LEAST_NBYTES + _BATCHES * largest_batch_nbytes
            if worst.most_nbytes() >= least and (copied := worst.nbytes()) >= least:
                return self._describe(copied, len(known))
        return ""

    def _describe(self, copied: int, num_workers: int) -> str:
        dataset = self._roots[0]
        search = Search({static.type_name(dataset): dataset, "collate_fn": self._roots[1]})
        nbytes, owner = search.largest()
        said = (
            f"each of {num_workers} workers has copied up to {copied:,} bytes of this process's memory. Reading "
            "a Python object writes its reference count, and so copies it; "
        )
        if nbytes < _LEAST_OWNED * copied:
            return (
                f"{said}but no owner of so many was found: {search.looked}, {owner.path} is the largest, with "
                f"about {nbytes:,} bytes. It may be what the dataset's code reads elsewhere, objects of a "
                "library; or with one worker, what this process has changed since it was forked"
            )
        said += f"{owner.path}, a {static.type_name(owner.value)}, has about {nbytes:,} bytes of objects. "
        if not self._is_shared and _would_be_shared(owner, dataset):
            return f"{said}DataLoader(..., share_dataset=True) keeps them in memory once, for all workers"
        return (
            f"{said}share_dataset=True does not move them from there: keep numbers, texts, and lists and dicts of "
            "such, in one list or dict that is an attribute of the dataset; or keep arrays, which are not copied"
        )


class Search:
    """Looks for the owner of many objects, in what workers read: values, classes, functions and their globals.

    Attributes:
        looked: Where it has looked, and where it stopped.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        todo = deque(Node(root, name) for name, root in roots.items())
        seen = set(map(id, roots.values()))
        self._found: list[tuple[int, Node]] = []  # holders before what they hold
        stopped = ""
        end = time.monotonic() + _MOST_SECONDS
        while todo:
            node = todo.popleft()
            if len(seen) > _MOST_NODES or time.monotonic() > end:
                stopped = f" (the search stopped at {node.path})"
                break
            self._found.append((kinds.estimate_nbytes(node.value, only_objects=True), node))
            for label, child in _held_by(node.value):
                if not (
                    id(child) in seen or is_small(child) or is_a(child, ModuleType) or kinds.is_store(child)
                ):
                    seen.add(id(child))
                    todo.append(Node(child, label, node))
        self.looked = f"of {len(seen):,} objects to which {' and '.join(roots)} lead{stopped}"

    def largest(self) -> tuple[int, Node]:
        """The largest owner of Python objects and its bytes of them; of holders in a chain the innermost one."""
        nbytes, owner = max(self._found, key=lambda found: found[0])
        for size, node in self._found:
            if node.holder is owner and size >= _INNERMOST * nbytes:
                nbytes, owner = size, node
        return nbytes, owner


def _held_by(value: Any) -> Iterator[tuple[Label, Any]]:
    """What a value holds, and what its code uses; of large containers some elements."""
    if is_a(value, FunctionType):
        yield from _used_by(value)
    elif is_a(value, type):
        if static.is_python_class(value):
            yield from ((f".{name}", held) for name, held in static.names_of(value).items())
            yield from ((static.class_name(base), base) for base in static.bases_of(value))
    elif static.base_of(value) is not None or kinds.container_kind(value) is not None:
        for key, held in static.some_items(value, _SAMPLED, _FURTHEST):
            yield (key,) if is_small(key) else f"[<{static.type_name(key)}>]", held
        yield from ((f".{name}", held) for name, held in static.dict_of(value).items())
    else:
        own = static.dict_of(value)
        yield from kinds.attributes_of(value)
        yield static.type_name(value), type(value)
        referents = (held for held in gc.get_referents(value) if held is not own)
        yield from ((f".<{static.type_name(held)}>", held) for held in referents)


def _used_by(function: FunctionType) -> Iterator[tuple[Label, Any]]:
    """What a function keeps, and the globals that it names, also those in modules."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield f".__closure__[{name!r}]", cell.cell_contents
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    names = set(_names_in(function.__code__))
    for name in names:
        value = dict.get(function.__globals__, name)
        yield f"global {name}", value
        if is_a(value, ModuleType):
            held = static.dict_of(value)
            yield from ((f"global {name}.{inner}", held[inner]) for inner in names if inner in held)


def _names_in(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in code, and in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _names_in(constant)


def _would_be_shared(owner: Node, dataset: Any) -> bool:
    """Whether ``share_dataset=True`` moves what a dataset holds; see `shmloader.store.graph.Graph`."""
    value = owner.value
    if kinds.container_kind(value) is None or not all(map(kinds.is_data, kinds.some(value))):
        return False
    node: Node | None = owner
    while node is not None and node.value is not dataset:
        node = node.holder
        if node is not None and not kinds.is_open(node.value) and kinds.container_kind(node.value) is None:
            return False
    return node is not None


def watch_copies(loader: Any, workers: Iterable[Any], counters: Counters) -> CopyWatch | None:
    """Begin to watch a loader's workers, which were just started; None if they are not forked.

    Only forked workers share objects with this process until they read them.
    """
    context = loader.multiprocessing_context or torch.multiprocessing
    if loader.worker_type == THREAD or context.get_start_method() != "fork" or counters.warned_of_copies:
        return None
    return CopyWatch(loader, workers)


def warn_of_copies(copied: str, counters: Counters) -> None:
    """Give the warning of `CopyWatch.ended`, if there is one; one for each loader."""
    if copied and not counters.warned_of_copies:
        counters.warned_of_copies = True
        warn(copied, NotSharedWarning)
