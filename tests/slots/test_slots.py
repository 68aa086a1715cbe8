"""The slot pool: in any order of events, no slot ever has two users."""

import gc

import pytest
from hypothesis import settings
from pool_machine import BUDGET_NBYTES, MOST_TASKS, PoolMachine

from shmloader.memory import PAGE_NBYTES, Segment
from shmloader.slots import SlotPool, SlotState

TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.fixture
def pool():
    pool = SlotPool(Segment(), MOST_TASKS, BUDGET_NBYTES)
    yield pool
    pool.close()


def _published(pool: SlotPool, nbytes: int = 100):
    slot = pool.grant()
    pool.reserve(slot, nbytes)
    pool.publish(slot, slot.nbytes, nbytes)
    return slot


def test_a_slot_is_free_when_its_last_view_dies(pool: SlotPool) -> None:
    slot = _published(pool)
    anchor = pool.lease(slot)[0]
    view = anchor[3:50].reshape(-1, 1)[::2]
    del anchor
    pool.collect()
    assert slot.state is SlotState.LEASED
    del view
    pool.collect()
    assert slot.state is SlotState.FREE


def test_the_last_freed_slot_is_granted_first(pool: SlotPool) -> None:
    first, second = _published(pool), _published(pool)
    pool.give_back(second)
    pool.give_back(first)
    assert pool.grant() is first


def test_a_reference_cycle_frees_the_slot_when_it_is_collected(pool: SlotPool) -> None:
    slot = _published(pool)
    cycle: list = [pool.lease(slot)[0]]
    cycle.append(cycle)
    del cycle
    gc.collect()
    pool.collect()
    assert slot.state is SlotState.FREE


def test_limits_of_tasks_share_the_budget() -> None:
    pool = SlotPool(Segment(), MOST_TASKS, BUDGET_NBYTES)
    limits = [pool.grant().limit_nbytes for _ in range(pool.base_slots)]
    assert sum(limits) <= BUDGET_NBYTES
    assert min(limits) >= BUDGET_NBYTES // (4 * pool.base_slots)
    pool.close()


def test_trim_returns_memory_that_the_program_no_longer_keeps(pool: SlotPool) -> None:
    kept = []
    for _ in range(pool.base_slots + 3):
        assert pool.can_lease()
        kept.append(pool.lease(_published(pool, PAGE_NBYTES))[0])
    kept.clear()
    pool.trim()
    assert sum(slot.nbytes for slot in pool.slots) == pool.base_slots * PAGE_NBYTES
    assert sum(slot.limit_nbytes for slot in pool.slots[pool.base_slots :]) == 0


def test_a_trimmed_slot_can_be_used_again(pool: SlotPool) -> None:
    kept = [pool.lease(_published(pool, PAGE_NBYTES))[0] for _ in range(pool.base_slots + 3)]
    kept.clear()
    pool.trim()
    kept = [pool.lease(_published(pool, PAGE_NBYTES))[0] for _ in range(pool.base_slots + 3)]
    for number, anchor in enumerate(kept):
        anchor[:] = number
    assert [int(anchor[-1]) for anchor in kept] == list(range(len(kept)))


def test_a_pool_out_of_budget_refuses_leases_and_still_grants_every_task() -> None:
    pool = SlotPool(Segment(), MOST_TASKS, (MOST_TASKS + 4) * PAGE_NBYTES)
    kept = []
    while pool.can_lease():
        kept.append(pool.lease(_published(pool, PAGE_NBYTES))[0])
        assert len(kept) < 100
    for _ in range(MOST_TASKS):
        assert pool.grant().state is SlotState.GRANTED
    assert len(kept) >= 2
    pool.close()


def test_views_outlive_the_pool(pool: SlotPool) -> None:
    anchor = pool.lease(_published(pool))[0]
    anchor[:] = 7
    pool.close()
    assert (anchor == 7).all()
