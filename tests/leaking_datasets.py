"""Datasets that leak, draw and keep states, for workers under every start method."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from shmloader import DataLoader


class Leaking(Dataset[dict[str, Any]]):
    """Sample ``i`` is ``i``, its worker's pid and draws of every generator; each leaks so many bytes."""

    def __init__(self, length: int, leaked_nbytes: int = 0) -> None:
        self.length, self.leaked_nbytes = length, leaked_nbytes
        self.leaked: list[bytes] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.leaked_nbytes:
            self.leaked.append(os.urandom(64) * (self.leaked_nbytes // 64))
            time.sleep(0.002)  # else a look at the memory may take as long as many batches
        rng = get_worker_info().rng
        draws = [
            torch.rand(1).item(),
            random.random(),
            np.random.rand(),
            np.random.default_rng(index).random(),
        ]
        draws += [torch.rand(1, generator=rng.torch_generator).item(), rng.random_generator.random()]
        draws += [rng.numpy_generator.random(), torch.randn(1).item(), random.gauss(0, 1), np.random.randn()]
        return {"index": index, "draws": torch.tensor(draws, dtype=torch.float64), "pid": os.getpid()}


class Told(Leaking):
    """It has heard of the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"epoch": self.epoch}


class LeakingAt(Told):
    """Leaks with one sample alone, and makes another number of draws in each epoch."""

    def __init__(self, length: int, leaked_nbytes: int, at: int) -> None:
        super().__init__(length)
        self.at, self.nbytes = at, leaked_nbytes

    def __getitem__(self, index: int) -> dict[str, Any]:
        torch.rand(2 + self.epoch)
        if index == self.at and self.nbytes:
            self.leaked.append(os.urandom(64) * (self.nbytes // 64))
            time.sleep(0.5)  # so that the next look at the memory is due
        return super().__getitem__(index)


class LeaksLast(LeakingAt):
    """Waits for a file before the sample with which it leaks, and takes two seconds for the one after it."""

    def __init__(self, length: int, leaked_nbytes: int, at: int, path: Path) -> None:
        super().__init__(length, leaked_nbytes, at)
        self.path = path

    def __getitem__(self, index: int) -> dict[str, Any]:
        while index >= self.at and not self.path.exists():
            time.sleep(0.01)
        time.sleep(2.0 if index > self.at else 0.0)
        return super().__getitem__(index)


class Unable(LeakingAt):
    """Its state cannot be taken."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Ended(Leaking):
    """Writes a line when it is torn down, after a moment."""

    def __init__(self, length: int, leaked_nbytes: int, path: Path) -> None:
        super().__init__(length, leaked_nbytes)
        self.path = path

    def worker_setup(self, _: Any) -> None:
        torch.rand(3)  # draws of the new worker's own beginning count for nothing

    def worker_teardown(self) -> None:
        time.sleep(0.1)
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")


class OwnGenerator(Leaking):
    """Draws from a generator of its own, which `WithState` keeps."""

    def __init__(self, length: int, leaked_nbytes: int = 0) -> None:
        super().__init__(length, leaked_nbytes)
        self.rng, self.count = np.random.default_rng(3), 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.count += 1
        return super().__getitem__(index) | {"own": self.rng.random(), "count": self.count}


class WithState(OwnGenerator):
    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state, "count": self.count, "large": b"x" * 300_000}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["large"] == b"x" * 300_000
        self.rng.bit_generator.state, self.count = state["rng"], state["count"]


class Around(Dataset[Any]):
    """Another dataset with one attribute more."""

    def __init__(self, inner: Any, extra: Any = None) -> None:
        self.inner, self.extra = inner, extra

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Transform:
    """Holds anything."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, sample: Any) -> Any:
        return sample


class Counting(Leaking):
    """A number that changes with each sample."""

    hits = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.hits += 1
        return super().__getitem__(index)


class Lazy(Leaking):
    """Makes its generator in the worker."""

    rng: Any = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.rng = self.rng or random.Random(index)
        return super().__getitem__(index)


class LeakingOnce(Leaking):
    """Ends its process, once, in the moment in which it would hand over."""

    def __init__(self, length: int, leaked_nbytes: int, folder: Path) -> None:
        super().__init__(length, leaked_nbytes)
        self.mark = folder / "ended"

    def state_dict(self) -> dict[str, Any]:
        try:
            self.mark.touch(exist_ok=False)  # by one of two workers that hand over at the same time
        except FileExistsError:
            return {}
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


# --- their loaders

# Forked from a small process: of a large one workers copy more, and it takes longer to read what they have.
SMALL = {"multiprocessing_context": "forkserver"}
LIMIT_NBYTES = 48 << 20  # a new worker has 9 MiB of its own
LEAK_NBYTES = 2 << 20
Batches = list[dict[str, Any]]


def loader_of(dataset: Any, limit_nbytes: int | None = LIMIT_NBYTES, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    options = {"num_workers": 2, "batch_size": 2, "shuffle": True, "generator": generator} | options
    return DataLoader(dataset, worker_max_nbytes=limit_nbytes, **options)


def values(batches: Any) -> Batches:
    """All but the pids."""
    return [{name: leaf.tolist() for name, leaf in batch.items() if name != "pid"} for batch in batches]
