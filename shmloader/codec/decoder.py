"""The decoder: a slot to a batch. Runs in the main process."""

from __future__ import annotations

import functools
import io
import math
import operator
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shmloader.codec.anchors import LEAST_NOTED, Anchor, forget_dead, keep_when_shared, noted
from shmloader.codec.layout import DTYPES, Leaf, rows_of, table_of, unpack_head, unpack_table
from shmloader.codec.leaves import as_bytes, with_strides, wrapper_of

_MOST_KNOWN = 256
_MOST_HEADER_NBYTES = 1 << 12  # longer headers hold data and do not repeat
_MOST_COMPOUND_NBYTES = (1 << 31) - 1  # NumPy 1 counts a dtype's bytes in 32 bits
_WrapAll = Callable[[Anchor], list[Any]]
_Read = Callable[[Anchor], Any]
_Wrapping = tuple[Callable[..., Any], np.dtype[Any], int, tuple[int, ...]]
"""The way to wrap a leaf: a function, the dtype of the array that it takes, the leaf's offset and shape."""
_ndarray: Any = np.ndarray  # looked up for every leaf
_ref = weakref.ref
_HAS_LARGE_BYTES = as_bytes.__name__.encode()
_lone = operator.itemgetter(0)
_CONSTANT_KEYS = (str, bytes, int, float, bool, type(None))


class Decoder:
    """Reads batches; lives in the main process.

    Headers, or at least their leaf tables, repeat from batch to batch. For a header or table that has come
    twice, the decoder remembers the quickest way to read it, by its bytes (docs/decisions/0007).
    """

    def __init__(self) -> None:
        keep_when_shared()
        self._most_noted = LEAST_NOTED
        self._headers: dict[bytes, _Read | None] = {}
        self._tables: dict[bytes, _WrapAll | None] = {}

    def decode(self, anchor: Anchor, header: bytes) -> Any:
        """Rebuild a batch over the slot's bytes. Every leaf keeps ``anchor`` alive, and nothing else does."""
        noted[id(anchor)] = _ref(anchor)  # its tensors may be shared
        if len(noted) > self._most_noted:
            self._most_noted = forget_dead()
        read = self._headers.get(header)
        if read is not None:
            return read(anchor)
        table = table_of(header)
        wrap_all = self._tables.get(table) or self._learn_table(table)
        comes_again = len(header) <= _MOST_HEADER_NBYTES and _comes_again(self._headers, header)
        if comes_again and self._tables.get(table) is not None:  # which may have been forgotten meanwhile
            self._headers[header] = _reader(header, wrap_all)
        return _load(header, wrap_all(anchor))

    def _learn_table(self, table: bytes) -> _WrapAll:
        wrappings = _wrappings(table)
        wrap_all: _WrapAll = functools.partial(_one_by_one, wrappings)
        if _comes_again(self._tables, table):
            wrap_all = self._tables[table] = _in_one_call(wrappings) or wrap_all
        return wrap_all


def _load(header: bytes, leaves: list[Any]) -> Any:
    if _HAS_LARGE_BYTES in header:
        return _WithLargeBytes(io.BytesIO(header), buffers=leaves).load()
    return pickle.loads(header, buffers=leaves)  # in a third of the time


class _WithLargeBytes(pickle.Unpickler):
    """Unpickles structures in which large bytes are leaves: see `encoder`."""

    def persistent_load(self, pid: Any) -> Any:
        """The object of a persistent id, which has been put together already."""
        return pid


def _reader(header: bytes, wrap_all: _WrapAll) -> _Read:
    """A function that reads a header: without unpickling for a lone leaf, or a list or dict of leaves."""
    join = structure_of(header)
    if join is list:
        return wrap_all
    if join is _lone:
        ((wrap, carrier, offset, shape),) = _wrappings(table_of(header))
        return lambda anchor: wrap(_ndarray(shape, carrier, anchor, offset))
    if join is None:
        return lambda anchor: _load(header, wrap_all(anchor))
    return lambda anchor: join(wrap_all(anchor))


def structure_of(header: bytes) -> Callable[[list[Any]], Any] | None:
    """A function that makes a batch of its leaves; None if it has more than these, containers, constants."""
    probes: list[object] = []
    try:
        batch = _WithoutCalls(io.BytesIO(header), buffers=_new_objects(probes)).load()
    except Exception:  # noqa: BLE001 - it cannot be made of mere objects
        return None
    if len(probes) == 1 and batch is probes[0]:
        return _lone
    if type(batch) is list and batch == probes:
        return list
    if (
        type(batch) is dict
        and list(batch.values()) == probes
        and all(type(key) in _CONSTANT_KEYS for key in batch)
    ):
        names = tuple(batch)
        return lambda leaves: dict(zip(names, leaves, strict=True))
    return lambda leaves: pickle.loads(header, buffers=leaves)


def _new_objects(made: list[object]) -> Iterator[object]:
    while True:
        made.append(object())
        yield made[-1]


class _WithoutCalls(pickle.Unpickler):
    """Unpickles structures of leaves, built-in containers and constants alone."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """The functions by which `leaves` refers to a leaf, in a form for probes; refuses others."""
        if (module, name) == (operator.getitem.__module__, "getitem"):
            return _leaf_itself
        if (module, name) == (with_strides.__module__, with_strides.__name__):
            return lambda *_: object()
        raise pickle.UnpicklingError(f"{module}.{name}")


def _leaf_itself(placeholder: Any, place: object) -> object:
    # A class of the program's own may be pickled by the same function, for an item of something else.
    if type(placeholder) is list and list(map(type, placeholder)) == [object] and place == 0:
        return placeholder[0]
    raise pickle.UnpicklingError("it is an item of something else than a leaf")


def _comes_again(known: dict[bytes, Any], key: bytes) -> bool:
    """Whether a key was looked up before; if not, it is noted."""
    if key in known:
        return True
    if len(known) >= _MOST_KNOWN:  # full of keys that do not repeat
        known.clear()
    known[key] = None
    return False


@functools.cache
def _wrapping(head: int) -> tuple[Callable[..., Any], np.dtype[Any]]:
    """The function that makes leaves of a head out of arrays, and the dtype of these arrays."""
    kind, code = unpack_head(head)
    return wrapper_of(kind, code), DTYPES[code].carrier


def _wrappings(table: bytes) -> list[_Wrapping]:
    return [(*_wrapping(head), offset, tuple(shape)) for head, offset, shape in rows_of(table)]


def _one_by_one(wrappings: list[_Wrapping], anchor: Anchor) -> list[Any]:
    return [wrap(_ndarray(shape, carrier, anchor, offset)) for wrap, carrier, offset, shape in wrappings]


def _in_one_call(wrappings: list[_Wrapping]) -> _WrapAll | None:
    """A function that wraps leaves as the fields of one compound dtype, in half the time of a call for each.

    The result is None if a leaf has no dimensions, since NumPy gives such a field as a number; also if a leaf
    has no bytes.
    """
    if len(wrappings) < 2 or not all(shape and 0 not in shape for *_, shape in wrappings):
        return None
    end = max(offset + math.prod(shape) * carrier.itemsize for _, carrier, offset, shape in wrappings)
    if end > _MOST_COMPOUND_NBYTES:
        return None
    compound = np.dtype(
        {
            "names": [str(place) for place in range(len(wrappings))],
            "formats": [(carrier, shape) for _, carrier, _, shape in wrappings],
            "offsets": [offset for _, _, offset, _ in wrappings],
            "itemsize": end,
        }
    )
    wrappers = [wrap for wrap, *_ in wrappings]
    if set(wrappers) == {torch.from_numpy}:
        return lambda anchor: list(map(torch.from_numpy, _ndarray((), compound, anchor).item()))
    return lambda anchor: [
        wrap(array) for wrap, array in zip(wrappers, _ndarray((), compound, anchor).item(), strict=True)
    ]


def read_leaves(header: bytes) -> list[Leaf]:
    """The leaves of a batch, by its header."""
    return unpack_table(table_of(header))
