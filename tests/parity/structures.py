"""Samples and batches described by plain, picklable specifications, for tests that draw them.

A specification is a leaf ``("tensor", dtype, shape)``, ``("array", code, shape)``, ``("plain", kind)``
or a container ``("dict", {key: spec})``, ``("list", [spec])``, ``("tuple", [spec])``,
``("point", [spec, spec])``, ``("same", spec)``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils.data import Dataset

from .kinds import Pair, Point

TENSORS = "float32 float64 float16 bfloat16 int64 int32 uint8 bool complex64 int16".split()
ARRAYS = "f4 f8 i8 u2 ? F".split()
ODD_ARRAYS = [*ARRAYS, "S3", "U2", "M8[s]", "O"]
PLAIN = ["int", "float", "bool", "str", "bytes"]
ODD_PLAIN = [*PLAIN, "none", "nan", "big", "set"]

Spec = tuple[str, Any] | tuple[str, str, tuple[int, ...]]


def make(spec: Any, number: int) -> Any:
    """The object that a specification describes; its values depend on `number`."""
    kind = spec[0]
    if kind == "tensor":
        return _tensor(spec[1], spec[2], number)
    if kind == "array":
        return _array(spec[1], spec[2], number)
    if kind == "plain":
        return _plain(spec[1], number)
    if kind == "dict":
        return {key: make(inner, number + place) for place, (key, inner) in enumerate(spec[1].items())}
    if kind == "ordered":
        return OrderedDict((key, make(inner, number)) for key, inner in spec[1].items())
    if kind == "same":
        made = make(spec[1], number)
        return [made, made, {"again": made}]
    inner = [make(item, number + place) for place, item in enumerate(spec[1])]
    builders = {"list": list, "tuple": tuple, "point": lambda x: Point(*x), "pair": lambda x: Pair(*x)}
    return builders[kind](inner)


def _tensor(name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
    count = int(np.prod(shape))
    numbers = torch.arange(count).add(number).remainder(97).to(getattr(torch, name)).reshape(shape)
    return numbers.transpose(0, -1) if number % 3 == 2 and len(shape) > 1 else numbers


def _array(code: str, shape: tuple[int, ...], number: int) -> np.ndarray:
    numbers = (np.arange(int(np.prod(shape))) + number) % 97
    made = numbers.astype(code) if code != "O" else np.array([str(n) for n in numbers], dtype=object)
    return made.reshape(shape, order="F" if number % 3 == 2 else "C")


def _plain(kind: str, number: int) -> Any:
    return {
        "int": number,
        "float": number / 3,
        "bool": number % 2 == 0,
        "str": "é" * (number % 5),
        "bytes": bytes([number % 256]) * (number % 7),
        "none": None,
        "nan": float("nan"),
        "big": 2**100 + number,
        "set": {number, "x"},
    }[kind]


def shapes(largest: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Up to three dimensions, empty and zero-dimensional ones included."""
    return st.lists(st.integers(0, largest), max_size=3).map(tuple)


def specs(odd: bool) -> st.SearchStrategy[Any]:
    """Sample structures that default_collate can join; with `odd`, any batch."""
    leaves = st.one_of(
        st.tuples(st.just("tensor"), st.sampled_from(TENSORS), shapes(17)),
        st.tuples(st.just("array"), st.sampled_from(ODD_ARRAYS if odd else ARRAYS), shapes(17)),
        st.tuples(st.just("plain"), st.sampled_from(ODD_PLAIN if odd else PLAIN)),
    )

    def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        kinds = ["list", "tuple", "dict", "ordered"]
        several = st.lists(inner, min_size=0 if odd else 1, max_size=4)
        keys = st.one_of(st.text(max_size=3), st.integers(0, 9))
        made = [
            st.tuples(st.sampled_from(kinds[:2]), several),
            st.tuples(
                st.sampled_from(kinds[2:]),
                st.dictionaries(keys, inner, min_size=0 if odd else 1, max_size=4),
            ),
            st.tuples(st.just("point"), st.lists(inner, min_size=2, max_size=2)),
        ]
        if odd:
            made.append(st.tuples(st.just("pair"), st.lists(inner, min_size=1, max_size=2)))
            made.append(st.tuples(st.just("same"), inner))
        return st.one_of(made)

    return st.recursive(leaves, containers, max_leaves=8)


class Structured(Dataset):
    """Samples of one structure; or, if `specs` is a list, sample k has the k-th structure."""

    def __init__(self, specs: Any, length: int) -> None:
        self.specs, self.length = specs, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.specs, list):
            return make(self.specs[index % len(self.specs)], index)
        # transposition would give samples of unequal shapes
        return make(self.specs, 3 * index if index % 3 else index)
