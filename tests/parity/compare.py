"""Deep, bitwise comparison of two batches, types included.

Two batches are the same if no program could tell them apart: same containers, same
leaves, same bits (so NaN equals the same NaN, and 0.0 differs from -0.0), same requires_grad, same
memory order, and the same objects repeated in the same places.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import numpy as np
import torch

COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
WITH_IDENTITY = (torch.Tensor, np.ndarray, list, dict, deque)


def assert_same(actual: Any, expected: Any) -> None:
    """Fail with every difference between two batches."""
    found = differences(actual, expected)
    assert not found, "\n".join(found)


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    """The contents of a storage."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def differences(actual: Any, expected: Any) -> list[str]:
    """Every difference between two batches, one line each."""
    return list(_Walk().both(actual, expected, "batch"))


class _Walk:
    """One parallel walk over two batches; remembers objects to compare their repetition."""

    def __init__(self) -> None:
        self.twin_of_actual: dict[int, int] = {}
        self.twin_of_expected: dict[int, int] = {}
        self.alive: list[Any] = []

    def both(self, actual: Any, expected: Any, at: str) -> Iterator[str]:
        if type(actual) is not type(expected):
            yield f"{at}: type {type(actual)} is not {type(expected)}"
            return
        if isinstance(expected, (enum.Enum, type, FunctionType)):
            if actual is not expected:
                yield f"{at}: {actual!r} is not {expected!r}"
            return
        if isinstance(expected, WITH_IDENTITY) or type(expected).__eq__ is object.__eq__:
            first = id(actual) not in self.twin_of_actual
            if self.twin_of_actual.setdefault(id(actual), id(expected)) != id(expected):
                yield f"{at}: one object stands where two did"
                return
            if self.twin_of_expected.setdefault(id(expected), id(actual)) != id(actual):
                yield f"{at}: two objects stand where one did"
                return
            self.alive += [actual, expected]
            if not first:
                return
        yield from self._contents(actual, expected, at)

    def _contents(self, actual: Any, expected: Any, at: str) -> Iterator[str]:
        if isinstance(expected, torch.Tensor):
            yield from self._tensors(actual, expected, at)
        elif isinstance(expected, (torch.UntypedStorage, torch.TypedStorage)):
            yield from _storages(actual, expected, at)
        elif isinstance(expected, (np.ndarray, np.generic)):
            yield from self._arrays(actual, expected, at)
        elif isinstance(expected, (float, complex)):
            if _bits(actual) != _bits(expected):
                yield f"{at}: {actual!r} is not {expected!r}"
        elif isinstance(expected, Mapping):
            yield from self._mappings(actual, expected, at)
        elif isinstance(expected, (list, tuple, deque)):
            yield from self._sequences(actual, expected, at)
        elif isinstance(expected, BaseException):
            yield from self.both(actual.args, expected.args, f"{at}.args")
        elif dataclasses.is_dataclass(expected) or type(expected).__eq__ is object.__eq__:
            yield from self._attributes(actual, expected, at)
        elif actual != expected:
            yield f"{at}: {actual!r} is not {expected!r}"

    def _mappings(self, actual: Any, expected: Any, at: str) -> Iterator[str]:
        if list(actual) != list(expected):
            yield f"{at}: keys {list(actual)!r} are not {list(expected)!r}"
            return
        if isinstance(expected, defaultdict) and actual.default_factory is not (expected.default_factory):
            yield f"{at}: default_factory differs"
        for mine, theirs in zip(actual, expected, strict=True):
            yield from self.both(mine, theirs, f"{at} key {theirs!r}")
            yield from self.both(actual[mine], expected[theirs], f"{at}[{theirs!r}]")
        yield from self._attributes(actual, expected, at)

    def _sequences(self, actual: Any, expected: Any, at: str) -> Iterator[str]:
        if len(actual) != len(expected):
            yield f"{at}: length {len(actual)} is not {len(expected)}"
            return
        if isinstance(expected, deque) and actual.maxlen != expected.maxlen:
            yield f"{at}: maxlen differs"
        for place, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            yield from self.both(mine, theirs, f"{at}[{place}]")
        yield from self._attributes(actual, expected, at)

    def _attributes(self, actual: Any, expected: Any, at: str) -> Iterator[str]:
        mine, theirs = _attributes_of(actual), _attributes_of(expected)
        if list(mine) != list(theirs):
            yield f"{at}: attributes {list(mine)} are not {list(theirs)}"
            return
        for name in theirs:
            yield from self.both(mine[name], theirs[name], f"{at}.{name}")

    def _tensors(self, actual: Any, expected: Any, at: str) -> Iterator[str]:
        facts = ["is_nested", "layout", "dtype", "device", "requires_grad", "is_leaf"]
        for fact in facts if expected.is_nested else [*facts, "shape"]:
            if getattr(actual, fact) != getattr(expected, fact):
                yield f"{at}: {fact} {getattr(actual, fact)} is not {getattr(expected, fact)}"
                return
        yield from self._attributes(actual, expected, at)
        actual, expected = actual.detach(), expected.detach()
        if type(expected) is not torch.Tensor:
            actual, expected = (x.as_subclass(torch.Tensor) for x in (actual, expected))
        if expected.is_nested:
            pairs = zip(actual.unbind(), expected.unbind(), strict=True)
            for place, (mine, theirs) in enumerate(pairs):
                yield from self._tensors(mine, theirs, f"{at}<{place}>")
        else:
            yield from _parts(actual, expected, at)

    def _arrays(self, actual: Any, expected: Any, at: str) -> Iterator[str]:
        for fact in ("dtype", "shape"):
            if getattr(actual, fact) != getattr(expected, fact):
                yield f"{at}: {fact} {getattr(actual, fact)} is not {getattr(expected, fact)}"
                return
        if actual.dtype.metadata != expected.dtype.metadata:
            yield f"{at}: dtype metadata differs"
        if isinstance(expected, np.ndarray):
            for flag in ("WRITEABLE", "ALIGNED", "C_CONTIGUOUS", "F_CONTIGUOUS"):
                if actual.flags[flag] != expected.flags[flag]:
                    yield f"{at}: {flag} is {actual.flags[flag]}, not {expected.flags[flag]}"
        if isinstance(expected, np.ma.MaskedArray):
            for part in ("data", "mask", "fill_value"):
                mine, theirs = getattr(actual, part), getattr(expected, part)
                yield from self.both(mine, theirs, f"{at}.{part}")
            return
        yield from self._attributes(actual, expected, at)
        if expected.dtype.hasobject:
            yield from self.both(actual.tolist(), expected.tolist(), f"{at}.tolist()")
        elif _octets(actual) != _octets(expected):
            yield f"{at}: bytes differ: {actual!r} is not {expected!r}"


def _attributes_of(thing: Any) -> dict[str, Any]:
    """Attributes of an object: its __dict__, its slots and its dataclass fields."""
    held = dict(getattr(thing, "__dict__", {}))
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                held[name] = getattr(thing, name)
    return held


def _bits(number: complex) -> bytes:
    parts = (number.real, number.imag)
    return struct.pack("<2d", *parts)


def _storages(actual: Any, expected: Any, at: str) -> Iterator[str]:
    if getattr(actual, "dtype", None) != getattr(expected, "dtype", None):
        yield f"{at}: storage dtypes differ"
    if storage_bytes(actual.untyped()) != storage_bytes(expected.untyped()):
        yield f"{at}: storage bytes differ"


def _octets(array: np.ndarray | np.generic) -> bytes:
    """An array's bytes; a long double's padding is no part of its value, and is left out."""
    octets = array.tobytes()
    if array.dtype.char not in "gG":
        return octets
    part = np.frombuffer(octets, np.uint8).reshape(-1, np.dtype("g").itemsize)
    return part[:, :10].tobytes()


def _raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""  # its strides may be anything, also what view() refuses
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their extent once, in some order: no gap, no overlap."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != extent:
            return False
        extent *= size
    return True


def _dense(actual: torch.Tensor, expected: torch.Tensor, at: str) -> Iterator[str]:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        yield f"{at}: {actual.dtype} {actual.shape} is not {expected.dtype} {expected.shape}"
        return
    if (actual.is_conj(), actual.is_neg()) != (expected.is_conj(), expected.is_neg()):
        yield f"{at}: the lazy conjugate or negative bit differs"
    if expected.numel() and _is_dense(expected) and actual.stride() != expected.stride():
        yield f"{at}: strides {actual.stride()} are not {expected.stride()}"
    if _raw(actual) != _raw(expected):
        yield f"{at}: values differ: {_summary(actual)} is not {_summary(expected)}"


def _parts(actual: torch.Tensor, expected: torch.Tensor, at: str) -> Iterator[str]:
    """Compare a tensor by the dense tensors that it is made of; a dense one is its own part."""
    if expected.device.type == "meta":
        if actual.stride() != expected.stride():
            yield f"{at}: strides differ"
        return
    parts = ["_indices", "_values"] if expected.layout is torch.sparse_coo else []
    if expected.layout in COMPRESSED:
        parts = [*COMPRESSED[expected.layout], "values"]
    if parts[:1] == ["_indices"] and actual.is_coalesced() != expected.is_coalesced():
        yield f"{at}: is_coalesced differs"
    for part in parts:
        yield from _dense(getattr(actual, part)(), getattr(expected, part)(), f"{at}<{part}>")
    if not parts:
        yield from _dense(actual, expected, at)


def _summary(tensor: torch.Tensor) -> str:
    return f"{tensor.reshape(-1)[:6].tolist()}{'…' if tensor.numel() > 6 else ''}"
