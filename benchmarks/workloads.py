"""The registry of workloads: each is a data set, how it is loaded, and the targets that belong to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset, default_collate

from benchmarks import made_data, own_collate, real_files
from benchmarks.made_data import CyclicBatches, Repeated, Uneven

__all__ = ["WORKLOADS", "Repeated", "Targets", "Workload", "register_workload"]

QUICK_DIVISOR = 16
"""Batches of a quick run are so many times smaller."""

QUICK_PERIOD = 64
"""Most batches in the data set of a quick start-up."""

THROUGHPUT, STARTUP, TRAINING = "throughput", "start-up", "training"
"""Kinds of workload: batches in a time; the time to the first batch; the share of time that a loop waits."""


@dataclass(frozen=True)
class Targets:
    """Targets of a workload; None for no target.

    Attributes:
        loader: The loader that they are for; None for this project's loader with its defaults.
        startup_within: Another workload and a factor, which bounds the ratio of their times to the first
            batch.
    """

    vs_torch: float | None = None
    of_limit: float | None = None
    batches_per_s: float | None = None
    constant_descriptors: bool = False
    vs_best_peer: float | None = None
    most_wait_share: float | None = None
    loader: str | None = None
    startup_within: tuple[str, float] | None = None


@dataclass(frozen=True)
class Workload:
    """One kind of data to move. Batches recur after `period_batches` of them.

    Attributes:
        name: Its name on the command line.
        batch_size: Samples per batch.
        period_batches: Number of batches before they repeat.
        dataset: Makes the data set, given its number of samples.
        targets: Its targets.
        kind: The kind of measurement: THROUGHPUT, STARTUP or TRAINING.
        about: Description of a sample, for people.
        collate: Joins samples, in workers; None for torch's default collate.
        samples: The contents of `dataset[i]`: "tensors", "arrays", "table" if the data set also takes a
            list of indices and gives the whole batch, or "whole" if that is how it is loaded
            (`batch_size=None`).
        prefetch_factor: Overrides the run's.
        start_method: How workers start; None for the platform's default.
        compute_s: Seconds that one step of the training loop computes.
        dataset_nbytes: The data set's size, if it is so large that memory may be short; else 0.
        make_into: Makes a batch of an index batch, into existing outputs if possible; the limit repeats it.
            None for fetching and `limit.collate_into`.
        ideal_rate: Gives the highest possible samples/s for a data set and a number of workers, if that is
            known without running as many processes.
        missing: Says what this host lacks for it, or None.
    """

    name: str
    batch_size: int
    period_batches: int
    dataset: Callable[[int], Dataset[Any]]
    targets: Targets = Targets()
    kind: str = THROUGHPUT
    about: str = ""
    collate: Callable[[list[Any]], Any] | None = None
    samples: str = "tensors"
    prefetch_factor: int | None = None
    start_method: str | None = None
    compute_s: float = 0.0
    dataset_nbytes: int = 0
    make_into: Callable[[Any, Any, Any], Any] | None = None
    ideal_rate: Callable[[Any, int], float] | None = None
    missing: Callable[[], str | None] | None = None

    def make_dataset(self) -> Dataset[Any]:
        """Makes the data set, the same in every process."""
        torch.manual_seed(0)
        return self.dataset(self.batch_size * self.period_batches)

    def index_batch(self, number: int) -> list[int]:
        """Gives the indices of a batch, folded into the first period."""
        first = number % self.period_batches * self.batch_size
        return list(range(first, first + self.batch_size))

    def reference_batch(self, dataset: Any, number: int) -> Any:
        """Makes a batch the plain way: fetch, collate, no loader."""
        return (self.collate or default_collate)([dataset[index] for index in self.index_batch(number)])

    def reference_batches(self, dataset: Any) -> Iterator[Any]:
        """Makes all batches of a period the plain way."""
        return (self.reference_batch(dataset, number) for number in range(self.period_batches))

    def options(self) -> dict[str, Any]:
        """Gives the loader's arguments that only this workload has, by torch's names."""
        options: dict[str, Any] = {}
        if self.collate is not None:
            options["collate_fn"] = self.collate
        if self.samples in ("table", "whole"):
            name = "batch_sampler" if self.samples == "table" else "sampler"
            options[name] = CyclicBatches(self.batch_size * self.period_batches, self.batch_size)
        if self.start_method is not None:
            options["multiprocessing_context"] = self.start_method
        return options

    def quick(self) -> Workload:
        """Gives the same workload with small batches."""
        period = min(QUICK_PERIOD, self.period_batches) if self.kind == STARTUP else self.period_batches
        return replace(
            self,
            batch_size=max(1, self.batch_size // QUICK_DIVISOR),
            period_batches=period,
            dataset_nbytes=0 if self.kind == STARTUP else self.dataset_nbytes,
        )


WORKLOADS: dict[str, Workload] = {}


def register_workload(workload: Workload) -> None:
    """Adds a workload."""
    if workload.name in WORKLOADS:
        raise ValueError(f"workload {workload.name!r} is registered already")
    WORKLOADS[workload.name] = workload


def pad_tokens(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins sequences, each filled up with zeros to the longest, and adds their lengths."""
    return pad_sequence(samples, batch_first=True), torch.tensor([len(sample) for sample in samples])


def list_into(dataset: Any, indices: list[int], out: Any) -> Any:
    """Makes a list of samples without a loader; nothing is joined, so no output is needed."""
    return [dataset[index] for index in indices]


def pad_into(dataset: Any, indices: list[int], out: Any) -> Any:
    """Pads without a loader. `pad_sequence` has no `out`; its results are small and need no fresh pages."""
    return pad_tokens(list_into(dataset, indices, out))


def take_into(dataset: Any, indices: list[int], out: Any) -> Any:
    """Asks the data set for the whole batch."""
    return dataset[indices]


def gather_into(dataset: TensorDataset, indices: list[int], out: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gathers a batch with one call per tensor."""
    index = index_tensor(indices[0], len(indices))
    return [
        torch.index_select(tensor, 0, index, out=into)
        for tensor, into in zip(dataset.tensors, out, strict=True)
    ]


def collate_alone(collate: Callable[[list[Any]], Any], dataset: Any, indices: list[int], out: Any) -> Any:
    """Calls a program's own collate function, which makes its results anew."""
    return collate([dataset[index] for index in indices])


_INDEX_TENSORS: dict[tuple[int, int], torch.Tensor] = {}


def index_tensor(first: int, count: int) -> torch.Tensor:
    """Gives the tensor of an index batch, made once: the limit is the gathering alone."""
    if (first, count) not in _INDEX_TENSORS:
        _INDEX_TENSORS[first, count] = torch.arange(first, first + count)
    return _INDEX_TENSORS[first, count]


def uneven_rate(dataset: Uneven, workers: int) -> float:
    """Gives the samples per second of workers that never wait.

    It is computed from measured times of fetching and collating, because a sleep lasts longer than asked for.
    """
    samples = 2 * dataset.every
    start_s = time.perf_counter()
    for index in range(samples):
        default_collate([dataset[index]])
    return workers * samples / (time.perf_counter() - start_s)


def start_up(name: str, nbytes: int, method: str) -> Workload:
    """Makes a workload of the time to the first batch of a data set of a size."""
    row_nbytes, batch_size = 1000, 256
    smallest = f"startup-1mb-{method}"
    return Workload(
        f"startup-{name}-{method}",
        batch_size,
        max(1, nbytes // row_nbytes // batch_size),
        made_data.make_large,
        Targets(startup_within=(smallest, 1.2) if method == "spawn" and name == "1gb" else None),
        kind=STARTUP,
        about=f"a data set that holds an array of {name.upper()}; workers start by {method}",
        samples="arrays",
        start_method=method,
        dataset_nbytes=nbytes,
    )


def _in_memory() -> list[Workload]:
    table = partial(Workload, samples="table", make_into=gather_into)
    image, row = "uint8 3x224x224", "64 float32"
    return [
        Workload("images", 256, 4, made_data.make_images, Targets(8, 0.9, vs_best_peer=6), about=image),
        Workload("rows", 1024, 16, made_data.make_rows, Targets(of_limit=0.95, vs_best_peer=1), about=row),
        Workload(
            "tiny",
            1,
            1024,
            made_data.make_tiny,
            Targets(vs_torch=20, batches_per_s=30_000, vs_best_peer=4),
            about="16 bytes",
        ),
        Workload(
            "dicts",
            32,
            4,
            made_data.make_records,
            Targets(of_limit=0.95, constant_descriptors=True, vs_best_peer=1),
            about="a dict of 100 x 8 float32 and a string, made beforehand",
        ),
        Workload(
            "dicts-cut",
            32,
            4,
            made_data.make_columns,
            Targets(of_limit=0.95, constant_descriptors=True, vs_best_peer=1),
            about="the same, cut out of columns",
        ),
        Workload(
            "images-arrays",
            256,
            4,
            made_data.make_image_arrays,
            Targets(of_limit=0.9, vs_best_peer=2),
            about=f"{image}, ndarrays",
            samples="arrays",
        ),
        Workload(
            "rows-arrays",
            1024,
            16,
            made_data.make_row_arrays,
            Targets(of_limit=0.95, vs_best_peer=1),
            about=f"{row}, ndarrays",
            samples="arrays",
        ),
        Workload(
            "dicts-arrays",
            32,
            4,
            made_data.make_record_arrays,
            Targets(of_limit=0.95, vs_best_peer=1),
            about="a dict of 100 ndarrays of 8 float32, and a string",
            samples="arrays",
        ),
        table(
            "images-table",
            256,
            4,
            made_data.make_image_table,
            Targets(vs_torch=12, of_limit=0.95),
            about=f"{image}, a TensorDataset",
        ),
        table(
            "rows-table",
            4096,
            16,
            made_data.make_row_table,
            Targets(vs_torch=30, vs_best_peer=1.5),
            about=f"{row} and a label, a TensorDataset",
        ),
        Workload(
            "rows-datasets",
            1024,
            4,
            made_data.make_row_datasets,
            about="the same rows, a Hugging Face data set in memory, torch format",
            samples="table",
            make_into=take_into,
            missing=made_data.datasets_missing,
        ),
        Workload(
            "ragged",
            64,
            16,
            made_data.make_tokens,
            Targets(of_limit=0.95, vs_best_peer=1),
            about="8 to 256 int64, padded to the batch's longest",
            collate=pad_tokens,
            make_into=pad_into,
        ),
        Workload(
            "boxes",
            64,
            16,
            made_data.make_boxes,
            Targets(vs_torch=5, vs_best_peer=1),
            about="1 to 40 boxes and labels for detection, a list that is not joined",
            collate=list,
            make_into=list_into,
        ),
    ]


def _in_time() -> list[Workload]:
    return [
        Workload(
            "cpu-2ms", 16, 4, made_data.make_busy, Targets(of_limit=0.97), about="2 ms of processor time"
        ),
        Workload(
            "slow-batch",
            1,
            20,
            made_data.make_uneven,
            Targets(of_limit=1 / 1.1, loader="shmloader-dynamic"),
            about="5 ms, one in twenty 100 ms, slept",
            # With two batches ahead per worker, any loader that keeps the order would run dry after a slow
            # batch.
            prefetch_factor=16,
            ideal_rate=uneven_rate,
        ),
        Workload(
            "training-5ms",
            32,
            8,
            made_data.make_images,
            Targets(most_wait_share=0.01),
            kind=TRAINING,
            about="uint8 3x224x224, and a step of 5 ms that keeps a core busy",
            compute_s=0.005,
        ),
        *(
            start_up(name, nbytes, method)
            for name, nbytes in (("1mb", 10**6), ("1gb", 10**9), ("10gb", 10**10))
            for method in ("fork", "spawn", "forkserver")
        ),
    ]


def _of_files() -> list[Workload]:
    return [
        Workload(
            "sources",
            64,
            16,
            real_files.make_sources,
            about="a Python source of the standard library, read and decoded, padded",
            collate=pad_tokens,
            make_into=pad_into,
        ),
        Workload("npy", 64, 8, real_files.make_npy, about="an npy file of 3x64x64 float32, read"),
        Workload(
            "png",
            64,
            8,
            real_files.make_png,
            about="a PNG file of 128x128x3, read and decoded",
            missing=real_files.png_missing,
        ),
    ]


def _own() -> list[Workload]:
    """Programs' own collate functions; the limit is the same function in as many processes."""

    def images(name: str, collate: Any, make: Any = made_data.make_images, about: str = "") -> Workload:
        said = about or (collate.__doc__ or "").partition(".")[0]
        alone = partial(collate_alone, collate)
        return Workload(f"own-{name}", 256, 4, make, about=said, collate=collate, make_into=alone)

    return [
        images("stack", own_collate.stack),
        images("pairs", own_collate.stack_pairs, own_collate.make_pairs),
        images("dicts", own_collate.stack_dicts, own_collate.make_pairs),
        images("cat", own_collate.cat),
        images("boxes", own_collate.stack_boxes, own_collate.make_boxed),
        images("scaled", own_collate.stack_scaled),
        images("zeros", own_collate.fill_zeros, own_collate.make_pairs),
        images("array", own_collate.of_array),
        images("numpy", own_collate.of_numpy_stack),
        images("shared", own_collate.old_default),
        images("padded", own_collate.pad_long, own_collate.make_long_tokens),
        images("texts", own_collate.words, own_collate.make_texts),
        images("encoded", list, own_collate.EncodedFiles, "encoded files of 100 kB, a list"),
        Workload(
            "own-nested",
            16,
            2,
            own_collate.make_detected,
            about="float32 3x560x560 and seven small tensors each, 65 MB in 114 tensors: RF-DETR's batch",
            collate=own_collate.nest,
            make_into=partial(collate_alone, own_collate.nest),
        ),
        Workload("own-fresh", 64, 2, own_collate.FreshArrays, about="float32 images made anew by NumPy"),
        Workload(
            "own-whole",
            256,
            4,
            own_collate.WholeBatches,
            about="uint8 3x224x224, a data set of whole batches, batch_size=None",
            samples="whole",
            make_into=take_into,
        ),
    ]


for _workload in (*_in_memory(), *_in_time(), *_of_files(), *_own()):
    register_workload(_workload)
