"""Hashes of keys that are the same in all processes: Python's own of a str differs from one to the next."""

from __future__ import annotations

import enum
import numbers
import uuid
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import PurePath
from typing import Any
from zlib import crc32

import numpy as np

HASH_BITS = 32
Numbers = np.ndarray[Any, np.dtype[Any]]
_GOLDEN = 0x9E3779B97F4A7C15  # spreads consecutive numbers over all 64 bits


_STAND_INS: dict[Any, Callable[[Any], int | str]] = {
    uuid.UUID: attrgetter("int"),
    PurePath: lambda key: str(key).lower(),  # case means nothing in Windows
    enum.Enum: attrgetter("_name_"),
}
"""Functions that give the value to hash for keys of these types, equal for equal keys."""


def hash_of(key: Any) -> int | None:
    """A hash of 32 bits that is the same in all processes, and for keys that are equal.

    None for types whose hash or equality is not known to be Python's own.
    """
    if key.__class__ is int:  # this and the next one are quicker than what follows
        return (hash(key) * _GOLDEN >> 32) & 0xFFFFFFFF
    if key.__class__ is str and key.isascii():
        return crc32(key.encode())
    kind_hash: Any = type(key).__hash__
    if kind_hash is int.__hash__:
        return (hash(key) * _GOLDEN >> 32) & 0xFFFFFFFF
    if kind_hash is str.__hash__ or isinstance(key, np.str_):
        return crc32(str.encode(key, "utf-8", "surrogatepass"))
    if kind_hash is bytes.__hash__ or isinstance(key, np.bytes_):
        return crc32(key)
    if key is None:
        return 0x2545F491
    # Numbers that are equal have one hash, whatever their types.
    if isinstance(key, numbers.Number | np.bool_) and not isinstance(key, np.timedelta64):
        return (hash(key) * _GOLDEN >> 32) & 0xFFFFFFFF
    if kind_hash is tuple.__hash__ or kind_hash is frozenset.__hash__:
        hashes: Any = [hash_of(item) for item in key]
        if None in hashes:
            return None
        hashes = hashes if kind_hash is tuple.__hash__ else sorted(hashes)
        return crc32(np.array(hashes, np.uint32).tobytes(), len(hashes))
    for kind, stand_in in _STAND_INS.items():
        if isinstance(key, kind) and kind.__hash__(key) == hash(key):
            return hash_of(stand_in(key))
    return None


def hashes_of(keys: Iterable[Any]) -> Numbers:
    """The hashes of keys; -1 for those that have none."""
    return np.array([-1 if (hashed := hash_of(key)) is None else hashed for key in keys], np.int64)
