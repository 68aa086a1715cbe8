"""``SHMLOADER_DEBUG=1``: the errors that it finds, each of them really made."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
from loading import Numbered

from shmloader import DataLoader
from shmloader.errors import SlotCorrupted
from shmloader.slots.inspection import POISON


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
        slot = next(slot for slot in iterator.table.places if slot.lease is not None)
        del batch
        iterator.table.collect()
        assert slot.lease is None
        assert ctypes.string_at(address, 32) == bytes([POISON]) * 32


def test_writing_to_a_freed_slot_is_found() -> None:
    with DataLoader(Numbered(400), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        batch = next(iterator)
        address = batch.data_ptr()
        del batch
        iterator.table.collect()
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
        iterator.table.collect()
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


def test_the_variable_is_read_when_iteration_begins() -> None:
    assert os.environ["SHMLOADER_DEBUG"] == "1"
    with DataLoader(Numbered(8), batch_size=4, num_workers=1) as loader:
        assert iter(loader).table.inspection is not None
