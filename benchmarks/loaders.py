"""The registry of loaders that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from benchmarks.workloads import Repeated

Build = Callable[[Repeated, int, int, int], Iterable[Any]]
"""Makes a loader of a data set, a batch size, a number of workers and a prefetch factor."""


@dataclass(frozen=True)
class Loader:
    """One contestant.

    `statistics` gives what the loader says about itself, by name; `reserved_nbytes` among it is its
    slot memory. A baseline is what ratios are taken against (the better one where there are
    several). The subject is the loader that the targets are for.
    """

    name: str
    build: Build
    statistics: Callable[[Any], dict[str, Any]] | None = None
    is_baseline: bool = False
    is_subject: bool = False


LOADERS: dict[str, Loader] = {}


def register_loader(loader: Loader) -> None:
    """Adds a loader."""
    if loader.name in LOADERS or loader.name == "limit":
        raise ValueError(f"the name {loader.name!r} is taken")
    LOADERS[loader.name] = loader


@dataclass(frozen=True)
class UseSharing:
    """A worker_init_fn that sets how a worker shares tensors: a spawned one does not inherit it."""

    strategy: str

    def __call__(self, worker_id: int) -> None:
        torch.multiprocessing.set_sharing_strategy(self.strategy)  # type: ignore[no-untyped-call]


def build_torch(strategy: str) -> Build:
    """Makes a builder of torch's loader with one way of sharing tensors."""

    def build(dataset: Repeated, batch_size: int, workers: int, prefetch_factor: int) -> Iterable[Any]:
        UseSharing(strategy)(0)  # in this process too
        return torch.utils.data.DataLoader(
            dataset,
            batch_size=batch_size,
            num_workers=workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=True,
            worker_init_fn=UseSharing(strategy),
        )

    return build


def build_shmloader(dataset: Repeated, batch_size: int, workers: int, prefetch_factor: int) -> Iterable[Any]:
    """Makes this project's loader."""
    from shmloader import DataLoader  # late: torch's loader is measured without it

    loader: Iterable[Any] = DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
    )
    return loader


def shmloader_statistics(loader: Any) -> dict[str, Any]:
    """Reads this project's loader's counters."""
    return dataclasses.asdict(loader.statistics())


for _loader in (
    Loader("torch-file_descriptor", build_torch("file_descriptor"), is_baseline=True),
    Loader("torch-file_system", build_torch("file_system"), is_baseline=True),
    Loader("shmloader", build_shmloader, shmloader_statistics, is_subject=True),
):
    register_loader(_loader)
