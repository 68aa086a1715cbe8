"""Other projects' loaders, each set up as its own documentation advises; docs/performance.md says how.

A project is imported only when its loader is made. So none is needed to measure the others, and none is
loaded in the measurement of another.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from benchmarks.loaders import Build, Loader, batching, is_of_arrays, register_loader
from benchmarks.made_data import ENDLESS, CyclicBatches
from benchmarks.numpy_collate import InOneThread, as_arrays, numpy_collate
from benchmarks.reading import LEAF_ALIGNMENT_NBYTES, batch_nbytes, leaves
from benchmarks.workloads import Workload

Collate = Callable[[list[Any]], Any]


class Batches:
    """The batches of a data set as a sequence, for libraries that take sequences and no samplers.

    Args:
        dataset: Map-style.
        batch_size: Samples per batch.
        collate: Joins samples, for a data set without a `cycle`.
        cycle: For a data set that takes many indices at once and gives a batch: the number of samples after
            which the indices begin again. None for a data set that gives one sample at a time.
    """

    def __init__(self, dataset: Any, batch_size: int, collate: Collate, cycle: int | None = None) -> None:
        self.dataset, self.batch_size, self.collate = dataset, batch_size, collate
        # As in a program: the epoch's order is a tensor, and a batch is a slice of it.
        self.order = None if cycle is None else torch.arange(cycle)

    def __len__(self) -> int:
        return ENDLESS // self.batch_size

    def __getitem__(self, number: int) -> Any:
        first = int(number) * self.batch_size
        if self.order is None:
            return self.collate([self.dataset[index] for index in range(first, first + self.batch_size)])
        first %= len(self.order)
        indices = self.order[first : first + self.batch_size]
        batch = self.dataset[indices if isinstance(self.dataset, TensorDataset) else indices.tolist()]
        return as_arrays(batch) if self.collate is numpy_collate else batch


def make_batches(dataset: Any, batch_size: int, collate: Collate, options: dict[str, Any]) -> Batches:
    """Makes the sequence of batches that a workload's options ask for.

    Args:
        dataset: The data set.
        batch_size: Samples per batch.
        collate: Joins samples, unless the workload has a collate function of its own.
        options: The workload's.
    """
    sampler: CyclicBatches | None = options.get("batch_sampler")
    cycle = None if sampler is None else sampler.length
    return Batches(dataset, batch_size, options.get("collate_fn") or collate, cycle)


def _collate_to_arrays(collate: Collate, samples: list[Any]) -> Any:
    return as_arrays(collate(samples))


def largest_nbytes(batches: Batches, ragged: bool) -> int:
    """Says how many bytes the leaves of the largest batch need, each on an aligned address."""
    period = getattr(batches.dataset, "period", batches.batch_size)
    count = max(1, period // batches.batch_size) if ragged else 1
    return max(
        batch_nbytes(batch) + LEAF_ALIGNMENT_NBYTES * sum(1 for _ in leaves(batch))
        for batch in (batches[number] for number in range(count))
    )


def build_torchdata(
    dataset: Any, batch_size: int, workers: int, prefetch_factor: int, **options: Any
) -> Iterable[Any]:
    """Makes torchdata's StatefulDataLoader, a drop-in for torch's."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(
        dataset,
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        **batching(batch_size, options),
    )


class Dealt:
    """A data set in another order, from which grain's workers make the batches of the original.

    Worker w of W gets every W-th element from w on, and batches are taken from the workers in turn. In
    this order, batch n holds the samples of the original from n times the batch size on.
    """

    def __init__(self, dataset: Any, batch_size: int, workers: int) -> None:
        self.dataset, self.batch_size, self.workers = dataset, batch_size, workers

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, place: int) -> Any:
        turn, worker = divmod(int(place), self.workers)
        batch, sample = divmod(turn, self.batch_size)
        return self.dataset[(batch * self.workers + worker) * self.batch_size + sample]


def build_grain(
    dataset: Any, batch_size: int, workers: int, prefetch_factor: int, **options: Any
) -> Iterable[Any]:
    """Makes a grain pipeline: batches of arrays, stacked in shared memory."""
    import grain

    # In memory, grain advises against reading threads; files are not in memory.
    in_memory = not hasattr(dataset, "paths")
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0) if in_memory else grain.ReadOptions()
    if "batch_sampler" in options:  # the elements are whole batches
        batches = make_batches(dataset, batch_size, numpy_collate, options)
        pipeline = grain.MapDataset.source(batches).to_iter_dataset(reading)
    else:
        collate = options.get("collate_fn")
        pipeline = (
            grain.MapDataset.source(Dealt(dataset, batch_size, workers))
            .to_iter_dataset(reading)
            .batch(batch_size, batch_fn=collate and partial(_collate_to_arrays, collate))
        )
    return pipeline.mp_prefetch(
        grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch_factor),
        worker_init_fn=use_one_thread,
    )


def use_one_thread(worker: int, workers: int) -> None:
    """Makes torch use one thread in a worker, as in its own workers."""
    torch.set_num_threads(1)


def build_spdl(
    dataset: Any, batch_size: int, workers: int, prefetch_factor: int, **options: Any
) -> Iterable[Any]:
    """Makes SPDL's drop-in for torch's loader, in order."""
    from spdl.dataloader import get_pytorch_dataloader

    size: int | None = batch_size
    if "batch_sampler" in options:  # whole batches, as with torch's own
        size, options["sampler"] = None, options.pop("batch_sampler")
    else:
        options["collate_fn"] = InOneThread(options.get("collate_fn") or default_collate)
    return get_pytorch_dataloader(
        dataset,
        batch_size=size,
        num_workers=workers,
        prefetch_factor=prefetch_factor,
        in_order=True,  # by default batches come as they are done
        **options,
    )


class EveryNth:
    """One worker's batches: every `step`-th from `first` on."""

    def __init__(self, batches: Batches, first: int, step: int) -> None:
        self.batches, self.first, self.step = batches, first, step

    def __iter__(self) -> Iterator[Any]:
        torch.set_num_threads(1)
        for number in range(self.first, len(self.batches), self.step):
            yield self.batches[number]


class InTurn:
    """Takes from some iterables in turn, over and over."""

    def __init__(self, iterables: list[Iterable[Any]]) -> None:
        self.iterables = iterables

    def __iter__(self) -> Iterator[Any]:
        iterators = [iter(iterable) for iterable in self.iterables]
        while True:
            for iterator in iterators:
                yield next(iterator)


def build_spdl_arena(collate: Collate) -> Build:
    """Makes a builder of SPDL subprocesses, one per worker, each with an arena of shared memory."""

    def build(
        dataset: Any, batch_size: int, workers: int, prefetch_factor: int, **options: Any
    ) -> Iterable[Any]:
        from spdl.pipeline import SharedMemorySegmentPool, iterate_in_subprocess

        batches = make_batches(dataset, batch_size, collate, options)
        # Envelope and alignment of each part are included: twice the payload, as in its own benchmark.
        nbytes = max(1 << 20, 2 * largest_nbytes(batches, ragged="collate_fn" in options))
        return InTurn(
            [
                iterate_in_subprocess(
                    partial(EveryNth, batches, rank, workers),
                    buffer_size=prefetch_factor,
                    mp_context=options.get("multiprocessing_context"),
                    # Batches that are buffered; one being made, one held by the program, and its successor.
                    arena=SharedMemorySegmentPool(segment_size=nbytes, count=prefetch_factor + 4),
                )
                for rank in range(workers)
            ]
        )

    return build


def build_seqtools(collate: Collate) -> Build:
    """Makes a builder of SeqTools' prefetching over batches, with buffers in shared memory."""

    def build(
        dataset: Any, batch_size: int, workers: int, prefetch_factor: int, **options: Any
    ) -> Iterable[Any]:
        import seqtools  # its workers start with the default method of this moment

        batches = make_batches(dataset, batch_size, collate, options)
        nbytes = largest_nbytes(batches, ragged="collate_fn" in options)
        # It queues two batches fewer than it has buffers, so that batches still held do not stop it.
        buffers = workers * prefetch_factor + 2
        prefetched: Iterable[Any] = seqtools.prefetch(
            batches,
            nworkers=workers,
            method="process",
            max_buffered=buffers,
            shm_size=buffers * nbytes,
            start_hook=prepare_seqtools_worker,
        )
        return prefetched

    return build


def prepare_seqtools_worker(worker: int) -> None:
    """Makes SeqTools send tensors in its buffers, as in its example of a torch loader."""
    torch.set_num_threads(1)
    copyreg.pickle(torch.Tensor, _reduce_tensor)


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return torch.from_numpy, (tensor.numpy(),)


def _grain_cannot(workload: Workload) -> str | None:
    if workload.start_method not in (None, "spawn"):
        return f"its workers start by spawn, not by {workload.start_method}"
    return None


for _loader in (
    Loader("torchdata", build_torchdata, packages=("torchdata.stateful_dataloader",)),
    Loader("grain", build_grain, packages=("grain",), cannot=_grain_cannot),
    Loader(
        "spdl",
        build_spdl,
        packages=("spdl.dataloader",),
        copies_dataset=lambda method, workers: 3.0 + workers,  # forked workers get a copy too
    ),
    Loader("spdl-arena", build_spdl_arena(default_collate), packages=("spdl.pipeline",)),
    Loader(
        "spdl-arena-numpy",
        build_spdl_arena(numpy_collate),
        packages=("spdl.pipeline",),
        meant_for=is_of_arrays,
    ),
    Loader("seqtools", build_seqtools(default_collate), packages=("seqtools",)),
    Loader("seqtools-numpy", build_seqtools(numpy_collate), packages=("seqtools",), meant_for=is_of_arrays),
):
    register_loader(_loader)
