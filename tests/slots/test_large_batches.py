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
from robustness.processes import LONG
from scripted_driver import ScriptedDriver
from table_machine import grant, make_in_vain, publish

from shmloader import DataLoader
from shmloader.device import pinned
from shmloader.device.guard import DeviceGuard
from shmloader.memory import Segment, whole_pages
from shmloader.slots import RETAINED_SLOTS, Place, PlaceTable

MB = 1_000_000
TASKS = 8


def play(table: PlaceTable, sizes: list[int]) -> Iterator[Place]:
    """Batches of these sizes, eight at a time; gives each slot when it is free again."""
    tasks = [grant(table) for _ in range(TASKS)]
    for nbytes in sizes:
        place = tasks.pop(0)
        slot_nbytes = max(place.nbytes, whole_pages(max(nbytes, table.budget.hint_nbytes)))
        make_in_vain(table, place, slot_nbytes, nbytes)
        yield place
        tasks.append(grant(table))


def reserved_nbytes(table: PlaceTable) -> int:
    return sum(place.nbytes for place in table.places)


def untouched_table() -> PlaceTable:
    """A table whose slots have sizes only."""
    return PlaceTable(Untouched(), TASKS, 40_000 * MB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "large", [{60}, set(range(20, 340, 20)), set(range(16)), set(range(100, 140))], ids=len
)
def test_after_large_batches_slots_are_as_large_as_typical_ones_need(large: set[int]) -> None:
    table = untouched_table()
    most_nbytes = 0
    for _ in play(table, [100 * MB if i in large else MB for i in range(max(large) + 40)]):
        most_nbytes = max(most_nbytes, reserved_nbytes(table))
    assert reserved_nbytes(table) <= (TASKS + 2) * whole_pages(MB)
    assert table.committed_nbytes <= TASKS * table.budget.limit_nbytes + 2 * whole_pages(MB)
    if len(large) == 16 and 0 not in large:  # one at a time
        assert most_nbytes <= 201 * MB + (TASKS + 2) * whole_pages(MB)


@settings(max_examples=200 if LONG else 50, deadline=None)
@given(seed=st.integers(), least=st.integers(100, 30 * MB), length=st.integers(1, 200))
def test_sizes_that_vary_by_less_than_four_times_never_make_a_slot_smaller(
    seed: int, least: int, length: int
) -> None:
    rng, table = random.Random(seed), untouched_table()
    largest: dict[int, int] = {}
    for place in play(table, [rng.randrange(least, 4 * least) for _ in range(length)]):
        largest[place.number] = max(place.nbytes, largest.get(place.number, 0))
        assert place.nbytes == largest[place.number]


def test_large_batches_that_come_again_and_again_find_slots_that_are_large() -> None:
    """To give memory back and to take it again costs more than a small batch."""
    table, largest = untouched_table(), dict[int, int]()
    for number, place in enumerate(play(table, [8 * MB if i % 10 == 9 else 100_000 for i in range(400)])):
        if number > 40:
            assert place.nbytes >= largest.get(place.number, 0)
            largest[place.number] = place.nbytes
    assert max(largest.values()) == whole_pages(8 * MB)
    assert table.budget.hint_nbytes == 100_000  # no slot is made as large for a small one


def test_batches_that_grow_are_expected_to() -> None:
    """What the workers are told to expect is at most a few batches behind, also where it grows by much."""
    table = untouched_table()
    for _ in play(table, [MB] * 100 + [50 * MB] * 12):
        pass
    assert table.budget.hint_nbytes == 50 * MB


def test_one_large_batch_promises_its_own_size_to_each_slot_and_no_more() -> None:
    table = PlaceTable(Untouched(), 16, 5_000 * MB)  # type: ignore[arg-type]
    for nbytes in [MB] * 20 + [105 * MB] + [MB] * 20:
        place = grant(table)
        make_in_vain(table, place, whole_pages(nbytes), nbytes)
    assert table.budget.limit_nbytes == whole_pages(105 * MB)
    assert 18 * table.budget.limit_nbytes < 1_900 * MB


def test_a_slot_that_the_program_still_reads_keeps_its_memory() -> None:
    with DataLoader(Growing([100_000] * 20 + [1_000_000] + [100_000] * 80), num_workers=1) as loader:
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(21)][-1]
        place = next(place for place in iterator.table.places if place.nbytes >= 8 * MB)
        for batch in iterator:
            assert batch.shape == (1, 100_000)
            assert place.nbytes >= 8 * MB
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
    table = PlaceTable(Segment(), 2, 400 * MB)
    driver = ScriptedDriver()
    table.guard_with(DeviceGuard(driver))
    try:
        for nbytes in [MB] * 6 + [20 * MB] + [MB] * 6:
            place = grant(table)
            table.reserve(place, nbytes)
            publish(table, place, place.nbytes, nbytes)
            table.take(place)
            table.can_lease()
        assert max(place.nbytes for place in table.places) == whole_pages(20 * MB)
        assert driver.violations == []
    finally:
        table.close()
        pinned._registered.clear()


@pytest.mark.parametrize("items", [1, 8_000])
def test_copies_of_a_few_bytes_give_no_warning(items: int) -> None:
    """``list(loader)`` copies what it keeps beyond the slots; 64,000 bytes take less time than ``next()``."""
    with caught_warnings() as caught, DataLoader(Numbered(80, items), num_workers=2) as loader:
        assert [int(batch[0, 0]) for batch in list(loader)] == list(range(80))
        assert loader.statistics().spills == 80 - RETAINED_SLOTS - 2
    assert caught == []
