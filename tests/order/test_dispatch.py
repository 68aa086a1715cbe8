"""``dispatch="dynamic"``: free workers continue while a batch is slow, as far as slots and memory allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dispatch_datasets import SMALL, Gate
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import Numbered
from protocol_fakes import Segment
from robustness.processes import LONG, assert_dies_with_its_last_reference
from torch.utils.data import IterableDataset, RandomSampler

from shmloader import DataLoader
from shmloader.memory import PAGE_NBYTES
from shmloader.order.scheduler import FreeWorkers
from shmloader.slots import PlaceState, PlaceTable

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


# --- which worker makes which batch


def passed(loader: DataLoader) -> torch.Tensor:
    """The samples of an epoch, whose indices must be in order. No batch is kept."""
    samples = torch.cat([batch.clone() for batch in loader])
    assert samples[:, 0].tolist() == list(range(len(samples)))
    return samples


@pytest.mark.parametrize(("closed", "others"), [({0}, 40), ({30}, 40), ({8, 70}, 25)])
def test_a_slow_batch_does_not_stall_the_other_worker(closed: set[int], others: int) -> None:
    """The other one makes many batches meanwhile, with the default prefetch_factor of 2."""
    with DataLoader(
        Gate(100, closed, others), num_workers=2, dispatch="dynamic", persistent_workers=True
    ) as loader:
        samples = passed(loader)
        assert not samples[:, 2].any()
        first = min(closed)
        meanwhile = samples[first + 4 : first + 4 + others // 2, 1]
        # except one, which the slow worker may have had already
        assert (meanwhile == samples[first, 1]).sum() <= 1
        assert loader.statistics().tasks_ahead >= others - 10


def test_with_static_dispatch_it_does() -> None:
    """Static dispatch waits, which proves the test above: no other worker gets past the slow batch."""
    with DataLoader(Gate(100, {30}, 40, patience_s=0.3), num_workers=2) as loader:
        assert passed(loader)[30, 2] == 1
        assert loader.statistics().tasks_ahead == 0


def test_out_of_order_a_slow_batch_comes_last() -> None:
    """The slow batch comes when its worker has made it; batches of the others come at once."""
    with DataLoader(Gate(40, {3}, 30), num_workers=2, dispatch="dynamic", in_order=False) as loader:
        samples = torch.cat(list(loader))
    assert sorted(samples[:, 0].tolist()) == list(range(40))
    assert not samples[:, 2].any()
    assert samples[:, 0].tolist().index(3) >= 30


def test_a_task_goes_to_a_worker_that_is_free() -> None:
    """One worker of three is held up in the first batch: it makes no other until the gate opens."""
    with DataLoader(
        Gate(60, {0}, 50), num_workers=3, prefetch_factor=1, dispatch="dynamic", batch_size=1
    ) as loader:
        samples = passed(loader)
    assert not samples[:, 2].any()
    assert samples[0, 1] not in samples[1:50, 1]
    assert len(set(samples[1:50, 1].tolist())) == 2


def test_the_next_slow_batch_finds_the_window_wide() -> None:
    with DataLoader(Gate(400, {10}, 30), num_workers=2, dispatch="dynamic") as loader:
        iterator = iter(loader)
        for _ in range(11):
            next(iterator)
        wide = iterator.table.window
        assert 30 <= wide <= 70
        # further tasks were sent although the program does not wait
        assert 4 < len(iterator.table.unreturned) <= wide
        iterator.close()


def test_the_window_is_wide_until_the_epoch_ends_and_memory_stays_warm_for_it() -> None:
    table = PlaceTable(Segment(), 4, 1 << 20, workers=2)  # type: ignore[arg-type]
    free_workers = FreeWorkers(table, 2, 2)

    def send() -> None:
        table.reserve(table.grant(free_workers.choose(), 0, 0, b""), 1)

    def answer() -> None:
        place = next(place for place in table.unreturned.values() if place.state is PlaceState.MAKING)
        table.arrive(place.seq, PAGE_NBYTES, 8, 8, 0, 0)

    for _ in range(4):
        send()
    while table.window < 9:
        answer()
        assert free_workers.may_widen()
        send()
    for _ in range(50):
        answer()
        table.take(next(iter(table.arrived.values())))
        assert free_workers.may_refill()
        send()
        assert not free_workers.may_refill()
    assert (table.window, len(table.unreturned)) == (9, 9)
    table.abandon()
    assert sum(place.nbytes > 0 for place in table.places) >= 9
    table.begin_epoch()
    assert table.window == 4  # as at the beginning
    assert sum(place.nbytes > 0 for place in table.places) <= 6


def test_no_more_slots_are_made_than_the_bound() -> None:
    """The bound is prefetch_factor x workers + 2, and 64. Then the window is full; the gate stays closed."""
    dataset = Gate(200, {5}, 150, patience_s=0.5)
    with DataLoader(dataset, num_workers=2, dispatch="dynamic", persistent_workers=True) as loader:
        samples = passed(loader)
        assert samples[5, 2] == 1
        assert len(loader._iterator.table.places) <= 2 * 2 + 2 + 64
        assert loader.statistics().spills == 0
        # the next epoch begins without the memory that the slow batch took
        assert iter(loader) is loader._iterator
        assert sum(slot.nbytes > 0 for slot in loader._iterator.table.places) <= 2 * 2 + 2


def test_the_memory_budget_bounds_how_far_others_run_ahead() -> None:
    """No batch is copied for it, and the slots together stay within the budget."""
    items, budget = 1 << 15, 12 << 18  # a batch is 1/4 MiB
    dataset = Gate(60, {5}, 40, patience_s=0.5, items=items)
    with DataLoader(
        dataset, num_workers=2, dispatch="dynamic", persistent_workers=True, memory_budget_nbytes=budget
    ) as loader:
        most = 0
        seen = []
        for batch in loader:
            seen.append(batch[0, :3].tolist())
            most = max(most, sum(slot.nbytes for slot in loader._iterator.table.places))
        assert [index for index, _, _ in seen] == list(range(60))
        assert seen[5][2] == 1
        assert budget // 2 < most <= budget
        now = loader.statistics()
        assert now.tasks_ahead > 0
        assert now.spills == 0


def test_batches_that_are_kept_stay_what_they_are() -> None:
    """More batches are kept than there are slots, while others run ahead of a slow one."""
    with DataLoader(
        Gate(150, {5, 100}, 30, patience_s=0.5), num_workers=2, dispatch="dynamic", persistent_workers=True
    ) as loader:
        kept = list(loader)
        assert len(loader._iterator.table.places) <= 2 * 2 + 2 + 64
        passed(loader)
        assert torch.cat(kept)[:, 0].tolist() == list(range(150))
        assert kept[5][0, 2] == 0


@settings(max_examples=200 if LONG else 50, derandomize="CI" in os.environ, **SMALL)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["send", "answer", "return"]), st.integers(0, 9)), max_size=60),
    workers=st.integers(1, 4),
)
def test_any_task_goes_to_the_worker_with_the_fewest_to_do(
    steps: list[tuple[str, int]], workers: int
) -> None:
    """Compare with a count, after any tasks were sent, answered in each worker's order, and returned."""
    table = PlaceTable(Segment(), 4, 1 << 30, workers=workers)  # type: ignore[arg-type]
    free_workers = FreeWorkers(table, workers, 2)
    for step, which in steps:
        to_do = [table.making(k) for k in range(workers)]
        if step == "send":
            worker_id = free_workers.choose()
            assert len(to_do[worker_id]) == min(map(len, to_do))
            table.grant(worker_id, 0, 0, b"")
        elif step == "answer" and to_do[which % workers]:
            table.arrive(to_do[which % workers][0].seq, PAGE_NBYTES, 8, 8, 0, 0)
        elif step == "return" and table.arrived:
            table.take(list(table.arrived.values())[which % len(table.arrived)])
        idle = any(not table.making(k) for k in range(workers))
        due = table.due()
        if due is not None:
            assert free_workers.is_stalled(due) == idle


# --- arguments and lives


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


def test_a_sampler_draws_at_its_end_no_sooner_than_with_static_dispatch() -> None:
    """All tasks of an epoch were sent when it is left: the next order does not depend on timing."""
    generator = torch.Generator().manual_seed(3)
    first = int(torch.randperm(20, generator=generator)[0])
    after_one_order = generator.get_state()
    sampler = RandomSampler(range(20), generator=generator.manual_seed(3))
    dataset = Gate(20, {first}, 18 - first)  # the slow worker may have another one in its hands
    with DataLoader(dataset, sampler=sampler, num_workers=2, dispatch="dynamic") as loader:
        iterator = iter(loader)
        assert next(iterator).tolist()[0][::2] == [first, 0]
        assert torch.equal(generator.get_state(), after_one_order)
        del iterator


def test_arguments_are_checked() -> None:
    assert DataLoader(Numbered(3)).dispatch == "static"
    with pytest.raises(ValueError, match="dispatch must be one of 'static', 'dynamic', not 'free'"):
        DataLoader(Numbered(3), dispatch="free")
    with pytest.raises(ValueError, match="dispatch='dynamic' needs a map-style dataset"):
        DataLoader(Stream(), dispatch="dynamic")


def test_without_workers_it_has_no_effect() -> None:
    assert [int(batch) for batch in DataLoader(Numbered(3, items=1), dispatch="dynamic")] == [0, 1, 2]


def test_an_error_of_the_sampler_comes_once_and_the_batches_before_it_come_all() -> None:
    """The sampler raises while the program waits for a slow batch and a further task is sent."""
    dataset = Gate(40, {4}, 40, patience_s=1)
    loader = DataLoader(dataset, sampler=BadSampler(), num_workers=2, dispatch="dynamic")
    iterator = iter(loader)
    found: list[Any] = []
    while True:
        try:
            found.append(int(next(iterator)[0, 0]))
        except StopIteration:
            break
        except ArithmeticError:
            found.append("error")
    assert sorted(entry for entry in found if entry != "error") == list(range(10))
    assert found.count("error") == 1
    loader.close()


class BadSampler:
    def __iter__(self) -> Iterator[int]:
        yield from range(10)
        raise ArithmeticError("no more")

    def __len__(self) -> int:
        raise ValueError("nobody needs it")


def test_an_iterator_dies_with_its_last_reference() -> None:
    """Code that waits for its workers holds no reference to it."""
    loader = DataLoader(Gate(50, {2}, 10), num_workers=2, dispatch="dynamic")
    assert_dies_with_its_last_reference(loader, batches=5)
