"""How much memory Python objects take: an estimate from a sample."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

_SAMPLED_ROWS = 64
_SAMPLED_OF_CHUNK = 8
_MOST_DEPTH = 12
_LIST_ENTRY_NBYTES = 8


class SizeEstimate:
    """What the rows of a list take, estimated while chunks of it go by.

    Attributes:
        nbytes: The estimate.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, values: Sequence[Any], sampled_rows: int = _SAMPLED_OF_CHUNK) -> None:
        """Add a chunk of rows, of which only about ``sampled_rows`` are looked at."""
        sample = values[:: max(1, len(values) // sampled_rows)]
        seen: set[int] = set()  # keys and small numbers are one object in many rows
        nbytes = sum([nbytes_of(value, seen) for value in sample])
        self.nbytes += round(nbytes / max(1, len(sample)) * len(values)) + _LIST_ENTRY_NBYTES * len(values)


def nbytes_of(value: Any, seen: set[int], depth: int = 0) -> int:
    """Bytes of an object and what it refers to, each object once.

    Args:
        value: The object.
        seen: The ids of what was counted before; added to.
        depth: How deep ``value`` lies.
    """
    if id(value) in seen or isinstance(value, type):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return _nbytes_of_tensor(value)
    nbytes = sys.getsizeof(value, 64)
    if isinstance(value, np.ndarray):
        return nbytes if value.base is None else nbytes + value.nbytes
    if depth >= _MOST_DEPTH or isinstance(value, str | bytes | int | float):
        return nbytes
    if isinstance(value, Mapping):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)
    else:
        inside = [*getattr(value, "__dict__", {}).values()]
    return nbytes + sum([nbytes_of(item, seen, depth + 1) for item in inside])


def _nbytes_of_tensor(tensor: torch.Tensor) -> int:
    object_nbytes = 300  # the Python object, TensorImpl and StorageImpl, roughly
    return object_nbytes + (tensor.numel() * tensor.element_size() if tensor.layout is torch.strided else 0)


def estimate_nbytes(value: Any) -> int:
    """Bytes that an object takes in memory, with all that it refers to, estimated from a sample.

    Args:
        value: Any object; of a list, tuple or dict only some items are looked at.
    """
    if isinstance(value, list | tuple) and len(value) > _SAMPLED_ROWS:
        estimate = SizeEstimate()
        estimate.add(value, _SAMPLED_ROWS)
        return estimate.nbytes + sys.getsizeof(())
    if isinstance(value, dict) and len(value) > _SAMPLED_ROWS:
        step = len(value) // _SAMPLED_ROWS
        sample = dict(islice(value.items(), 0, len(value), step))
        seen: set[int] = set()
        inside = sum([nbytes_of(item, seen) for pair in sample.items() for item in pair])
        return sys.getsizeof(value) + round(inside / len(sample) * len(value))
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int) and not isinstance(value, torch.Tensor):
        return nbytes  # ndarrays, also views; Arrow
    return nbytes_of(value, set())
