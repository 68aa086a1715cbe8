"""The registry of loaders that are compared: torch's and this project's; `peers` adds the others."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from benchmarks.numpy_collate import numpy_collate
from benchmarks.workloads import STARTUP, Workload

Build = Callable[..., Iterable[Any]]
"""Makes a loader of a data set, a batch size, a number of workers and a prefetch factor.

A workload may add arguments by torch's names: `collate_fn`, `batch_sampler`, `multiprocessing_context`."""


def batching(batch_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Turns a workload's options into torch's arguments: a batch size, or a sampler of whole batches."""
    if "sampler" in options:  # of lists of indices, each of which is one item of the data set
        return {"batch_size": None, **options}
    return options if "batch_sampler" in options else {"batch_size": batch_size, **options}


def pickled_copies(method: str | None, workers: int) -> float:
    """Counts the copies of a data set that is pickled for its workers: the bytes, and the objects."""
    return 1.0 if method == "fork" else 2.0 + 2 * workers


@dataclass(frozen=True)
class Loader:
    """One contestant.

    Attributes:
        name: Its name on the command line.
        build: Makes it.
        statistics: Gives the loader's own figures by name; `reserved_nbytes` is its slot memory.
        is_baseline: Whether ratios are relative to it (to the better one, if there are several).
        is_subject: Whether the targets are for it, if a workload names no other.
        is_own: Whether it is this project's, in any mode.
        packages: Packages that it imports. It is made in a process whose default start method is the
            workload's, and which has not imported them before.
        meant_for: Whether it makes sense on a workload; if not, it is left out silently.
        cannot: The reason why it cannot do a workload, or None.
        copies_dataset: The most copies of the data set for a start method and a number of workers, the
            program's own included.
    """

    name: str
    build: Build
    statistics: Callable[[Any], dict[str, Any]] | None = None
    is_baseline: bool = False
    is_subject: bool = False
    is_own: bool = False
    packages: tuple[str, ...] = ()
    meant_for: Callable[[Workload], bool] = lambda workload: True
    cannot: Callable[[Workload], str | None] = lambda workload: None
    copies_dataset: Callable[[str | None, int], float] = pickled_copies

    def missing(self) -> str | None:
        """Says what has to be installed for it, and how; None if all is installed."""
        tops = [name.partition(".")[0] for name in self.packages]
        absent = [name for name in tops if importlib.util.find_spec(name) is None]
        if not absent:
            return None
        return f"{', '.join(absent)} not installed: pip install -c constraints.txt -e '.[peers]'"


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
        torch.multiprocessing.set_sharing_strategy(self.strategy)


def build_torch(strategy: str, **fixed: Any) -> Build:
    """Makes a builder of torch's loader with one way of sharing tensors."""

    def build(
        dataset: Any, batch_size: int, workers: int, prefetch_factor: int, **options: Any
    ) -> Iterable[Any]:
        UseSharing(strategy)(0)  # in this process too
        return torch.utils.data.DataLoader(
            dataset,
            num_workers=workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=True,
            worker_init_fn=UseSharing(strategy),
            **batching(batch_size, options),
            **fixed,
        )

    return build


def build_torch_bulk(
    dataset: Any, batch_size: int, workers: int, prefetch_factor: int, *, batch_sampler: Any, **options: Any
) -> Iterable[Any]:
    """Makes torch's loader as its documentation advises for data sets that take many indices at once."""
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        sampler=batch_sampler,
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        **options,
    )


def build_shmloader(
    dataset: Any, batch_size: int, workers: int, prefetch_factor: int, **options: Any
) -> Iterable[Any]:
    """Makes this project's loader."""
    from shmloader import DataLoader  # late: torch's loader is measured without it

    loader: Iterable[Any] = DataLoader(
        dataset,
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        **batching(batch_size, options),
    )
    return loader


def build_shmloader_shared(*arguments: Any, **options: Any) -> Iterable[Any]:
    """Makes this project's loader, which moves the data set to shared memory first."""
    return build_shmloader(*arguments, **options, share_dataset=True)


def build_shmloader_dynamic(*arguments: Any, **options: Any) -> Iterable[Any]:
    """Makes this project's loader with dynamic dispatch: any free worker takes the next task."""
    return build_shmloader(*arguments, **options, dispatch="dynamic")


def build_shmloader_threads(*arguments: Any, **options: Any) -> Iterable[Any]:
    """Makes this project's loader with threads for workers."""
    return build_shmloader(*arguments, **options, worker_type="thread")


def has_argument(name: str) -> bool:
    """Tells whether this version of the loader takes an argument."""
    from shmloader import DataLoader

    return name in inspect.signature(DataLoader).parameters


def shmloader_statistics(loader: Any) -> dict[str, Any]:
    """Reads this project's loader's counters."""
    return dataclasses.asdict(loader.statistics())


def is_table(workload: Workload) -> bool:
    """Tells whether the data set takes many indices at once."""
    return workload.samples == "table"


def is_of_arrays(workload: Workload) -> bool:
    """Tells whether samples are ndarrays whose batches are timed."""
    return workload.samples == "arrays" and workload.kind != STARTUP


for _loader in (
    Loader("torch-file_descriptor", build_torch("file_descriptor"), is_baseline=True),
    Loader("torch-file_system", build_torch("file_system"), is_baseline=True),
    Loader("torch-bulk", build_torch_bulk, meant_for=is_table),
    Loader(
        "torch-numpy",
        build_torch("file_descriptor", collate_fn=numpy_collate),
        meant_for=is_of_arrays,
    ),
    Loader(
        "shmloader",
        build_shmloader,
        shmloader_statistics,
        is_subject=True,
        is_own=True,
        packages=("shmloader",),
        # Large arrays are pickled once, into a file that all workers map.
        copies_dataset=lambda method, workers: 1.0 if method == "fork" else 2.2,
    ),
    Loader(
        "shmloader-shared",
        build_shmloader_shared,
        shmloader_statistics,
        is_own=True,
        packages=("shmloader",),
        meant_for=lambda workload: workload.kind == STARTUP,
        copies_dataset=lambda method, workers: 2.2,
    ),
    Loader(
        "shmloader-threads",
        build_shmloader_threads,
        shmloader_statistics,
        is_own=True,
        packages=("shmloader",),
        meant_for=lambda workload: is_table(workload) and has_argument("worker_type"),
    ),
    Loader(
        "shmloader-dynamic",
        build_shmloader_dynamic,
        shmloader_statistics,
        is_own=True,
        packages=("shmloader",),
        meant_for=lambda workload: workload.ideal_rate is not None and has_argument("dispatch"),
    ),
):
    register_loader(_loader)
