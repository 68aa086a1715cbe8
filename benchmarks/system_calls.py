"""Counts the system calls that the main process makes for each batch, with strace.

``python -m benchmarks.system_calls`` loads batches of two small leaves in a process of its own under
strace, which sees only that process and not its workers, and counts what it does between two marks in
the middle of an epoch. Twice: with a consumer that is slower than the workers, so that batches lie
ready, and with workers that are slower than the consumer, so that the loader waits for each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

import shmloader

ROOT = Path(__file__).resolve().parent.parent
BATCH_SIZE = 4
WARM_BATCHES = 200
BEGIN, END = "/begin-of-counting", "/end-of-counting"
LINE = re.compile(r"(\w+)\((.*)")


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


def load(batches: int, delay_s: float) -> None:
    """The traced part: an epoch, with marks around the batches that count."""
    dataset = TwoLeaves((WARM_BATCHES + batches + 100) * BATCH_SIZE, delay_s)
    compute_s = 0.0 if delay_s else 0.002
    loader = shmloader.DataLoader(dataset, BATCH_SIZE, num_workers=2, prefetch_factor=8)
    iterator = iter(loader)
    for number in itertools.count():
        if number == WARM_BATCHES:
            os.access(BEGIN, os.F_OK)
        if number == WARM_BATCHES + batches:
            os.access(END, os.F_OK)
            break
        next(iterator)
        until = time.perf_counter() + compute_s
        while time.perf_counter() < until:  # in the vDSO, without a system call
            pass
    loader.close()


def count(batches: int, delay_s: float) -> Counter[str]:
    """The system calls of the traced part, by name; one that had nothing to read, or no room, apart."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        command = [sys.executable, "-m", "benchmarks.system_calls", "--traced", str(delay_s)]
        subprocess.run(
            ["strace", "-o", str(trace), *command, "--batches", str(batches)], check=True, cwd=ROOT
        )
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
    parser.add_argument("--batches", type=int, default=2000, help="batches that are counted (%(default)s)")
    parser.add_argument("--traced", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.traced is not None:
        load(arguments.batches, arguments.traced)
        return
    for title, delay_s in (("batches lie ready", 0.0), ("the loader waits for each", 0.001)):
        print(f"{title}: system calls of the main process for each batch")
        for name, calls in count(arguments.batches, delay_s).most_common():
            print(f"  {name:24} {calls / arguments.batches:8.3f}")


if __name__ == "__main__":
    main()
