"""Slot to batch; runs in the main process."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.header import LONE_LEAF, SIZES
from shmloader.layout import DTYPES, REST, TENSOR, unpack_leaves
from shmloader.slot_writer import wrap_tensor


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


class Decoder:
    """Reads batches; lives in the main process. Headers repeat, so what they say is remembered."""

    _MOST_HEADERS = 256

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}

    def decode(
        self, anchor: np.ndarray[Any, np.dtype[np.uint8]], header_offset: int, header_nbytes: int
    ) -> Any:
        """Rebuild a batch over the memory of ``anchor``.

        Args:
            anchor: uint8, the slot's bytes; every leaf keeps it alive and nothing else does.
            header_offset: Bytes from the slot's start to the header.
            header_nbytes: Its length.
        """
        header = anchor[header_offset : header_offset + header_nbytes].tobytes()
        table_nbytes, structure_nbytes = SIZES.unpack_from(header)
        split = SIZES.size + table_nbytes + structure_nbytes
        fixed = header[:split]  # the object itself where there is no rest
        known = self._known.get(fixed)
        if known is None:
            known = self._remember(fixed, table_nbytes)
        wraps, structure = known
        rest = iter(pickle.loads(memoryview(header)[split:])) if split < header_nbytes else iter(())
        ndarray, from_numpy = np.ndarray, torch.from_numpy
        leaves: list[Any] = []
        for kind, carrier, shape, offset, dtype in wraps:
            if kind == TENSOR:
                array: Any = ndarray(shape, carrier, anchor, offset)
                leaves.append(from_numpy(array) if dtype is None else wrap_tensor(array, dtype))
            elif kind == REST:
                leaves.append(next(rest))
            else:
                leaves.append(ndarray(shape, carrier, anchor, offset))
        return leaves[0] if structure == LONE_LEAF else pickle.loads(structure, buffers=leaves)

    def _remember(self, fixed: bytes, table_nbytes: int) -> _Known:
        split = SIZES.size + table_nbytes
        wraps = []
        for kind, code, offset, shape in unpack_leaves(fixed[SIZES.size : split]):
            entry = DTYPES[code]
            dtype = None if entry.native else entry.torch_dtype
            wraps.append(_Wrap(kind, entry.carrier, shape, offset, dtype))
        if len(self._known) >= self._MOST_HEADERS:
            self._known.clear()
        known = self._known[fixed] = _Known(wraps, fixed[split:])
        return known
