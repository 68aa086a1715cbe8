"""Datasets with attributes to share, importable by workers under every start method."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

ROWS = 20_000
"""Enough rows that their list is worth sharing."""


def make_samples(rows: int = ROWS) -> list[dict[str, Any]]:
    return [{"path": f"folder/image-{number}.jpeg", "label": number % 10} for number in range(rows)]


class Images(Dataset[tuple[int, int]]):
    """Samples in a list, and small things beside it."""

    def __init__(self, rows: int = ROWS) -> None:
        self.samples = make_samples(rows)
        self.classes = [f"class {number}" for number in range(10)]
        self.size = (224, 224)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[int, int]:
        sample = self.samples[index]
        return len(sample["path"]), sample["label"]


class Everything(Images):
    """Each kind of attribute that is replaced; a sample shows the memory that the worker reads."""

    def __init__(self) -> None:
        super().__init__()
        self.features = np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 16)
        self.weights = torch.arange(ROWS * 16, dtype=torch.float32).reshape(ROWS, 16)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = super().__getitem__(index)
        first = index % (ROWS // 4) == 0  # looking costs time
        return {
            "path": path,
            "label": label,
            "feature": self.features[index],
            "weight": self.weights[index],
            "memory": os.fstat(self.samples.buffer.fd).st_ino if first else 0,
            "mapped": mapped_stores() if first else 0,
        }


def mapped_stores() -> int:
    """The number of stores that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:shmloader-store")


class Stream(IterableDataset[int]):
    def __init__(self) -> None:
        self.samples = make_samples()

    def __iter__(self) -> Any:
        return (sample["label"] for sample in self.samples)


@dataclass(frozen=True)
class Frozen:
    samples: list[dict[str, Any]]
    name: str = "frozen"


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    samples: list[dict[str, Any]]
    name: str = "frozen"


class Slotted:
    __slots__ = ("__hidden", "empty", "samples")

    def __init__(self) -> None:
        self.samples = make_samples()
        self.__hidden = list(range(200_000))

    def hidden(self) -> Any:
        return self.__hidden


class WithMethod(Images):
    """Refers to itself by a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.read_path

    def read_path(self, index: int) -> str:
        path: str = self.samples[index]["path"]
        return path
