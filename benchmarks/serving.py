"""One loader for several programs: throughput of each, and the processor time of serving.

``python -m benchmarks.serving`` runs four trainers on one served loader, and four loaders with as many
workers in all; then readers in step, whose added processor time per batch and reader it prints, beside that
of TensorSocket where that is installed. Every program is a process of its own, forked.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterable
from multiprocessing import connection
from typing import Any

import numpy as np
import torch

import shmloader
from benchmarks.options import whole_number
from benchmarks.tables import render_table

_CONTEXT = multiprocessing.get_context("fork")
_BATCH_SIZE = 32


class Compressed(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of 48 KiB that take a millisecond to decode."""

    def __init__(self, samples: int) -> None:
        noise = np.random.default_rng(0).integers(0, 16, 1 << 17, np.uint8)
        self._packed = zlib.compress(noise.tobytes(), 6)
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        decoded = np.frombuffer(zlib.decompress(self._packed), np.uint8)
        return torch.from_numpy(decoded[: 48 << 10].copy())


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of any size, already in memory."""

    def __init__(self, samples: int, nbytes: int) -> None:
        self._row = torch.zeros(nbytes, dtype=torch.uint8)
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._row


def loader_of(dataset: Any, workers: int) -> shmloader.DataLoader[Any]:
    return shmloader.DataLoader(
        dataset, _BATCH_SIZE, num_workers=workers, persistent_workers=True, multiprocessing_context="fork"
    )


def consume(loader: Iterable[Any]) -> tuple[float, float, int]:
    """Seconds and processor seconds of this process for a second epoch, and its batches."""
    for _ in loader:
        pass
    began_s, used_s, batches = time.perf_counter(), time.process_time(), 0
    for _ in loader:
        batches += 1
    return time.perf_counter() - began_s, time.process_time() - used_s, batches


def plain(dataset: Any, workers: int, results: Any) -> None:
    results.send(consume(loader_of(dataset, workers)))


def attached(name: str, results: Any) -> None:
    results.send(consume(shmloader.attach(name)))


def served(dataset: Any, workers: int, name: str, readers: int, results: Any) -> None:
    """Serve two epochs; puts the processor seconds that the second one took in this process."""
    at: list[float] = []

    class Timed:
        def __init__(self) -> None:
            self.inner = loader_of(dataset, workers)

        def __len__(self) -> int:
            return len(self.inner)

        def __iter__(self) -> Any:
            at.append(time.process_time())
            return iter(self.inner)

    shmloader.serve(Timed(), name, readers=readers, epochs=2)
    results.send(time.process_time() - at[1])


class Tuples(torch.utils.data.Dataset[tuple[torch.Tensor]]):
    """The samples of a dataset in tuples, which TensorSocket needs."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (self._inner[index],)


def tensorsocket_serves(dataset: Any, workers: int, ports: list[int], readers: int, results: Any) -> None:
    """Serve an epoch by TensorSocket; puts the processor seconds that it took in this process."""
    tensorsocket: Any = importlib.import_module("tensorsocket")
    producer = tensorsocket.TensorProducer(loader_of(Tuples(dataset), workers), *ports[:2], tuple(ports[2:]))
    while len(producer.hb.consumers) < readers:
        time.sleep(0.1)
    used_s = time.process_time()
    for _ in producer:
        pass
    results.send(time.process_time() - used_s)
    time.sleep(5)  # its readers take what was sent
    os._exit(0)  # its threads do not end


def tensorsocket_reads(ports: list[int], results: Any) -> None:
    """Read an epoch, and tell of nine tenths of it: TensorSocket does not send all of its end."""
    tensorsocket: Any = importlib.import_module("tensorsocket")
    reader = tensorsocket.TensorConsumer(*ports[:2], tuple(ports[2:]), batch_size=_BATCH_SIZE)
    began_s, used_s, batches = time.perf_counter(), time.process_time(), len(reader) * 9 // 10
    for _ in itertools.islice(reader, batches):
        pass
    results.send((time.perf_counter() - began_s, (time.process_time() - used_s) * 10 / 9, batches))
    for _ in reader:  # its producer goes on only with readers that live
        pass
    os._exit(0)


def run_tensorsocket(dataset: Any, workers: int, readers: int) -> tuple[float, list[Any]]:
    first = 20_000 + os.getpid() % 5_000 * 4
    ports = list(range(first, first + 4))
    server = functools.partial(tensorsocket_serves, dataset, workers, ports, readers)
    used_s, *rest = run([server, *[functools.partial(tensorsocket_reads, ports)] * readers])
    return used_s, rest


def run(programs: list[Callable[[Any], None]]) -> list[Any]:
    """Run programs at once, each with a pipe for its result; returns the results in their order."""
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in programs]
    processes = [
        _CONTEXT.Process(target=program, args=(write,))
        for program, (_, write) in zip(programs, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    results = []
    for process, (read, _) in zip(processes, pipes, strict=True):
        connection.wait([read, process.sentinel])
        if not read.poll():
            for one in processes:
                one.kill()
            raise SystemExit(f"process {process.pid} ended with exit code {process.exitcode}, and no result")
        results.append(read.recv())
    for process in processes:
        process.join()
    return results


def run_served(dataset: Any, workers: int, readers: int) -> tuple[float, list[tuple[float, float, int]]]:
    name = f"benchmark-{os.getpid()}"
    server = functools.partial(served, dataset, workers, name, readers)
    used_s, *rest = run([server, *[functools.partial(attached, name)] * readers])
    return used_s, rest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--trainers", type=whole_number(1), default=4, metavar="N")
    parser.add_argument("--readers", type=whole_number(1), default=8, metavar="N", help="in step")
    parser.add_argument("--repeats", type=whole_number(1), default=3, metavar="N")
    arguments = parser.parse_args()
    dataset, trainers = Compressed(1600), arguments.trainers
    rows = [[f"{trainers} loaders, 1 worker each", f"1 served, {trainers} workers", "ratio"]]
    for _ in range(arguments.repeats):
        alone = run([functools.partial(plain, dataset, 1)] * trainers)
        _, together = run_served(dataset, trainers, trainers)
        rates = [len(dataset) / max(seconds for seconds, *_ in each) for each in (alone, together)]
        rows.append([f"{rate:,.0f}" for rate in rates] + [f"{rates[1] / rates[0]:.2f}"])
    print(f"samples/s of each of {trainers} trainers, decode-bound:")
    print(render_table(rows, texts=0))
    serving = {"shmloader": run_served}
    if importlib.util.find_spec("tensorsocket") is not None:
        serving[f"TensorSocket {importlib.metadata.version('tensorsocket')}"] = run_tensorsocket
    else:
        print("\nTensorSocket is not installed: left out")
    print(f"\nprocessor time per batch, microseconds; {arguments.readers} readers in step:")
    print(render_table(in_step(serving, arguments.readers, arguments.repeats), texts=1))


def in_step(serving: dict[str, Any], readers: int, repeats: int) -> list[list[str]]:
    """The rows of a table: processor time of each way of serving, beside the plain loader's."""
    rows = [["", "bytes of a batch", "plain loader", "server", "each reader", "added per batch and reader"]]
    for nbytes in (64, 4 << 10, 32 << 10):
        for _ in range(repeats):
            data = Rows(32_000, nbytes)
            ((_, plain_s, batches),) = run([functools.partial(plain, data, 2)])
            for name, run_it in serving.items():
                server_s, results = run_it(data, 2, readers)
                reader_s = sum(used_s for _, used_s, _ in results) / readers
                added_s = server_s + reader_s * readers - plain_s
                each = [plain_s / batches, server_s / batches, reader_s / batches]
                each.append(added_s / batches / readers)
                texts = [f"{1e6 * one:.1f}" for one in each]
                rows.append([name, f"{nbytes * _BATCH_SIZE:,}", *texts])
    return rows


if __name__ == "__main__":
    main()
