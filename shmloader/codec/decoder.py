"""The decoder: a slot to a batch. Runs in the main process."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmloader.codec.layout import DTYPES, LONE_LEAF, Leaf, table_of, unpack_table
from shmloader.codec.leaves import wrapper_of

_MOST_TABLES = 256
_MOST_COMPOUND_NBYTES = (1 << 31) - 1  # NumPy 1 counts a dtype's bytes in 32 bits
_Anchor = np.ndarray[Any, np.dtype[np.uint8]]
_WrapAll = Callable[[_Anchor], list[Any]]
_ndarray: Any = np.ndarray  # looked up for every leaf


class Decoder:
    """Reads batches; lives in the main process.

    Leaf tables repeat from batch to batch, so the way to wrap the leaves is remembered by the table's bytes:
    for a table that has come twice, the quickest one.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _WrapAll | None] = {}

    def decode(self, anchor: _Anchor, header: bytes) -> Any:
        """Rebuild a batch over the memory of ``anchor``.

        Args:
            anchor: uint8, the slot's bytes; every leaf keeps it alive and nothing else does.
            header: The batch's header.
        """
        table = table_of(header)
        wrap_all = self._known.get(table) or self._learn(table)
        if header.startswith(LONE_LEAF):
            return wrap_all(anchor)[0]
        return pickle.loads(header, buffers=wrap_all(anchor))

    def _learn(self, table: bytes) -> _WrapAll:
        leaves = unpack_table(table)
        if table in self._known:
            wrap_all = self._known[table] = _in_one_call(leaves) or _one_by_one(leaves)
            return wrap_all
        if len(self._known) >= _MOST_TABLES:  # shapes that never repeat
            self._known.clear()
        self._known[table] = None
        return _one_by_one(leaves)


def _one_by_one(leaves: list[Leaf]) -> _WrapAll:
    wrappings = [(wrapper_of(leaf), leaf.shape, DTYPES[leaf.code].carrier, leaf.offset) for leaf in leaves]

    def wrap_all(anchor: _Anchor) -> list[Any]:
        return [wrap(_ndarray(shape, carrier, anchor, offset)) for wrap, shape, carrier, offset in wrappings]

    return wrap_all


def _in_one_call(leaves: list[Leaf]) -> _WrapAll | None:
    """Wraps the leaves as the fields of one compound dtype: less than half the time of a call for each.

    A field without dimensions would come as a number; so None if there is a leaf without dimensions, and if
    one has no bytes.
    """
    if len(leaves) < 2 or not all(leaf.shape and 0 not in leaf.shape for leaf in leaves):
        return None
    carriers = [DTYPES[leaf.code].carrier for leaf in leaves]
    end = max(
        leaf.offset + math.prod(leaf.shape) * carrier.itemsize
        for leaf, carrier in zip(leaves, carriers, strict=True)
    )
    if end > _MOST_COMPOUND_NBYTES:
        return None
    compound = np.dtype(
        {
            "names": [str(place) for place in range(len(leaves))],
            "formats": [(carrier, leaf.shape) for leaf, carrier in zip(leaves, carriers, strict=True)],
            "offsets": [leaf.offset for leaf in leaves],
            "itemsize": end,
        }
    )
    wrappers = [wrapper_of(leaf) for leaf in leaves]
    if set(wrappers) == {torch.from_numpy}:
        return lambda anchor: list(map(torch.from_numpy, _ndarray((), compound, anchor).item()))
    return lambda anchor: [
        wrap(array) for wrap, array in zip(wrappers, _ndarray((), compound, anchor).item(), strict=True)
    ]


def read_leaves(header: bytes) -> list[Leaf]:
    """The leaves of a batch, by its header."""
    return unpack_table(table_of(header))
