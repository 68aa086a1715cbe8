"""Estimates, from samples, of how much memory Python objects take."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

_SAMPLED = 64  # of the values in one container
_SAMPLED_OF_CHUNK = 8
_MOST_DEPTH = 12
_TENSOR_NBYTES = 300  # the Python object, TensorImpl and StorageImpl, roughly


def estimate_nbytes(value: Any) -> int:
    """Bytes that an object takes in memory, with all that it refers to, estimated from samples."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.reshape(-1).tolist()
    nbytes = None if isinstance(value, torch.Tensor) else getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else _nbytes_of(value, set())  # ndarrays, also views; Arrow


def nbytes_of_rows(rows: Sequence[Any], sampled: int = _SAMPLED_OF_CHUNK) -> int:
    """Bytes that rows take as Python objects, with their places in a list, from about so many of them."""
    return 8 * len(rows) + _of_some(rows, len(rows), set(), 0, sampled)


def _of_some(values: Any, count: int, seen: set[int], depth: int, sampled: int = _SAMPLED) -> int:
    """Bytes of the values of a container, from those of some.

    The first one has paid for what they share (keys, small numbers, a vocabulary): that is counted once.
    """
    step = max(1, count // sampled)
    some = values[::step] if isinstance(values, list | tuple) else islice(values, 0, None, step)
    first, *rest = [_nbytes_of(value, seen, depth) for value in some] or [0]
    return first + (round(sum(rest) / len(rest) * (count - 1)) if rest else first * (count - 1))


def _nbytes_of(value: Any, seen: set[int], depth: int = 0) -> int:
    """Bytes of an object and what it refers to, without what was ``seen`` before, by ``id``."""
    if id(value) in seen or isinstance(value, type):
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        items = value.numel() if value.layout is torch.strided else 0
        return _TENSOR_NBYTES + items * value.element_size()
    nbytes = sys.getsizeof(value, 64)
    if isinstance(value, np.ndarray):
        return nbytes if value.base is None else nbytes + value.nbytes
    if depth >= _MOST_DEPTH or isinstance(value, str | bytes | int | float):
        return nbytes
    if isinstance(value, Mapping):
        keys = _of_some(value.keys(), len(value), seen, depth + 1)
        return nbytes + keys + _of_some(value.values(), len(value), seen, depth + 1)
    if not isinstance(value, list | tuple | set | frozenset | deque):
        value = list(getattr(value, "__dict__", {}).values())
    return nbytes + _of_some(value, len(value), seen, depth + 1)
