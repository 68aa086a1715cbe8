"""Slot to batch; runs in the main process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.header import LONE_LEAF, SIZES
from shmloader.layout import DTYPES, REST, TENSOR, unpack_leaves
from shmloader.slot_writer import wrap_tensor

_MOST_HEADERS = 256
_ndarray, _from_numpy = np.ndarray, torch.from_numpy  # looked up for every leaf
_NOTHING: Iterator[Any] = iter(())


class _Wrap(NamedTuple):
    """How to wrap one leaf: a row of the leaf table with its codes looked up."""

    kind: int
    carrier: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None  # set where the carrier's dtype is not the tensor's


class _Known(NamedTuple):
    """A header without its rest, as read once."""

    wraps: list[_Wrap]
    structure: bytes
    lone: _Wrap | None  # the leaf of a batch that is one tensor of a dtype that NumPy knows


class Decoder:
    """Reads batches; lives in the main process. Headers repeat, so what they say is remembered."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}

    def decode(self, anchor: np.ndarray[Any, np.dtype[np.uint8]], header: bytes) -> Any:
        """Rebuild a batch over the memory of ``anchor``.

        Args:
            anchor: uint8, the slot's bytes; every leaf keeps it alive and nothing else does.
            header: The batch's header.
        """
        known = self._known.get(header)
        rest: Iterator[Any] = _NOTHING
        if known is None:
            known, rest = self._read(header)
        wraps, structure, lone = known
        if lone is not None:
            return _from_numpy(_ndarray(lone.shape, lone.carrier, anchor, lone.offset))
        leaves: list[Any] = []
        for kind, carrier, shape, offset, dtype in wraps:
            if kind == TENSOR:
                array: Any = _ndarray(shape, carrier, anchor, offset)
                leaves.append(_from_numpy(array) if dtype is None else wrap_tensor(array, dtype))
            elif kind == REST:
                leaves.append(next(rest))
            else:
                leaves.append(_ndarray(shape, carrier, anchor, offset))
        return pickle.loads(structure, buffers=leaves)

    def _read(self, header: bytes) -> tuple[_Known, Iterator[Any]]:
        """Read a header that is new, or that has a rest, which is read anew every time."""
        table_nbytes, structure_nbytes = SIZES.unpack_from(header)
        split = SIZES.size + table_nbytes
        end = split + structure_nbytes
        fixed = header[:end]
        known = self._known.get(fixed)
        if known is None:
            structure = header[split:end]
            wraps = _wraps(header[SIZES.size : split])
            first = wraps[0] if structure == LONE_LEAF else None
            plain = first is not None and first.kind == TENSOR and first.dtype is None
            known = _Known(wraps, structure, first if plain else None)
            if len(self._known) >= _MOST_HEADERS:
                self._known.clear()
            self._known[fixed] = known
        return known, iter(pickle.loads(memoryview(header)[end:]) if end < len(header) else ())


def _wraps(table: bytes) -> list[_Wrap]:
    wraps = []
    for kind, code, offset, shape in unpack_leaves(table):
        entry = DTYPES[code]
        dtype = None if entry.native else entry.torch_dtype
        wraps.append(_Wrap(kind, entry.carrier, shape, offset, dtype))
    return wraps
