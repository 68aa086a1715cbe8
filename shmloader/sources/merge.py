"""Merging the parts of a batch whose rows came from several sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shmloader.sources.base import Make, NotGathered, Rows, is_strings
from shmloader.store.arrays import array_of_tensor, kind_of_tensor

_UNLIKE = "one batch has rows of several datasets of a ConcatDataset, and these have samples"

Part = tuple[Rows, Any]
"""Places in the batch, and the rows that belong there."""


def merge(parts: Sequence[Part], count: int, make: Make) -> Any:
    """Make one batch of parts of it.

    Args:
        parts: At least one; together they have each place once.
        count: Rows of the batch.
        make: Makes the tensors of leaves.

    Raises:
        NotGathered: If the parts are not alike: then only collating their samples gives the right batch.
    """
    first = parts[0][1]
    kind = type(first)
    if any(type(value) is not kind for _, value in parts):
        raise NotGathered(f"{_UNLIKE} of different types")
    if kind is torch.Tensor:
        return _merge_tensors(parts, count, make)
    if kind is dict:
        if any(list(value) != list(first) for _, value in parts):
            raise NotGathered(f"{_UNLIKE} with different keys, or keys in another order")
        return {name: merge([(at, value[name]) for at, value in parts], count, make) for name in first}
    if kind is list or isinstance(first, tuple):
        if all(is_strings(value) for _, value in parts):
            return _merge_strings(parts, count, kind)
        if kind is tuple or any(len(value) != len(first) for _, value in parts):
            raise NotGathered(f"{_UNLIKE} of different lengths")
        fields = [merge([(at, value[n]) for at, value in parts], count, make) for n in range(len(first))]
        return fields if kind is list else kind(*fields)
    raise NotGathered(f"parts of type {kind.__qualname__} cannot be merged")


def _merge_tensors(parts: Sequence[Part], count: int, make: Make) -> torch.Tensor:
    first: torch.Tensor = parts[0][1]
    kind, shape = kind_of_tensor(first), first.shape[1:]
    for at, value in parts:
        if kind is None or kind_of_tensor(value) != kind or value.shape != (len(at), *shape):
            raise NotGathered(f"{_UNLIKE} of different dtypes or shapes")
    assert kind is not None
    out = make(count, shape, first.dtype)
    target = array_of_tensor(out, kind.dtype)
    for at, value in parts:
        target[at] = array_of_tensor(value, kind.dtype)
    return out


def _merge_strings(parts: Sequence[Part], count: int, kind: type) -> Any:
    merged: list[Any] = [None] * count
    for at, value in parts:
        if len(value) != len(at):
            raise NotGathered("a part of the batch has another number of strings than rows")
        for place, text in zip(at.tolist(), value, strict=True):
            merged[place] = text
    return merged if kind is list else tuple(merged)
