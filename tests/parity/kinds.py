"""The classes that the batches of batches.py are made of."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch


class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


class Colour(enum.Enum):
    """An enumeration: its members are singletons."""

    RED = 1
    BLUE = 2


@dataclass
class Pair:
    """A dataclass."""

    left: Any
    right: Any = None
    extra: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class FrozenPair:
    """A dataclass that refuses assignment."""

    left: Any
    right: Any


@dataclass(slots=True)
class SlottedPair:
    """A dataclass without a __dict__."""

    left: Any
    right: Any


class FrozenMapping(Mapping):
    """A Mapping that is no dict and cannot be changed."""

    def __init__(self, content: Any) -> None:
        self._content = dict(content)

    def __getitem__(self, key: Any) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


class TaggedDict(dict):
    """A dict with an attribute."""

    def __init__(self, *args: Any, tag: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag = tag


class TaggedOrderedDict(OrderedDict):
    """An OrderedDict with a class of its own, like Hugging Face's ModelOutput."""


class Encoding(UserDict):
    """A UserDict, like Hugging Face's BatchEncoding."""


class TaggedList(list):
    """A list with a class of its own."""


class TaggedTuple(tuple):
    """A tuple with a class of its own."""

    __slots__ = ()


class PlainBatch:
    """A batch class with a pin_memory method, as torch's documentation shows."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.inputs = torch.stack(samples)
        self.targets = [sample.sum() for sample in samples]
        self.pinned = False

    def pin_memory(self) -> PlainBatch:
        self.inputs, self.pinned = self.inputs.pin_memory(), True
        return self


class StatefulBatch:
    """A batch class with its own __getstate__ and __setstate__."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.restored = tensor, False

    def __getstate__(self) -> tuple[torch.Tensor]:
        return (self.tensor,)

    def __setstate__(self, state: tuple[torch.Tensor]) -> None:
        self.tensor, self.restored = state[0], True


class ReducedBatch:
    """A batch class with its own __reduce__."""

    def __init__(self, array: np.ndarray, tensor: torch.Tensor) -> None:
        self.array, self.tensor = array, tensor

    def __reduce__(self) -> Any:
        return ReducedBatch, (self.array, self.tensor)


class SelfReferring:
    """A batch class whose instances refer to themselves."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.me = tensor, self


class NewArgs:
    """A batch class that cannot be made without its tensor."""

    def __new__(cls, tensor: torch.Tensor) -> Self:
        made = object.__new__(cls)
        made.tensor = tensor
        return made

    def __getnewargs__(self) -> tuple[torch.Tensor]:
        return (self.tensor,)


class SlottedBatch:
    """A batch class with __slots__, one of them unset."""

    __slots__ = ("missing", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class TaggedTensor(torch.Tensor):
    """A tensor subclass that carries an attribute."""


class TaggedArray(np.ndarray):
    """An ndarray subclass."""


def tagged(tensor: torch.Tensor, tag: str) -> torch.Tensor:
    """A TaggedTensor with its attribute set."""
    made = tensor.as_subclass(TaggedTensor)
    made.tag = tag
    return made
