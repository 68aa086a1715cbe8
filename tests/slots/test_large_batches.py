"""Slots after batches that were much larger than most: memory that only those needed goes back."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from caught_warnings import caught_warnings
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import Growing, Numbered
from protocol_fakes import Segment as Untouched
from scripted_driver import ScriptedDriver

from shmloader import DataLoader
from shmloader.device import pinned
from shmloader.device.guard import DeviceGuard
from shmloader.device.guarded_pool import GuardedPool
from shmloader.memory import Segment, whole_pages
from shmloader.slots import RETAINED_SLOTS, Slot, SlotPool

MB = 1_000_000
TASKS = 8


def play(pool: SlotPool, sizes: list[int]) -> Iterator[Slot]:
    """Batches of these sizes, eight at a time; gives each slot when it is free again."""
    tasks = [pool.grant() for _ in range(TASKS)]
    for nbytes in sizes:
        slot = tasks.pop(0)
        pool.publish(slot, max(slot.nbytes, whole_pages(max(nbytes, pool.budget.hint_nbytes))), nbytes)
        pool.give_back(slot)
        yield slot
        tasks.append(pool.grant())


def untouched_pool() -> SlotPool:
    """A pool whose slots have sizes only."""
    return SlotPool(Untouched(), TASKS, 40_000 * MB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "large", [{60}, set(range(20, 340, 20)), set(range(16)), set(range(100, 140))], ids=len
)
def test_after_large_batches_slots_are_as_large_as_typical_ones_need(large: set[int]) -> None:
    pool = untouched_pool()
    most_nbytes = 0
    for _ in play(pool, [100 * MB if i in large else MB for i in range(max(large) + 40)]):
        most_nbytes = max(most_nbytes, pool.reserved_nbytes())
    assert pool.reserved_nbytes() <= (TASKS + 2) * whole_pages(MB)
    assert pool.budget.committed_nbytes <= TASKS * pool.budget.limit_nbytes + 2 * whole_pages(MB)
    if len(large) == 16 and 0 not in large:  # one at a time
        assert most_nbytes <= 201 * MB + (TASKS + 2) * whole_pages(MB)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(), least=st.integers(100, 30 * MB), length=st.integers(1, 200))
def test_sizes_that_vary_by_less_than_four_times_never_make_a_slot_smaller(
    seed: int, least: int, length: int
) -> None:
    rng, pool = random.Random(seed), untouched_pool()
    largest: dict[int, int] = {}
    for slot in play(pool, [rng.randrange(least, 4 * least) for _ in range(length)]):
        largest[slot.number] = max(slot.nbytes, largest.get(slot.number, 0))
        assert slot.nbytes == largest[slot.number]


def test_large_batches_that_come_again_and_again_find_slots_that_are_large() -> None:
    """To give memory back and to take it again costs more than a small batch."""
    pool, largest = untouched_pool(), dict[int, int]()
    for number, slot in enumerate(play(pool, [8 * MB if i % 10 == 9 else 100_000 for i in range(400)])):
        if number > 40:
            assert slot.nbytes >= largest.get(slot.number, 0)
            largest[slot.number] = slot.nbytes
    assert max(largest.values()) == whole_pages(8 * MB)
    assert pool.budget.hint_nbytes == 100_000  # no slot is made as large for a small one


def test_batches_that_grow_are_expected_to() -> None:
    """What the workers are told to expect is at most a few batches behind, also where it grows by much."""
    pool = untouched_pool()
    for _ in play(pool, [MB] * 100 + [50 * MB] * 12):
        pass
    assert pool.budget.hint_nbytes == 50 * MB


def test_one_large_batch_promises_its_own_size_to_each_slot_and_no_more() -> None:
    pool = SlotPool(Untouched(), 16, 5_000 * MB)  # type: ignore[arg-type]
    for nbytes in [MB] * 20 + [105 * MB] + [MB] * 20:
        slot = pool.grant()
        pool.publish(slot, whole_pages(nbytes), nbytes)
        pool.give_back(slot)
    assert pool.budget.limit_nbytes == whole_pages(105 * MB)
    assert 18 * pool.budget.limit_nbytes < 1_900 * MB


def test_a_slot_that_the_program_still_reads_keeps_its_memory() -> None:
    with DataLoader(Growing([100_000] * 20 + [1_000_000] + [100_000] * 80), num_workers=1) as loader:
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(21)][-1]
        slot = next(slot for slot in iterator.pool.slots if slot.nbytes >= 8 * MB)
        for batch in iterator:
            assert batch.shape == (1, 100_000)
            assert slot.nbytes >= 8 * MB
        assert (kept == 20).all()


def test_a_slot_is_smaller_once_its_large_batch_is_dropped() -> None:
    with DataLoader(Growing([100_000] * 20 + [1_000_000] + [100_000] * 80), num_workers=2) as loader:
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            assert (batch == number).all()
            assert batch.shape[1] == (1_000_000 if number == 20 else 100_000)
            if number > 21:
                assert loader.statistics().reserved_nbytes < 7 * MB


def test_a_page_locked_slot_stays_as_it_is() -> None:
    """To unlock it and lock it again would take longer than to keep it."""
    pool = GuardedPool(Segment(), 2, 400 * MB)
    driver = ScriptedDriver()
    pool.guard = DeviceGuard(driver)
    try:
        for nbytes in [MB] * 6 + [20 * MB] + [MB] * 6:
            slot = pool.grant()
            pool.reserve(slot, nbytes)
            pool.publish(slot, slot.nbytes, nbytes)
            pool.lease(slot)
            pool.can_lease()
        assert max(slot.nbytes for slot in pool.slots) == whole_pages(20 * MB)
        assert driver.violations == []
    finally:
        pool.close()
        pinned._registered.clear()


@pytest.mark.parametrize("items", [1, 8_000])
def test_copies_of_a_few_bytes_give_no_warning(items: int) -> None:
    """``list(loader)`` copies what it keeps beyond the slots; 64,000 bytes take less time than ``next()``."""
    with caught_warnings() as caught, DataLoader(Numbered(80, items), num_workers=2) as loader:
        assert [int(batch[0, 0]) for batch in list(loader)] == list(range(80))
        assert loader.statistics().spills == 80 - RETAINED_SLOTS - 2
    assert caught == []
