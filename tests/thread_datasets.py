"""Datasets for worker threads: with draws, with slow samples, and with facts about their worker."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Mixed(Dataset[dict[str, Any]]):
    """Leaves of several kinds, strings and numbers; some differ in shape from sample to sample."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "row": torch.arange(6.0).reshape(2, 3) + index,
            "array": np.full((3,), index, np.int16),
            "half": torch.tensor([index], dtype=torch.bfloat16),
            "label": index,
            "weight": index / 3,
            "name": f"sample {index}",
            "pair": (torch.tensor(index), [b"%d" % index]),
        }


class GlobalDraws(Dataset[dict[str, Any]]):
    """Draws from the global generators, as a dataset for worker processes does."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        import random

        return {"index": index, "torch": torch.rand(3), "random": random.random()}


class OwnDraws(GlobalDraws):
    """Draws from its worker's own generators."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        assert info is not None
        assert info.rng is not None
        return {
            "index": index,
            "torch": torch.rand(3, generator=info.rng.torch_generator),
            "random": info.rng.random_generator.random(),
        }


class AllOwnDraws(OwnDraws):
    """Draws from NumPy's too."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = get_worker_info().rng.numpy_generator.integers(0, 1 << 40, 4)
        return super().__getitem__(index) | {"numpy": numbers}


class Facts(Dataset[dict[str, Any]]):
    """Facts that a sample can learn about its worker."""

    note = "unset"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        return {
            "id": info.id,
            "num_workers": info.num_workers,
            "seed": info.seed,
            "method": info.worker_method,
            "is_dataset": info.dataset is self,
            "note": self.note,
            "cores": torch.get_num_threads(),
            "thread": threading.current_thread().name,
        }


class Gated(Dataset[torch.Tensor]):
    """Sample ``at`` waits until the test opens the gate, and is then as large as ``items`` says."""

    def __init__(self, length: int, at: int = 0, items: int = 8) -> None:
        self.length, self.at, self.items = length, at, items
        self.inside, self.gate, self.left = threading.Event(), threading.Event(), threading.Event()
        self.begun: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.begun.append(index)
        if index != self.at:
            return torch.full((8,), index)
        self.inside.set()
        assert self.gate.wait(60)
        self.left.set()
        return torch.full((self.items,), index)


class Meeting(Dataset[int]):
    """A sample waits until the given number of workers are at a sample."""

    def __init__(self, length: int, workers: int) -> None:
        self.length, self.barrier = length, threading.Barrier(workers)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.barrier.wait(60)
        return index


class Timed(Dataset[torch.Tensor]):
    """Notes the begin and end of each sample, in a list that all copies share."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.intervals: list[tuple[float, float, int]] = []

    def __len__(self) -> int:
        return self.length

    def work(self, index: int) -> torch.Tensor:
        """The work that takes the time."""
        time.sleep(0.02)
        return torch.tensor([index])

    def __getitem__(self, index: int) -> torch.Tensor:
        began = time.perf_counter()
        sample = self.work(index)
        self.intervals.append((began, time.perf_counter(), threading.get_ident()))
        return sample

    def overlaps(self) -> int:
        """The number of samples that were begun while another thread was making one."""
        ordered = sorted(self.intervals)
        return sum(
            any(begin < end and ident != other for _, end, other in ordered[:place])
            for place, (begin, _, ident) in enumerate(ordered)
        )


class Compressed(Timed):
    """Decompresses its samples, without the interpreter lock."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        noise = np.random.default_rng(0).integers(0, 8, 1 << 23, dtype=np.uint8)
        self.packed = zlib.compress(noise.tobytes(), 1)

    def work(self, index: int) -> torch.Tensor:
        """Decompress 8 MiB."""
        return torch.frombuffer(bytearray(zlib.decompress(self.packed)), dtype=torch.uint8) + index % 2


class Pipes(Dataset[bytes]):
    """Reads each sample from a named pipe, to its end."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        return self.paths[index].read_bytes()


class Sharded(IterableDataset[int]):
    """A range of numbers, divided among the workers."""

    def __init__(self, end: int) -> None:
        self.begin, self.end = 0, end

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(
            range(self.begin, self.end) if info is None else range(info.id, self.end, info.num_workers)
        )


class SetPart(Sharded):
    """Goes from ``begin`` to ``end``, which `set_part` sets."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.begin, self.end))


def set_part(worker_id: int) -> None:
    """A ``worker_init_fn`` that gives each worker's dataset its part, as in torch's documentation."""
    info = get_worker_info()
    dataset = info.dataset
    each = -(-(dataset.end - dataset.begin) // info.num_workers)
    dataset.begin, dataset.end = worker_id * each, min(dataset.end, (worker_id + 1) * each)


class Counting(IterableDataset[int]):
    """A dataset that is its own iterator, with its position and its iterations as attributes."""

    def __init__(self, length: int) -> None:
        self.length, self.position, self.epochs = length, 0, 0

    def __iter__(self) -> Counting:
        self.position, self.epochs = 0, self.epochs + 1
        return self

    def __next__(self) -> int:
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return self.epochs * 100 + self.position
