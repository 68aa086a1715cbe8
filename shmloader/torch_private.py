"""The only module that touches private names of torch, each with its reason.

torch gives no public way to these; all were checked against torch 2.13. Everything else in shmloader uses
torch's public interface.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.pin_memory as torch_pin_memory
import torch.utils.data._utils.worker as torch_worker
from torch.autograd import profiler
from torch.multiprocessing import reductions
from torch.storage import TypedStorage
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils.collate import (
    collate_numpy_array_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _sharding_worker_init_fn,
    _SingleProcessDataLoaderIter,
)

BaseIterator = _BaseDataLoaderIter
"""Base of torch's iterators. Subclassed because Lightning recognises live iterators by it when it pickles
checkpoints, and because its ``__init__`` and ``_reset`` fix the order of calls to the sampler and of draws
from the generator, which must stay identical to torch's."""

SingleProcessIterator = _SingleProcessDataLoaderIter
"""torch's iterator without workers; frameworks and users may look for its type."""

ITERABLE_KIND = _DatasetKind.Iterable
"""The value of ``loader._dataset_kind`` for iterable-style datasets."""

sharding_worker_init_fn = _sharding_worker_init_fn
"""Shards torch's DataPipes over ranks and workers before the user's ``worker_init_fn`` runs."""

collate_fn_map = default_collate_fn_map
"""The map that torch's ``default_collate`` reads at each call (public, but in a private package). Workers
change it so that a user's ``collate_fn`` built on ``default_collate`` collates into the slot too."""

__all__ = [
    "DATAPIPES",
    "ITERABLE_KIND",
    "BaseIterator",
    "SingleProcessIterator",
    "collate_fn_map",
    "collate_map_is_pristine",
    "collate_numpy_array_fn",
    "collate_tensor_fn",
    "pin_memory",
    "profiler_enabled",
    "reduce_tensor",
    "seed_datapipe",
    "set_worker_info",
    "sharding_worker_init_fn",
    "typed_storage",
    "untyped",
    "use_one_core_in_this_thread",
]

DATAPIPES = (IterDataPipe, MapDataPipe)


def set_worker_info(
    *, worker_id: int, num_workers: int, seed: int, dataset: Any, rng: Any, in_thread: bool = False
) -> None:
    """Make ``torch.utils.data.get_worker_info()`` answer in this worker process, or in this thread only.

    Args:
        worker_id: Its ``id``.
        num_workers: Its ``num_workers``.
        seed: Its ``seed``.
        dataset: Its ``dataset``.
        rng: Its ``rng``.
        in_thread: Whether the worker is the calling thread.
    """
    info = _worker_info(
        id=worker_id,
        num_workers=num_workers,
        seed=seed,
        dataset=dataset,
        rng=rng,
        worker_method="thread" if in_thread else "multiprocessing",
    )
    if in_thread:
        _have_worker_info_in_threads().worker_info = info
    else:
        torch_worker._worker_info = info


def _worker_info(*, rng: Any, worker_method: str, **known: Any) -> Any:
    kind: Any = torch_worker.WorkerInfo
    try:
        return kind(**known, rng=rng, worker_method=worker_method)
    except TypeError:  # an older torch, that has no such fields
        info = type("WorkerInfo", (kind,), {"__module__": kind.__module__})(**known)
        object.__setattr__(info, "rng", rng)
        object.__setattr__(info, "worker_method", worker_method)
        return info


_IN_THREADS = "_thread_local_worker_info"  # the name that torch has for it in versions to come
_installing = threading.Lock()


@functools.cache
def _have_worker_info_in_threads() -> Any:
    """Let ``get_worker_info()`` look at what the calling thread was given before it looks at the process's.

    Programs hold the function itself (``from torch.utils.data import get_worker_info``), and it reads a
    global name of its module, so it is its code that is replaced. That stays so: in threads that were given
    nothing it answers as before.
    """
    with _installing:
        in_threads: Any = getattr(torch_worker, _IN_THREADS, None)
        if in_threads is None:
            in_threads = threading.local()
            setattr(torch_worker, _IN_THREADS, in_threads)
            torch_worker.get_worker_info.__code__ = _get_worker_info.__code__
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=functools.partial(_keep_after_fork, in_threads))
    return in_threads


def _get_worker_info() -> Any:
    # Runs as torch's own function, among the names of torch's module.
    info = getattr(_thread_local_worker_info, "worker_info", None)  # type: ignore[name-defined]  # noqa: F821
    return _worker_info if info is None else info


def _keep_after_fork(in_threads: Any) -> None:
    """A process forked by a worker thread answers as one forked by a worker process, until it is a worker."""
    info = getattr(in_threads, "worker_info", None)
    if info is not None:
        in_threads.worker_info = None
        torch_worker._worker_info = info


def use_one_core_in_this_thread() -> None:
    """Let torch's operations in the calling thread use no further threads, as ``set_num_threads(1)`` would.

    That function would also change what threads that the program starts later begin with. What OpenMP is told
    holds for the calling thread only. Where torch does not use it, nothing happens.
    """
    torch.get_num_threads()  # by which torch settles this thread's number; it would do so later otherwise
    try:
        ctypes.CDLL(None).omp_set_num_threads(1)
    except (AttributeError, OSError, TypeError):
        return


def seed_datapipe(dataset: Any, shared_seed: int | None) -> Any:
    """Give an ``IterDataPipe`` graph the seed that all workers of an epoch share; others pass through."""
    if not isinstance(dataset, IterDataPipe):
        return dataset
    if shared_seed is None:
        raise AssertionError("an IterDataPipe needs the epoch's shared seed")
    shared_rng = torch.Generator()
    shared_rng.manual_seed(shared_seed)
    return torch.utils.data.graph_settings.apply_random_seed(dataset, shared_rng)


def collate_map_is_pristine(ours: tuple[Any, ...] = ()) -> bool:
    """Whether torch's map of collate functions has torch's keys, and torch's functions or ``ours``."""
    keys = {torch.Tensor, np.ndarray, (np.bool_, np.number, np.object_), float, int, str, bytes}
    module = collate_tensor_fn.__module__
    return default_collate_fn_map.keys() == keys and all(
        function in ours or getattr(function, "__module__", None) == module
        for function in default_collate_fn_map.values()
    )


def profiler_enabled() -> bool:
    """Whether torch's profiler is recording: only then ``next()`` opens a profiler range.

    This is the flag that torch keeps in Python for quick checks, and at which its compiled code looks. The
    deprecated ``torch.autograd.profiler_legacy`` does not set it.
    """
    return profiler._is_profiler_enabled


def reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How torch itself sends a tensor to another process (sparse, nested, other devices)."""
    reduced: tuple[Any, ...] = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return reduced


def pin_memory(batch: Any, device: str | None) -> Any:
    """Copy a batch to pinned memory as torch's pin-memory thread does."""
    return torch_pin_memory.pin_memory(batch, device)  # type: ignore[no-untyped-call]


def untyped(storage: TypedStorage) -> torch.UntypedStorage:
    """The bytes below a ``TypedStorage``, without its deprecation warning."""
    return storage._untyped_storage


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    """Wrap bytes as a ``TypedStorage``, without its deprecation warning."""
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
