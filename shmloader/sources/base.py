"""The interface of a source, and the memory that sources write to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.slot_allocator import current_allocator, set_current_allocator
from shmloader.indices.packed_indices import Run

Rows = np.ndarray[Any, np.dtype[np.int64]]
"""Row numbers, one dimension; negative ones count from the end."""

NOT_GATHERED: Any = object()
"""Stands for a batch that is to be made sample by sample."""


class NotGathered(Exception):
    """Raised if a batch, or any batch of the dataset, must be made sample by sample; has the reason."""


Gather = Callable[[Any], Any]
"""Makes the batch that ``default_collate`` would make from the samples of these `Rows`, at least one; in the
main process, which may have consecutive ones, also of a `Run`.

In a worker, leaves come from `make_output`. Raises `NotGathered` if the batch has to be made sample by
sample, also if a row does not exist, so that the error is the dataset's own.
"""


class Source(NamedTuple):
    """Gathers batches of one dataset, in the process that makes them. Keeps nothing between two batches."""

    gather: Gather
    # Whether gathering runs code of the program, which must not run twice for one batch.
    users_code: bool = False


def array_of(rows: Rows | Run) -> Rows:
    """Row numbers as an array."""
    return rows.array() if type(rows) is Run else rows  # type: ignore[return-value]


def make_output(
    items: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """An uninitialised leaf of ``items`` rows: in the slot if there is one and it fits, else private."""
    allocator = current_allocator()
    if allocator is not None:
        output = allocator.output(items, tuple(shape), dtype)
        if output is not None:
            return output.tensor
    return torch.empty((items, *shape), dtype=dtype, device=device)


@contextlib.contextmanager
def own_memory() -> Iterator[None]:
    """Have leaves made in memory of their own meanwhile, and not in the slot."""
    allocator = current_allocator()
    set_current_allocator(None)
    try:
        yield
    finally:
        set_current_allocator(allocator)


def within(rows: Rows | Run, length: int) -> Rows:
    """Row numbers from 0 on, as an array; `NotGathered` if there are not so many rows."""
    rows = array_of(rows)
    # As unsigned numbers the negative ones are large: one pass shows that no row is negative or too large.
    if int(rows.view(np.uint64).max()) < length:
        return rows
    least, most = int(rows.min()), int(rows.max())
    if least < -length or most >= length:
        row = least if least < -length else most
        raise NotGathered(f"there is no row {row:,} in a dataset of {length:,} rows")
    return np.where(rows < 0, rows + length, rows)


def as_sample_field(joined: Any) -> Any:
    """A field of tuples as ``default_collate`` joins it: strings in a tuple, not in a list."""
    # Lists of anything else hold leaves or containers.
    are_strings = type(joined) is list and joined and isinstance(joined[0], str | bytes)
    return tuple(joined) if are_strings else joined
