"""The shared memory that is left after some batches were much larger than most.

``python -m benchmarks.large_batches`` loads batches of 1 MB, among them some of 100 MB, with torch's loader
and with this one in turn, each in a fresh process; the program takes 5 ms for each batch. It prints the most
shared memory that there was at any moment, and how much is left at the end, up to a hundred small batches
after the last large one. The memory is that of all files in /dev/shm and of the process's memfds, so nothing
else may use /dev/shm meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import shmloader
from benchmarks.fresh_process import claim_output, run_fresh
from benchmarks.options import whole_number
from benchmarks.tables import render_table

LOADERS: dict[str, Any] = {"torch": DataLoader, "shmloader": shmloader.DataLoader}
LARGE = {
    "one": {60},
    "scattered": set(range(20, 340, 20)),
    "in a row": set(range(16)),
}
"""The numbers of the batches that are large."""

SMALL_AT_THE_END = 100
SMALL_NBYTES = 1_000_000
POLL_S = 0.001
STEP_S = 0.005


class Sized(Dataset[torch.Tensor]):
    """Sample ``i`` has as many bytes as the list says."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index % 256, dtype=torch.uint8)


def shared_nbytes() -> int:
    """Bytes of all files in /dev/shm, also of unlinked ones, and of this process's memfds."""
    found = os.statvfs("/dev/shm")
    blocks = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            if str(path.readlink()).startswith("/memfd:"):
                blocks += path.stat().st_blocks
        except OSError:  # closed meanwhile
            continue
    return (found.f_blocks - found.f_bfree) * found.f_frsize + 512 * blocks


def play(name: str, where: str, large_nbytes: int, workers: int, prefetch: int) -> dict[str, int]:
    """Loads an epoch; gives the bytes at the end (the median of the last batches) and at the peak."""
    before_nbytes = shared_nbytes()
    sizes = [
        large_nbytes if i in LARGE[where] else SMALL_NBYTES
        for i in range(max(LARGE[where]) + SMALL_AT_THE_END)
    ]
    loader = LOADERS[name](Sized(sizes), num_workers=workers, prefetch_factor=prefetch)
    peak_nbytes, ended = before_nbytes, threading.Event()

    def watch() -> None:
        nonlocal peak_nbytes
        while not ended.wait(POLL_S):
            peak_nbytes = max(peak_nbytes, shared_nbytes())

    watcher = threading.Thread(target=watch)
    seen = []
    iterator = iter(loader)
    watcher.start()  # after the fork
    for batch in iterator:
        time.sleep(STEP_S)
        seen.append(shared_nbytes() - before_nbytes)
        peak_nbytes = max(peak_nbytes, before_nbytes + seen[-1])
        assert batch[0, 0] == batch[0, -1] == (len(seen) - 1) % 256
    ended.set()
    watcher.join()
    # Without the last batches, which no others are made after.
    left = seen[-SMALL_AT_THE_END // 2 : -workers * prefetch - 1]
    return {"left": int(median(left)), "peak": peak_nbytes - before_nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--turns", type=whole_number(1), default=3, help="how often each loader loads (%(default)s)")
    add("--workers", type=whole_number(1), default=4, help="(%(default)s)")
    add("--prefetch-factor", type=whole_number(1), default=2, help="(%(default)s)")
    add("--large-mb", type=whole_number(1), default=100, help="size of a large batch (%(default)s)")
    add("--measure", nargs=2, metavar=("LOADER", "WHERE"), help=argparse.SUPPRESS)  # in the fresh process
    arguments = parser.parse_args()
    given = arguments.large_mb * 1_000_000, arguments.workers, arguments.prefetch_factor
    if arguments.measure:
        answer, (name, where) = claim_output(), arguments.measure
        answer(play(name, where, *given))
        return
    table = [["large batches", "loader", "MB left", "of torch's", "MB at the peak", "of torch's"]]
    for where, numbers in LARGE.items():
        seen: dict[str, list[dict[str, int]]] = {name: [] for name in LOADERS}
        for _ in range(arguments.turns):
            for name, figures in seen.items():
                words = [*sys.argv[1:], "--measure", name, where]
                figures.append(run_fresh(f"{name}, {where}", "benchmarks.large_batches", *words))
        for name in LOADERS:
            row = [f"{len(numbers)} {where}" if len(numbers) > 1 else where, name]
            for kind in ("left", "peak"):
                own, torchs = (median(each[kind] for each in seen[key]) for key in (name, "torch"))
                row += [f"{own / 1e6:,.1f}", f"{own / torchs:.2f}"]
            table.append(row)
    print(f"batches of 1 MB, some of {arguments.large_mb} MB, {arguments.workers} workers, medians\n")
    print(render_table(table, texts=2))


if __name__ == "__main__":
    main()
