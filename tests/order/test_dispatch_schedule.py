"""The cost of an order of tasks, in a world without a clock: workers, a program, and the real `FreeWorkers`.

Time is counted, not measured: the loader's own work takes none. docs/dispatch.md has figures of a real
machine.
"""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from protocol_fakes import Segment
from robustness.processes import LONG

from shmloader.memory import PAGE_NBYTES
from shmloader.order.scheduler import FreeWorkers
from shmloader.slots import PlaceTable


class Table(PlaceTable):
    """Has slots for ``most`` batches at once, without the two that the program may hold."""

    def __init__(self, most_tasks: int, most: int, workers: int) -> None:
        super().__init__(Segment(), most_tasks, 1 << 30, workers=workers)  # type: ignore[arg-type]
        self.most = most

    def _has_room_beyond(self) -> bool:
        return len(self.unreturned) < self.most


class Scheduler:
    """Plays an epoch; times are in milliseconds.

    Args:
        costs: Time of a worker for each batch.
        workers: Number of workers.
        prefetch: Tasks per worker in advance.
        compute: Time of the program for each batch.
        dynamic: Whether `FreeWorkers` decides; otherwise workers take turns.
        most: Number of tasks that the table has slots for.
    """

    def __init__(
        self,
        costs: list[float],
        workers: int = 2,
        prefetch: int = 2,
        compute: float = 0.0,
        dynamic: bool = True,
        most: int = 68,
    ) -> None:
        self.costs, self.compute, self.dynamic = costs, compute, dynamic
        self.table = Table(workers * prefetch, most, workers)
        self.free_workers = FreeWorkers(self.table, workers, prefetch)
        self.turns = itertools.cycle(range(workers))
        self.free_at = [0.0] * workers
        self.answers: list[tuple[float, int]] = []  # time, and batch
        self.sent = 0
        self.widest = 0
        self.now = 0.0

    def play(self) -> float:
        """Play the epoch; returns the time of the last batch."""
        for _ in range(self.table.budget.most_tasks):
            self.send()
        for seq in range(len(self.costs)):
            self.hear()
            while seq not in self.table.arrived:
                self.widen()
                self.now = max(self.now, self.answers[0][0])
                self.hear()
            self.take(seq)
            self.now += self.compute
        return self.now

    def hear(self) -> None:
        while self.answers and self.answers[0][0] <= self.now:
            seq = heapq.heappop(self.answers)[1]
            self.table.arrive(seq, PAGE_NBYTES, 8, 8, 0, 0)

    def send(self) -> bool:
        if self.sent == len(self.costs):
            return False
        worker = self.free_workers.choose() if self.dynamic else next(self.turns)
        self.free_at[worker] = max(self.now, self.free_at[worker]) + self.costs[self.sent]
        heapq.heappush(self.answers, (self.free_at[worker], self.sent))
        self.table.grant(worker, 0, self.sent, b"")
        self.sent += 1
        self.widest = max(self.widest, len(self.table.unreturned))
        return True

    def widen(self) -> None:
        due = self.table.due()
        if self.dynamic and due is not None and self.free_workers.is_stalled(due):
            while self.free_workers.may_widen() and self.send():
                pass

    def take(self, seq: int) -> None:
        self.table.take(self.table.unreturned[seq])
        if len(self.table.unreturned) < self.table.budget.most_tasks:
            self.send()
        elif self.dynamic:
            while self.free_workers.may_refill() and self.send():
                pass


def slow_ones(batches: int, shift: int = 0) -> list[float]:
    """One batch in twenty takes 100 ms, the others 5 ms; in each twenty it moves by ``shift``."""
    return [100.0 if k % 20 == (k // 20 * shift + 10) % 20 else 5.0 for k in range(batches)]


@pytest.mark.parametrize("compute", [0.0, 2.0, 4.0, 4.8, 6.0])
@pytest.mark.parametrize("shift", [0, 7])
def test_one_slow_batch_in_twenty_costs_less_than_ten_percent(compute: float, shift: int) -> None:
    """The cost is relative to the least time of two workers, or of the program, with the defaults."""
    costs = slow_ones(1000, shift)
    ideal = max(sum(costs) / 2, compute * len(costs))
    dynamic = Scheduler(costs, compute=compute)
    assert dynamic.play() <= 1.06 * ideal
    assert dynamic.widest <= 30
    assert Scheduler(costs, compute=compute, dynamic=False).play() > 1.4 * ideal


def test_slow_batches_at_random_cost_little_where_the_program_is_not_the_bottleneck() -> None:
    chance = random.Random(3)
    costs = [100.0 if chance.random() < 0.05 else 5.0 for _ in range(1000)]
    assert Scheduler(costs).play() <= 1.06 * sum(costs) / 2


def test_batches_that_take_equally_long_need_no_more_slots_than_static_dispatch() -> None:
    """Batches that differ a little, as all do, need no more either."""
    chance = random.Random(3)
    for workers in (1, 2, 5):
        even = Scheduler([5.0] * 300, workers)
        assert even.play() == pytest.approx(5.0 * -(-300 // workers))
        assert even.widest == 2 * workers
        uneven = Scheduler([5.0 + chance.random() for _ in range(300)], workers)
        uneven.play()
        assert uneven.widest == 2 * workers


COSTS = st.lists(st.floats(0.1, 50.0), min_size=1, max_size=60)


@settings(
    max_examples=200 if LONG else 50,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(
    costs=COSTS,
    workers=st.integers(1, 5),
    prefetch=st.integers(1, 3),
    more=st.integers(0, 80),
    compute=st.floats(0, 20),
)
def test_any_work_is_conserved(
    costs: list[float], workers: int, prefetch: int, more: int, compute: float
) -> None:
    """No worker is idle before the sampler's end while slots are left, and no more slots are taken."""
    most = workers * prefetch + more
    bounded = Scheduler(costs, workers, prefetch, compute, most=most)
    bounded.play()
    assert bounded.widest <= most
    at_once = Scheduler(costs, workers, prefetch, most=1000)
    # From the sampler's end on each worker has at most prefetch batches left to make.
    assert at_once.play() <= sum(costs) / workers + prefetch * max(costs) + 1e-6
