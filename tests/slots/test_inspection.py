"""``SHMLOADER_DEBUG=1``: what it finds, with what it finds really done."""

from __future__ import annotations

import ctypes
import os
import pickle

import numpy as np
import pytest
import torch
from loading import Numbered

from shmloader import DataLoader
from shmloader.errors import SlotCorrupted
from shmloader.shared_memory import Segment
from shmloader.slots import Slot, SlotPool
from shmloader.slots.inspection import POISON, Inspection


@pytest.fixture(autouse=True)
def _debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")


def test_an_inspected_epoch_is_the_same(start_method: str) -> None:
    with DataLoader(
        Numbered(40), batch_size=4, num_workers=2, multiprocessing_context=start_method
    ) as loader:
        assert [batch[:, 0].tolist() for batch in loader] == [list(range(k, k + 4)) for k in range(0, 40, 4)]


def test_freed_slots_are_poisoned() -> None:
    """A pointer to an old batch, without a reference to it, reads the pattern."""
    with DataLoader(Numbered(40), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        address = batch.data_ptr()
        slot = next(slot for slot in iterator.pool.slots if slot.lease is not None)
        del batch
        iterator.pool.collect()
        assert slot.lease is None
        assert ctypes.string_at(address, 32) == bytes([POISON]) * 32


def test_writing_to_a_freed_slot_is_found() -> None:
    with DataLoader(Numbered(400), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        address = batch.data_ptr()
        del batch
        iterator.pool.collect()
        ctypes.memset(address + 5, 7, 3)
        with pytest.raises(SlotCorrupted, match=r"written to while it was free: 3 of .* offset 5"):
            for _ in range(20):
                next(iterator)


def test_without_it_nothing_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOADER_DEBUG", "0")
    with DataLoader(Numbered(40), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        address = batch.data_ptr()
        del batch
        iterator.pool.collect()
        assert np.frombuffer(ctypes.string_at(address, 32), np.int64).tolist() == [0] * 4
        assert loader.statistics().oldest_leases == ()


def test_who_holds_the_slots_is_told() -> None:
    with DataLoader(Numbered(40, items=6), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        held, other = next(iterator), next(iterator)
        first, second = loader.statistics().oldest_leases
        assert first.startswith("batch 0 in slot")
        assert second.startswith("batch 1 in slot")
        assert first.endswith("Tensor (4, 6) int64")
        del other
        assert len(loader.statistics().oldest_leases) == 1
        assert held[0, 0] == 0


@pytest.fixture
def granted() -> tuple[Inspection, SlotPool, Slot]:
    pool = SlotPool(Segment(), 2, 1 << 20)
    inspection = Inspection(pool)
    slot = pool.grant()
    pool.reserve(slot, 4096)
    yield inspection, pool, slot
    pool.close()


@pytest.mark.parametrize(
    ("worker_id", "end", "match"),
    [(1, 74, "sent to worker 0"), (0, 4100, "up to byte 4,100, beyond its 4,096 bytes")],
)
def test_wrong_records_are_found(
    granted: tuple[Inspection, SlotPool, Slot], worker_id: int, end: int, match: str
) -> None:
    inspection, _, slot = granted
    with pytest.raises(SlotCorrupted, match=match):
        inspection.published(slot, 7, (worker_id, 0), 4096, end)
    inspection.published(slot, 7, (0, 0), 4096, 74)


def test_leaves_outside_their_slot_are_found(granted: tuple[Inspection, SlotPool, Slot]) -> None:
    from shmloader.codec.layout import CODE_OF_TORCH_DTYPE, TENSOR, Leaf, join_header

    inspection, _, slot = granted
    code = CODE_OF_TORCH_DTYPE[torch.float32]

    def header(offset: int, items: int) -> bytes:
        return join_header([pickle.dumps(None)], [Leaf(TENSOR, code, offset, (items,)).pack()])

    inspection.leased(slot, 3, header(64, 16), 128)
    for offset, items in ((64, 17), (-64, 4), (66, 2)):
        with pytest.raises(SlotCorrupted, match="a leaf of batch 3"):
            inspection.leased(slot, 3, header(offset, items), 128)


def test_the_variable_is_read_when_iteration_begins() -> None:
    assert os.environ["SHMLOADER_DEBUG"] == "1"
    with DataLoader(Numbered(8), batch_size=4, num_workers=1) as loader:
        assert iter(loader)._dispatcher.inspection is not None
