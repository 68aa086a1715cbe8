"""Persistent workers make the next epoch's batches before it begins; a warning says where they do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loading import Numbered
from torch.utils.data import IterableDataset, Sampler

from shmloader import DataLoader

# --- batches that are made early, and cases without any


def test_the_next_epoch_is_at_work_before_it_begins() -> None:
    """The next epoch's first samples are made before iter(), in the usual number of slots."""
    dataset = Noted(24)
    with DataLoader(
        dataset, batch_size=3, num_workers=2, persistent_workers=True, prefetch_epochs=True
    ) as loader:
        iterator = iter(loader)
        for _ in range(8):
            next(iterator)
        assert next(iterator, None) is None
        for _ in range(200):
            if dataset.made.tolist() == [2] * 12 + [1] * 12:
                break
            signal.sigtimedwait([], 0.05)
        assert dataset.made[:12].tolist() == [2] * 12
        assert dataset.made[12:].tolist() == [1] * 12
        assert len(loader._iterator.table.places) <= 2 * 2 + 2
        assert [batch[:, 0].tolist() for batch in loader] == [list(range(k, k + 3)) for k in range(0, 24, 3)]


class Noted(Numbered):
    """Notes how often each sample was made."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.made = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.made[index] += 1
        return super().__getitem__(index)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(9)


def test_of_a_stream_nothing_is_made_early_and_that_is_said() -> None:
    with DataLoader(Stream(), num_workers=2, persistent_workers=True, prefetch_epochs=True) as loader:
        with pytest.warns(UserWarning, match="prefetch_epochs=True has no effect.*an iterable-style dataset"):
            first = [int(batch) for batch in loader]
        second = [int(batch) for batch in loader]
        assert first == second
        assert loader.statistics().epochs_prefetched == 0


def test_it_needs_workers_that_persist() -> None:
    assert DataLoader(Numbered(3)).prefetch_epochs is False
    with pytest.raises(ValueError, match="prefetch_epochs=True needs persistent_workers=True"):
        DataLoader(Numbered(3), num_workers=1, prefetch_epochs=True)


def test_workers_that_die_are_replaced_in_either_epoch() -> None:
    """The dead worker may hold tasks of either epoch: none is lost, and none comes twice."""
    expected = [list(range(k, min(k + 3, 22))) for k in range(0, 22, 3)]
    with DataLoader(
        Numbered(22),
        batch_size=3,
        num_workers=2,
        persistent_workers=True,
        prefetch_epochs=True,
        worker_restarts=20,
    ) as loader:
        for kill_at in (5, 6, 7):
            found = []
            for number, batch in enumerate(loader):
                found.append(batch[:, 0].tolist())
                if number == kill_at:
                    os.kill(loader._iterator._workers[kill_at % 2].pid, signal.SIGKILL)
            assert found == expected
        assert [batch[:, 0].tolist() for batch in loader] == expected
        now = loader.statistics()
        assert now.worker_restarts == 3
        assert now.epochs_prefetched == 3


class Course(Sampler[int]):
    """The indices of so many epochs; there is none after them, or it ends early."""

    def __init__(self, epochs: int, good: int) -> None:
        self.epochs, self.good, self.epoch = epochs, good, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.epoch >= self.epochs:
            yield from range(self.good)
            raise LookupError(f"no epoch {self.epoch}")
        yield from range(24)


@pytest.mark.parametrize("dispatch", ["static", "dynamic"])
@pytest.mark.parametrize("good", [0, 4])
def test_a_sampler_that_has_no_next_epoch_raises_when_that_begins(dispatch: Any, good: int) -> None:
    """Asked early, it raises too: that is no exception of the present epoch, which loses no batch."""
    with DataLoader(
        Numbered(24),
        batch_size=3,
        sampler=Course(2, good),
        num_workers=2,
        persistent_workers=True,
        prefetch_epochs=True,
        dispatch=dispatch,
    ) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert [int(batch[0, 0]) for batch in loader] == list(range(0, 24, 3))
        loader.set_epoch(2)
        with pytest.raises(LookupError, match="no epoch 2"):
            list(loader)
        loader.set_epoch(0)
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 24, 3))
