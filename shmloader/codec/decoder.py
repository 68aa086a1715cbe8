"""Slot to batch; runs in the main process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from shmloader.codec.layout import DTYPES, LONE_LEAF, Leaf, table_of, unpack_table
from shmloader.codec.leaves import wrapper_of

_MOST_TABLES = 256
_Anchor = np.ndarray[Any, np.dtype[np.uint8]]
_Wrapping = tuple[Callable[[Any], Any], tuple[int, ...], np.dtype[Any], int]
_ndarray: Any = np.ndarray  # looked up for every leaf


class Decoder:
    """Reads batches; lives in the main process.

    Leaf tables repeat from batch to batch, so what they say is remembered by their bytes.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, list[_Wrapping]] = {}

    def decode(self, anchor: _Anchor, header: bytes) -> Any:
        """Rebuild a batch over the memory of ``anchor``.

        Args:
            anchor: uint8, the slot's bytes; every leaf keeps it alive and nothing else does.
            header: The batch's header.
        """
        table = table_of(header)
        leaves = self._known.get(table)
        if leaves is None:
            leaves = self._learn(table)
        if header.startswith(LONE_LEAF):
            ((wrap, shape, carrier, offset),) = leaves
            return wrap(_ndarray(shape, carrier, anchor, offset))
        return pickle.loads(
            header,
            buffers=[
                wrap(_ndarray(shape, carrier, anchor, offset)) for wrap, shape, carrier, offset in leaves
            ],
        )

    def _learn(self, table: bytes) -> list[_Wrapping]:
        if len(self._known) >= _MOST_TABLES:  # shapes that never repeat
            self._known.clear()
        leaves = self._known[table] = [
            (wrapper_of(leaf), leaf.shape, DTYPES[leaf.code].carrier, leaf.offset)
            for leaf in unpack_table(table)
        ]
        return leaves


def read_leaves(header: bytes) -> list[Leaf]:
    """The leaves of a batch, by its header."""
    return unpack_table(table_of(header))
