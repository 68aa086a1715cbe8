"""Worker threads write to slots of their own: kept batches never change, nor does collation elsewhere."""

from __future__ import annotations

import os
import threading
from typing import Any

import loading
import numpy as np
import pytest
import torch
from parity.compare import differences
from thread_datasets import Meeting, Mixed
from thread_loaders import threads
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate

from shmloader import SpillWarning
from shmloader.memory import Segment
from shmloader.worker.collate import install_slot_collate

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# --- slots


def test_kept_batches_do_not_change_and_slots_are_used_again() -> None:
    """Every fourth batch is kept, the rest is dropped; they grow, and change hands between threads."""
    sizes = [1 + (7 * i) % 50 * 100 for i in range(240)]
    kept = []
    with threads(
        loading.Growing(sizes), batch_size=1, num_workers=3, memory_budget_nbytes=64 << 20
    ) as loader:
        iterator = iter(loader)
        for place, batch in enumerate(iterator):
            if place % 4 == 0:
                kept.append((place, batch, batch.clone()))
            del batch
        assert loader.statistics().spills == 0
        assert loader.statistics().slots_leased == len(kept) == 60
    for place, batch, copy in kept:
        assert torch.equal(batch, copy)
        assert batch.tolist() == [[place] * sizes[place]]


@pytest.mark.parametrize("keeps", [loading.KeepsBatches, loading.SendsAgain])
def test_what_a_thread_keeps_of_a_batch_does_not_change(keeps: Any) -> None:
    """At each batch the collate function checks everything that it has kept."""
    with threads(loading.Numbered(120), batch_size=3, num_workers=1, collate_fn=keeps()) as loader:
        batches = [batch if torch.is_tensor(batch) else batch[0] for batch in loader]
        assert torch.cat(batches)[:, 0].tolist() == list(range(120))
        assert loader.statistics().detached > 0


def test_batches_beyond_the_budget_come_in_parts() -> None:
    """Index batches that do not fit in a record come through the slot."""
    sizes = [40_000 if i == 17 else 8 for i in range(64)]
    with (
        threads(loading.Growing(sizes), batch_size=1, num_workers=2, memory_budget_nbytes=100_000) as loader,
        pytest.warns(SpillWarning),
    ):
        shapes = [len(batch[0]) for batch in loader]
    assert shapes == sizes
    order = list(torch.randperm(3000, generator=torch.Generator().manual_seed(1)).numpy())
    with threads(
        loading.Numbered(3000, items=1), batch_sampler=[order[:1500], order[1500:]], num_workers=2
    ) as loader:
        assert torch.cat(list(loader))[:, 0].tolist() == order


def test_slots_are_inspected_in_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are right pass with SHMLOADER_DEBUG=1, and held ones are listed."""
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")
    with threads(Mixed(30), batch_size=2, num_workers=2) as loader:
        iterator = iter(loader)
        held = list(iterator)
        assert not differences(held, list(TorchLoader(Mixed(30), batch_size=2)))
        assert len(loader.statistics().oldest_leases) == 5


def is_collated_as_shared(samples: list[torch.Tensor]) -> bool:
    return bool(default_collate(samples).is_shared())


def test_collation_in_other_threads_stays_torchs() -> None:
    """Other threads keep torch's dtypes and gradients while worker threads collate into slots, and after."""
    meeting = Meeting(4, 2)

    def check() -> None:
        joined = default_collate([torch.tensor([1]), torch.tensor([2.5])])
        assert joined.dtype == torch.float32
        assert default_collate([torch.ones(2, requires_grad=True)] * 2).grad_fn is not None
        assert not default_collate([torch.ones(2)] * 2).is_shared()

    with threads(meeting, batch_size=1, num_workers=1) as loader:
        iterator = iter(loader)
        check()
        meeting.barrier.wait(60)
        next(iterator)
        check()
        meeting.barrier.abort()
    check()
    # Workers of torch's loader that are forked now collate as torch does, into memory that it shares.
    assert (
        list(TorchLoader([torch.ones(2)] * 4, 2, num_workers=1, collate_fn=is_collated_as_shared))
        == [True] * 2
    )
    # And a worker process that is forked now still collates in the quick way.
    assert install_slot_collate(default_collate, in_thread=True) is not default_collate


def test_memory_that_is_detached_never_reads_as_anything_else() -> None:
    """Other threads may be reading a batch that a collate function keeps at that very moment."""
    segment = Segment()
    nbytes = segment.reserve(0, 0, 1 << 20)
    wrong: list[int] = []
    for _ in range(60):
        extent = segment.map(0, nbytes)
        array = np.frombuffer(extent.buffer, np.uint8)
        array[:] = 5
        begun, stop = threading.Event(), threading.Event()

        def read(array: Any = array, begun: Any = begun, stop: Any = stop) -> None:
            while not stop.is_set():
                if not (array[::4096] == 5).all() or array[-1] != 5:
                    wrong.append(1)
                begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        begun.wait(60)
        extent.detach()
        stop.set()
        reader.join(60)
        np.frombuffer(segment.map(0, nbytes).buffer, np.uint8)[:] = 9
        assert (array == 5).all()
    segment.close()
    assert not wrong


def test_a_threads_segment_outlives_the_owners_and_dies_with_the_thread() -> None:
    """A thread that ends late writes to its own slot, even if the owner's descriptor is another file."""
    segment = Segment()
    before = len(os.listdir("/proc/self/fd"))
    own = segment.duplicate()
    nbytes = segment.reserve(0, 0, 1)
    segment.map(0, nbytes).view[:3] = b"abc"
    segment.close()
    with open(os.devnull, "rb"):
        assert bytes(own.map(0, nbytes).view[:3]) == b"abc"
        assert own.reserve(0, nbytes, 5 * nbytes) == 5 * nbytes
    del own
    assert len(os.listdir("/proc/self/fd")) == before - 1
