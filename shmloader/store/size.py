"""How much memory Python objects take, and how much they will take in a store: estimates from samples."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

_SAMPLED_ROWS = 64
_SAMPLED_OF_CHUNK = 8
_MOST_DEPTH = 12
_LIST_ENTRY_NBYTES = 8
_MOST_LOOKED = 4096  # of the values in one container


class SizeEstimate:
    """What the rows of a list take, estimated while chunks of it go by.

    Attributes:
        nbytes: The estimate.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def add(
        self, values: Sequence[Any], sampled_rows: int = _SAMPLED_OF_CHUNK, known: Container[int] = ()
    ) -> None:
        """Add a chunk of rows.

        Args:
            values: The rows, of which only some are looked at.
            sampled_rows: About how many.
            known: Ids of objects that have been counted before.
        """
        sample = values[:: max(1, len(values) // max(1, sampled_rows))]
        seen: set[int] = set()
        sampled = [nbytes_of(value, seen, known=known) for value in sample]
        self.nbytes += _of_all(sampled, len(values)) + _LIST_ENTRY_NBYTES * len(values)


def _of_all(sampled: list[int], rows: int) -> int:
    """Bytes of all rows, from those of some.

    The first one has paid for what they share (keys, small numbers, a vocabulary): that is counted once.
    """
    if len(sampled) < 2:
        return sum(sampled) * rows
    return sampled[0] + round(sum(sampled[1:]) / (len(sampled) - 1) * (rows - 1))


def nbytes_of_rows(sample: Sequence[Any], rows: int) -> int:
    """Bytes that rows take as Python objects, from those of some that are evenly spaced."""
    seen: set[int] = set()
    return _of_all([nbytes_of(value, seen) for value in sample], rows)


def nbytes_of(value: Any, seen: set[int], depth: int = 0, known: Container[int] = ()) -> int:
    """Bytes of an object and what it refers to, each object once.

    Args:
        value: The object.
        seen: The ids of what was counted before; added to.
        depth: How deep ``value`` lies.
        known: More ids of what was counted before.
    """
    if id(value) in seen or isinstance(value, type) or id(value) in known:
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
    if len(inside) > _MOST_LOOKED:
        sample = inside[:: len(inside) // _MOST_LOOKED + 1]
        return nbytes + _of_all([nbytes_of(item, seen, depth + 1, known) for item in sample], len(inside))
    return nbytes + sum([nbytes_of(item, seen, depth + 1, known) for item in inside])


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
        inside = [nbytes_of(key, seen) + nbytes_of(item, seen) for key, item in sample.items()]
        return sys.getsizeof(value) + _of_all(inside, len(value))
    nbytes = None if isinstance(value, torch.Tensor) else getattr(value, "nbytes", None)
    return nbytes if isinstance(nbytes, int) else nbytes_of(value, set())  # ndarrays, also views; Arrow


_SAMPLED_STORED = 8
_SAMPLED_INSIDE = 4
_MOST_DEPTH_STORED = 3
_OTHER_NBYTES = 48  # of a pickle


def mean_stored_nbytes(values: Sequence[Any]) -> float:
    """Bytes that a value takes in a store, roughly and on the average, from a few of the values."""
    sample = values[:: max(1, len(values) // _SAMPLED_STORED)]
    return sum([_stored_nbytes(value, 0) for value in sample]) / max(1, len(sample))


def _stored_nbytes(value: Any, depth: int) -> float:
    kind = type(value)  # a subclass is pickled
    if kind is int:
        return 1 if -128 <= value < 128 else 4
    if kind is float:
        return 8
    if kind is bool or value is None:
        return 0.125
    if kind is str or kind is bytes:
        return 4 + len(value)
    if kind in (list, tuple):
        return (4 if kind is list else 0) + _stored_inside(list(value), depth)
    if kind is dict:
        return _stored_inside(list(value.values()), depth)
    if isinstance(value, np.generic | np.ndarray):
        return value.nbytes
    if isinstance(value, torch.Tensor):
        return _nbytes_of_tensor(value)
    if isinstance(value, list | tuple):  # a namedtuple
        return _stored_inside(list(value), depth)
    return max(_OTHER_NBYTES, _stored_inside([*getattr(value, "__dict__", {}).values()], depth))


def _stored_inside(values: list[Any], depth: int) -> float:
    if depth == _MOST_DEPTH_STORED:
        return 8.0 * len(values)
    sample = values[:: max(1, len(values) // _SAMPLED_INSIDE)]
    nbytes = sum([_stored_nbytes(value, depth + 1) for value in sample])
    return nbytes / max(1, len(sample)) * len(values)
