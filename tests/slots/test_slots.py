"""The table of places: in any order of events, no slot ever has two users."""

import gc

import pytest
from hypothesis import settings
from robustness.processes import LONG
from table_machine import BUDGET_NBYTES, MOST_TASKS, TableMachine, grant, publish

from shmloader.memory import PAGE_NBYTES, Segment
from shmloader.slots import Place, PlaceState, PlaceTable

TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60 if LONG else 20, stateful_step_count=60, deadline=None)


@pytest.fixture
def table():
    table = PlaceTable(Segment(), MOST_TASKS, BUDGET_NBYTES)
    yield table
    table.close()


def _published(table: PlaceTable, nbytes: int = 100) -> Place:
    place = grant(table)
    table.reserve(place, nbytes)
    publish(table, place, place.nbytes, nbytes)
    return place


def test_a_place_is_free_when_its_last_view_dies(table: PlaceTable) -> None:
    place = _published(table)
    anchor, _ = table.take(place)
    view = anchor[3:50].reshape(-1, 1)[::2]
    del anchor
    table.collect()
    assert place.state is PlaceState.LEASED
    del view
    table.collect()
    assert place.state is PlaceState.FREE


def test_the_last_freed_slot_is_granted_first(table: PlaceTable) -> None:
    first, second = grant(table), grant(table)
    for place in (second, first):
        table.reserve(place, 100)
        table.drop(place.seq, place.nbytes)
    assert grant(table) is first


def test_a_reference_cycle_frees_the_place_when_it_is_collected(table: PlaceTable) -> None:
    place = _published(table)
    cycle: list = [table.take(place)[0]]
    cycle.append(cycle)
    del cycle
    gc.collect()
    table.collect()
    assert place.state is PlaceState.FREE


def test_limits_of_tasks_share_the_budget() -> None:
    table = PlaceTable(Segment(), MOST_TASKS, BUDGET_NBYTES)
    limits = [grant(table).limit_nbytes for _ in range(table.budget.base_slots)]
    assert sum(limits) <= BUDGET_NBYTES
    assert min(limits) >= BUDGET_NBYTES // (4 * table.budget.base_slots)
    table.close()


def test_an_epochs_begin_returns_memory_that_the_program_no_longer_keeps(table: PlaceTable) -> None:
    kept = []
    base_slots = table.budget.base_slots
    for _ in range(base_slots + 3):
        assert table.can_lease()
        kept.append(table.take(_published(table, PAGE_NBYTES))[0])
    kept.clear()
    table.begin_epoch()
    assert sum(place.nbytes for place in table.places) == base_slots * PAGE_NBYTES
    assert sum(place.limit_nbytes for place in table.places[base_slots:]) == 0


def test_a_slot_that_gave_its_memory_back_can_be_used_again(table: PlaceTable) -> None:
    more = table.budget.base_slots + 3
    kept = [table.take(_published(table, PAGE_NBYTES))[0] for _ in range(more)]
    kept.clear()
    table.begin_epoch()
    kept = [table.take(_published(table, PAGE_NBYTES))[0] for _ in range(more)]
    for number, anchor in enumerate(kept):
        anchor[:] = number
    assert [int(anchor[-1]) for anchor in kept] == list(range(len(kept)))


def test_a_table_out_of_budget_refuses_leases_and_still_grants_every_task() -> None:
    table = PlaceTable(Segment(), MOST_TASKS, (MOST_TASKS + 4) * PAGE_NBYTES)
    kept = []
    while table.can_lease():
        kept.append(table.take(_published(table, PAGE_NBYTES))[0])
        assert len(kept) < 100
    for _ in range(MOST_TASKS):
        assert grant(table).state is PlaceState.MAKING
    assert len(kept) >= 2
    table.close()


def test_views_outlive_the_table(table: PlaceTable) -> None:
    anchor, _ = table.take(_published(table))
    anchor[:] = 7
    table.close()
    assert (anchor == 7).all()


def test_a_count_that_is_wrong_is_found(table: PlaceTable) -> None:
    """What `check` asserts with SHMLOADER_DEBUG=1 fails for each number that is not as it should be."""
    anchor, _ = table.take(_published(table))
    grant(table)
    for name, wrong in (("tasks", 2), ("kept", 0), ("committed_nbytes", 0), ("unanswered", [0])):
        right = getattr(table, name)
        setattr(table, name, wrong)
        with pytest.raises(AssertionError, match="the table of places says"):
            table.check()
        setattr(table, name, right)
    table.check()
    assert len(anchor)
