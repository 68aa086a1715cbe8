"""Copies of batches to a device, second by second: how fast, and what the loader does beside them.

Parts of `benchmarks.device`: `copy` and `calls`.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import shmloader
from benchmarks.made_data import Numbers
from shmloader.device.driver import CudaDriver
from shmloader.memory import Segment

SIZES_NBYTES = (64_000_000, 8_000_000, 1_000_000)
WAYS: dict[str, dict[str, Any]] = {"device=": {"device": "cuda"}, "pinned": {"pin_memory": True}}
WARM_S = 2
"""Seconds after which a loader should be as fast as it gets."""


class Second(NamedTuple):
    """One second of a loader's batches."""

    batches: int
    took_s: float
    faults: int  # of pages, in all workers
    calls: Counter[str]  # of `Segment` and of the driver, by name


@contextlib.contextmanager
def counted(*methods: tuple[type, str]) -> Iterator[Counter[str]]:
    """Count the calls of methods of classes."""
    calls: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for owner, name in methods:
            method = getattr(owner, name)

            def call(*arguments: Any, method: Any = method, name: str = name, **options: Any) -> Any:
                calls[name] += 1
                return method(*arguments, **options)

            stack.enter_context(mock.patch.object(owner, name, call))
        yield calls


def faults_of(pids: Iterable[int | None]) -> int:
    """The page faults of processes so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace") for pid in pids]
    return sum(int(stat.rpartition(")")[2].split()[7]) for stat in stats)


def second_by_second(
    loader: shmloader.DataLoader[Any],
    seconds: int,
    step: Callable[[Any], object],
    wait: Callable[[], object],
) -> list[Second]:
    """Load for so many seconds; ``wait`` ends when the device has done everything."""
    found = []
    methods = ((Segment, "discard"), (Segment, "map"), (CudaDriver, "register"), (CudaDriver, "unregister"))
    with counted(*methods) as calls, loader:
        iterator = iter(loader)
        pids = [worker.pid for worker in multiprocessing.active_children()]
        faults = faults_of(pids)
        for _ in range(seconds):
            began_s, batches = time.perf_counter(), 0
            while time.perf_counter() - began_s < 1:
                step(next(iterator))
                batches += 1
            wait()
            before, faults = faults, faults_of(pids)
            found.append(Second(batches, time.perf_counter() - began_s, faults - before, calls.copy()))
            calls.clear()
    return found


class Plain:
    """Copies of one pinned tensor to memory of a device: what the bus gives."""

    def __init__(self, nbytes: int) -> None:
        self.source = torch.empty(nbytes, dtype=torch.uint8).pin_memory()
        self.target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def copy(self) -> None:
        """Queue one."""
        self.target.copy_(self.source, non_blocking=True)

    def rate(self, seconds: float) -> float:
        """Copies per second."""
        torch.cuda.synchronize()
        began_s, count = time.perf_counter(), 0
        while time.perf_counter() - began_s < seconds:
            for _ in range(16):
                self.copy()
            torch.cuda.synchronize()
            count += 16
        return count / (time.perf_counter() - began_s)


def lines(found: list[Second], plain: float) -> Iterator[tuple[str, float, str, bool | None]]:
    """The figures of one loader, with units, and whether they are good; ``plain`` is the best rate."""
    shares = [100 * second.batches / second.took_s / plain for second in found]
    yield "first second", shares[0], "% of plain", shares[0] >= 70
    later = found[WARM_S:]
    share = statistics.median(shares[WARM_S:])
    yield f"after {WARM_S} s", share, "% of plain", share >= 95
    batches = sum(second.batches for second in later)
    yield "page faults of workers, then", sum(second.faults for second in later) / batches, "per batch", None
    for name in ("register", "discard", "map"):
        calls = sum(second.calls[name] for second in later)
        yield f"calls of {name}, then", calls / batches, "per batch", calls == 0


def copy(arguments: argparse.Namespace, collate: Callable[[int], Any]) -> Iterator[tuple[Any, ...]]:
    """See `benchmarks.device`; ``collate`` makes a collate function for batches of so many bytes."""
    workers, seconds = min(arguments.workers, 8), WARM_S + max(2, round(arguments.seconds))
    for nbytes in SIZES_NBYTES:
        plain = Plain(nbytes)
        rate = plain.rate(arguments.seconds)
        yield f"{nbytes / 1e6:g} MB, plain pinned copy_", rate * nbytes / 1e9, "GB/s", None
        for way, options in WAYS.items():
            loader = shmloader.DataLoader(
                Numbers(1 << 40), 1, num_workers=workers, collate_fn=collate(nbytes), **options
            )
            step = (
                (lambda batch: batch) if way == "device=" else (lambda batch: batch.cuda(non_blocking=True))
            )
            found = second_by_second(loader, seconds, step, torch.cuda.synchronize)
            rates = " ".join(f"{second.batches / second.took_s * nbytes / 1e9:.1f}" for second in found)
            print(
                f"{nbytes / 1e6:g} MB, {way}, {workers} workers, GB/s second by second: {rates}", flush=True
            )
            for what, value, unit, good in lines(found, rate):
                yield f"{nbytes / 1e6:g} MB, {way}: {what}", value, unit, good


def calls(driver: CudaDriver, seconds: float) -> Iterator[tuple[Any, ...]]:
    """The guard's calls on an idle device, and beside running copies, in microseconds."""
    device = torch.cuda.current_device()

    def record() -> None:
        with driver.captures.lock, driver.on(device):
            event = driver.record_all(device)
        if event is not None:
            driver.recycle(event)

    def took_us(call: Callable[[], object], plain: Plain | None) -> float:
        took_s, count, end_s = 0.0, 0, time.perf_counter() + seconds
        event = torch.cuda.Event()
        while time.perf_counter() < end_s:
            if plain is not None and event.query():
                for _ in range(8):
                    plain.copy()
                event.record()
            began_s = time.perf_counter()
            call()
            took_s += time.perf_counter() - began_s
            count += 1
        torch.cuda.synchronize()
        return took_s / count * 1e6

    driver.captures_open()  # makes the streams of torch's pools, which the event waits for
    for nbytes in (0, *SIZES_NBYTES):
        beside = f"beside copies of {nbytes / 1e6:g} MB" if nbytes else "on an idle device"
        plain = Plain(nbytes) if nbytes else None
        yield f"is a graph captured? {beside}", took_us(driver.captures_open, plain), "us", None
        yield f"an event behind all work, {beside}", took_us(record, plain), "us", None
