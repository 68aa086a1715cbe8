"""Batches whose parts move themselves: tensors, containers of them, and classes of the program's own.

As torch's ``pin_memory`` goes through a batch: into mappings, sequences and named tuples, which are copied,
and not into strings; what has a method for it decides by itself, and all else stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import torch

from shmloader.errors import LoaderError

_CONSTANTS = (str, bytes, int, float, complex, bool, type(None), np.ndarray)


def numbered(device: torch.device) -> torch.device:
    """A device with its number, the current one's if it has none; that initialises the accelerator."""
    index: int | None = device.index
    return torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)


def is_plain(batch: Any) -> bool:
    """Whether a batch out of a slot consists of dense CPU tensors, built-in containers and constants."""
    kind = type(batch)
    if kind is torch.Tensor:
        return batch.layout is torch.strided and batch.is_cpu and not batch.is_nested
    if kind is list or kind is tuple:
        return all(map(is_plain, batch))
    if kind is dict:
        return all(map(is_plain, batch.values()))
    return kind in _CONSTANTS


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch to a device, without waiting for the copies of pinned memory.

    An object with a method ``to`` gets ``to(device, non_blocking=True)`` called, or ``to(device)`` if it does
    not take that.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        try:
            return batch.to(device, non_blocking=True)
        except TypeError:
            return batch.to(device)
    return _rebuilt(batch, lambda part: to_device(part, device))


def _rebuilt(batch: Any, move: Callable[[Any], Any]) -> Any:
    """A container like ``batch``, of moved parts; anything else as it is."""
    try:
        if isinstance(batch, MutableMapping):
            mapping = copy.copy(batch)  # it may have further attributes
            mapping.update({key: move(part) for key, part in batch.items()})
            return mapping
        if isinstance(batch, Mapping):
            kind: Any = type(batch)
            return kind({key: move(part) for key, part in batch.items()})
        if isinstance(batch, tuple):
            parts = map(move, batch)
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        if isinstance(batch, MutableSequence) and not isinstance(batch, bytearray):
            sequence = copy.copy(batch)
            for place, part in enumerate(batch):
                sequence[place] = move(part)
            return sequence
        if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes, bytearray)):
            kind = type(batch)
            return kind([move(part) for part in batch])
    except TypeError:  # a class that cannot be copied or made so, such as range
        if isinstance(batch, Mapping):
            return {key: move(part) for key, part in batch.items()}
        return [move(part) for part in batch]
    return batch


def capture_error(device: torch.device | None) -> LoaderError:
    """The error for ``next()`` of a loader with a device while the current stream captures a graph."""
    return LoaderError(
        f"next() of a loader with device='{device}' was called while a CUDA graph is captured: "
        "its copies would become a part of the graph. Take the batch before the capture begins, and copy "
        "it into the graph's input between replays. No batch was lost."
    )
