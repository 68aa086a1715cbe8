"""``num_workers="auto"`` and ``prefetch_factor="auto"``: the choice never exceeds the available memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from autotune_datasets import Draws, processes
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from robustness.processes import LONG
from table_machine import BUDGET_NBYTES, MOST_TASKS_EVER, TableMachine, grant, make_in_vain, publish
from torch.utils.data import Dataset

from shmloader import DataLoader
from shmloader.memory import PAGE_NBYTES, Segment, whole_pages
from shmloader.memory.limits import Headroom
from shmloader.slots import PlaceTable
from shmloader.slots.budget import SPARE_SLOTS

MIB = 1 << 20

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Sized(Dataset):
    """Sample ``i`` has ``nbytes[i]`` bytes."""

    def __init__(self, nbytes: list[int], delay_s: float = 0.0) -> None:
        self.nbytes, self.delay_s = nbytes, delay_s

    def __len__(self) -> int:
        return len(self.nbytes)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return torch.full((self.nbytes[index],), index % 256, dtype=torch.uint8)


# --- the memory budget


def within_budget(loader: DataLoader, budget_nbytes: int, most: list[int]) -> None:
    """Check the bytes of the slots, also computed as if all were as large as a typical batch."""
    table = loader._iterator.table
    reserved_nbytes = sum(place.nbytes for place in table.places)
    most[0] = max(most[0], reserved_nbytes)
    assert reserved_nbytes <= budget_nbytes
    assert (
        table.budget.base_slots * table.budget.typical_nbytes <= budget_nbytes or table.budget.most_tasks == 1
    )
    assert table.budget.most_tasks <= loader.prefetch_factor * loader.num_workers


@pytest.mark.parametrize(
    ("slots", "prefetch"),
    [
        pytest.param(4, 2, marks=pytest.mark.long),
        (5, 2),
        (6, 2),
        pytest.param(8, 2, marks=pytest.mark.long),
        pytest.param(4, "auto", marks=pytest.mark.long),
        (5, "auto"),
    ],
)
def test_a_budget_for_so_many_slots_is_not_exceeded(three_cores: None, slots: int, prefetch: Any) -> None:
    """Three workers would be faster, but there is no copy and no warning."""
    nbytes = MIB // 4
    budget_nbytes = slots * (nbytes * 5 // 4 + 8192)
    dataset = Sized([nbytes] * 200, 0.01)
    most = [0]
    with DataLoader(
        dataset,
        num_workers="auto",
        prefetch_factor=prefetch,
        persistent_workers=True,
        memory_budget_nbytes=budget_nbytes,
    ) as loader:
        for number, batch in enumerate(loader):
            within_budget(loader, budget_nbytes, most)
            assert int(batch[0, 0]) == int(batch[0, -1]) == number % 256
        now = loader.statistics()
        assert now.autotune.settled
        assert now.autotune.num_workers * now.autotune.prefetch_factor + SPARE_SLOTS <= max(slots * 5 // 4, 4)
        assert now.spills == 0
        assert now.autotune.num_workers == 3 or "memory" in now.autotune.why
    assert most[0] > budget_nbytes // 3


@pytest.mark.filterwarnings("ignore::shmloader.SpillWarning")
@pytest.mark.parametrize("prefetch", [2, "auto"])
def test_batches_that_grow_leave_fewer_tasks_and_never_exceed_the_budget(
    three_cores: None, prefetch: Any
) -> None:
    """They become twenty times as large, long after the choice has settled; some are kept meanwhile."""
    budget_nbytes = 4 * MIB
    sizes = [100_000] * 200 + [100_000 + 10_000 * i for i in range(190)]
    most = [0]
    kept: list[torch.Tensor] = []
    with DataLoader(
        Sized(sizes, 0.004),
        num_workers="auto",
        prefetch_factor=prefetch,
        persistent_workers=True,
        memory_budget_nbytes=budget_nbytes,
    ) as loader:
        tasks = []
        for number, batch in enumerate(loader):
            within_budget(loader, budget_nbytes, most)
            assert batch.shape == (1, sizes[number])
            assert int(batch[0, 0]) == int(batch[0, -1]) == number % 256
            kept = [*kept[-(number % 3) :], batch] if number % 3 else []
            if number >= 199:
                tasks.append(loader._iterator.table.budget.most_tasks)
        assert tasks[0] > 2
        assert tasks == sorted(tasks, reverse=True)  # only ever less, once it has settled
        assert tasks[-1] == 1
        assert loader.statistics().batches == len(sizes)


def test_workers_that_the_memory_has_no_room_for_are_not_started(
    three_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take as much memory as the first one, and half of the memory has no room for that."""
    with DataLoader(Draws(20, 0.004), num_workers="auto", persistent_workers=True) as loader:
        iterator = iter(loader)
        next(iterator)
        taken_nbytes = psutil.Process(iterator._workers[0].pid).memory_full_info().uss
    room = Headroom(taken_nbytes, taken_nbytes * 9, "a test")
    monkeypatch.setattr("shmloader.order.auto.memory_headroom", lambda: room)
    with DataLoader(Draws(90, 0.012), num_workers="auto", persistent_workers=True) as loader:
        assert len(list(loader)) == 90
        assert loader.num_workers == processes(loader) == 1
        assert "no more workers fit in the memory" in loader.statistics().autotune.why


class HoldsArray(Draws):
    def __init__(self, length: int, delay_s: float) -> None:
        super().__init__(length, delay_s)
        self.array = np.zeros(25_000_000, np.float32)


def test_arrays_that_each_further_worker_is_given_are_reckoned(
    three_cores: None, warm_helpers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays are pickled for one worker alone, into memory that counts only when it is read."""
    room = Headroom(180_000_000, 400_000_000, "a test")
    monkeypatch.setattr("shmloader.order.auto.memory_headroom", lambda: room)
    given: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "forkserver"}
    with DataLoader(HoldsArray(90, 0.012), num_workers="auto", **given) as loader:
        assert len(list(loader)) == 90
        assert loader.num_workers == processes(loader) == 1
        assert "no more workers fit in the memory" in loader.statistics().autotune.why


def test_kept_batches_leave_room_for_what_is_chosen(three_cores: None) -> None:
    """All batches are kept, with room for all: batches and choice are the same as without keeping."""
    with DataLoader(
        Sized([50_000] * 130, 0.01),
        num_workers="auto",
        memory_budget_nbytes=64 * MIB,
        persistent_workers=True,
    ) as loader:
        kept = list(loader)
        assert loader.num_workers == 3
        assert all(int(batch[0, 0]) == int(batch[0, -1]) == number for number, batch in enumerate(kept))


class ResizedPool(TableMachine):
    """The table's own machine, with another number of tasks now and then."""

    most_tasks = 2

    @rule(tasks=st.integers(1, MOST_TASKS_EVER))
    def resize(self, tasks: int) -> None:
        before = self.table.budget.most_tasks
        done = self.table.resize(tasks)
        assert self.table.budget.most_tasks == (tasks if done else before)
        assert done or tasks > before

    @precondition(lambda self: not (self.granted or self.published or self.held))
    @rule()
    def what_fits_can_be_had(self) -> None:
        slots = self.table.budget.nbytes // whole_pages(self.table.budget.largest_nbytes)
        for tasks in range(self.table.budget.most_tasks, min(MOST_TASKS_EVER, slots - SPARE_SLOTS) + 1):
            assert self.table.resize(tasks)


def test_a_pool_does_not_promise_again_what_slots_have_or_may_take() -> None:
    """The budget has 40 pages: four slots with 9 each, and then two with 9 and one that may grow to 10."""
    table = PlaceTable(Segment(), 2, BUDGET_NBYTES)
    kept = [lease_of(table, 9) for _ in range(4)]
    assert not table.resize(4)  # six slots: the two new ones would have 2 pages each
    assert not table.resize(3)
    kept.clear()
    assert table.resize(1)
    assert sum(place.nbytes for place in table.places) == 27 * PAGE_NBYTES
    table.close()


def test_a_refused_number_of_tasks_is_had_later() -> None:
    """Slots that are granted after the refusal leave the others what they need."""
    table = PlaceTable(Segment(), 2, BUDGET_NBYTES)
    kept = [lease_of(table, 6) for _ in range(2)]
    first, second = grant(table), grant(table)
    assert first.limit_nbytes == second.limit_nbytes == 10 * PAGE_NBYTES
    assert not table.resize(4)  # 32 pages, and 6 for each of two more tasks
    for place in (first, second):
        table.reserve(place, 6 * PAGE_NBYTES)
        make_in_vain(table, place, place.nbytes, place.nbytes)
    assert grant(table).limit_nbytes == 6 * PAGE_NBYTES
    assert table.resize(4)
    kept.clear()
    table.close()


def lease_of(table: PlaceTable, pages: int) -> np.ndarray:
    """A batch of so many pages that the program keeps."""
    place = grant(table)
    table.reserve(place, pages * PAGE_NBYTES)
    publish(table, place, place.nbytes, place.nbytes)
    return table.take(place)[0]


TestResizedPool = ResizedPool.TestCase
TestResizedPool.settings = settings(
    max_examples=60 if LONG else 20,
    stateful_step_count=50,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
