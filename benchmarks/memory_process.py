"""One measurement of memory, in the fresh process that it has to itself.

`python -m benchmarks.memory_process SPEC`: the specification as JSON. It answers once, with the figures.
Memory is read from `/proc/PID/smaps_rollup`.
"""

from __future__ import annotations

import ctypes
import io
import json
import multiprocessing
import multiprocessing.reduction
import os
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fresh_process import FreshProcess, claim_output
from benchmarks.memory_datasets import CONTESTANTS, Rows, expected_sum, records
from shmloader.memory.process_memory import read_memory

MARK = "SHMLOADER_MEMORY_BENCHMARK"
"""The environment variable by which the processes of a measurement are found."""

BATCH_SIZE = 1024
CONTEXT = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Spec:
    """One measurement.

    `kind` is size, growth, ranks, rank (one of the ranks), spawn or epochs. `rows` are records, or with spawn
    KB of data. `name` is the name under which the ranks share. Only epochs have a `shape` and a `method`, in
    which workers start.
    """

    kind: str
    contestant: str
    rows: int
    workers: int
    epochs: int = 1
    ranks: int = 1
    name: str = ""
    shape: str = "paths"
    method: str = "fork"


def make_loader(spec: Spec, dataset: Any, **arguments: Any) -> Any:
    """Makes the contestant's loader; the arguments are the same for all."""
    if CONTESTANTS[spec.contestant].ours:
        from shmloader import DataLoader as Loader
    else:
        from torch.utils.data import DataLoader as Loader  # type: ignore[assignment]
    return Loader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=spec.workers,
        persistent_workers=spec.workers > 0,
        **arguments,
    )


def run_epochs(loader: Any, spec: Spec) -> None:
    """Consumes epochs, and checks the sum of their samples."""
    for _ in range(spec.epochs):
        total = sum(int(batch.sum()) for batch in loader)
        if total != expected_sum(spec.rows):
            raise AssertionError(f"{spec.contestant}: the samples add up to {total}")


class Start:
    """A worker_init_fn that notes each worker's private memory before its first batch."""

    def __init__(self, workers: int) -> None:
        self.private: Any = CONTEXT.Array("q", workers)
        self.pids: Any = CONTEXT.Array("q", workers)

    def __call__(self, worker_id: int) -> None:
        self.pids[worker_id] = os.getpid()
        self.private[worker_id] = read_memory(os.getpid())["Private_Dirty"]


def measure_size(spec: Spec) -> dict[str, Any]:
    """Measures the private memory that the samples take."""
    before = read_memory(os.getpid())["Private_Dirty"]
    samples = CONTESTANTS[spec.contestant].make(spec.rows)
    nbytes = read_memory(os.getpid())["Private_Dirty"] - before
    return {"data_nbytes": nbytes, "rows": len(samples)}


def measure_growth(spec: Spec) -> dict[str, Any]:
    """Measures the growth of each worker's private memory while it reads."""
    began_s = time.monotonic()
    samples = CONTESTANTS[spec.contestant].make(spec.rows)
    built_s = time.monotonic() - began_s
    start = Start(spec.workers)
    loader = make_loader(spec, Rows(samples), worker_init_fn=start, multiprocessing_context="fork")
    began_s = time.monotonic()
    run_epochs(loader, spec)
    epoch_s = (time.monotonic() - began_s) / spec.epochs
    growth = [
        read_memory(pid)["Private_Dirty"] - private
        for pid, private in zip(start.pids, start.private, strict=True)
    ]
    return {
        "growth_nbytes": growth,
        "build_s": built_s,
        "epoch_s": epoch_s,
        "samples_per_s": spec.rows / epoch_s,
        "rss_nbytes": read_memory(os.getpid())["Rss"],
    }


def be_rank(spec: Spec, answer: Callable[[Any], None]) -> None:
    """Loads an epoch, answers with the store's size, and stays until the input ends."""
    contestant = CONTESTANTS[spec.contestant]
    if contestant.subject:
        import shmloader

        samples = shmloader.share_on_host(lambda: shmloader.share(records(spec.rows)), name=spec.name)
        store_nbytes = samples.nbytes
    else:
        samples, store_nbytes = contestant.make(spec.rows), 0
    loader = make_loader(spec, Rows(samples), multiprocessing_context="fork")
    run_epochs(loader, spec)
    # An epoch's index list leaves memory in the heap that differs from run to run by tens of MB.
    ctypes.CDLL(None).malloc_trim(0)
    answer({"store_nbytes": store_nbytes})
    sys.stdin.read()


def measure_ranks(spec: Spec) -> dict[str, Any]:
    """Measures the memory of all processes of several ranks, the process that serves them included.

    Pages of files (the code of libraries) are counted apart: the number of processes that share them, and so
    the share of each, depends on other programs on the machine.
    """
    mark = uuid.uuid4().hex
    rank = json.dumps({**asdict(spec), "kind": "rank", "name": mark})
    with ExitStack() as ends:
        ranks = [
            ends.enter_context(
                FreshProcess(
                    f"rank {number}",
                    "benchmarks.memory_process",
                    rank,
                    environment={MARK: mark, "LOCAL_RANK": str(number)},
                )
            )
            for number in range(spec.ranks)
        ]
        stores = [process.answer()["store_nbytes"] for process in ranks]
        found = [read_memory(pid) for pid in marked(mark)]
        for process in ranks:
            process.finish(timeout_s=60)
    return {
        "pss_nbytes": sum(one.get("Pss", 0) - one.get("Pss_File", 0) for one in found),
        "pss_of_files_nbytes": sum(one.get("Pss_File", 0) for one in found),
        "processes": len(found),
        "by_process": sorted(found, key=lambda one: one.get("Pss", 0), reverse=True),
        "store_nbytes": max(stores),
    }


def marked(mark: str) -> list[int]:
    """The processes whose environment has the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in psutil.pids():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
        except OSError:
            continue
    return found


class Blocks:
    """A dataset over a container that gives 1 KB of bytes for an index."""

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> int:
        return self.blocks[index][0]


class CountedDump:
    """Replaces `multiprocessing.reduction.dump` and notes the bytes that each process is sent."""

    def __init__(self) -> None:
        self.sent_nbytes: list[int] = []
        self._dump = multiprocessing.reduction.dump

    def __call__(self, value: Any, file: io.BytesIO, protocol: int | None = None) -> None:
        before = file.tell()
        self._dump(value, file, protocol)
        self.sent_nbytes.append(file.tell() - before)

    def of_workers(self) -> int:
        """The largest message: the process's data and its object, which are sent one after the other."""
        return max(map(sum, zip(self.sent_nbytes[::2], self.sent_nbytes[1::2], strict=True)))


def measure_spawn(spec: Spec) -> dict[str, Any]:
    """Measures the message to a spawned worker, and the time to the first batch."""
    blocks: Any = [index.to_bytes(8, "little") * 128 for index in range(spec.rows)]
    if CONTESTANTS[spec.contestant].subject:
        import shmloader

        blocks = shmloader.share(blocks)
    multiprocessing.reduction.dump = dump = CountedDump()  # type: ignore[assignment]
    loader = make_loader(spec, Blocks(blocks), multiprocessing_context="spawn")
    began_s = time.monotonic()
    batches = iter(loader)
    next(batches)
    first_batch_s = time.monotonic() - began_s
    del batches, loader
    return {"first_batch_s": first_batch_s, "message_nbytes": dump.of_workers()}


def measure_epochs(spec: Spec) -> dict[str, Any]:
    """Measures the time to the first batch, and each process's memory after all epochs."""
    began_s = time.monotonic()
    samples = CONTESTANTS[spec.contestant].make(spec.rows, spec.shape)
    built_s = time.monotonic() - began_s
    wanted = expected_sum(spec.rows, spec.shape)
    context = spec.method if spec.workers else None
    loader = make_loader(spec, Rows(samples), multiprocessing_context=context)
    began_s = time.monotonic()
    first_batch_s = 0.0
    for _ in range(spec.epochs):
        total = 0
        for batch in loader:
            first_batch_s = first_batch_s or time.monotonic() - began_s
            total += int(batch.sum())
        if total != wanted:
            raise AssertionError(f"{spec.contestant}, {spec.shape}: the samples add up to {total}")
    seconds = time.monotonic() - began_s - first_batch_s
    me = psutil.Process()
    workers = [read_memory(child.pid) for child in me.children(recursive=True)]
    private = sorted(one.get("Private_Dirty", 0) for one in workers)
    return {
        "build_s": built_s,
        "first_batch_s": first_batch_s,
        "samples_per_s": spec.epochs * spec.rows / seconds if spec.epochs else 0.0,
        "worker_private_nbytes": private[-1] if private else 0,
        "pss_nbytes": sum(
            one.get("Pss", 0) - one.get("Pss_File", 0) for one in [*workers, read_memory(me.pid)]
        ),
    }


def measure_first_batch(spec: Spec) -> dict[str, Any]:
    """Measures the time from `iter(loader)` to the first batch, in a process that has not loaded before."""
    samples = CONTESTANTS[spec.contestant].make(spec.rows)
    loader = make_loader(spec, Rows(samples), multiprocessing_context=spec.method)
    began_s = time.monotonic()
    batches = iter(loader)
    next(batches)
    first_batch_s = time.monotonic() - began_s
    del batches, loader
    return {"first_batch_s": first_batch_s}


KINDS = {
    "epochs": measure_epochs,
    "first": measure_first_batch,
    "size": measure_size,
    "growth": measure_growth,
    "ranks": measure_ranks,
    "spawn": measure_spawn,
}


def main() -> None:
    """Runs the measurement on the command line."""
    spec = Spec(**json.loads(sys.argv[1]))
    answer = claim_output()
    if spec.kind == "rank":
        be_rank(spec, answer)
    else:
        answer(KINDS[spec.kind](spec))


if __name__ == "__main__":
    main()
