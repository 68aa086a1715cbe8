"""Index batches as they travel to a worker: many ints as an int64 array, others as a pickle.

The array saves a pickler in the main process, which takes 30 µs and more if the program has done something
else since the last batch. A worker that gathers rows needs an array anyway.
"""

from __future__ import annotations

import contextlib
import io
import marshal
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch

_LONG_NBYTES = 1024
_PROTOCOL = 4  # of torch's queues: with it arrays arrive writable and in native byte order
_ARRAY = b"int64:  "  # in front of the numbers; no pickle begins so
LEAST_PACKED = 32
"""Least number of indices: pickling a shorter list is faster than making an array of it."""

# A list in marshal's format, version 2: a head, then for each int of 32 bits the letter and its bytes.
# Anything else in the list (a bool, a larger int, an instance of a subclass) has another letter or length, or
# is refused: comparing the letters proves that the list holds ints only.
_FORMAT = 2
_HEAD_NBYTES = 5
_INT, _INT_NBYTES = b"i", 5
_VALUE = np.dtype("<i4")

IntArray = np.ndarray[Any, np.dtype[np.int64]]

BY_VALUE: list[type[Any]] = []
"""Base classes of sequences in shared memory, which are pickled as lists: an index batch may be read any
number of times, or never, so no descriptor can be sent with it. Their modules add them here."""

PackedInts = memoryview
"""Packed ints of an index batch: 64 bits each, in native byte order. A program's own memoryview cannot be
pickled, so in a worker there is no other kind."""
_FORMATS = "lq"  # of such ints, by the platform


class Run(NamedTuple):
    """Consecutive indices of one batch, from 0 on; it is never sent to a worker."""

    begin: int
    end: int

    def tolist(self) -> list[int]:
        """The index batch as the sampler gives it."""
        return list(range(self.begin, self.end))

    def array(self) -> IntArray:
        """The indices as a new array."""
        return np.arange(self.begin, self.end, dtype=np.int64)


def int_array(numbers: list[Any] | tuple[Any, ...]) -> IntArray | None:
    """A list or tuple of plain ints as a new array; None if it holds anything but 64-bit ints.

    marshal checks and converts 32-bit ints in half of the time that NumPy takes for the conversion alone.
    """
    if not numbers or type(numbers[0]) is not int or type(numbers[-1]) is not int:
        return None
    try:
        packed = marshal.dumps(numbers, _FORMAT)
    except ValueError:  # a type that marshal does not know
        packed = b""
    length, letters = len(numbers), packed[_HEAD_NBYTES::_INT_NBYTES]
    if len(packed) == _HEAD_NBYTES + length * _INT_NBYTES and letters == _INT * length:
        values = np.ndarray(length, _VALUE, packed, _HEAD_NBYTES + len(_INT), _INT_NBYTES)
        return values.astype(np.int64)
    with contextlib.suppress(OverflowError):
        if set(map(type, numbers)) == {int}:
            return np.array(numbers, np.int64)
    return None


def with_packed_ints(index_batch: Any) -> Any:
    """A list of many ints as `PackedInts`; any other index batch as it is."""
    if type(index_batch) is list and len(index_batch) >= LEAST_PACKED:
        numbers = int_array(index_batch)
        if numbers is not None:
            return numbers.data
    return index_batch


def pack_index_batch(index_batch: object) -> bytes:
    """Pack the indices of one batch, or one index: it arrives equal, or as `PackedInts` of many ints.

    Stores of ``shmloader.share`` arrive as lists, shared arrays and tensors as private ones.
    """
    if type(index_batch) is list and len(index_batch) >= LEAST_PACKED:
        index_batch = with_packed_ints(index_batch)
    if type(index_batch) is PackedInts and index_batch.format in _FORMATS:
        return _ARRAY + index_batch
    try:
        payload = pickle.dumps(index_batch, _PROTOCOL)
        if len(payload) <= _LONG_NBYTES:
            return payload
    except pickle.PicklingError:
        pass  # it may hold objects in shared memory
    file = io.BytesIO()
    _Pickler(file, _PROTOCOL).dump(index_batch)
    return file.getvalue()


def unpack_index_batch(payload: bytes, nbytes: int) -> Any:
    """Read the ``nbytes`` that `pack_index_batch` gave; other bytes may follow them."""
    if payload.startswith(_ARRAY):
        return memoryview(payload)[len(_ARRAY) : nbytes].cast("q")
    return pickle.loads(payload)


class _Pickler(pickle.Pickler):
    """Pickles a tensor's own items, not all of its storage; objects in shared memory by value."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor's own items, and an object in shared memory as a list; others as pickle does."""
        if isinstance(obj, tuple(BY_VALUE)):
            values: Any = obj
            return list, (list(values),)
        plain = type(obj) is torch.Tensor and obj.device.type == "cpu" and obj.layout is torch.strided
        if plain and obj.untyped_storage().nbytes() > obj.numel() * obj.element_size():
            return obj.clone().__reduce_ex__(_PROTOCOL)
        return NotImplemented
