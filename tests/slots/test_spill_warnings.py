"""Copies of batches to private memory give one warning, with numbers and advice."""

import warnings

from caught_warnings import caught_warnings
from loading import Growing, Numbered

from shmloader import DataLoader, SpillWarning
from shmloader.slots import RETAINED_SLOTS


def test_more_kept_batches_than_slots_are_said_once() -> None:
    with DataLoader(Numbered(200, items=10_000), num_workers=2, persistent_workers=True) as loader:
        with caught_warnings() as caught:
            kept = [batch for _ in range(2) for batch in loader]
        assert [int(batch[0, 0]) for batch in kept] == [*range(200)] * 2
        spills = loader.statistics().spills
        assert spills == 400 - RETAINED_SLOTS - 2
    (warning,) = caught
    assert warning.category is SpillWarning
    assert warning.filename == __file__
    text = str(warning.message)
    assert f"the program keeps {RETAINED_SLOTS + 2} batches" in text
    assert f"this one of {loader.statistics().spilled_nbytes // spills:,} bytes" in text
    assert "tensor.clone()" in text


def test_as_many_kept_batches_as_there_are_slots_for_are_not_copied() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpillWarning)
        with DataLoader(Numbered(RETAINED_SLOTS + 2), num_workers=2) as loader:
            kept = list(loader)
            assert loader.statistics().spills == 0
    assert len(kept) == RETAINED_SLOTS + 2


def test_a_budget_without_room_for_all_says_how_many_are_made_ahead() -> None:
    """Batches have 10 pages; the budget has room for five of them."""
    sizes = [10] * 6 + [5001] * 30
    with DataLoader(
        Growing(sizes), batch_size=None, num_workers=2, prefetch_factor=4, memory_budget_nbytes=50 * 4096
    ) as loader:
        iterator = iter(loader)
        with caught_warnings() as caught:
            assert [len(batch) for batch in iterator] == sizes
        assert iterator.table.budget.most_tasks == 3
    assert [one.category for one in caught] == [SpillWarning]


def test_one_warning_says_that_batches_are_copied_and_that_fewer_are_made_ahead() -> None:
    """Batches have 10 pages and come in pieces at first: a sixth of the budget is too small for one."""
    options = {"num_workers": 2, "prefetch_factor": 2, "memory_budget_nbytes": 42 * 4096}
    with DataLoader(Growing([5001] * 30), batch_size=None, **options) as loader:
        iterator = iter(loader)
        with caught_warnings() as caught:
            assert sum(1 for _ in iterator) == 30
        assert loader.statistics().spills > 0
        assert iterator.table.budget.most_tasks == 2
    (warning,) = caught
    assert warning.category is SpillWarning
    assert "copied to private memory" in str(warning.message)
    assert "fewer than 4 are made in advance" in str(warning.message)
