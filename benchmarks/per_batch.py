"""The cost of a batch of two small leaves in the main process: time in `next()`, and system calls.

``python -m benchmarks.per_batch`` loads batches in a process of its own, in the middle of an epoch, in three
cases: the consumer does something else between two batches, so that they are ready; it takes a dozen batches
in a row; or the workers are slower than the consumer, so that the loader waits for each batch. Each case runs
again under cProfile, which shows where the time in ``next()`` goes (and makes it longer), and under strace,
which sees only that process and not its workers. First it measures something that does not depend on a
loader: how much longer the same Python code takes on this machine if the core has done something else
meanwhile.

``--device`` loads batches of one large leaf instead, as they are, pinned, and copied to a device whose driver
does nothing: processor time of ``next()``, and calls of the driver for each batch.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import os
import pstats
import re
import shutil
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shmloader
from benchmarks.fresh_process import FreshProcess
from benchmarks.idle_driver import idle_device
from benchmarks.made_data import Numbers
from benchmarks.options import finite_number, whole_number

BATCH_SIZE = 4
WARM_BATCHES = 200
OTHER_WORK_S = 0.002
IN_A_ROW = 12
PREFETCH_FACTOR = 8
BEGIN, END = "/begin-of-counting", "/end-of-counting"
LINE = re.compile(r"(\w+)\((.*)")
MOST_PARTS = 12
LEAST_BATCHES = 20
"""With fewer batches, the 5th and 95th percentiles would mean nothing."""


@dataclass(frozen=True)
class Case:
    """One way to make and consume batches.

    Attributes:
        title: Its description.
        delay_s: Seconds that a sample takes.
        pause_s: Seconds for which the consumer does something else.
        in_a_row: Batches that the consumer takes between two pauses.
    """

    title: str
    delay_s: float
    pause_s: float
    in_a_row: int = 1


CASES = {
    "ready": Case(
        f"batches lie ready, {OTHER_WORK_S * 1e3:.0f} ms of other work between two", 0.0, OTHER_WORK_S
    ),
    "in-a-row": Case(f"batches lie ready, {IN_A_ROW} taken in a row", 0.0, 0.02, IN_A_ROW),
    "awaited": Case("the loader waits for each", 0.001, 0.0),
}


class TwoLeaves(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Sample ``i`` is sixteen floats and its number."""

    def __init__(self, length: int, delay_s: float) -> None:
        self.rows = torch.rand(64, 16)
        self.length = length
        self.delay_s = delay_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.delay_s:
            time.sleep(self.delay_s)
        return self.rows[index % 64], index


def load(batches: int, case: Case, timed: bool, profile: cProfile.Profile | None = None) -> list[float]:
    """Loads an epoch, with marks around the batches that are measured.

    Args:
        batches: Number of batches that are measured.
        case: How they are made and consumed.
        timed: Whether to time them: reading the thread's clock is a system call.
        profile: Profiles each measured call of ``next()``; None for no profile.

    Returns:
        Seconds of processor time that each call of ``next()`` took; zeros if not timed.
    """
    dataset = TwoLeaves((WARM_BATCHES + batches + 100) * BATCH_SIZE, case.delay_s)
    loader = shmloader.DataLoader(dataset, BATCH_SIZE, num_workers=2, prefetch_factor=PREFETCH_FACTOR)
    iterator = iter(loader)
    clock = time.thread_time if timed else float
    take: Callable[[], Any] = partial(next, iterator)
    costs_s = []
    for number in itertools.count():
        if number == WARM_BATCHES:
            os.access(BEGIN, os.F_OK)
            take = take if profile is None else partial(profile.runcall, take)
        if number == WARM_BATCHES + batches:
            os.access(END, os.F_OK)
            break
        began_s = clock()
        take()
        costs_s.append(clock() - began_s)
        if number % case.in_a_row == 0:
            until = time.perf_counter() + case.pause_s
            while time.perf_counter() < until:  # in the vDSO, without a system call
                pass
    loader.close()
    return costs_s[WARM_BATCHES:]


def parts(batches: int, case: Case) -> dict[str, float]:
    """Functions that the time in ``next()`` is spent on, by the clock: µs for each batch, the longest first.

    A function's time does not include the functions it calls. It includes cProfile's own time, so a call of
    Python code looks longer than a call of C code that takes as long.
    """
    profile = cProfile.Profile()
    load(batches, case, False, profile)
    times: dict[str, float] = defaultdict(float)
    for (path, _, name), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        times[name if path == "~" else f"{Path(path).name}: {name}"] += 1e6 * own_s / batches
    return dict(sorted(times.items(), key=lambda item: -item[1]))


class OneLeaf:
    """A collate function: one tensor of so many bytes, of which the first is written."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        batch: torch.Tensor = shmloader.empty((self.nbytes,), dtype=torch.uint8)
        batch[0] = 1
        return batch


WAYS: dict[str, dict[str, Any]] = {"plain": {}, "pinned": {"pin_memory": True}, "device=": {"device": "cuda"}}


def device_costs(batches: int, nbytes: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Measure all `WAYS` in turns, each with batches that lie ready, a dozen taken in a row.

    Returns:
        By way, processor time of ``next()`` in µs, and calls of the driver for each batch.
    """
    costs_us: dict[str, list[float]] = {way: [] for way in WAYS}
    calls: dict[str, float] = {}
    with idle_device() as driver:
        for _ in range(repeats):
            for way, options in WAYS.items():
                dataset = Numbers((WARM_BATCHES + batches + 100) * BATCH_SIZE)
                given = options | {"num_workers": 2, "prefetch_factor": PREFETCH_FACTOR}
                with shmloader.DataLoader(dataset, BATCH_SIZE, collate_fn=OneLeaf(nbytes), **given) as loader:
                    iterator, taken_us = iter(loader), list[float]()
                    for number in range(WARM_BATCHES + batches):
                        if number == WARM_BATCHES:
                            before = driver.calls()
                        began_s = time.thread_time()
                        next(iterator)
                        taken_us.append(1e6 * (time.thread_time() - began_s))
                        if number % IN_A_ROW == 0:
                            time.sleep(0.02)
                    calls[way] = (driver.calls() - before) / batches
                costs_us[way].append(statistics.median(taken_us[WARM_BATCHES:]))
    return {way: (statistics.median(found), calls[way]) for way, found in costs_us.items()}


def python_after_other_work(repeats: int, other_work_s: float) -> float:
    """Median processor time, in µs, of a piece of Python code that runs now and then.

    Args:
        repeats: Number of runs.
        other_work_s: Seconds for which the core does something else before each run.
    """
    text = json.dumps([{"name": f"a{number}", "values": [number] * 8} for number in range(30)])
    costs_s = []
    for _ in range(repeats):
        until = time.perf_counter() + other_work_s
        while time.perf_counter() < until:
            pass
        began_s = time.thread_time()
        json.loads(text)
        costs_s.append(time.thread_time() - began_s)
    return statistics.median(costs_s) * 1e6


def count(batches: int, case: str) -> Counter[str]:
    """Counts the system calls for batches of one of the `CASES`, by name; reads that found nothing apart."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        words = ["--traced", case, "--batches", str(batches)]
        prefix = ("strace", "-o", str(trace))
        with FreshProcess(f"counting {case}", "benchmarks.per_batch", *words, prefix=prefix) as fresh:
            fresh.finish(timeout_s=600)
        lines = iter(trace.read_text().splitlines())
    calls: Counter[str] = Counter()
    for _ in itertools.takewhile(lambda line: BEGIN not in line, lines):
        pass
    for line in itertools.takewhile(lambda line: END not in line, lines):
        if match := LINE.match(line):
            calls[match[1] + " (EAGAIN)" * ("EAGAIN" in line)] += 1
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    batches = whole_number(LEAST_BATCHES)
    add("--batches", type=batches, default=2000, help="batches that are counted (%(default)s)")
    add("--traced", choices=list(CASES), help=argparse.SUPPRESS)
    add("--device", action="store_true", help="batches for a device whose driver does nothing")
    add("--mb", type=finite_number(0.001), default=0.1, help="megabytes of such a batch (%(default)s)")
    add("--repeats", type=whole_number(1), default=5, help="rounds of such batches (%(default)s)")
    arguments = parser.parse_args()
    if arguments.device:
        costs = device_costs(arguments.batches, int(arguments.mb * 1e6), arguments.repeats)
        for way, (took_us, calls) in costs.items():
            above_us = took_us - costs["plain"][0]
            print(
                f"{way:8} {took_us:6.1f} us of processor time in next(), {above_us:5.1f} us above plain; "
                f"{calls:.2f} calls of the driver for each batch"
            )
        return
    if arguments.traced is not None:
        load(arguments.batches, CASES[arguments.traced], timed=False)
        return
    hot_us, cold_us = (python_after_other_work(500, seconds) for seconds in (0.0, OTHER_WORK_S))
    print(
        f"json.loads of a short text, no loader there: {hot_us:.1f} us; after {OTHER_WORK_S * 1e3:.0f} ms of "
        f"other work {cold_us:.1f} us"
    )
    for name, case in CASES.items():
        costs_us = [cost_s * 1e6 for cost_s in load(arguments.batches, case, timed=True)]
        low, middle, high = (statistics.quantiles(costs_us, n=20)[place] for place in (0, 9, 18))
        print(
            f"{case.title}: processor time of next() {middle:.1f} us (5 to 95 %: {low:.1f} to {high:.1f} us)"
        )
        spent_us = parts(arguments.batches, case)
        print(f"  time in it under cProfile: {sum(spent_us.values()):.0f} us, of which most in")
        for function, took_us in itertools.islice(spent_us.items(), MOST_PARTS):
            print(f"    {took_us:6.1f} us  {function}")
        if shutil.which("strace") is None:
            print("  system calls: not counted, strace is not installed")
            continue
        print("  system calls of the main process for each batch")
        for call, calls in count(arguments.batches, name).most_common():
            print(f"    {call:24} {calls / arguments.batches:8.3f}")


if __name__ == "__main__":
    main()
