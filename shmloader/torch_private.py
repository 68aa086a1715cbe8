"""The only module that touches private names of torch, each with its reason.

torch gives no public way to these; all were checked against torch 2.13. Everything else in shmloader uses
torch's public interface.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.pin_memory as torch_pin_memory
import torch.utils.data._utils.worker as torch_worker
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
]

DATAPIPES = (IterDataPipe, MapDataPipe)


def set_worker_info(*, worker_id: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Make ``torch.utils.data.get_worker_info()`` answer in this worker process."""
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=worker_id, num_workers=num_workers, seed=seed, dataset=dataset
    )


def seed_datapipe(dataset: Any, shared_seed: int | None) -> Any:
    """Give an ``IterDataPipe`` graph the seed that all workers of an epoch share; others pass through."""
    if not isinstance(dataset, IterDataPipe):
        return dataset
    if shared_seed is None:
        raise AssertionError("an IterDataPipe needs the epoch's shared seed")
    shared_rng = torch.Generator()
    shared_rng.manual_seed(shared_seed)
    return torch.utils.data.graph_settings.apply_random_seed(dataset, shared_rng)


def collate_map_is_pristine() -> bool:
    """Whether torch's map of collate functions is as torch made it: same keys, and torch's functions."""
    keys = {torch.Tensor, np.ndarray, (np.bool_, np.number, np.object_), float, int, str, bytes}
    module = collate_tensor_fn.__module__
    return default_collate_fn_map.keys() == keys and all(
        getattr(function, "__module__", None) == module for function in default_collate_fn_map.values()
    )


profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether torch's autograd profiler is recording: only then ``next()`` opens a profiler range."""


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
