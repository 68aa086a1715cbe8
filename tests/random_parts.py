"""Datasets, samplers and collate functions of random programs.

For torch's loader a dataset keeps what `set_epoch` sets in shared memory, where persistent workers see it: so
torch's loader gives the batches that ours must give with ``loader.set_epoch()``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info


class Unreadable(Exception):
    """An exception of the program's own, with an argument that its text does not show."""

    def __init__(self, index: Any, why: str = "") -> None:  # torch calls it with one argument, a text
        super().__init__(index, why)

    def __str__(self) -> str:
        return f"sample {self.args[0]} cannot be read"


def error_of(index: int) -> Exception:
    """One of several kinds of exceptions."""
    kinds = (
        ValueError(index),
        KeyError(index),
        OSError(2, "no such file", f"{index}.png"),
        Unreadable(index, "why"),
    )
    return kinds[index % len(kinds)]


class Bad:
    """What the dataset gives torch's loader in place of an exception, where ours has ``on_error``."""


class LeftOut:
    """The batch of torch's loader that ours leaves out."""


class Told:
    """What a program tells of epochs, and how a sample shows it.

    Args:
        length: Number of samples.
        bad: Those that raise.
        draws: Whether samples draw from the global generators.
        told: What ``set_epoch`` does: keep the ``"number"``, draw an ``"order"``, or ``"seed"`` generators.
        shared: Whether it reaches persistent workers of torch's loader too.
        marks: Whether bad samples are marked instead of raised.
    """

    def __init__(
        self, length: int, bad: frozenset[int], draws: bool, told: str, shared: bool, marks: bool
    ) -> None:
        self.length, self.bad, self.draws, self.told, self.marks = length, bad, draws, told, marks
        self.cells = torch.arange(-1, length)  # the epoch's number and its order
        if shared:
            self.cells.share_memory_()

    def tell(self, epoch: int) -> None:
        self.cells[0] = epoch
        if self.told == "order":
            order = list(range(self.length))
            random.shuffle(order)
            self.cells[1:] = torch.tensor(order, dtype=torch.int64)
        elif self.told == "seed":
            torch.manual_seed(epoch)
            np.random.seed(epoch)
            random.seed(epoch)

    def sample(self, place: int) -> Any:
        index = int(self.cells[1 + place])
        if index in self.bad:
            if self.marks:
                return Bad()
            raise error_of(index)
        numbers = (float(torch.rand(())), np.random.random(), random.random()) if self.draws else ()
        return {
            "index": torch.tensor([index, int(self.cells[0])]),
            "row": np.full(3 + 40 * (index % 2 == 7), index, np.float32),
            "text": f"sample {index}",
            "drawn": torch.tensor(numbers, dtype=torch.float64),
        }


class Samples(Told, Dataset[Any]):
    """A map-style dataset."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> Any:
        return self.sample(place)


class SamplesTold(Samples):
    def set_epoch(self, epoch: int) -> None:
        self.tell(epoch)


class Lists(SamplesTold):
    """It gives whole lists of samples."""

    def __getitems__(self, places: list[int]) -> list[Any]:
        return [self.sample(place) for place in places]


class Stream(Told, IterableDataset[Any]):
    """An iterable-style dataset that divides itself, if ``divides``. Its iterator goes on after errors."""

    divides, passes_over_bad = True, False

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info and self.divides else (0, 1)
        return StreamIterator(self, list(range(first, self.length, step)))


class StreamIterator:
    def __init__(self, stream: Stream, places: list[int]) -> None:
        self.stream, self.places, self.place = stream, places, 0

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> Any:
        while self.place < len(self.places):
            self.place += 1
            sample = self.stream.sample(self.places[self.place - 1])
            if type(sample) is not Bad or not self.stream.passes_over_bad:
                return sample
        raise StopIteration


class StreamTold(Stream):
    def set_epoch(self, epoch: int) -> None:
        self.tell(epoch)


class StreamWithState(StreamTold):
    """A generator, which ends with its first exception, and a state of the dataset."""

    start = place = 0

    def __iter__(self) -> Iterator[Any]:
        places = super().__iter__().places  # type: ignore[attr-defined]
        self.place, self.start = self.start, 0
        while self.place < len(places):
            self.place += 1
            yield self.sample(places[self.place - 1])

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


class StreamWithIteratorState(StreamTold):
    """The state is the iterator's."""

    def __iter__(self) -> Iterator[Any]:
        plain = super().__iter__()
        return IteratorWithState(self, plain.places)  # type: ignore[attr-defined]


class IteratorWithState(StreamIterator):
    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Lazy(Sampler[int]):
    """Draws index by index from a generator of its own, or from torch's global one; raises at one index."""

    def __init__(self, length: int, generator: torch.Generator | None, raises_at: int | None = None) -> None:
        self.length, self.generator, self.raises_at = length, generator, raises_at

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            if number == self.raises_at:
                raise error_of(number)
            yield int(torch.randint(self.length, (), generator=self.generator))

    def __len__(self) -> int:
        return self.length


class LazyTold(Lazy):
    def set_epoch(self, epoch: int) -> None:
        if self.generator is not None:
            self.generator.manual_seed(epoch)


class WithState(Sampler[int]):
    """Counts its epochs itself, and has a state."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.place, self.goes_on = length, 0, 0, False

    def __iter__(self) -> Iterator[int]:
        if not self.goes_on:
            self.epoch, self.place = self.epoch + 1, 0
        self.goes_on = False
        order = np.random.default_rng(self.epoch).permutation(self.length)
        while self.place < self.length:
            self.place += 1
            yield int(order[self.place - 1])

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place, self.goes_on = state["epoch"], state["place"], state["epoch"] > 0


class Batches(Sampler[list[int]]):
    """A batch sampler. Its batches have several sizes, or two items if its sampler has a state."""

    def __init__(self, sampler: Any, length: int, told: bool) -> None:
        self.sampler, self.length = sampler, length
        self.ends = (1, 3, 5) if hasattr(sampler, "state_dict") else (1, 2, 5)
        if told:
            self.set_epoch = self.tell
        self.epoch = 0

    def tell(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for number, index in enumerate(self.sampler):
            batch.append(index)
            if number % 6 in self.ends:
                yield batch[: 2 - self.epoch % 2] + batch[2:]
                batch = []

    def __len__(self) -> int:
        return sum(number % 6 in self.ends for number in range(self.length))


class Collate:
    """Joins samples; as the reference of ``on_error`` it also leaves out or replaces bad ones.

    Args:
        join: Joins good samples, or converts a single one.
        replaces: Whether bad samples are replaced.
        bad: Batches with this index raise.
    """

    def __init__(self, join: Any, replaces: bool, bad: int | None) -> None:
        self.join, self.replaces, self.bad = join, replaces, bad

    def __call__(self, samples: Any) -> Any:
        if type(samples) is Bad:
            return LeftOut()
        if type(samples) is list:
            good = [place for place, sample in enumerate(samples) if type(sample) is not Bad]
            if not good:
                return LeftOut()
            places = good
            if self.replaces:
                later = [[place for place in good if place >= wanted] for wanted in range(len(samples))]
                places = [places[0] if places else good[0] for places in later]
            copies = (
                [number != place for number, place in enumerate(places)]
                if self.replaces
                else [False] * len(places)
            )
            samples = [
                copy.deepcopy(samples[place]) if is_copy else samples[place]
                for place, is_copy in zip(places, copies, strict=True)
            ]
            if any(int(sample["index"][0]) == self.bad for sample in samples):
                raise error_of(self.bad or 0)
        return self.join(samples)


def stacked(samples: Any) -> Any:
    """A collate function of the program's own, whose results torch makes."""
    if type(samples) is dict:
        return samples["index"] + 1
    rows = [torch.from_numpy(sample["row"]) for sample in samples]
    return (
        torch.stack([sample["index"] for sample in samples]),
        torch.cat(rows),
        [s["drawn"] for s in samples],
    )


def listed(samples: Any) -> Any:
    return samples
