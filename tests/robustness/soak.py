"""Soak: mixed loaders, random kills, breaks and holds, for as long as asked.

Every batch is compared with the expected one, and held batches once more when they are dropped. At the end of
each round no process, descriptor, mapping or memory may be left. Run as a program:
``python -m robustness.soak --minutes 30 --seed 1``.
"""

import argparse
import contextlib
import ctypes
import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

import shmloader
from robustness.processes import descriptors, mappings, pss_nbytes, shared_nbytes, workers_of
from robustness.worker_kills import hang_limit, ready_helpers
from shmloader import DataLoader

MOST_GROWTH_NBYTES = 64 << 20  # private memory over the whole soak: allocators keep some
MOST_MAPPINGS = 200
_WARM_ROUNDS = 12  # before the lasting memory is measured
_HANG_S = 120


class Mixed(Dataset[Any]):
    """Sample ``i`` of a kind can be told from its index alone, so that the oracle needs no workers."""

    KINDS = ("tensor", "dict", "ragged", "bytes", "large")

    def __init__(self, kind: str, length: int, seed: int) -> None:
        self.kind, self.length, self.seed = kind, length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        value = self.seed * 100_003 + index
        if self.kind == "dict":
            return {"x": torch.full((3, 5), value), "y": np.float32(index), "name": f"sample {value}"}
        if self.kind == "ragged":
            return torch.full((1 + value * 7919 % 3000,), value)
        if self.kind == "bytes":
            return np.frombuffer(value.to_bytes(8, "little") * 40, np.uint8).copy(), (index, str(value))
        return torch.full((20_000 if self.kind == "large" else 16,), value)


class Plan(NamedTuple):
    """One round: a loader, and the things done to it."""

    kind: str
    seed: int
    length: int
    batch_size: int
    workers: int
    prefetch: int
    method: str
    persistent: bool
    in_order: bool
    budget_nbytes: int | None
    restarts: int


def make_plan(rng: random.Random, methods: tuple[str, ...]) -> Plan:
    """Draw a round's loader."""
    kind = rng.choice(Mixed.KINDS)
    return Plan(
        kind=kind,
        seed=rng.randrange(1000),
        length=rng.randint(20, 200),
        batch_size=1 if kind == "ragged" else rng.randint(1, 8),
        workers=rng.randint(1, 3),
        prefetch=rng.randint(1, 5),
        method=rng.choice(methods),
        persistent=rng.random() < 0.6,
        in_order=rng.random() < 0.8,
        budget_nbytes=rng.choice([None, None, 1 << 20, 8 << 20]),
        restarts=rng.choice([0, 0, 2]),
    )


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal, types, dtypes and shapes included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def copy_of(batch: Any) -> Any:
    """A copy in private memory."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if isinstance(batch, dict):
        return {key: copy_of(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(map(copy_of, batch))
    return batch


class Tally:
    """Counts of a soak."""

    def __init__(self) -> None:
        self.rounds = self.epochs = self.batches = self.kills = self.deaths = self.breaks = self.held = 0
        self.unnoticed = False  # the present loader has a killed worker that it has not reported

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {name}" for name, count in vars(self).items() if name != "unnoticed")


class Held:
    """Batches that the program keeps, each with a copy, let go of at random."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self._rng, self._tally = rng, tally
        self._pairs: list[tuple[Any, Any]] = []

    def perhaps(self, batch: Any) -> None:
        """Keep a batch now and then; drop one, or all, now and then."""
        if self._rng.random() < 0.2:
            self._pairs.append((batch, copy_of(batch)))
            self._tally.held += 1
        if self._pairs and self._rng.random() < 0.15:
            self._check(*self._pairs.pop(self._rng.randrange(len(self._pairs))))
        if len(self._pairs) > 100 or self._rng.random() < 0.01:
            self.drop()

    def drop(self) -> None:
        """Drop all batches."""
        while self._pairs:
            self._check(*self._pairs.pop())

    def _check(self, batch: Any, copy: Any) -> None:
        assert same(batch, copy), "a batch has changed while it was held"


def run_epoch(
    loader: DataLoader, dataset: Mixed, plan: Plan, rng: random.Random, tally: Tally, held: Held
) -> None:
    """One pass, with an end drawn at random: the sampler's, a break, or the death of a worker."""
    order = list(range(plan.length))
    rng.shuffle(order)
    loader.sampler.order = order
    due = {n: order[n * plan.batch_size : (n + 1) * plan.batch_size] for n in range(len(loader))}
    count = len(due)
    stop = rng.randrange(2 * count + 1)
    kill = rng.randrange(count) if rng.random() < 0.35 else -1
    how = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    try:
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            wanted = _take_expected(batch, due, number, plan, dataset)
            assert same(batch, wanted), f"{plan}: batch {number} is {batch}, not {wanted}"
            tally.batches += 1
            held.perhaps(batch)
            if number == kill and iterator._workers:
                os.kill(rng.choice(iterator._workers).pid, how)
                tally.kills += 1
                tally.unnoticed = True
            if number == stop:
                tally.breaks += 1
                return
            if rng.random() < 0.02:
                time.sleep(0.005)
        assert not due, f"{plan}: batches are missing: {due}"
    except shmloader.WorkerDied:
        tally.deaths += 1
        assert tally.unnoticed, "a worker died that nobody killed"
        tally.unnoticed = False


def _take_expected(batch: Any, due: dict[int, list[int]], number: int, plan: Plan, dataset: Mixed) -> Any:
    """The expected batch: the next one, or, out of order, the only one that can match."""
    if plan.in_order:
        return default_collate([dataset[index] for index in due.pop(number)])
    for candidate, indices in due.items():
        expected = default_collate([dataset[index] for index in indices])
        if same(batch, expected):
            del due[candidate]
            return expected
    raise AssertionError(f"{plan}: a batch that is not due, or twice: {batch}")


class _Order:
    """A sampler whose order is set before each epoch."""

    def __init__(self, length: int) -> None:
        self.order = list(range(length))

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def run_round(plan: Plan, rng: random.Random, tally: Tally) -> None:
    """Some epochs with one loader, which is closed or just dropped at the end."""
    dataset = Mixed(plan.kind, plan.length, plan.seed)
    loader = DataLoader(
        dataset,
        batch_size=plan.batch_size,
        sampler=_Order(plan.length),
        num_workers=plan.workers,
        prefetch_factor=plan.prefetch,
        multiprocessing_context=plan.method,
        persistent_workers=plan.persistent,
        in_order=plan.in_order,
        memory_budget_nbytes=plan.budget_nbytes,
        worker_restarts=plan.restarts,
    )
    held = Held(rng, tally)
    tally.unnoticed = False
    for _ in range(rng.randint(1, 4)):
        with hang_limit(_HANG_S):
            run_epoch(loader, dataset, plan, rng, tally, held)
        tally.epochs += 1
    if rng.random() < 0.5:
        loader.close()  # before the batches that are held
    held.drop()
    tally.rounds += 1


class Footprint(NamedTuple):
    """Resources of this program at the end of a round.

    Attributes:
        processes: Workers; none, in the end.
        descriptors: Open files.
        mappings: Memory mappings.
        pss_nbytes: Private memory, and its share of shared memory.
        shared_nbytes: Shared memory of the machine.
    """

    processes: int
    descriptors: int
    mappings: int
    pss_nbytes: int
    shared_nbytes: int

    @classmethod
    def take(cls) -> "Footprint":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free already has not leaked
        deadline = time.monotonic() + 10
        while (workers := len(workers_of(os.getpid()))) and time.monotonic() < deadline:
            time.sleep(0.02)
        return cls(workers, descriptors(), mappings(), pss_nbytes(), shared_nbytes())

    def check_against(self, first: "Footprint") -> None:
        """Check that nothing has grown."""
        assert self.processes == 0, f"{self.processes} workers are left"
        assert self.descriptors <= first.descriptors, (
            f"descriptors: {first.descriptors} -> {self.descriptors}"
        )
        assert self.mappings <= first.mappings + MOST_MAPPINGS, (
            f"{first.mappings} -> {self.mappings} mappings"
        )
        grown = self.pss_nbytes - first.pss_nbytes
        assert grown < MOST_GROWTH_NBYTES, f"memory has grown by {grown:,} bytes"


def soak(seconds: float, seed: int, methods: tuple[str, ...], say: Any = None) -> tuple[Tally, Footprint]:
    """Run rounds until the time is over.

    Raises:
        AssertionError: At the first batch that is wrong, and if anything is left or has grown.
    """
    rng, tally, first = random.Random(seed), Tally(), None
    entries = set(os.listdir("/dev/shm"))
    began = said = time.monotonic()
    while time.monotonic() < began + seconds or first is None:
        run_round(make_plan(rng, methods), rng, tally)
        if tally.rounds == _WARM_ROUNDS:
            first = Footprint.take()
        elif tally.rounds % 25 == 0 and first is not None:
            Footprint.take().check_against(first)
        if say and time.monotonic() > said + 30:
            said = time.monotonic()
            say(f"{said - began:6.0f} s: {tally}; {Footprint.take()}")
    last = Footprint.take()
    last.check_against(first)
    mine = {name for name in set(os.listdir("/dev/shm")) - entries if name.startswith("shml")}
    assert not mine, f"left in /dev/shm: {mine}"
    return tally, last


def main() -> int:
    """Soak for as long as asked; exit status 1 at the first thing that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=None, help="drawn, and printed, if not given")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}", flush=True)
    torch.set_num_threads(1)
    ready_helpers()
    # Forked workers are the quickest to start, so most rounds have them.
    methods = ("fork",) * 8 + ("forkserver",) * 4 + ("spawn",)
    with warnings.catch_warnings():
        ignore_expected()
        tally, last = soak(arguments.minutes * 60, seed, methods, say=lambda text: print(text, flush=True))
    print(f"done: {tally}; {last}")
    return 0


def ignore_expected() -> None:
    """Silence the warnings that are right for small budgets, many workers and restarts."""
    warnings.simplefilter("ignore", shmloader.SpillWarning)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    with contextlib.suppress(AttributeError):
        warnings.simplefilter("ignore", shmloader.RestartWarning)


if __name__ == "__main__":
    assert multiprocessing.current_process().name == "MainProcess"
    sys.exit(main())
