"""Epochs that end early, begin anew, or change data that workers read; other threads that look on."""

import gc
import itertools
import multiprocessing
import os
import random
import threading
import time

import psutil
import pytest
import torch
from loading import HeldAt, Numbered
from torch.utils.data import DistributedSampler
from when_waiting import when_waiting

import shmloader
from robustness.datasets import BATCH, WithEpoch, first_indices
from robustness.processes import LONG, descriptors, mappings, pss_nbytes, workers_of
from shmloader import DataLoader


def _family_pss_nbytes() -> int:
    return pss_nbytes() + sum(pss_nbytes(worker.pid) for worker in workers_of(os.getpid()))


@pytest.mark.parametrize("drop_iterator", [False, True])
def test_no_batch_of_a_broken_epoch_comes_in_the_next(drop_iterator: bool) -> None:
    rng = random.Random(drop_iterator)
    sampler = list(range(400))
    loader = DataLoader(
        Numbered(400, delay_s=0.0002), sampler=sampler, batch_size=4, num_workers=2, persistent_workers=True
    )
    kept = []
    for _ in range(40):
        rng.shuffle(sampler)
        stop = rng.randrange(100)
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            assert batch[:, 0].tolist() == sampler[4 * number : 4 * number + 4]
            if rng.random() < 0.1:
                kept = [*kept[-5:], (batch, batch.clone())]
            if number == stop:
                time.sleep(rng.choice([0, 0, 0.002, 0.01]))
                break
        if drop_iterator:
            del iterator
        assert all(torch.equal(batch, copy) for batch, copy in kept)
    loader.close()


def test_breaking_off_leaves_no_slot_behind() -> None:
    loader = DataLoader(
        Numbered(400), batch_size=4, num_workers=2, prefetch_factor=4, persistent_workers=True
    )
    for _ in range(20):
        iterator = iter(loader)
        next(iterator)
        time.sleep(0.05)
        next(iterator)
        assert len(iterator.table.places) <= iterator.table.budget.base_slots + 1
    loader.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_first_batches_grow_nothing(persistent: bool) -> None:
    loader = DataLoader(
        Numbered(4000, items=1 << 14), batch_size=4, num_workers=1, persistent_workers=persistent
    )

    def measure() -> tuple[int, int, int, int]:
        gc.collect()
        processes = len(psutil.Process().children(recursive=True))
        return processes, descriptors(), mappings(), _family_pss_nbytes()

    for _ in range(5):
        next(iter(loader))
    before = measure()
    for _ in range(100 if LONG or persistent else 30):
        assert first_indices([next(iter(loader))]) == [0]
    after = measure()
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 10
    assert after[3] <= before[3] + (8 << 20)  # a batch is half a MiB
    loader.close()


def test_a_samplers_epoch_reaches_persistent_workers(start_method: str) -> None:
    dataset = Numbered(64)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=True, seed=3)
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=sampler,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        got = [index for batch in loader for index in batch[:, 0].tolist()]
        assert got == list(sampler)
        orders.append(got)
    assert orders[0] != orders[1] != orders[2]
    loader.close()


@pytest.mark.parametrize("kind", [pytest.param("value", marks=pytest.mark.long), "tensor"])
def test_a_shared_epoch_value_reaches_persistent_workers(kind: str, start_method: str) -> None:
    context = multiprocessing.get_context(start_method)
    epoch = context.Value("q", 0) if kind == "value" else torch.zeros((), dtype=torch.int64).share_memory_()
    loader = DataLoader(
        WithEpoch(16, epoch),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    for number in (5, 6, 7):
        if kind == "value":
            epoch.value = number
        else:
            epoch.fill_(number)
        batches = list(loader)
        assert [batch[:, 1].tolist() for batch in batches] == [[number] * 4] * 4
    loader.close()


def test_closing_from_another_thread_ends_a_waiting_next() -> None:
    dataset = HeldAt(64, at=4)
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    closer = when_waiting(iterator, loader.close)
    began = time.monotonic()
    try:
        with pytest.raises(shmloader.LoaderClosed, match="closed by another thread"):
            next(iterator)
        assert time.monotonic() - began < 30
    finally:
        dataset.released.set()
        closer.join()


def test_statistics_may_be_read_all_the_time_by_another_thread() -> None:
    loader = DataLoader(Numbered(1000), batch_size=BATCH, num_workers=2, persistent_workers=True)
    errors, reads, stop = [], [0], threading.Event()

    def read() -> None:
        while not stop.is_set():
            try:
                statistics = loader.statistics()
                assert min(statistics.slots_free, statistics.slots_granted, statistics.slots_leased) >= 0
                reads[0] += 1
            except BaseException as error:
                errors.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    rng, kept = random.Random(0), []
    try:
        for epoch in itertools.count():
            if epoch >= 2 and (reads[0] > 100 or epoch == 100):
                break
            for number, batch in enumerate(loader):
                assert first_indices([batch]) == [BATCH * number]
                kept.append(batch)
                if len(kept) > rng.randrange(1, 60):
                    kept.clear()
    finally:
        stop.set()
        reader.join()
    assert not errors
    assert reads[0] > 100
    del batch
    kept.clear()
    assert loader.statistics().slots_leased == 0
    loader.close()
