"""The limit: the same work without a loader.

As many processes as there are workers fetch and collate, each into one output that it uses over
and over. One more process reads like the consumer, once for each batch that is made. Nothing is
transported: the reader reads a batch of its own. The rest is the work that any loader has to do, and
the processes compete for the cores as they do with a loader.

The output is reused because fresh memory costs page faults, which would make the limit several
times too easy to reach.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from benchmarks.machine import CpuMeter
from benchmarks.reading import Period, touch, update_digest
from benchmarks.records import Measurement, Spec
from benchmarks.workloads import Workload

_MOST_WINDOWS = 20  # until `min_batches` were made and read, on a busy machine

STRIDE = 16
"""Distance of two counters, in 8-byte words: two cache lines, so that writers do not share one."""

NAP_S = 0.0005
"""Sleep of the reader when nothing is due; spinning would take a core from the producers."""

CHECKED_BATCHES = 8
"""Batches that go into the checksum, here and with the loaders."""


def outputs_like(batch: Any) -> Any:
    """Allocates one output per leaf of a batch, and writes to all its pages."""
    if isinstance(batch, torch.Tensor):
        return torch.zeros_like(batch).fill_(1)  # zeros alone may leave the pages unbacked
    if isinstance(batch, dict):
        return {key: outputs_like(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [outputs_like(value) for value in batch]
    return None


def collate_into(samples: list[Any], out: Any) -> Any:
    """Collates as torch's default collate does, into outputs that exist already."""
    first = samples[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(samples, out=out)
    if isinstance(first, np.ndarray):
        np.stack(samples, out=out.numpy())
        return out
    if isinstance(first, dict):
        return {key: collate_into([sample[key] for sample in samples], out[key]) for key in first}
    if isinstance(first, str):
        return samples
    raise TypeError(f"no workload makes samples of {type(first).__name__}")


class Shared:
    """Counters in shared memory, one writer each: per producer, the reader's, and a stop sign."""

    def __init__(self, producers: int, context: multiprocessing.context.BaseContext) -> None:
        self.producers = producers
        self.words = context.RawArray("q", (producers + 2) * STRIDE)
        self.barrier = context.Barrier(producers + 2)

    def view(self) -> memoryview:
        """Gives the words as a view that is quick to index."""
        return memoryview(self.words).cast("B").cast("q")

    def made(self, view: memoryview) -> int:
        """The number of batches that the producers have made."""
        return sum(view[rank * STRIDE] for rank in range(self.producers))

    @property
    def read_word(self) -> int:
        """Index of the reader's counter."""
        return self.producers * STRIDE

    @property
    def stop_word(self) -> int:
        """Index of the stop sign."""
        return (self.producers + 1) * STRIDE


def make_into(dataset: Any, indices: list[int], out: Any) -> Any:
    """Fetches and collates one batch, into outputs that exist already."""
    return collate_into([dataset[index] for index in indices], out)


Make = Callable[[Any, list[int], Any], Any]


def produce(
    dataset: Any, index_batches: list[list[int]], out: Any, make: Make, rank: int, shared: Shared
) -> None:
    """Fetches and collates, one index batch after the other, until told to stop."""
    torch.set_num_threads(1)  # as in a worker
    out = outputs_like(out)  # of its own: the argument may be shared
    view, stop_word, made = shared.view(), shared.stop_word, 0
    make(dataset, index_batches[0], out)
    shared.barrier.wait()
    while not view[stop_word]:
        make(dataset, index_batches[made % len(index_batches)], out)
        made += 1
        view[rank * STRIDE] = made


def consume(batch: Any, shared: Shared) -> None:
    """Reads a warm batch once for each batch that the producers make."""
    torch.set_num_threads(1)
    view, stop_word, read = shared.view(), shared.stop_word, 0
    touch(batch)
    shared.barrier.wait()
    while not view[stop_word]:
        due = shared.made(view)
        if read == due:
            time.sleep(NAP_S)
            continue
        touch(batch)
        read += 1
        view[shared.read_word] = read


def measure_limit(spec: Spec, workload: Workload, dataset: Any) -> Measurement:
    """Runs producers and reader side by side and counts for a while."""
    reference = workload.reference_batch(dataset, 0)
    make = workload.make_into or make_into
    checksum = checksum_without_loader(workload, dataset, outputs_like(reference), make)
    if workload.ideal_rate is not None:
        rate = workload.ideal_rate(dataset, spec.workers) / workload.batch_size
        return _measurement(workload, dataset, checksum, {"made": rate, "read": rate, "window_s": 1.0})
    context = multiprocessing.get_context()
    shared = Shared(spec.workers, context)
    period = range(workload.period_batches)
    processes: list[BaseProcess] = [context.Process(target=consume, args=(reference, shared))]
    for rank in range(spec.workers):
        batches = [workload.index_batch(rank + turn * spec.workers) for turn in period]
        arguments = (dataset, batches, reference, make, rank, shared)
        processes.append(context.Process(target=produce, args=arguments))
    for process in processes:
        process.daemon = True
        process.start()
    shared.barrier.wait(timeout=60)
    time.sleep(spec.warmup_s)
    counts = _count(spec, shared)
    for process in processes:
        process.join()
    return _measurement(workload, dataset, checksum, counts)


def _measurement(workload: Workload, dataset: Any, checksum: str, counts: dict[str, float]) -> Measurement:
    # If the reader fell behind here, it would with a loader too.
    batches = min(counts["made"], counts["read"])
    batches_per_s = batches / counts["window_s"]
    nbytes = Period.of(workload.reference_batches(dataset)).mean_nbytes
    return Measurement(
        contestant="limit",
        batches=int(batches),
        window_s=counts["window_s"],
        batches_per_s=batches_per_s,
        samples_per_s=batches_per_s * workload.batch_size,
        nbytes_per_s=batches_per_s * nbytes,
        cpu_s=counts.get("cpu_s", 0.0),
        foreign_share=counts.get("foreign_share", 0.0),
        batch_nbytes=round(nbytes),
        checksum=checksum,
        details={"made": counts["made"], "read": counts["read"]},
    )


def _count(spec: Spec, shared: Shared) -> dict[str, float]:
    """Waits for the window, counts the batches made and read in it, and stops all processes."""
    view = shared.view()
    meter = CpuMeter()
    start_s, made, read = time.perf_counter(), shared.made(view), view[shared.read_word]
    before = made, read
    for _ in range(_MOST_WINDOWS):
        time.sleep(spec.seconds)
        made, read = shared.made(view) - before[0], view[shared.read_word] - before[1]
        if min(made, read) >= spec.min_batches:
            break
    window_s = time.perf_counter() - start_s
    cpu_s, foreign_s = meter.read()
    view[shared.stop_word] = 1
    return {
        "made": made,
        "read": read,
        "window_s": window_s,
        "cpu_s": cpu_s,
        "foreign_share": foreign_s / window_s / (os.cpu_count() or 1),
    }


def checksum_without_loader(workload: Workload, dataset: Any, out: Any, make: Make = make_into) -> str:
    """Takes the checksum of the first batches, to compare with the loaders'."""
    digest = hashlib.blake2b(digest_size=16)
    for number in range(CHECKED_BATCHES):
        update_digest(digest, make(dataset, workload.index_batch(number), out))
    return digest.hexdigest()
