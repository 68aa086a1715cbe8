"""Collating with NumPy, for loaders whose transport is made for arrays and samples that are arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def numpy_collate(samples: list[Any]) -> Any:
    """Joins samples as torch's default collate does, into arrays."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: numpy_collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, (list, tuple)):
        return [numpy_collate(list(column)) for column in zip(*samples, strict=True)]
    if isinstance(first, str):
        return samples
    return np.stack(samples)


def as_arrays(batch: Any) -> Any:
    """Gives a batch's tensors as arrays over the same memory."""
    if isinstance(batch, torch.Tensor):
        return batch.numpy()
    if isinstance(batch, dict):
        return {key: as_arrays(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not (batch and isinstance(batch[0], str)):
        return tuple(as_arrays(value) for value in batch)
    return batch


class InOneThread:
    """A collate function that uses one thread, as in torch's workers.

    A forked worker hangs in OpenMP if it begins a parallel region that its parent has run before. And workers
    that each use all cores take them from one another.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        return self.collate(samples)
