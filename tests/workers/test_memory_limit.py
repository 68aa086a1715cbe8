"""``worker_max_nbytes``: leaking workers are replaced; order and draws are those of an undrained run."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import random
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import leaking_datasets as leaking
import numpy as np
import psutil
import pytest
import torch
from leaking_datasets import LEAK_NBYTES, LIMIT_NBYTES, SMALL, Leaking, loader_of, values
from robustness.processes import LONG, wait_gone
from torch.utils.data import Dataset, IterableDataset

import shmloader
from shmloader import DataLoader, NotReady
from shmloader.memory.process_memory import private_nbytes


def polled(loader: Any) -> Any:
    iterator = iter(loader)
    while True:
        with contextlib.suppress(NotReady):
            try:
                yield iterator.try_next()
            except StopIteration:
                return
        time.sleep(0.0005)


def test_memory_is_constant_and_nothing_else_differs() -> None:
    """10,000 batches with SHMLOADER_LONG=1. Each of the two workers leaks many times its limit."""
    batches = 10_000 if LONG else 160
    leak_nbytes = (1 << 20) if LONG else (2 << 20)
    expected = values(loader_of(Leaking(2 * batches), None, **SMALL))
    most_nbytes, pids, found = 0, set(), []
    with loader_of(Leaking(2 * batches, leak_nbytes // 2), **SMALL) as loader:
        for number, batch in enumerate(loader):
            pids |= set(batch["pid"].tolist())
            if number % 20 == 0:
                nbytes = max(private_nbytes(worker.pid) for worker in active_children())
                most_nbytes = max(most_nbytes, nbytes)
            found.append(batch)
            if len(found) == 20:
                assert values(found) == expected[number - 19 : number + 1]
                found.clear()
        statistics = loader.statistics()
    assert number == batches - 1
    leaked_nbytes = batches * leak_nbytes // 2  # by each worker
    assert leaked_nbytes > 2 * LIMIT_NBYTES
    renewed = statistics.workers_renewed
    assert renewed >= 2 * (leaked_nbytes // LIMIT_NBYTES) - 2
    assert renewed <= len(pids) <= 2 + renewed  # each of the last two may have come for no batch
    assert most_nbytes < LIMIT_NBYTES + 30 * leak_nbytes, f"{most_nbytes:,} bytes"
    assert statistics.worker_restarts == 0
    assert "workers replaced for their memory" in str(statistics)


@pytest.mark.in_ci(3)
@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": True},
        {"persistent_workers": True, "prefetch_epochs": True},
        {"dispatch": "dynamic"},
        {"num_workers": 1, "prefetch_factor": 5},
        {"memory_budget_nbytes": 1 << 16},
        {"dataset": leaking.Told, "persistent_workers": True},
        {"dataset": leaking.WithState, "persistent_workers": True},
        {"dataset": leaking.WithState, "num_workers": 1},
        {"read": polled},
    ],
)
def test_order_and_draws_are_those_of_an_undrained_run(options: dict[str, Any]) -> None:
    """In two epochs, of which the first is left early where workers persist."""
    kind, read = options.pop("dataset", Leaking), options.pop("read", iter)
    runs = []
    samples, first = (300, 120) if LONG else (120, 45)
    for leak_nbytes, limit in ((0, None), (LEAK_NBYTES, LIMIT_NBYTES)):
        found = []
        with loader_of(kind(samples, leak_nbytes), limit, **SMALL, **options) as loader:
            for epoch in range(2):
                loader.set_epoch(epoch)
                short = options.get("persistent_workers") and not epoch
                found.append(values(itertools.islice(read(loader), first if short else None)))
            runs.append(found)
            renewed = loader.statistics().workers_renewed
    assert runs[0] == runs[1]
    assert renewed >= 2


@pytest.mark.in_ci
def test_all_start_methods(start_method: str) -> None:
    expected = values(loader_of(Leaking(150), None, num_workers=1))
    # A spawned worker has torch's memory for itself.
    limit, leak_nbytes = (500 << 20, 8 << 20) if start_method == "spawn" else (160 << 20, 4 << 20)
    leaks = Leaking(150, leak_nbytes)  # the worker looks at its memory from time to time
    with loader_of(leaks, limit, num_workers=1, multiprocessing_context=start_method) as loader:
        assert values(loader) == expected
        assert loader.statistics().workers_renewed >= 1


def test_the_old_worker_tears_down_and_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "torn down"
    expected = values(loader_of(leaking.Ended(240, 0, tmp_path / "others"), None, **SMALL))
    with (
        caplog.at_level(logging.INFO, "shmloader"),
        loader_of(leaking.Ended(240, LEAK_NBYTES, path), **SMALL) as loader,
    ):
        found = list(loader)
        renewed = loader.statistics().workers_renewed
    assert values(found) == expected
    assert renewed >= 2
    pids = {pid for batch in found for pid in batch["pid"].tolist()}
    torn = set(map(int, path.read_text().split()))
    assert pids <= torn
    assert len(torn) <= 2 + renewed  # each of the last two may have come for no batch
    said = [record.getMessage() for record in caplog.records if "private memory" in record.getMessage()]
    assert len(said) == renewed
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_a_worker_that_has_no_further_batch_to_make_is_not_replaced(tmp_path: Path) -> None:
    """The epoch would wait for its end and for a new one, which would make none."""
    go_on = tmp_path / "all batches are asked for"
    dataset = leaking.LeaksLast(4, 2 * LIMIT_NBYTES, 2, go_on)
    with loader_of(dataset, batch_size=1, shuffle=False, **SMALL) as loader:
        iterator = iter(loader)
        pids = [worker.pid for worker in iterator._workers]
        next(iterator)
        go_on.touch()
        assert len(list(iterator)) == 3
        assert [worker.pid for worker in iterator._workers] == pids
        assert loader.statistics().workers_renewed == 0


def test_a_worker_that_is_killed_as_it_hands_over(tmp_path: Path) -> None:
    """Its death is one as others: replaced if that is asked for, else an error."""
    dataset = leaking.LeakingOnce(400, LEAK_NBYTES, tmp_path)
    with loader_of(dataset, worker_restarts=1, **SMALL) as loader:
        assert [batch["index"].tolist() for batch in loader] == [
            batch["index"] for batch in values(loader_of(Leaking(400), None))
        ]
        assert loader.statistics().worker_restarts == 1
        assert loader.statistics().workers_renewed >= 1
    dataset.mark.unlink()
    with loader_of(dataset, **SMALL) as loader, pytest.raises(shmloader.WorkerDied, match="SIGKILL"):
        list(loader)


@pytest.mark.in_ci
def test_kills_at_random_moments_lose_no_batch() -> None:
    """Of workers that are replaced all the time."""
    chance = random.Random(2)
    order = [batch["index"] for batch in values(loader_of(Leaking(800), None))]
    with loader_of(Leaking(800, LEAK_NBYTES), worker_restarts=100, **SMALL) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(batch["index"].tolist())
            if number % 25 == 10:
                chance.choice(active_children()).kill()
        assert found == order
        assert loader.statistics().workers_renewed >= 2


def test_closing_meanwhile_leaves_nothing() -> None:
    for batches in (30, 40, 50, 60, 70) if LONG else (40, 60):
        loader = loader_of(Leaking(400, LEAK_NBYTES), **SMALL)
        for _ in itertools.islice(loader, batches):
            pass
        family = [psutil.Process(child.pid) for child in active_children()]
        loader.close()
        assert not wait_gone(family, 30)[1]


# --- what is refused

AMPLE_NBYTES = 1 << 30  # also for a fork of a process in which many tests ran


def lambda_over(value: Any) -> Callable[[Any], Any]:
    return lambda samples: (value, samples)[1]


NAMED: dict[str, Callable[[], Any]] = {
    r"dataset\.rng is a random generator of its own \(Generator\)": lambda: leaking.OwnGenerator(80),
    r"dataset\.inner\.rng is a random": lambda: leaking.Around(leaking.OwnGenerator(80)),
    r"dataset\.extra\[0\]\.held is": lambda: around([leaking.Transform(random.Random())]),
    r"dataset\.extra\['a'\] is a random": lambda: around({"a": torch.Generator()}),
    r"dataset\.extra is an iterator \(count\)": lambda: around(itertools.count()),
    r"dataset\.extra is an iterator \(generator\)": lambda: around(one for one in range(9)),
    r"RandomState": lambda: around(np.random.RandomState(3)),
    r"extra\.keywords\['end'\]": lambda: around(functools.partial(print, end=random.Random())),
    r"dataset\.rng is a random generator": lambda: leaking.Lazy(80),
    r"Counting\.hits has changed from \d+ to \d+": lambda: leaking.Counting(80),
    r"Counting\.hits \(dataset 1 inside it\)": lambda: leaking.Around(leaking.Counting(80)),
}


def around(extra: Any) -> Any:
    return leaking.Around(Leaking(80), extra)


@pytest.mark.parametrize("named", NAMED)
def test_states_that_would_be_lost_are_named(named: str) -> None:
    """Long before the worker is to be replaced."""
    loader = loader_of(NAMED[named](), AMPLE_NBYTES, batch_size=1)
    with loader, pytest.raises(shmloader.LoaderError, match=named) as raised:
        list(loader)
    assert "state_dict" in str(raised.value)


def test_a_collate_fn_with_a_generator_is_named() -> None:
    collate_fn = lambda_over(np.random.default_rng())
    with (
        loader_of(Leaking(80), AMPLE_NBYTES, collate_fn=collate_fn) as loader,
        pytest.raises(shmloader.LoaderError, match="collate_fn, its value is a random generator"),
    ):
        list(loader)


def test_what_is_no_state_is_not_refused() -> None:
    held = [
        io.BytesIO(b"file"),
        {"a": [1, 2]},
        leaking.Transform(torch.rand(3)),
        len,
        np,
        Leaking,
        lambda_over(3),
    ]
    dataset = leaking.Around(leaking.WithState(80), held)
    assert len(list(loader_of(dataset, AMPLE_NBYTES))) == 40


@pytest.mark.parametrize("value", [float("nan"), np.float64("nan")])
def test_a_number_that_is_none_has_not_changed(value: float) -> None:
    """NaN as the value for what is missing: neither in a worker nor in one that replaces it."""
    dataset = leaking.Around(Leaking(400, LEAK_NBYTES), value)
    with loader_of(dataset, **SMALL) as loader:
        assert len(list(loader)) == 200
        assert loader.statistics().workers_renewed > 0


def test_the_global_generators_are_handed_over() -> None:
    held = [
        random.uniform,
        functools.partial(random.uniform, 0.8, 1.2),
        np.random.uniform,
        np.random.mtrand._rand,
        torch.default_generator,
    ]
    assert len(list(loader_of(around(held), AMPLE_NBYTES))) == 40


class UsesCuda(Leaking):
    def __getitem__(self, index: int) -> Any:
        torch.cuda.is_initialized = lambda: True  # in this worker
        return super().__getitem__(index)


def test_a_worker_that_uses_cuda_is_refused() -> None:
    with loader_of(UsesCuda(80), AMPLE_NBYTES) as loader, pytest.raises(shmloader.LoaderError, match="CUDA"):
        list(loader)


def test_a_limit_below_what_a_new_worker_has_is_an_error() -> None:
    with (
        loader_of(Leaking(80), 1 << 20) as loader,
        pytest.raises(
            shmloader.LoaderError, match=r"=1,048,576: a worker has [\d,]{9,} bytes .* first batch"
        ),
    ):
        list(loader)


def test_a_dataset_that_the_program_has_changed_meanwhile_is_an_error() -> None:
    """The old worker has the one of its start, as with torch."""
    dataset = leaking.Around(Leaking(400, LEAK_NBYTES), 1)
    with (
        loader_of(dataset, persistent_workers=True, **SMALL) as loader,
        pytest.raises(
            shmloader.LoaderError, match=r"Around\.extra is 2 in a worker that replaces one .* it is 1"
        ),
    ):
        for _ in loader:
            dataset.extra = 2


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"worker_type": "thread"}, ValueError, "needs worker_type='process'"),
        ({"dataset": Numbers(), "shuffle": False}, ValueError, "needs a map-style dataset"),
        ({"num_workers": 0}, ValueError, "needs num_workers"),
        ({"worker_max_nbytes": 1e9}, TypeError, r"pass an int, such as int\(4e9\)"),
        ({"worker_max_nbytes": 0}, ValueError, "at least 1"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], error: type[Exception], why: str) -> None:
    dataset: Dataset[Any] = options.pop("dataset", Leaking(8))
    with pytest.raises(error, match=why):
        DataLoader(dataset, **{"num_workers": 2, "worker_max_nbytes": 1 << 30} | options)


class Proxy:
    """Makes up whatever is asked for, as a lazy module does, and has no ``__dict__``."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__dict__":
            raise AttributeError(name)
        return lambda *_: None


class WithProxy(Leaking):
    proxy: Any = None


def test_a_dataset_may_hold_objects_that_make_up_their_attributes() -> None:
    dataset = WithProxy(160, LEAK_NBYTES)
    dataset.proxy = Proxy()
    with loader_of(dataset, **SMALL) as loader:
        assert values(loader) == values(loader_of(Leaking(160), None, **SMALL))
        assert loader.statistics().workers_renewed > 0
