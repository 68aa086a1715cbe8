"""The registry of workloads: each is a data set, a batch size and the targets that belong to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

ENDLESS = 1 << 40
"""The length of every data set here, in samples: an epoch that outlasts any window."""

QUICK_DIVISOR = 16
"""How many times smaller the batches of a quick run are."""


class Repeated(Dataset[Any]):
    """Samples that come again after `period` of them; a subclass says what one sample is."""

    def __init__(self, period: int) -> None:
        self.period = period

    def __len__(self) -> int:
        return ENDLESS


class Rows(Repeated):
    """Rows of one tensor."""

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__(len(base))
        self.base = base

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.base[index % self.period]


class Records(Repeated):
    """Dicts that were made beforehand, so that fetching one costs next to nothing."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        super().__init__(len(records))
        self.records = records

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.records[index % self.period]


class Columns(Repeated):
    """Dicts that are cut out of columns when they are asked for, as many data sets do it."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        super().__init__(len(next(iter(columns.values()))))
        self.columns = columns

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = index % self.period
        record: dict[str, Any] = {name: column[row] for name, column in self.columns.items()}
        record["name"] = f"record-{row:05d}"
        return record


@dataclass(frozen=True)
class Targets:
    """What a workload should reach; None where nothing is asked."""

    vs_torch: float | None = None
    of_limit: float | None = None
    batches_per_s: float | None = None
    constant_descriptors: bool = False


@dataclass(frozen=True)
class Workload:
    """One kind of data to move. Batches recur after `period_batches` of them."""

    name: str
    batch_size: int
    period_batches: int
    dataset: Callable[[int], Repeated]
    targets: Targets = Targets()

    def make_dataset(self) -> Repeated:
        """Makes the data set, the same in every process."""
        torch.manual_seed(0)
        return self.dataset(self.batch_size * self.period_batches)

    def index_batch(self, number: int) -> list[int]:
        """Gives the indices of a batch, folded into the first period."""
        first = number % self.period_batches * self.batch_size
        return list(range(first, first + self.batch_size))

    def reference_batch(self, dataset: Repeated, number: int) -> Any:
        """Makes a batch the plain way: fetch, torch's default collate, no loader."""
        return default_collate([dataset[index] for index in self.index_batch(number)])

    def quick(self) -> Workload:
        """Gives the same workload with small batches."""
        return replace(self, batch_size=max(1, self.batch_size // QUICK_DIVISOR))


WORKLOADS: dict[str, Workload] = {}


def register_workload(workload: Workload) -> None:
    """Adds a workload."""
    if workload.name in WORKLOADS:
        raise ValueError(f"workload {workload.name!r} is registered already")
    WORKLOADS[workload.name] = workload


def make_images(samples: int) -> Repeated:
    """Makes uint8 images of 3x224x224."""
    return Rows(torch.randint(0, 256, (samples, 3, 224, 224), dtype=torch.uint8))


def make_rows(samples: int) -> Repeated:
    """Makes rows of 64 float32."""
    return Rows(torch.rand(samples, 64))


def make_tiny(samples: int) -> Repeated:
    """Makes items of 16 bytes."""
    return Rows(torch.rand(samples, 4))


def make_columns(samples: int) -> Columns:
    """Makes 100 columns of 8 float32 per record, and a name."""
    return Columns({f"leaf_{number:02d}": torch.rand(samples, 8) for number in range(100)})


def make_records(samples: int) -> Repeated:
    """Makes dicts of 100 tensors of 8 float32, and a name."""
    columns = make_columns(samples)
    return Records([columns[row] for row in range(samples)])


for _workload in (
    Workload("images", 256, 4, make_images, Targets(vs_torch=8, of_limit=0.8)),
    Workload("rows", 1024, 16, make_rows, Targets(of_limit=0.9)),
    Workload("tiny", 1, 1024, make_tiny, Targets(vs_torch=15, batches_per_s=30_000)),
    Workload("dicts", 32, 4, make_records, Targets(of_limit=0.8, constant_descriptors=True)),
    Workload("dicts-cut", 32, 4, make_columns, Targets(of_limit=0.8, constant_descriptors=True)),
):
    register_workload(_workload)
