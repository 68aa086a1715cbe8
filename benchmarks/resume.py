"""The cost of a loader's state: making it, its size, going on from it, and throughput with one per batch.

Run from a checkout:

    python -m benchmarks.resume [--batches N] [--turns N] [--json FILE]

The epoch is shuffled, in batches of four. Beside this loader stands torchdata's StatefulDataLoader, where it
is installed. Going on is from batch N: from ``iter()`` to the first batch, less what the same takes at the
epoch's beginning, so that neither the start of workers nor drawing the order counts. Throughput is that of
epochs with a state per batch over that of epochs without, in turns. StatefulDataLoader takes its snapshots in
``next()``, whether they are asked for or not; so the processor time of the main process per batch is given,
too: of ``next()`` with a state behind it, less that of ``next()`` where no snapshot is taken.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

import shmloader
from benchmarks.machine import describe
from benchmarks.options import NOT_WRITTEN, whole_number
from benchmarks.result_files import result_file, write_json
from benchmarks.tables import render_table

BATCH_SIZE = 4
WORKERS = 2
PLACE = 200
"""Batch at which states are made."""


class Rows(Dataset[torch.Tensor]):
    """Sample ``i`` is eight floats and its number; no row is kept."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.row = torch.rand(8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.row, index


def contestants() -> dict[str, Callable[..., Any]]:
    """The loaders' classes, by name."""
    found: dict[str, Callable[..., Any]] = {"shmloader": shmloader.DataLoader}
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        print("torchdata is not installed: pip install -c constraints.txt torchdata")
    else:
        found["torchdata"] = StatefulDataLoader
    return found


def build(make: Callable[..., Any], batches: int, **options: Any) -> Any:
    """A shuffled loader with an epoch of so many batches."""
    return make(
        Rows(batches * BATCH_SIZE),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=WORKERS,
        generator=torch.Generator().manual_seed(1),
        **options,
    )


@dataclass
class Costs:
    """The cost of one loader's states.

    Attributes:
        first_s: Seconds that the first state of an epoch takes.
        state_s: Seconds that a further one takes, the median.
        batch_s: Seconds of processor time in the main process that states take per batch: see above.
        nbytes: Length of its pickle.
        resume_s: Seconds to the first batch, from a state, beyond those at the epoch's beginning; the median.
        throughput: Of epochs with a state per batch, over that of epochs without.
    """

    first_s: float
    state_s: float
    batch_s: float
    nbytes: int
    resume_s: float = 0.0
    throughput: float = 0.0


def snapshots(make: Callable[..., Any], batches: int, number: int) -> Costs:
    """The cost of states, one behind each of so many batches, and their size."""
    medians_s = []
    for never in (False, True):
        seldom = {"snapshot_every_n_steps": 1 << 40} if never and make is not shmloader.DataLoader else {}
        loader = build(make, batches, **seldom)
        iterator = iter(loader)
        for _ in range(PLACE):
            next(iterator)
        first_s = timed(loader.state_dict)
        costs_s, batch_s = [], []
        for _ in range(number):
            began_s = time.thread_time()
            next(iterator)
            if not never:
                costs_s.append(timed(loader.state_dict))
            batch_s.append(time.thread_time() - began_s)
        medians_s.append(statistics.median(batch_s))
        if not never:
            found = first_s, statistics.median(costs_s), len(pickle.dumps(loader.state_dict(), 5))
        end(iterator)
    return Costs(found[0], found[1], medians_s[0] - medians_s[1], found[2])


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def resume_s(make: Callable[..., Any], batches: int) -> float:
    """Seconds by which the first batch of a resumed epoch comes later than that of a new one."""
    loader = build(make, batches + 1000)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = at_batch(loader.state_dict(), batches)
    end(iterator)
    took_s = []
    for begin in ({}, state):
        loader = build(make, batches + 1000)
        loader.load_state_dict(begin)
        began_s = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        took_s.append(time.perf_counter() - began_s)
        end(iterator)
    return took_s[1] - took_s[0]


def at_batch(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """The state behind so many batches, without loading them: both loaders count."""
    if "batches" in state:
        return state | {"batches": batches}
    samples = batches * BATCH_SIZE
    snapshot = state["_snapshot"]
    main = snapshot["_main_snapshot"]
    sampler = main["_sampler_iter_state"]
    snapshot["_snapshot_step"] = main["_sampler_iter_yielded"] = batches
    sampler["samples_yielded"] = sampler["sampler_iter_state"]["yielded"] = samples
    return state


def throughput(make: Callable[..., Any], batches: int, turns: int) -> float:
    """The ratio of rates with a state per batch and without, over epochs that take turns."""
    loader = build(make, batches, persistent_workers=True)
    for _ in loader:  # starts the workers
        pass
    took_s = {False: 0.0, True: 0.0}
    for turn in range(turns):
        for with_states in (False, True) if turn % 2 else (True, False):
            began_s = time.perf_counter()
            for _ in loader:
                if with_states:
                    loader.state_dict()
            took_s[with_states] += time.perf_counter() - began_s
    end(iter(loader))
    return took_s[False] / took_s[True]


def end(iterator: Any) -> None:
    """End an iterator's workers now."""
    iterator._shutdown_workers()  # noqa: SLF001 - named so in both, as in torch's


def measure(make: Callable[..., Any], batches: int, turns: int, epoch: int = 2000) -> Costs:
    """All that is measured of one loader."""
    costs = snapshots(make, batches, min(500, batches - PLACE - 2))
    costs.resume_s = statistics.median(resume_s(make, batches) for _ in range(turns))
    costs.throughput = throughput(make, epoch, 5 * turns)
    return costs


def main() -> int:
    """Print a table, and write it as JSON if asked; 3 where that could not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=whole_number(PLACE + 10), default=1_000_000)
    parser.add_argument("--turns", type=whole_number(1), default=3)
    parser.add_argument("--json", type=result_file)
    given = parser.parse_args()
    results = {name: measure(make, given.batches, given.turns) for name, make in contestants().items()}
    rows = [
        [
            name,
            f"{costs.first_s * 1e6:,.1f}",
            f"{costs.state_s * 1e6:,.1f}",
            f"{costs.batch_s * 1e6:,.1f}",
            f"{costs.nbytes:,}",
            f"{costs.resume_s:,.3f}",
            f"{costs.throughput:.3f}",
        ]
        for name, costs in results.items()
    ]
    place = f"from batch {given.batches:,}, s"
    head = ["loader", "first state, µs", "state, µs", "per batch, µs", "bytes", place, "with / without"]
    print(render_table([head, *rows], texts=1))
    found = {name: vars(costs) for name, costs in results.items()}
    if given.json and not write_json(given.json, {"machine": describe(), "results": found}):
        return NOT_WRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
