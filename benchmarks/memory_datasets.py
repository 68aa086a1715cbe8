"""The records, by shape, and the ways to keep them in memory that are compared."""

from __future__ import annotations

import importlib.util
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Record = dict[str, Any]


def record(index: int) -> Record:
    """Makes one record, as in a list of image files and their classes."""
    label = index % 1000
    return {"path": f"/data/imagenet/train/n{label:08d}/n{label:08d}_{index}.JPEG", "label": label}


def coco_record(index: int) -> Record:
    """Makes one record like an image of COCO with its annotations: nested lists of numbers."""
    boxes = [
        {"bbox": [1.5 * number, 2.5 * index, 30.25, 40.75], "category_id": number % 90, "iscrowd": 0}
        for number in range(index % 7 + 1)
    ]
    return {
        "file_name": f"{index:012d}.jpg",
        "height": 480,
        "width": 640,
        "label": index,
        "annotations": boxes,
    }


def text_record(index: int) -> Record:
    """Makes one record of text, of 40 to 400 characters."""
    return {"path": f"sentence {index} " * (index % 20 + 3), "label": index % 5}


def table_record(index: int) -> Record:
    """Makes one row of a table: numbers only."""
    return {f"feature_{number}": index + 0.5 * number for number in range(15)} | {"label": index % 2}


SHAPES: dict[str, Callable[[int], Record]] = {
    "paths": record,
    "coco": coco_record,
    "text": text_record,
    "table": table_record,
}
"""Makes a record for an index, by shape."""


def records(rows: int, shape: str = "paths") -> Iterator[Record]:
    """Makes records."""
    return map(SHAPES[shape], range(rows))


def value_of(sample: Record) -> int:
    """A sample: a number that depends on the parts of a record."""
    if "path" in sample:
        return len(sample["path"]) + int(sample["label"])
    return int(sample["label"]) + len(sample.get("annotations", ()))


def expected_sum(rows: int, shape: str = "paths") -> int:
    """Sum of the samples of an epoch."""
    return sum(map(value_of, records(rows, shape)))


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

    def __init__(self, rows: int, shape: str = "paths") -> None:
        self.rows, self.shape = rows, shape

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Record:
        return SHAPES[self.shape](index)


class PickledBytes:
    """A common way, also detectron2's: all pickles in one array of bytes, and an array of their ends."""

    def __init__(self, samples: Iterable[Record]) -> None:
        pickled = [pickle.dumps(sample, -1) for sample in samples]
        self.ends = np.cumsum([len(one) for one in pickled])
        self.data = np.frombuffer(b"".join(pickled), np.uint8)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        begin = self.ends[index - 1] if index else 0
        return pickle.loads(self.data[begin : self.ends[index]].data)


class PickledTensors:
    """The same in tensors, which spawned processes are given by handle."""

    def __init__(self, samples: Iterable[Record]) -> None:
        arrays = PickledBytes(samples)
        self.ends = torch.from_numpy(arrays.ends)
        self.data = torch.from_numpy(arrays.data.copy())

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        begin = int(self.ends[index - 1]) if index else 0
        return pickle.loads(self.data[begin : int(self.ends[index])].numpy().data)


class Columns:
    """One array for each column, of texts with the length of the longest; only for flat records."""

    def __init__(self, samples: Iterable[Record]) -> None:
        kept = list(samples)
        self.columns = {name: np.array([sample[name] for sample in kept]) for name in kept[0]}

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, index: int) -> Record:
        return {name: column[index].item() for name, column in self.columns.items()}


class Lance:
    """A Lance data set in files, opened by each process when it first reads."""

    def __init__(self, samples: Iterable[Record]) -> None:
        import lance
        import pyarrow as pa

        self.folder = tempfile.TemporaryDirectory(prefix="shmloader-lance-")
        self.path = f"{self.folder.name}/records.lance"
        table = pa.Table.from_pylist(list(samples))
        lance.write_dataset(table, self.path)
        self.rows = len(table)
        self.opened: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_lance, (self.path, self.rows)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        import lance

        self.opened = self.opened or lance.dataset(self.path)
        return self.opened.take([index]).to_pylist()[0]


def _open_lance(path: str, rows: int) -> Lance:
    opened = Lance.__new__(Lance)
    opened.path, opened.rows, opened.opened = path, rows, None
    return opened


def make_shared(rows: int, shape: str = "paths") -> Any:
    """Makes a list of records and shares it."""
    import shmloader

    return shmloader.share(list(records(rows, shape)))


def make_nothing_shared(rows: int, shape: str = "paths") -> Nothing:
    """No data, in a program that has made a store, so that all modules of stores are loaded."""
    import shmloader

    shmloader.share([record(0)])
    return Nothing(rows, shape)


def make_hugging_face(rows: int, shape: str = "paths") -> Any:
    """A Hugging Face dataset over Arrow memory."""
    import datasets

    return datasets.Dataset.from_list(list(records(rows, shape)))


@dataclass(frozen=True)
class Contestant:
    """A way to keep records.

    `make` makes the samples for a number of rows, and a shape. If `ours`, they are loaded with this project's
    loader, else with torch's. The targets are for the subject. `package` is what it needs; `shapes` are those
    that it can keep. Without `forks` its library has threads, beside which nothing is forked.
    """

    name: str
    make: Callable[..., Any]
    ours: bool = False
    subject: bool = False
    package: str = "torch"
    shapes: tuple[str, ...] = tuple(SHAPES)
    forks: bool = True

    @property
    def baseline(self) -> str:
        """The contestant that shows the memory of the same program without data."""
        return "shmloader, nothing" if self.ours else "torch, nothing"


def _made_by(kind: Callable[[Iterable[Record]], Any]) -> Callable[..., Any]:
    return lambda rows, shape="paths": kind(records(rows, shape))


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("torch, nothing", Nothing),
        Contestant("shmloader, nothing", make_nothing_shared, ours=True),
        Contestant("torch, list", _made_by(list)),
        Contestant("torch, array of each column", _made_by(Columns), shapes=("paths", "text", "table")),
        Contestant("torch, pickled bytes", _made_by(PickledBytes)),
        Contestant("torch, pickled tensors", _made_by(PickledTensors)),
        Contestant("torch, datasets", make_hugging_face, package="datasets"),
        Contestant("torch, lance", _made_by(Lance), package="lance", forks=False),
        Contestant("shmloader, share(list)", make_shared, ours=True, subject=True),
    )
}
"""All of them, by name."""


def available() -> list[str]:
    """The names of the contestants that have data and whose libraries are installed."""
    return [
        name
        for name, one in CONTESTANTS.items()
        if name != one.baseline and importlib.util.find_spec(one.package) is not None
    ]
