"""Parts that the tests of stores share: exact comparison of rows, and classes of which rows consist."""

import dataclasses
import enum
from typing import NamedTuple

import numpy as np
import torch

from shmloader.store.testing import identical


class Point(NamedTuple):
    x: int
    y: float | None = None


@dataclasses.dataclass
class Person:
    name: str
    age: int
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    path: str
    label: int


@dataclasses.dataclass(slots=True)
class Slotted:
    path: str
    label: int


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class Text(str):  # noqa: SLOT000
    """A subclass with attributes of its own."""


class Custom:
    """Arrays and tensors inside an object that only pickle can write."""

    def __init__(self, array: np.ndarray, tensor: torch.Tensor, name: str) -> None:
        self.array, self.tensor, self.name = array, tensor, name

    def __eq__(self, other: object) -> bool:
        return type(other) is Custom and same(vars(self), vars(other))

    __hash__ = None


same = identical
