"""The choice of ``num_workers="auto", prefetch_factor="auto"`` beside each fixed one.

Run from a checkout:

    python -m benchmarks.autotune [--workload NAME] [--turns N] [--json FILE]

For each workload there is one loader for each fixed choice (1 to as many workers as there are usable cores,
2, 4 and 8 batches in advance) and one that chooses for itself and has settled. All dispatch dynamically, keep
their workers, and take turns with one epoch each. Figures are medians. "auto / best fixed" is the rate of the
loader that chose, divided by the rate of the best fixed choice in the same turn. "while choosing /
afterwards" compares its rates before and after it has settled: the cost of choosing, start-up included.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.machine import describe
from benchmarks.options import NOT_WRITTEN, whole_number
from benchmarks.result_files import result_file, write_json
from benchmarks.tables import render_table
from shmloader import DataLoader
from shmloader.memory.limits import cores

_PREFETCH = (2, 4, 8)


def keep_busy(seconds: float) -> None:
    """Use the given processor time of this thread."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


class Work(Dataset[torch.Tensor]):
    """Samples of 16 bytes.

    Args:
        length: Number of samples.
        cpu_s: Processor time of each sample.
        sleep_s: Seconds of sleep for each sample.
        slow_s: Seconds of sleep for one sample in twenty.
    """

    def __init__(self, length: int, cpu_s: float = 0.0, sleep_s: float = 0.0, slow_s: float = 0.0) -> None:
        self.rows = torch.arange(2 * length).reshape(length, 2)
        self.cpu_s, self.sleep_s, self.slow_s = cpu_s, sleep_s, slow_s

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.cpu_s:
            keep_busy(self.cpu_s)
        sleep_s = self.slow_s if self.slow_s and index % 20 == 10 else self.sleep_s
        if sleep_s:
            time.sleep(sleep_s)
        return self.rows[index]


@dataclass(frozen=True)
class Workload:
    """A workload; one epoch of it is one measurement.

    Attributes:
        dataset: Makes the data set.
        batch_size: Samples per batch.
        program_s: Processor time that the program takes for each batch.
    """

    dataset: Callable[[], Work]
    batch_size: int = 1
    program_s: float = 0.0


WORKLOADS = {
    "cpu-2ms": Workload(lambda: Work(640, cpu_s=0.002), batch_size=8),
    "tiny": Workload(lambda: Work(5000)),
    "training-5ms": Workload(lambda: Work(200, cpu_s=0.004), program_s=0.005),
    "slow-batch": Workload(lambda: Work(200, sleep_s=0.005, slow_s=0.1)),
}


def play(loader: DataLoader[Any], workload: Workload, batches: int | None = None) -> float:
    """Batches per second of an epoch, or of its first ``batches``."""
    began_s = time.perf_counter()
    number = 0
    for number, batch in enumerate(loader, start=1):
        int(batch[0, 0])
        if workload.program_s:
            keep_busy(workload.program_s)
        if number == batches:
            break
    return number / (time.perf_counter() - began_s)


def settle(loader: DataLoader[Any], workload: Workload) -> float:
    """Let the loader choose, and return its batches per second meanwhile."""
    began_s, batches = time.perf_counter(), 0
    while True:
        for batch in loader:
            int(batch[0, 0])
            if workload.program_s:
                keep_busy(workload.program_s)
            batches += 1
            chosen = loader.statistics().autotune if batches % 10 == 0 else None
            if chosen is not None and chosen.settled:
                return batches / (time.perf_counter() - began_s)


def measure(workload: Workload, turns: int) -> dict[str, Any]:
    """Measure all loaders of one workload, in turns."""
    fixed = [(workers, ahead) for workers in range(1, cores().usable + 1) for ahead in _PREFETCH]
    loaders: dict[str, DataLoader[Any]] = {}
    with contextlib.ExitStack() as stack:
        choices: list[tuple[Any, Any]] = [*fixed, ("auto", "auto")]
        for choice in choices:
            loader: DataLoader[Any] = DataLoader(
                workload.dataset(),
                batch_size=workload.batch_size,
                num_workers=choice[0],
                prefetch_factor=choice[1],
                dispatch="dynamic",
                persistent_workers=True,
            )
            loaders["x".join(map(str, choice))] = stack.enter_context(loader)
        auto = loaders["autoxauto"]
        while_choosing = settle(auto, workload)
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for name, loader in loaders.items():
            if name != "autoxauto":
                play(loader, workload, 50)  # started, and its slots have grown
        for turn in range(turns):
            names = list(loaders) if turn % 2 == 0 else list(reversed(loaders))
            for name in names:
                rates[name].append(play(loaders[name], workload))
        chosen = auto.statistics().autotune
        assert chosen is not None
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best = max((name for name in rates if name != "autoxauto"), key=lambda name: medians[name])
    ratios = [ours / theirs for ours, theirs in zip(rates["autoxauto"], rates[best], strict=True)]
    same = rates.get(f"{chosen.num_workers}x{chosen.prefetch_factor}", [])
    to_same = [ours / theirs for ours, theirs in zip(rates["autoxauto"], same, strict=False)]
    return {
        "batches_per_s": medians,
        "spread": {name: (max(found) - min(found)) / medians[name] for name, found in rates.items()},
        "best_fixed": best,
        "ratio_to_best_fixed": statistics.median(ratios),
        "ratios": ratios,
        "ratio_to_same_fixed": statistics.median(to_same) if to_same else None,
        "while_choosing": while_choosing / medians["autoxauto"],
        "chosen": vars(chosen),
    }


def main() -> int:
    """Print a table for each workload, and write all of it as JSON if asked; 3 if that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="one of them; may be repeated")
    parser.add_argument("--turns", type=whole_number(1), default=7)
    parser.add_argument("--json", type=result_file)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for name in given.workload or WORKLOADS:
        found = results[name] = measure(WORKLOADS[name], given.turns)
        print(f"\n{name}: auto has chosen {found['chosen']['num_workers']} worker(s)", end=" ")
        print(f"x {found['chosen']['prefetch_factor']} after {found['chosen']['batches']} batches")
        print(f"  {found['chosen']['why']}")
        rows = [
            [choice, f"{rate:,.1f}", f"{found['spread'][choice]:.1%}"]
            for choice, rate in found["batches_per_s"].items()
        ]
        print(render_table([["workers x prefetch", "batches/s", "spread"], *rows], texts=1))
        print(f"  auto / best fixed ({found['best_fixed']}): {found['ratio_to_best_fixed']:.3f}")
        if found["ratio_to_same_fixed"] is not None:
            print(f"  auto / the same choice, fixed: {found['ratio_to_same_fixed']:.3f} (1 but for noise)")
        print(f"  while choosing / afterwards: {found['while_choosing']:.3f}", flush=True)
    if given.json and not write_json(given.json, {"machine": describe(), "results": results}):
        return NOT_WRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
