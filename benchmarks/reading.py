"""The consumer's side of a batch: touching its pages, taking its checksum, weighing it."""

from __future__ import annotations

import hashlib
import mmap
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

PAGE_NBYTES = mmap.PAGESIZE
LEAF_ALIGNMENT_NBYTES = 64


class Digest(Protocol):
    """The part of a hashlib object that is used here."""

    def update(self, data: Any, /) -> None:
        """Takes more bytes in."""


def touch(batch: object) -> float:
    """Reads at least one element of every page of every leaf.

    This is the cheapest way to read every page. An expensive consumer would hide the differences between
    loaders, and one that reads nothing would not pay for the batch's arrival.

    Returns:
        A sum of the values read; the order of the leaves changes it only through rounding.
    """
    if isinstance(batch, torch.Tensor):
        return touch_array(batch.numpy())
    if isinstance(batch, dict):
        return sum(map(touch, batch.values()), 0.0)
    if isinstance(batch, (list, tuple)):
        return sum(map(touch, batch), 0.0)
    if isinstance(batch, str):
        return float(len(batch))
    if isinstance(batch, bytes):
        return touch_array(np.frombuffer(batch, np.uint8))
    if isinstance(batch, np.ndarray):
        return touch_array(batch) if batch.dtype.kind != "U" else touch(batch.tolist())
    raise TypeError(f"no workload makes batches with {type(batch).__name__} in them")


def touch_array(array: NDArray[Any]) -> float:
    """Reads at least one element of every page of a contiguous array."""
    if array.nbytes <= PAGE_NBYTES:  # at most two pages, and the ends lie on both
        return float(array.item(0)) + float(array.item(-1))
    octets = array.reshape(-1).view(np.uint8)
    # The stride reaches all pages, except the last one of an array that starts inside a page.
    return float(octets[::PAGE_NBYTES].sum()) + float(octets[-1])


def update_digest(digest: Digest, batch: object) -> None:
    """Adds the whole of a batch to a digest: structure, types, shapes, and every byte.

    An array of strings counts as a list of strings: grain has no other way to join them.
    """
    if isinstance(batch, np.ndarray) and batch.dtype.kind == "U":
        batch = batch.tolist()
    if isinstance(batch, dict):
        digest.update(f"dict {list(batch)}".encode())
        for value in batch.values():
            update_digest(digest, value)
    elif isinstance(batch, (list, tuple)):
        digest.update(f"sequence {len(batch)}".encode())
        for value in batch:
            update_digest(digest, value)
    elif isinstance(batch, (str, bytes)):
        digest.update(f"{type(batch).__name__} {batch!r}".encode())
    else:
        array = batch.numpy() if isinstance(batch, torch.Tensor) else np.asarray(batch)
        digest.update(f"array {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def take_checksum(batches: Iterator[Any], count: int) -> str:
    """Takes the checksum of the next batches: of all their bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for _ in range(count):
        update_digest(digest, next(batches))
    return digest.hexdigest()


def count_wrong(touched: list[float], expected: list[float], first: int) -> int:
    """Counts the batches that were not the batch that was due, by the sums read of them.

    Args:
        touched: Results of `touch`, from batch `first` on.
        expected: Results of `touch` for each batch of a period.
        first: Number of the first batch in `touched`.
    """
    return sum(value != expected[number % len(expected)] for number, value in enumerate(touched, start=first))


def leaves(batch: object) -> Iterator[torch.Tensor | NDArray[Any]]:
    """Yields the tensors and arrays of a batch."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from leaves(value)


def batch_nbytes(batch: object) -> int:
    """Says how many bytes the leaves of a batch have."""
    return sum(leaf.nbytes for leaf in leaves(batch))


def batch_in_pages_nbytes(batch: object) -> int:
    """Says how many bytes a batch occupies in memory that is handed out in whole pages.

    They are its leaves, each aligned to 64 bytes, and a pickle of all the rest (keys, strings, and the type
    and shape of each leaf), rounded up to whole pages. So even a batch of 16 bytes needs a page.
    """
    aligned = sum(_round_up(leaf.nbytes, LEAF_ALIGNMENT_NBYTES) for leaf in leaves(batch))
    rest = len(pickle.dumps(_without_data(batch), protocol=5))
    return _round_up(aligned + _round_up(rest, LEAF_ALIGNMENT_NBYTES), PAGE_NBYTES)


def _without_data(batch: object) -> object:
    if isinstance(batch, dict):
        return {key: _without_data(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_without_data(value) for value in batch]
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return (str(batch.dtype), tuple(batch.shape))
    return batch


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Period:
    """Facts about a workload's batches, known before any loader makes them.

    Attributes:
        touched: Results of `touch` for each batch of a period.
        mean_nbytes: Bytes of a batch's leaves, on average.
        largest_in_pages_nbytes: Bytes that the largest batch occupies in whole pages.
    """

    touched: list[float]
    mean_nbytes: float
    largest_in_pages_nbytes: int

    @classmethod
    def of(cls, batches: Iterable[object]) -> Period:
        """Makes it of the batches of a period."""
        known = [(touch(batch), batch_nbytes(batch), batch_in_pages_nbytes(batch)) for batch in batches]
        touched, sizes, in_pages = zip(*known, strict=True)
        return cls(list(touched), mean(sizes), max(in_pages))
