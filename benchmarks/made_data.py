"""Data sets in memory: the samples of the workloads."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler, TensorDataset

ENDLESS = 1 << 40
"""The length of the workloads' data sets, in samples: an epoch that outlasts any window."""


class Repeated(Dataset[Any]):
    """Samples that repeat after `period` of them; a subclass makes one sample."""

    def __init__(self, period: int) -> None:
        self.period = period

    def __len__(self) -> int:
        return ENDLESS


class Numbers(Dataset[int]):
    """Sample ``i`` is ``i``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Rows(Repeated):
    """Rows of one tensor, or of one array."""

    def __init__(self, base: torch.Tensor | NDArray[Any]) -> None:
        super().__init__(len(base))
        self.base = base

    def __getitem__(self, index: int) -> torch.Tensor | NDArray[Any]:
        return self.base[index % self.period]


class Records(Repeated):
    """Samples that were made beforehand, so that fetching one costs almost nothing."""

    def __init__(self, records: list[Any]) -> None:
        super().__init__(len(records))
        self.records = records

    def __getitem__(self, index: int) -> Any:
        return self.records[index % self.period]


class Columns(Repeated):
    """Dicts that are cut out of columns when they are fetched, as in many data sets."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        super().__init__(len(next(iter(columns.values()))))
        self.columns = columns

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = index % self.period
        record: dict[str, Any] = {name: column[row] for name, column in self.columns.items()}
        record["name"] = f"record-{row:05d}"
        return record


class Busy(Rows):
    """Each sample takes `cpu_s` of its process's processor time, however long that lasts."""

    def __init__(self, base: torch.Tensor, cpu_s: float) -> None:
        super().__init__(base)
        self.cpu_s = cpu_s

    def __getitem__(self, index: int) -> torch.Tensor | NDArray[Any]:
        end_s = time.thread_time() + self.cpu_s
        while time.thread_time() < end_s:
            sum(range(500))
        return super().__getitem__(index)


class Uneven(Rows):
    """Each sample takes `usual_s`, and one in `every` takes `slow_s`; the time is slept."""

    def __init__(self, base: torch.Tensor, usual_s: float, slow_s: float, every: int) -> None:
        super().__init__(base)
        self.usual_s, self.slow_s, self.every = usual_s, slow_s, every

    def __getitem__(self, index: int) -> torch.Tensor | NDArray[Any]:
        time.sleep(self.slow_s if index % self.every == self.every // 2 else self.usual_s)
        return super().__getitem__(index)


class CyclicBatches(Sampler[list[int]]):
    """Draws the index batches of a finite data set in order, over and over; each list is made once.

    The cost of a sampler is not the loader's, and loaders without samplers do not have it.
    """

    def __init__(self, length: int, batch_size: int) -> None:
        self.length, self.batch_size = length, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        begins = range(0, self.length, self.batch_size)
        return itertools.cycle([list(range(begin, begin + self.batch_size)) for begin in begins])

    def __len__(self) -> int:
        return ENDLESS // self.batch_size


def make_images(samples: int) -> Rows:
    """Makes uint8 images of 3x224x224."""
    return Rows(torch.randint(0, 256, (samples, 3, 224, 224), dtype=torch.uint8))


def make_image_arrays(samples: int) -> Rows:
    """Makes the same images as arrays."""
    return as_arrays(make_images(samples))


def make_image_table(samples: int) -> TensorDataset:
    """Makes the same images as torch's own data set of tensors."""
    images = make_images(samples).base
    assert isinstance(images, torch.Tensor)
    return TensorDataset(images)


def make_rows(samples: int) -> Rows:
    """Makes rows of 64 float32."""
    return Rows(torch.rand(samples, 64))


def make_row_arrays(samples: int) -> Rows:
    """Makes the same rows as arrays."""
    return as_arrays(make_rows(samples))


def make_row_table(samples: int) -> TensorDataset:
    """Makes rows of 64 float32, each with a label, as torch's own data set of tensors."""
    return TensorDataset(torch.rand(samples, 64), torch.randint(0, 1000, (samples,)))


def make_row_datasets(samples: int) -> Any:
    """Makes the same rows as a Hugging Face data set in memory, which gives tensors."""
    import datasets

    table = make_row_table(samples)
    rows, labels = (tensor.numpy() for tensor in table.tensors)
    row = datasets.Sequence(datasets.Value("float32"), length=64)
    features = datasets.Features({"row": row, "label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict({"row": rows, "label": labels}, features=features)
    return made.with_format("torch")


def datasets_missing() -> str | None:
    """Says what has to be installed for Hugging Face data sets; None if it is installed."""
    if importlib.util.find_spec("datasets") is None:
        return "datasets not installed: pip install -c constraints.txt -e '.[peers]'"
    return None


def as_arrays(rows: Rows) -> Rows:
    """Turns rows of a tensor into rows of an array."""
    return Rows(np.asarray(rows.base))


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


def make_record_arrays(samples: int) -> Repeated:
    """Makes dicts of 100 arrays of 8 float32, and a name."""
    records = make_records(samples)
    assert isinstance(records, Records)
    return Records(
        [
            {name: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in record.items()}
            for record in records.records
        ]
    )


def make_tokens(samples: int) -> Repeated:
    """Makes sequences of 8 to 256 int64 tokens."""
    lengths = torch.randint(8, 257, (samples,)).tolist()
    return Records([torch.randint(0, 50_000, (length,)) for length in lengths])


def make_boxes(samples: int) -> Repeated:
    """Makes dicts of 1 to 40 boxes of 4 float32, and as many int64 labels."""
    counts = torch.randint(1, 41, (samples,)).tolist()
    return Records(
        [{"boxes": torch.rand(count, 4), "labels": torch.randint(0, 91, (count,))} for count in counts]
    )


def make_busy(samples: int) -> Repeated:
    """Makes samples that take 2 ms of processor time each."""
    return Busy(torch.rand(samples, 1024), cpu_s=0.002)


def make_uneven(samples: int) -> Uneven:
    """Makes samples of 4 KiB that take 5 ms each, and one in twenty 100 ms."""
    return Uneven(torch.rand(samples, 1024), usual_s=0.005, slow_s=0.1, every=20)


def make_large(samples: int) -> Rows:
    """Makes an array of rows of 1 kB with all pages in memory, in about the time of a copy."""
    base = np.empty((samples, 250), np.float32)
    block = torch.rand(min(samples, 65_536), 250).numpy()
    for start in range(0, samples, len(block)):
        rows = base[start : start + len(block)]
        rows[:] = block[: len(rows)]
    return Rows(base)
