"""The cost of a loader's state: making it, its size, resuming from it, and throughput with one per batch.

Run from a checkout. The extra ``bench`` has torchdata, for a comparison with its StatefulDataLoader:

    python -m benchmarks.resume [--batches N] [--turns N] [--json FILE]

The epoch is shuffled, in batches of four. All contestants take turns, and figures are medians, so that other
load of the machine falls on all of them.

- State: wall time of ``state_dict()``, for the first state of an epoch and for further ones, and of
  ``state_dict(taken=k)`` for every ``k`` in turn, which torchdata has not.
- Per batch: processor time of the main process for ``next()`` and a state after it, minus that of ``next()``
  of a loader that is asked for none and takes no snapshot. StatefulDataLoader takes its snapshots in
  ``next()``, whether they are asked for or not (``snapshot_every_n_steps``).
- Resume: time from ``iter()`` to the first batch after batch N. There are no workers, so their start does not
  count. Both loaders draw the order of the whole epoch in this time. "Of that, skipping" is the difference to
  the same time in a new epoch.
- Throughput: rate of epochs with a state per batch, divided by the rate of epochs without, in pairs.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

import shmloader
from benchmarks.machine import describe
from benchmarks.options import NOT_WRITTEN, whole_number
from benchmarks.result_files import result_file, write_json
from benchmarks.tables import render_table
from shmloader.resume.compatibility import signed

BATCH_SIZE = 4
WORKERS = 2
PLACE = 200
"""Batch at which states are made."""


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Sample ``i`` is eight floats and its number; no row is kept."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.row = torch.rand(8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.row, index


def first_batch(loader: Any) -> Any:
    """The first batch of an epoch."""
    return next(iter(loader))


def contestants() -> dict[str, Callable[..., Any]]:
    """The loaders' classes, by name."""
    found: dict[str, Callable[..., Any]] = {"shmloader": shmloader.DataLoader}
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        print("torchdata is not installed: pip install -c constraints.txt -e '.[bench]'")
    else:
        found["torchdata"] = StatefulDataLoader
    return found


def build(make: Callable[..., Any], batches: int, **options: Any) -> Any:
    """A shuffled loader with an epoch of so many batches."""
    return make(
        Rows(batches * BATCH_SIZE),
        batch_size=BATCH_SIZE,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
        **{"num_workers": WORKERS} | options,
    )


@dataclass
class Costs:
    """The cost of one loader's states: for each measurement a list with one figure per turn.

    Attributes:
        first_s: Seconds that the first state of an epoch takes.
        state_s: Seconds that a further state takes.
        taken_s: Seconds that the state after a number of batches takes; empty if the loader has none.
        batch_s: Seconds of processor time in the main process that states take per batch: see above.
        nbytes: Length of a pickled state.
        resume_s: Seconds from ``iter()`` to the first batch, from a state, without workers.
        skip_s: The part of ``resume_s`` beyond the seconds of a new epoch.
        throughput: Rate of epochs with a state per batch, divided by the rate of epochs without.
    """

    first_s: list[float] = field(default_factory=list)
    state_s: list[float] = field(default_factory=list)
    taken_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)
    skip_s: list[float] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """The median of each, by name."""
        return {name: statistics.median(found) for name, found in vars(self).items() if found}


def measure_states(make: Callable[..., Any], batches: int, number: int, costs: Costs) -> None:
    """Measure states, one after each batch, against a loader that is asked for none."""
    seldom = {"snapshot_every_n_steps": 1 << 40} if make is not shmloader.DataLoader else {}
    asked, other = build(make, batches), build(make, batches, **seldom)
    iterators = iter(asked), iter(other)
    for _ in range(PLACE):
        for iterator in iterators:
            next(iterator)
    costs.first_s.append(timed(asked.state_dict))
    state_s, asked_s, other_s = [], [], []
    for _ in range(number):
        began_s = time.thread_time()
        next(iterators[0])
        state_s.append(timed(asked.state_dict))
        asked_s.append(time.thread_time() - began_s)
        began_s = time.thread_time()
        next(iterators[1])
        other_s.append(time.thread_time() - began_s)
    if make is shmloader.DataLoader:
        taken = range(PLACE + number + 1)
        costs.taken_s.append(
            statistics.median(timed(functools.partial(asked.state_dict, taken=k)) for k in taken)
        )
    costs.state_s.append(statistics.median(state_s))
    costs.batch_s.append(statistics.median(asked_s) - statistics.median(other_s))
    costs.nbytes.append(len(pickle.dumps(asked.state_dict(), 5)))
    for iterator in iterators:
        end(iterator)


def timed(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def measure_resume(make: Callable[..., Any], batches: int, costs: Costs) -> None:
    """Measure the time to the first batch of a resumed epoch, and of a new one."""
    loader = build(make, batches + 1000, num_workers=0)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = at_batch(loader.state_dict(), batches)
    took_s = []
    for begin in ({}, state):
        loader = build(make, batches + 1000, num_workers=0)
        loader.load_state_dict(begin)
        took_s.append(timed(functools.partial(first_batch, loader)))
    costs.resume_s.append(took_s[1])
    costs.skip_s.append(took_s[1] - took_s[0])


def at_batch(state: dict[str, Any], batches: int) -> dict[str, Any]:
    """The state after so many batches of a loader without workers, not loading them: both loaders count."""
    if "batches" in state:
        return signed(state | {"batches": batches})
    sampler = state["_sampler_iter_state"]
    state["_sampler_iter_yielded"] = state["_num_yielded"] = batches
    sampler["samples_yielded"] = sampler["sampler_iter_state"]["yielded"] = batches * BATCH_SIZE
    return state


def measure_throughput(make: Callable[..., Any], epoch_s: float, pairs: int, costs: Costs) -> None:
    """Measure the ratio of rates with a state per batch and without, over pairs of epochs.

    Each epoch is long enough to take about ``epoch_s``: ratios of a tenth of a second scatter by a half.
    """
    trial = build(make, 1_000, persistent_workers=True)
    time_epoch(trial)  # starts the workers
    batches = int(1_000 * epoch_s / time_epoch(trial))
    end(iter(trial))
    loader = build(make, batches, persistent_workers=True)
    time_epoch(loader)
    for pair in range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        took_s = {with_states: time_epoch(loader, with_states=with_states) for with_states in order}
        costs.throughput.append(took_s[False] / took_s[True])
    end(iter(loader))


def time_epoch(loader: Any, *, with_states: bool = False) -> float:
    """Return the seconds that an epoch takes, with a state per batch or without."""
    began_s = time.perf_counter()
    for _ in loader:
        if with_states:
            loader.state_dict()
    return time.perf_counter() - began_s


def end(iterator: Any) -> None:
    """End an iterator's workers now."""
    iterator._shutdown_workers()  # noqa: SLF001 - named so in both, as in torch's


def main() -> int:
    """Print a table, and write it as JSON if asked; 3 if that fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=whole_number(PLACE + 10), default=1_000_000)
    parser.add_argument("--turns", type=whole_number(1), default=3)
    parser.add_argument("--json", type=result_file)
    given = parser.parse_args()
    measured = {name: (make, Costs()) for name, make in contestants().items()}
    for _ in range(given.turns):
        for make, costs in measured.values():
            measure_states(make, given.batches, min(500, given.batches - PLACE - 2), costs)
        for make, costs in measured.values():
            measure_resume(make, given.batches, costs)
        for make, costs in measured.values():
            measure_throughput(make, 0.5, 8, costs)
    found = {name: costs.medians() for name, (_, costs) in measured.items()}
    rows = [
        [
            name,
            f"{costs['first_s'] * 1e6:,.1f}",
            f"{costs['state_s'] * 1e6:,.1f}",
            f"{costs['taken_s'] * 1e6:,.1f}" if "taken_s" in costs else "none",
            f"{costs['batch_s'] * 1e6:,.1f}",
            f"{costs['nbytes']:,}",
            f"{costs['resume_s']:,.3f}",
            f"{costs['skip_s']:,.3f}",
            f"{costs['throughput']:.3f}",
        ]
        for name, costs in found.items()
    ]
    resume = f"to batch {given.batches:,}, s"
    head = ["loader", "first state, µs", "state, µs", "taken=k, µs", "per batch, µs", "bytes", resume]
    print(render_table([[*head, "of that, skipping", "with / without"], *rows], texts=1))
    if given.json and not write_json(given.json, {"machine": describe(), "results": found}):
        return NOT_WRITTEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
