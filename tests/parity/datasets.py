"""Importable datasets, samplers and collate functions, so that every start method can send them.

Each sample depends on its key alone, unless its class says otherwise, so a test can compute the expected
batch without a loader.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate, get_worker_info
from torch.utils.data._utils.worker import WorkerInfo


def row(index: int, width: int = 8) -> torch.Tensor:
    """Sample `index` of Rows: a float32 tensor that no other index has."""
    return torch.arange(width, dtype=torch.float32) + 1000 * index


def identity(samples: Any) -> Any:
    """A collate function that changes nothing."""
    return samples


class Rows(Dataset):
    """`length` distinct tensors."""

    def __init__(self, length: int, width: int = 8) -> None:
        self.length, self.width = length, width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return row(index, self.width)


class Keys(Dataset):
    """Any key is valid; the sample is the key that came, and its type."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, key: Any) -> tuple[str, str, torch.Tensor]:
        return type(key).__name__, repr(key), torch.full((2,), float(len(repr(key))))


class EqualKeys(Dataset):
    """Samples are dicts whose keys are equal in every batch of two, and are not the same."""

    KEYS = ((1,), (True,), (1.0,), 0.0, -0.0, "s", np.str_("s"), 2, 2.0, np.int64(2), (2, ("x",)))

    def __len__(self) -> int:
        return 2 * 4 * len(self.KEYS)

    def __getitem__(self, index: int) -> dict[Any, Any]:
        key = self.KEYS[index // 2 % len(self.KEYS)]
        return {key: row(index), "n": index, "inner": {key: [index]}}


class Many(Dataset):
    """Has __getitems__; the samples tell the type and length of what it was given."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ must be preferred")

    def __getitems__(self, indices: Any) -> list[Any]:
        tags = (type(indices).__name__, len(indices))
        return [(row(index), *tags) for index in indices]


class SumOfKeys(Dataset):
    """A batch is the sum and the number of its keys."""

    def __len__(self) -> int:
        return 2**30

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> tuple[int, int]:
        return sum(indices), len(indices)


class NoMany(Rows):
    """A falsy __getitems__ means there is none."""

    __getitems__ = None


class Draws(Dataset):
    """Draws from all three global generators at each sample."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "torch": torch.rand(3),
            "randint": torch.randint(2**40, (1,)),
            "numpy": np.random.rand(2),
            "random": random.random(),
        }


class WorkerFacts(Dataset):
    """Samples are facts from torch's get_worker_info and the process's generators."""

    def __init__(self, length: int = 4) -> None:
        self.length, self.note = length, "unset"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "note": self.note, **worker_facts(self)}


class DrawsAndFacts(Draws):
    """Samples are draws, and facts about the worker."""

    note = "unset"

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"note": self.note} | worker_facts(self)


def worker_facts(dataset: Any) -> dict[str, Any]:
    """Everything a sample may learn about the worker that it is made in."""
    info = get_worker_info()
    facts: dict[str, Any] = {"initial_seed": torch.initial_seed(), "info": info is not None}
    if info is not None:
        facts |= {
            "threads": torch.get_num_threads(),
            "type": type(info).__name__,
            "id": info.id,
            "num_workers": info.num_workers,
            "seed": info.seed,
            "is_dataset": info.dataset is dataset,
        }
        if "worker_method" in WorkerInfo.__annotations__:  # which torch 2.6 lacks
            facts["method"] = info.worker_method
    return facts


def note_worker(worker_id: int) -> None:
    """A worker_init_fn that leaves a trace in the dataset and draws random numbers."""
    draws = (torch.rand(1).item(), float(np.random.rand()), random.random())
    get_worker_info().dataset.note = f"{worker_id}: {draws}"


def reseed_worker(worker_id: int) -> None:
    """A worker_init_fn that sets seeds of its own."""
    torch.manual_seed(worker_id)
    np.random.seed(worker_id)
    random.seed(worker_id)


class Fails(Rows):
    """Raises at the given indices."""

    def __init__(self, length: int, at: tuple[int, ...], error: type[Exception]) -> None:
        super().__init__(length)
        self.at, self.error = at, error

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.at:
            raise self.error(f"sample {index} is bad")
        return super().__getitem__(index)


class Slow(Rows):
    """Sleeps before the given sample."""

    def __init__(self, length: int, at: int, seconds: float) -> None:
        super().__init__(length)
        self.at, self.seconds = at, seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            time.sleep(self.seconds)
        return super().__getitem__(index)


class Held(Rows):
    """Waits before the given sample until the program says `go`, a minute at most."""

    def __init__(self, length: int, at: int) -> None:
        super().__init__(length)
        self.at, self.go = at, multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            self.go.wait(60)
        return super().__getitem__(index)


class Stuck(Dataset):
    """Sample `at` waits until four others were made and, for a second, none more."""

    def __init__(self, length: int, at: int) -> None:
        self.length, self.at = length, at
        self.made = multiprocessing.get_context("fork").Value("q", 0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        before = -1
        while index == self.at and (self.made.value < 4 or self.made.value != before):
            before = self.made.value
            time.sleep(1)
        with self.made.get_lock():
            self.made.value += 1
        return index


class Sized(Dataset):
    """Sample `index` has `sizes[index]` bytes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(self.sizes[index] // 8) * (index + 1)


class Stream(IterableDataset):
    """Worker k yields `lengths[k]` samples; in the main process, all of them."""

    def __init__(self, lengths: tuple[int, ...], draws: bool = False) -> None:
        self.lengths, self.draws = lengths, draws

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        for worker in range(len(self.lengths)) if info is None else [info.id]:
            for step in range(self.lengths[worker]):
                sample: dict[str, Any] = {"worker": worker, "x": row(100 * worker + step)}
                if self.draws:
                    sample |= {"torch": torch.rand(2), "random": random.random()}
                yield sample


class SizedStream(Stream):
    """A Stream that reports a length, which may be wrong."""

    def __init__(self, lengths: tuple[int, ...], reported: int) -> None:
        super().__init__(lengths)
        self.reported = reported

    def __len__(self) -> int:
        return self.reported

    def __repr__(self) -> str:
        return f"SizedStream({self.lengths}, {self.reported})"


class CountedStream(IterableDataset):
    """Remembers how often this copy was iterated: a persistent worker counts on."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.epochs += 1
        yield from ((self.epochs, step) for step in range(3))


class EagerSampler(Sampler):
    """Draws from the global generator when iter() is called, before the first index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class LazySampler(EagerSampler):
    """Draws from the global generator at every index, so how far ahead it is read shows."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, (1,)))


class EndlessSampler(Sampler):
    """Never stops, and has no length."""

    def __iter__(self) -> Iterator[int]:
        step = 0
        while True:
            yield step % 7
            step += 1


class FailingSampler(EagerSampler):
    """Raises after its last index."""

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)
        raise LookupError("no index is left")


class Repeat:
    """Iterates a sampler for ever, as loaders do that keep their workers."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


def ragged(samples: list[torch.Tensor]) -> dict[str, Any]:
    """A collate function with a shape of its own: padding, lengths, an array and the list."""
    cut = [sample[: 1 + int(sample[0]) // 1000 % 5] for sample in samples]
    return {
        "padded": torch.nn.utils.rnn.pad_sequence(cut, batch_first=True),
        "lengths": [len(sample) for sample in cut],
        "array": np.concatenate([sample.numpy() for sample in cut]),
        "stacked": default_collate(samples),
    }
