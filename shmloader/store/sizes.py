"""Estimates, from samples, of how much memory Python objects take."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

_SAMPLED_ROWS = 64
_SAMPLED_OF_CHUNK = 8
_MOST_DEPTH = 12
_LIST_ENTRY_NBYTES = 8
_MOST_LOOKED = 4096  # of the values in one container


def nbytes_of_rows(rows: Sequence[Any], sampled_rows: int = _SAMPLED_OF_CHUNK) -> int:
    """Bytes that rows take as Python objects, with the list that they are in.

    Args:
        rows: The rows, of which only some are looked at.
        sampled_rows: About how many.
    """
    sample = rows[:: max(1, len(rows) // sampled_rows)]
    seen: set[int] = set()
    sampled = [nbytes_of(value, seen) for value in sample]
    return _of_all(sampled, len(rows)) + _LIST_ENTRY_NBYTES * len(rows)


def _of_all(sampled: list[int], rows: int) -> int:
    """Bytes of all rows, from those of some.

    The first one has paid for what they share (keys, small numbers, a vocabulary): that is counted once.
    """
    if len(sampled) < 2:
        return sum(sampled) * rows
    return sampled[0] + round(sum(sampled[1:]) / (len(sampled) - 1) * (rows - 1))


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
        object_nbytes = 300  # the Python object, TensorImpl and StorageImpl, roughly
        return object_nbytes + (value.numel() * value.element_size() if value.layout is torch.strided else 0)
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
    if len(inside) > _MOST_LOOKED:
        sample = inside[:: len(inside) // _MOST_LOOKED + 1]
        return nbytes + _of_all([nbytes_of(item, seen, depth + 1) for item in sample], len(inside))
    return nbytes + sum([nbytes_of(item, seen, depth + 1) for item in inside])


def estimate_nbytes(value: Any) -> int:
    """Bytes that an object takes in memory, with all that it refers to, estimated from a sample.

    Args:
        value: Any object; of a container only some items are looked at.
    """
    if isinstance(value, list | tuple | deque) and len(value) > _SAMPLED_ROWS:
        return nbytes_of_rows(
            value if not isinstance(value, deque) else list(value), _SAMPLED_ROWS
        ) + sys.getsizeof(())
    if isinstance(value, dict | set | frozenset) and len(value) > _SAMPLED_ROWS:
        step = len(value) // _SAMPLED_ROWS
        items: Any = value.items() if isinstance(value, dict) else value
        seen: set[int] = set()
        sample = list(islice(items, 0, len(value), step))
        if isinstance(value, dict):
            inside = [nbytes_of(key, seen) + nbytes_of(item, seen) for key, item in sample]
        else:
            inside = [nbytes_of(item, seen) for item in sample]
        return sys.getsizeof(value) + _of_all(inside, len(value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return nbytes_of_rows(value.reshape(-1).tolist(), _SAMPLED_ROWS)
    nbytes = None if isinstance(value, torch.Tensor) else getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else nbytes_of(value, set())  # ndarrays, also views; Arrow
