"""Loaders of the tests of `state_dict()`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from resume_datasets import Plain

from shmloader import DataLoader


def build(workers: int = 2, length: int = 40, **options: Any) -> DataLoader[Any]:
    """A shuffled loader with a generator of its own."""
    options = {"batch_size": 4, "shuffle": True, "multiprocessing_context": "fork"} | options
    if not workers:
        del options["multiprocessing_context"]
    generator = torch.Generator().manual_seed(7)
    return DataLoader(Plain(length), num_workers=workers, generator=generator, **options)


def values(batches: Any) -> list[list[int]]:
    return [batch.flatten().tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain(*batches))


def take(iterator: Any, number: int) -> list[list[int]]:
    return values(next(iterator) for _ in range(number))


def fetched(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def started(loader: DataLoader[Any]) -> dict[str, Any]:
    next(iter(loader))
    return loader.state_dict()
