"""Slot to batch; runs in the main process."""

from __future__ import annotations

import math
import operator
import pickle
import pickletools
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from shmloader.codec.header import LONE_LEAF, SIZES
from shmloader.codec.layout import DTYPES, REST, TENSOR, Leaf, unpack_leaves
from shmloader.codec.slot_writer import wrap_tensor

_MOST_HEADERS = 256
_LONGEST_HEADER_NBYTES = 1 << 14  # longer ones hold data, and do not repeat
_Anchor = np.ndarray[Any, np.dtype[np.uint8]]
_LARGEST_COMPOUND_NBYTES = (1 << 31) - 1  # NumPy 1 counts a dtype's bytes in 32 bits
# What pickles of built-in containers and strings consist of, besides numbers.
_PLAIN_OPCODES = frozenset(
    "PROTO FRAME STOP MARK MEMOIZE NEXT_BUFFER EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS "
    "SHORT_BINUNICODE BINUNICODE".split()
)
_ndarray: Any = np.ndarray  # looked up for every leaf
_from_numpy = torch.from_numpy
_NOTHING: Iterator[Any] = iter(())


class _Known(NamedTuple):
    """A header without its rest, as read once.

    Attributes:
        lone: The shape, carrier dtype and offset of a batch that is one tensor and nothing else.
        arrays: Wraps all leaves as arrays of their carrier dtypes.
        dtypes: Of the tensors over those arrays; None where it is the carrier's own.
        tensors: Which leaves are tensors; None where all are, of dtypes that NumPy knows.
        rest: Where objects that have no leaf belong among the leaves.
        assemble: Puts leaves and rest together.
    """

    lone: tuple[tuple[int, ...], np.dtype[Any], int] | None
    arrays: Callable[[_Anchor], Iterable[Any]]
    dtypes: list[torch.dtype | None]
    tensors: list[bool] | None
    rest: list[int]
    assemble: Callable[[list[Any]], Any]


class Decoder:
    """Reads batches; lives in the main process.

    Headers repeat, so what they say is remembered, and of one that has come twice also how to read it in
    the fewest calls. One that never comes again, as where shapes change, is not worth that.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self._seen: dict[bytes, None] = {}  # once so far

    def decode(self, anchor: _Anchor, header: bytes) -> Any:
        """Rebuild a batch over the memory of ``anchor``.

        Args:
            anchor: uint8, the slot's bytes; every leaf keeps it alive and nothing else does.
            header: The batch's header.
        """
        known = self._known.get(header)
        rest: Iterator[Any] = _NOTHING
        if known is None:
            table, structure, rest = _split(header)
            known = self._look_up(header, table, structure)
            if known is None:
                return pickle.loads(structure, buffers=_wrap_once(anchor, table, rest))
        lone, arrays, dtypes, tensors, rest_positions, assemble = known
        if lone is not None:
            shape, carrier, offset = lone
            return _from_numpy(_ndarray(shape, carrier, anchor, offset))
        if tensors is None:
            leaves: list[Any] = list(map(_from_numpy, arrays(anchor)))
        else:
            leaves = list(map(_wrap, arrays(anchor), tensors, dtypes))
        for position in rest_positions:
            leaves.insert(position, next(rest))
        return assemble(leaves)

    def _look_up(self, header: bytes, table: bytes, structure: bytes) -> _Known | None:
        """What is known of a header that has a rest, or has come once before; None of a new one."""
        fixed = header[: SIZES.size + len(table) + len(structure)]
        known = self._known.get(fixed)
        if known is None:
            if fixed in self._seen:
                del self._seen[fixed]
                known = _learn(unpack_leaves(table), structure)
                _remember(self._known, fixed, known)
            else:
                _remember(self._seen, fixed, None)
        return known


def _split(header: bytes) -> tuple[bytes, bytes, Iterator[Any]]:
    """A header's leaf table, its structure, and the objects that have no leaf."""
    table_nbytes, structure_nbytes = SIZES.unpack_from(header)
    split = SIZES.size + table_nbytes
    end = split + structure_nbytes
    rest = iter(pickle.loads(memoryview(header)[end:])) if end < len(header) else _NOTHING
    return header[SIZES.size : split], header[split:end], rest


def _wrap_once(anchor: _Anchor, table: bytes, rest: Iterator[Any]) -> Iterator[Any]:
    """Wrap the leaves of a header that may never come again."""
    for kind, code, offset, shape in unpack_leaves(table):
        if kind == REST:
            yield next(rest)
        else:
            dtype = DTYPES[code]
            array = _ndarray(shape, dtype.carrier, anchor, offset)
            yield _wrap(array, kind == TENSOR, None if dtype.native else dtype.torch_dtype)


def read_leaves(header: bytes) -> list[Leaf]:
    """The leaf table of a batch's header."""
    table_nbytes, _ = SIZES.unpack_from(header)
    return unpack_leaves(header[SIZES.size : SIZES.size + table_nbytes])


def _remember(known: dict[bytes, Any], header: bytes, what: _Known | None) -> None:
    if len(header) <= _LONGEST_HEADER_NBYTES:
        if len(known) >= _MOST_HEADERS:
            known.clear()
        known[header] = what


def _learn(table: list[Leaf], structure: bytes) -> _Known:
    """How to read a header in the fewest calls."""
    leaves = [leaf for leaf in table if leaf.kind != REST]
    codes = [DTYPES[leaf.code] for leaf in leaves]
    tensors = [leaf.kind == TENSOR for leaf in leaves]
    plain = all(tensors) and all(code.native for code in codes)
    lone = plain and len(leaves) == 1 and structure == LONE_LEAF
    return _Known(
        lone=(leaves[0].shape, codes[0].carrier, leaves[0].offset) if lone else None,
        arrays=_wrap_all(leaves),
        dtypes=[None if code.native else code.torch_dtype for code in codes],
        tensors=None if plain else tensors,
        rest=[position for position, leaf in enumerate(table) if leaf.kind == REST],
        assemble=_assembler(structure, len(table)),
    )


def _wrap_all(leaves: list[Leaf]) -> Callable[[_Anchor], Iterable[Any]]:
    """A function that wraps the memory of ``leaves`` as arrays, in their order.

    In one call if that can be: they are the fields of one compound dtype, and NumPy makes all views at less
    than half the time that as many calls take. A field of no dimensions would come as a number, so where a
    leaf has none, or no bytes, they are wrapped one by one.
    """
    shapes = [leaf.shape for leaf in leaves]
    carriers = [DTYPES[leaf.code].carrier for leaf in leaves]
    offsets = [leaf.offset for leaf in leaves]

    def wrap_each(anchor: _Anchor) -> Iterable[Any]:
        return map(_ndarray, shapes, carriers, repeat(anchor), offsets)

    if len(leaves) < 2 or not all(shape and 0 not in shape for shape in shapes):
        return wrap_each
    ends = [
        offset + carrier.itemsize * math.prod(shape)
        for shape, carrier, offset in zip(shapes, carriers, offsets, strict=True)
    ]
    if max(ends) > _LARGEST_COMPOUND_NBYTES:
        return wrap_each
    compound = np.dtype(
        {
            "names": [f"leaf {i}" for i in range(len(leaves))],
            "formats": list(zip(carriers, shapes, strict=True)),
            "offsets": offsets,
            "itemsize": max(ends),
        }
    )

    def wrap_fields(anchor: _Anchor) -> Iterable[Any]:
        fields: tuple[Any, ...] = _ndarray((), compound, anchor).item()
        return fields

    return wrap_fields


def _assembler(structure: bytes, size: int) -> Callable[[list[Any]], Any]:
    """A function that puts ``size`` leaves into the pickled structure.

    The structures that ``default_collate`` makes most often, a list and a dict of leaves, need no pickle.
    """
    if {opcode.name for opcode, _, _ in pickletools.genops(structure)} <= _PLAIN_OPCODES:
        probes = [object() for _ in range(size)]
        whole = pickle.loads(structure, buffers=probes)
        if type(whole) is list and _are_same(whole, probes):
            return _as_it_is
        if type(whole) is dict and _are_same(whole.values(), probes):
            keys = tuple(whole)
            return lambda leaves: dict(zip(keys, leaves, strict=True))
    return lambda leaves: pickle.loads(structure, buffers=leaves)


def _are_same(items: Iterable[Any], probes: list[object]) -> bool:
    found = list(items)
    return len(found) == len(probes) and all(map(operator.is_, found, probes))


def _as_it_is(leaves: list[Any]) -> list[Any]:
    return leaves


def _wrap(array: np.ndarray[Any, Any], tensor: bool, dtype: torch.dtype | None) -> Any:
    if not tensor:
        return array
    return torch.from_numpy(array) if dtype is None else wrap_tensor(array, dtype)
