"""Slot to batch; runs in the main process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.header import LONE_LEAF, SIZES
from shmloader.layout import DTYPES, REST, TENSOR, Leaf, unpack_leaves
from shmloader.slot_writer import wrap_tensor

_MOST_HEADERS = 256
_LONGEST_HEADER_NBYTES = 1 << 14  # longer ones hold data, and do not repeat
_ndarray: Any = np.ndarray  # looked up for every leaf
_from_numpy = torch.from_numpy
_NOTHING: Iterator[Any] = iter(())


class _Known(NamedTuple):
    """A header without its rest, as read once. One item per leaf, in the table's order.

    Attributes:
        structure: The pickled structure.
        shapes: Of the arrays that wrap the leaves.
        carriers: Their dtypes.
        offsets: Where they lie.
        dtypes: Of the tensors over those arrays: None where it is the carrier's own.
        tensors: Which leaves are tensors; None where all are, of dtypes that NumPy knows.
        rest: Where objects that have no leaf belong among the leaves.
        lone: Whether the batch is one such tensor.
    """

    structure: bytes
    shapes: list[tuple[int, ...]]
    carriers: list[np.dtype[Any]]
    offsets: list[int]
    dtypes: list[torch.dtype | None]
    tensors: list[bool] | None
    rest: list[int]
    lone: bool


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
        if known.lone:
            return _from_numpy(_ndarray(known.shapes[0], known.carriers[0], anchor, known.offsets[0]))
        arrays = map(_ndarray, known.shapes, known.carriers, repeat(anchor), known.offsets)
        if known.tensors is None:
            leaves: list[Any] = list(map(_from_numpy, arrays))
        else:
            leaves = list(map(_wrap, arrays, known.tensors, known.dtypes))
        for position in known.rest:
            leaves.insert(position, next(rest))
        return pickle.loads(known.structure, buffers=leaves)

    def _read(self, header: bytes) -> tuple[_Known, Iterator[Any]]:
        """Read a header that is new, or that has a rest, which is read anew every time."""
        table_nbytes, structure_nbytes = SIZES.unpack_from(header)
        split = SIZES.size + table_nbytes
        end = split + structure_nbytes
        fixed = header[:end]
        known = self._known.get(fixed)
        if known is None:
            known = _look_up(unpack_leaves(header[SIZES.size : split]), header[split:end])
            if end <= _LONGEST_HEADER_NBYTES:
                if len(self._known) >= _MOST_HEADERS:
                    self._known.clear()
                self._known[fixed] = known
        return known, iter(pickle.loads(memoryview(header)[end:]) if end < len(header) else ())


def _look_up(table: list[Leaf], structure: bytes) -> _Known:
    leaves = [leaf for leaf in table if leaf.kind != REST]
    codes = [DTYPES[leaf.code] for leaf in leaves]
    tensors = [leaf.kind == TENSOR for leaf in leaves]
    plain = all(tensors) and all(code.native for code in codes)
    return _Known(
        structure,
        [leaf.shape for leaf in leaves],
        [code.carrier for code in codes],
        [leaf.offset for leaf in leaves],
        [None if code.native else code.torch_dtype for code in codes],
        None if plain else tensors,
        [position for position, leaf in enumerate(table) if leaf.kind == REST],
        plain and len(leaves) == 1 and structure == LONE_LEAF,
    )


def _wrap(array: np.ndarray[Any, Any], tensor: bool, dtype: torch.dtype | None) -> Any:
    if not tensor:
        return array
    return torch.from_numpy(array) if dtype is None else wrap_tensor(array, dtype)
