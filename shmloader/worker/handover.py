"""``worker_max_nbytes``: when a worker process hands over to a new one, and what. Runs in the worker.

The new one must draw what this one would have drawn. So the states of the generators are handed over, and the
dataset's own state if it has a ``state_dict`` pair. What else a dataset keeps cannot be known: a leak and a
cache look alike, and are left behind. But what is certain to be a state is refused by name.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import random
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from shmloader.errors import LoaderError
from shmloader.indices.samplers import has_state
from shmloader.memory.process_memory import private_nbytes
from shmloader.store_hooks import hooks
from shmloader.worker.epoch_settings import datasets_in, owners_in
from shmloader.worker.heap import WarmHeap
from shmloader.worker.random_state import (
    Generators,
    global_generators,
    global_states,
    set_global_states,
)

_PAUSE, _LEAST_PAUSE = 50, 4  # times as long passes until the next look as the last one took
_MOST_PAUSE_NS = 250_000_000
_MOST_OBJECTS = 10_000  # that are searched for states
_LONG = 64  # items: a longer list or dict holds samples
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_SCALARS = (bool, int, float, str, bytes)
_LEAVES = (*_SCALARS, type(None), type, types.ModuleType, torch.Tensor, np.ndarray, Generators)
_ADVICE = (
    "A worker that is replaced (worker_max_nbytes) would lose it. Give the dataset state_dict() and "
    "load_state_dict(state), which are called in the workers; return {} if it does not matter"
)


class Handover:
    """One worker's limit of private memory, and its handover to the process that replaces it."""

    def __init__(self, max_nbytes: int, generators: Generators, heap: WarmHeap | None) -> None:
        self.nbytes = 0  # private memory when it was looked at last
        self._max_nbytes = max_nbytes
        self._generators = generators  # those of ``get_worker_info().rng``
        self._heap = heap  # if it keeps memory that is free
        self._looked_ns = self._due_ns = 0
        self._scalars: dict[str, Any] | None = None  # of the datasets, since the epoch's first batch
        self._received = bytearray()  # of the state of the worker before

    def begin_epoch(self) -> None:
        """Compare the datasets' numbers from the next batch on: ``set_epoch()`` may have changed them."""
        self._scalars = None

    def is_due(self, dataset: Any, collate_fn: Any) -> bool:
        """Whether the worker has more private memory than the limit; looks from time to time, after a batch.

        Sooner if the memory, growing on as since the last look, would reach the limit before.

        Raises:
            LoaderError: If the worker cannot be replaced: with the state that would be lost, or if a new one
                would have as much memory.
        """
        if time.perf_counter_ns() < self._due_ns:
            return False
        began_ns = time.thread_time_ns()  # not the time in which others had the core
        is_first, before_nbytes, self.nbytes = not self.nbytes, self.nbytes, private_nbytes(os.getpid())
        self._refuse_states(dataset, collate_fn, thoroughly=is_first)
        if self.nbytes > self._max_nbytes and self._heap is not None:
            self._heap.trim()
            self.nbytes = private_nbytes(os.getpid())
        if is_first and not 0 < self.nbytes <= self._max_nbytes:
            raise LoaderError(
                f"worker_max_nbytes={self._max_nbytes:,}: a worker has {self.nbytes:,} bytes of private "
                "memory after its first batch, and a new one would have as much. Pass at least twice that"
                if self.nbytes
                else "worker_max_nbytes: this kernel does not tell private memory (/proc/PID/smaps_rollup)"
            )
        now_ns, spent_ns = time.perf_counter_ns(), time.thread_time_ns() - began_ns
        if not is_first:  # the second batch tells which numbers change
            grown_nbytes, left_nbytes = self.nbytes - before_nbytes, self._max_nbytes - self.nbytes
            pause_ns = min(_PAUSE * spent_ns, _MOST_PAUSE_NS)
            if grown_nbytes > 0:
                pause_ns = min(pause_ns, (now_ns - self._looked_ns) * left_nbytes // grown_nbytes)
            self._due_ns = now_ns + max(pause_ns, _LEAST_PAUSE * spent_ns)
        self._looked_ns = now_ns
        return self.nbytes > self._max_nbytes

    def _refuse_states(self, dataset: Any, collate_fn: Any, *, thoroughly: bool) -> None:
        """Raise the error for a state that would be lost: a number that has changed, thoroughly an object."""
        owners = owners_in(dataset, has_state)
        scalars = _scalars_of(dataset)
        before, self._scalars = self._scalars or scalars, scalars
        for path, was, value in _changes(before, scalars):
            raise LoaderError(f"{path} has changed from {was!r:.50} to {value!r:.50}. {_ADVICE}")
        if thoroughly:
            for path, what in _states_in({"dataset": dataset, "collate_fn": collate_fn}, owners):
                raise LoaderError(f"{path} is {what}. {_ADVICE}")
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                raise LoaderError(
                    "worker_max_nbytes: a worker uses CUDA, whose generators a new one could not go on with"
                )

    def pack(self, dataset: Any, collate_fn: Any) -> bytes:
        """The state that a new worker goes on with; raises `LoaderError` if a state would be lost."""
        self._refuse_states(dataset, collate_fn, thoroughly=True)
        owned = [owner.state_dict() for owner in owners_in(dataset, has_state)]
        return pickle.dumps((global_states(), self._generators.states(), self._scalars, owned), 5)

    def receive(self, dataset: Any, total_nbytes: int, begin: int, piece: bytes) -> None:
        """Receive a piece of such a state, and go on with it once it is whole.

        Raises:
            LoaderError: If the program has changed its dataset since its workers were started.
        """
        self._received[begin:] = piece
        if len(self._received) < total_nbytes:
            return
        # Packed by this worker's predecessor.
        states, own_states, scalars, owned = pickle.loads(self._received[:total_nbytes])
        for path, was, value in _changes(scalars or {}, _scalars_of(dataset)):
            raise LoaderError(
                f"{path} is {value!r:.50} in a worker that replaces one in which it is {was!r:.50}: the "
                "program has changed its dataset since its workers were started. With worker_max_nbytes "
                "change it before iter(), without persistent_workers"
            )
        for owner, state in zip(owners_in(dataset, has_state), owned, strict=True):
            owner.load_state_dict(state)
        self._generators.set_states(own_states)
        set_global_states(states)  # last: what the program's code above draws does not count


def _scalars_of(dataset: Any) -> dict[str, Any]:
    """Numbers and strings that are attributes of datasets without a state of their own."""
    found = {}
    for number, one in enumerate(datasets_in(dataset, has_state)):
        if not (has_state(one) or hooks.is_store(one)):  # which count what was read of them
            for name, value in _attributes_of(one).items():
                if isinstance(value, _SCALARS):
                    inside = f" (dataset {number} inside it)" if number else ""
                    found[f"{type(one).__qualname__}.{name}{inside}"] = value
    return found


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Numbers and strings that differ from those before: path, value then, value now."""
    for path, value in now.items():
        was = before.get(path, value)
        if was != value and repr(was) != repr(value):  # NaN differs from itself
            yield path, was, value


def _states_in(roots: dict[str, Any], owners: list[Any]) -> Iterator[tuple[str, str]]:
    """Random generators and iterators that objects hold: the path of attributes to each, and what it is."""
    seen = {id(one) for one in (*owners, *global_generators())}  # what is handed over
    todo = list(roots.items())
    for path, value in itertools.islice(todo, _MOST_OBJECTS):  # it grows meanwhile
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _RANDOM):
            yield path, f"a random generator of its own ({type(value).__qualname__})"
        elif hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools"):
            yield path, f"an iterator ({type(value).__qualname__})"
        todo += _held_by(path, value)


def _held_by(path: str, value: Any) -> list[tuple[str, Any]]:
    """The objects that one holds, in attributes, short containers, closures and partial arguments."""
    if isinstance(value, dict):
        return [(f"{path}[{key!r:.50}]", one) for key, one in itertools.islice(value.items(), _LONG)]
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"{path}[{number}]", one) for number, one in enumerate(itertools.islice(value, _LONG))]
    if isinstance(value, functools.partial):
        return [(f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords")]
    if isinstance(value, types.MethodType):
        return [(f"{path}.__self__", value.__self__)]
    if isinstance(value, types.FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != types.CellType()]
        names = value.__code__.co_freevars
        return [(f"{path}, its {name}", cell.cell_contents) for name, cell in zip(names, cells, strict=False)]
    return [(f"{path}.{name}", one) for name, one in _attributes_of(value).items()]


def _attributes_of(value: Any) -> dict[str, Any]:
    try:
        return dict(vars(value))
    except TypeError:  # it has none, only slots, or a `__getattr__` that makes one up
        return {}
