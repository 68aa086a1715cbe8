"""Whether torch's ``default_collate`` is torch's own, so that batches may be joined without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shmloader.torch_private import collate_fn_map, is_torchs_collation

SAME_AS_TORCHS: list[Any] = []
"""Functions of `worker.collate` that join samples as torch's own do, and may stand in its map."""

_pristine: dict[Any, Any] | None = None  # the map as it was when it was last found pristine
_KNOWN_KEYS = {torch.Tensor, np.ndarray, (np.bool_, np.number, np.object_), float, int, str, bytes}
_JOINED_HERE = (torch.Tensor, np.ndarray, np.generic, bool, int, float, str, bytes, dict, list, tuple)
"""Types of samples and of their parts that shmloader joins without torch's functions."""


def collate_map_is_pristine() -> bool:
    """Whether ``default_collate`` joins samples of the types that shmloader knows as torch 2.13 does.

    The program may change the map at any time. An entry for a further type does not count, unless it would be
    used for one of these types.
    """
    global _pristine  # noqa: PLW0603 - there is one map
    if collate_fn_map == _pristine:
        return True
    if not collate_fn_map.keys() >= _KNOWN_KEYS:
        return False
    pristine = all(
        is_torchs_collation(function) or function in SAME_AS_TORCHS
        if key in _KNOWN_KEYS
        else not _is_of_known_type(key, by_torch=is_torchs_collation(function))
        for key, function in collate_fn_map.items()
    )
    _pristine = dict(collate_fn_map) if pristine else None
    return pristine


def _is_of_known_type(key: Any, *, by_torch: bool) -> bool:
    """Whether a further key of torch's map is for a type that shmloader joins itself."""
    kinds = key if isinstance(key, tuple) else (key,)
    also = () if by_torch else (np.generic, tuple, list, Mapping)  # stores have records of such classes
    try:
        return any(
            issubclass(kind, also) or any(issubclass(known, kind) for known in _JOINED_HERE) for kind in kinds
        )
    except TypeError:  # not a class
        return True


def is_default_collate(collate_fn: object) -> bool:
    """Whether a collate function is torch's ``default_collate``, or ours in its place."""
    return collate_fn is default_collate or collate_fn in SAME_AS_TORCHS


def joins_by_default(collate_fn: object) -> bool:
    """Whether a collate function does the same as ``default_collate`` in an unmodified torch."""
    return is_default_collate(collate_fn) and collate_map_is_pristine()
