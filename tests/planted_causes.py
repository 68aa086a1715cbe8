"""Programs that are held up by one known cause: ``python tests/planted_causes.py CAUSE`` prints the verdict.

Each runs on two cores. Work that should take a core is measured by processor time, so that other programs on
the machine make it slower but not less.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from shmloader import DataLoader
from shmloader.profiling import ProfileReport
from shmloader.verdict import Cause

BATCH_SIZE = 8
LARGE = np.ones(20_000_000, np.uint8)
OBJECTS = [{"id": number, "text": str(number)} for number in range(5_000)]


def work(seconds: float) -> None:
    """Take so much processor time."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Samples(Dataset[torch.Tensor]):
    """Small samples that take processor time, or that a call comes before."""

    def __init__(
        self, batches: int, work_s: float = 0.0, before: Callable[[int], None] | None = None
    ) -> None:
        self.length, self.work_s, self.before = batches * BATCH_SIZE, work_s, before

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.before is not None:
            self.before(index)
        if self.work_s:
            work(self.work_s)
        return torch.full((16,), index)


class Large(Dataset[Any]):
    """Whole batches that lie in memory."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.batches[index % len(self.batches)]


class Slow(Sampler[int]):
    """A sampler that takes its time."""

    def __init__(self, length: int, seconds: float) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            time.sleep(self.seconds)
            yield index


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    work(0.02)
    return torch.stack(samples)


def late_samples(index: int) -> None:
    if index % 80 == 41:
        time.sleep(0.3)


def late_in_one_worker(_: int) -> None:
    if get_worker_info().id == 1:
        time.sleep(0.005)


def a_disk(_: int) -> None:
    time.sleep(0.003)


def as_it_is(batch: Any) -> Any:
    return batch


def profiled(loader: Any, step: Callable[[Any], object] = lambda _: None, epochs: int = 1) -> ProfileReport:
    with loader, loader.profile() as profile:
        for _ in range(epochs):
            for batch in loader:
                step(batch)
    return profile.report()


def load(
    dataset: Any, num_workers: int = 2, step: Callable[[Any], object] = lambda _: None, **given: Any
) -> Any:
    return profiled(DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, **given), step)


def keep(held: list[Any]) -> ProfileReport:
    """Loads batches that stay."""
    return load(Samples(150), step=lambda batch: (held.append(batch), time.sleep(0.005)))


PLANTED: dict[Cause, Callable[[], ProfileReport]] = {
    Cause.FETCH: lambda: load(Samples(30, 0.004)),
    Cause.COLLATE: lambda: load(Samples(40), collate_fn=slow_collate),
    Cause.SLOW_SAMPLE: lambda: load(Samples(40, before=late_samples)),
    Cause.SLOW_WORKER: lambda: load(Samples(40, before=late_in_one_worker)),
    Cause.SAMPLER: lambda: load(Samples(40), sampler=Slow(40 * BATCH_SIZE, 0.003)),
    Cause.TOO_FEW: lambda: load(Samples(60, before=a_disk), 1, lambda _: time.sleep(0.01)),
    Cause.TOO_MANY: lambda: load(Samples(40, 0.004), 8),
    Cause.PROGRAM: lambda: load(Samples(40), step=lambda _: time.sleep(0.02)),
    Cause.HELD: lambda: keep([]),
    Cause.COPIED: lambda: profiled(
        DataLoader(Large([LARGE], 500), None, num_workers=2, collate_fn=torch.from_numpy)
    ),
    Cause.PICKLED: lambda: profiled(
        DataLoader(Large([OBJECTS], 1500), None, num_workers=2, collate_fn=as_it_is)
    ),
    Cause.THROTTLED: lambda: load(Samples(16, 0.004)),  # in a cgroup with little of a core
}

if __name__ == "__main__":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    report = PLANTED[Cause(sys.argv[1])]()
    if "-v" in sys.argv:
        print(report)
    print(json.dumps([str(report.verdict.cause), report.verdict.text]))
