"""torch's data pipes, built of importable functions."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def iter_pipe(length: int) -> Any:
    """Shuffled, sharded and mapped, in the order that torch's tutorial gives."""
    return IterableWrapper(range(length)).shuffle(buffer_size=8).sharding_filter().map(double)


def map_pipe(length: int) -> Any:
    """A sequence of tensors, mapped."""
    return SequenceWrapper([torch.tensor(k) for k in range(length)]).map(double)
