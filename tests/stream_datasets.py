"""Iterable-style datasets, sharded and resumed in all ways that the loader knows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info


def identity(samples: Any) -> Any:
    return samples


class Numbers(IterableDataset[int]):
    """The numbers below ``length``, undivided; ``fails_at`` raises instead."""

    def __init__(self, length: int, fails_at: int = -1) -> None:
        self.length, self.fails_at = length, fails_at

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            if number == self.fails_at:
                raise ValueError(f"no number {number}")
            yield number


class ByShard(Numbers):
    """Gives shards of itself: strided numbers, or if ``uneven``, shards twice as long as their index."""

    def __init__(self, length: int, num_shards: int | None = None, uneven: bool = False) -> None:
        super().__init__(length)
        self.part = 1, 0
        self.epoch = 0
        self.num_shards, self.uneven = num_shards, uneven

    def shard(self, num_shards: int, index: int) -> ByShard:
        shard = type(self)(self.length, self.num_shards, self.uneven)
        shard.part = num_shards, index
        return shard

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        shards, index = self.part
        if self.uneven:
            return iter([1000 * self.epoch + number for number in range(2 * index)])
        return iter([1000 * self.epoch + number for number in range(index, self.length, shards)])


class Files(Numbers):
    """Consists of files with four numbers each, and gives some of them as a shard."""

    def __init__(self, files: list[int]) -> None:
        super().__init__(4 * len(files))
        self.files, self.num_shards = files, len(files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.files[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            yield from range(4 * file, 4 * file + 4)


class ByItself(Numbers):
    """Divides itself among workers and ranks, as shown in the documentation of torch."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        index, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        yield from range(rank * workers + index, self.length, ranks * workers)


class ByItselfTooLate(Numbers):
    """Divides itself only after its first number."""

    def __iter__(self) -> Iterator[int]:
        yield -1
        yield from ByItself(self.length)


class Looks(Numbers):
    """Uses the worker's id and seed, and shows its worker info, but is not divided by it."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is None or (info.id >= 0 and info.seed >= 0 and "num_workers" in repr(info))
        yield from range(self.length)


class ByShardAndItself(ByShard):
    """Gives shards of itself, and each divides itself among workers again, as Hugging Face's do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        index, workers = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = list(super().__iter__())
        yield from numbers[index::workers]


class Stateful(Numbers):
    """Has a state: the next number. Each item includes the number at which this iteration began."""

    def __init__(self, length: int, tensors: bool = False) -> None:
        super().__init__(length)
        self.next, self.tensors = 0, tensors

    def __iter__(self) -> Iterator[tuple[int, int]]:
        began = self.next
        while self.next < self.length:
            self.next += 1
            yield self.next - 1, began
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": torch.tensor(self.next) if self.tensors else self.next, "nested": {"kind": (1, 2)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"] == {"kind": (1, 2)}
        self.next = int(state["next"])


class StatefulIterator(Iterator[tuple[int, int]]):
    def __init__(self, length: int) -> None:
        self.length, self.next, self.began = length, 0, 0

    def __next__(self) -> tuple[int, int]:
        if self.next >= self.length:
            raise StopIteration
        self.next += 1
        return self.next - 1, self.began

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = self.began = state["next"]


class WithStatefulIterator(Numbers):
    """A dataset without a state, whose iterators have one."""

    def __iter__(self) -> StatefulIterator:
        return StatefulIterator(self.length)


class StatefulShards(Stateful):
    """Has a state, and gives shards of itself."""

    def __init__(self, length: int, part: tuple[int, int] = (1, 0)) -> None:
        super().__init__(length)
        self.part = part

    def shard(self, num_shards: int, index: int) -> StatefulShards:
        return StatefulShards(self.length, (num_shards, index))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        shards, index = self.part
        return ((number, began) for number, began in super().__iter__() if number % shards == index)


class Uneven(Numbers):
    """A dataset that gives each worker a stream of another length."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(sum(lengths))
        self.lengths = lengths

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        yield from range(100 * worker, 100 * worker + self.lengths[worker])


class GoesOn(Iterator[int]):
    def __init__(self, length: int) -> None:
        self.length, self.next = length, 0

    def __next__(self) -> int:
        if self.next >= self.length:
            raise StopIteration
        self.next += 1
        if self.next % 5 == 0:
            raise ValueError(f"bad sample {self.next - 1}")
        return self.next - 1


class WithBadSamples(Numbers):
    """Every fifth sample raises, and the iterator continues after it."""

    def __iter__(self) -> GoesOn:
        return GoesOn(self.length)
