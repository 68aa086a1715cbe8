"""The records, and the ways to keep them in memory that are compared."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Record = dict[str, Any]


def record(index: int) -> Record:
    """Makes one record, as in a list of image files and their classes."""
    label = index % 1000
    return {"path": f"/data/imagenet/train/n{label:08d}/n{label:08d}_{index}.JPEG", "label": label}


def records(rows: int) -> Iterator[Record]:
    """Makes records."""
    return map(record, range(rows))


def value_of(sample: Record) -> int:
    """A sample: a number that depends on every part of a record."""
    return len(sample["path"]) + sample["label"]


def expected_sum(rows: int) -> int:
    """Sum of the samples of an epoch."""
    return sum(map(value_of, records(rows)))


class Rows:
    """A dataset over a container that gives a record for an index."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return value_of(self.samples[index])


class Nothing:
    """The same records without any memory: each is made when it is read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Record:
        return record(index)


class PickledBytes:
    """A common way: all pickles in one array of bytes, and an array of their ends."""

    def __init__(self, samples: Iterator[Record]) -> None:
        pickled = [pickle.dumps(sample, -1) for sample in samples]
        self.ends = np.cumsum([len(one) for one in pickled])
        self.data = np.frombuffer(b"".join(pickled), np.uint8)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        begin = self.ends[index - 1] if index else 0
        return pickle.loads(self.data[begin : self.ends[index]].data)


def make_shared(rows: int) -> Any:
    """Makes a list of records and shares it."""
    import shmloader

    return shmloader.share(list(records(rows)))


def make_nothing_shared(rows: int) -> Nothing:
    """No data, in a program that has made a store, so that all modules of stores are loaded."""
    import shmloader

    shmloader.share([record(0)])
    return Nothing(rows)


def make_hugging_face(rows: int) -> Any:
    """A Hugging Face dataset over Arrow memory."""
    import datasets

    return datasets.Dataset.from_list(list(records(rows)))


@dataclass(frozen=True)
class Contestant:
    """A way to keep records.

    `make` makes the samples for a number of rows. If `ours`, they are loaded with this project's loader, else
    with torch's. The targets are for the subject.
    """

    name: str
    make: Callable[[int], Any]
    ours: bool = False
    subject: bool = False

    @property
    def baseline(self) -> str:
        """The contestant that shows the memory of the same program without data."""
        return "shmloader, nothing" if self.ours else "torch, nothing"


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("torch, nothing", Nothing),
        Contestant("shmloader, nothing", make_nothing_shared, ours=True),
        Contestant("torch, list", lambda rows: list(records(rows))),
        Contestant("torch, pickled bytes", lambda rows: PickledBytes(records(rows))),
        Contestant("torch, datasets", make_hugging_face),
        Contestant("shmloader, share(list)", make_shared, ours=True, subject=True),
    )
}
"""All of them, by name."""


def available() -> list[str]:
    """The names of the contestants that have data and whose libraries are installed."""
    names = [name for name, one in CONTESTANTS.items() if name != one.baseline]
    if importlib.util.find_spec("datasets") is None:
        names.remove("torch, datasets")
    return names
