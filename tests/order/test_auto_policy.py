"""The rule of ``"auto"``: no clock, no process, no loader."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from robustness.processes import LONG

from shmloader.order.auto import MOST_BATCHES, MOST_PREFETCH, Auto


class World:
    """A simulated machine: the measurements of each batch under a choice.

    Args:
        batch_s: Seconds that a worker needs for a batch.
        program_s: Seconds that the program needs for a batch.
        useful: Number of workers beyond which it gets no faster (memory is too slow, say).
        noise: Largest random extra time, as a share.
        slow_s: Additional seconds that a worker needs for one batch in twenty.
    """

    def __init__(
        self, batch_s: float, program_s: float, useful: int = 1000, noise: float = 0.3, slow_s: float = 0.0
    ) -> None:
        self.batch_s, self.program_s, self.useful, self.slow_s = batch_s, program_s, useful, slow_s
        self.noise = noise
        self.chance = random.Random(1)

    def measure(self, auto: Auto, number: int) -> tuple[float, float, float]:
        batch_s = self.batch_s / min(auto.num_workers, self.useful)
        wait_s = max(0.0, batch_s - self.program_s)
        idle_s = auto.num_workers * max(0.0, self.program_s - batch_s)
        if self.slow_s and number % 20 == 10:
            in_advance_s = auto.num_workers * auto.prefetch_factor * max(batch_s, self.program_s)
            wait_s = max(wait_s, self.slow_s - in_advance_s)
            idle_s = (auto.num_workers - 1) * wait_s
        factor = 1 + self.noise * self.chance.random()
        return self.program_s * factor, wait_s * factor, idle_s * factor


def play(auto: Auto, world: World, batches: int = 2 * MOST_BATCHES) -> list[tuple[int, int]]:
    """The choice in effect for each batch."""
    choices = []
    for number in range(batches):
        choices.append((auto.num_workers, auto.prefetch_factor))
        auto.note(world.measure(auto, number))
    return choices


def auto(
    cores: int = 2,
    start: tuple[int, int] = (1, 2),
    *,
    tunes_workers: bool = True,
    tunes_prefetch: bool = False,
) -> Auto:
    given = [None if tunes_workers else start[0], None if tunes_prefetch else start[1]]
    return Auto(*start, given, cores)


WORKLOADS: dict[str, tuple[World, int, range]] = {
    "all cores of two": (World(0.03, 0.0001), 2, range(2, 3)),
    "all cores of many": (World(0.03, 0.0001), 16, range(16, 17)),
    "as many as the program needs": (World(0.03, 0.0065), 16, range(5, 8)),
    "one is enough": (World(0.001, 0.005), 16, range(1, 2)),
    "one core": (World(0.03, 0.0001), 1, range(1, 2)),
    "too quick to measure": (World(0.0004, 0.00001), 16, range(1, 2)),
    "a machine that is busy with other things": (World(0.03, 0.0065, noise=1.5), 16, range(5, 13)),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_number_of_workers_is_the_one_that_the_program_can_use(name: str) -> None:
    world, cores, expected = WORKLOADS[name]
    chooser = auto(cores)
    play(chooser, world)
    assert chooser.settled
    assert chooser.num_workers in expected, chooser.report()


def test_workers_that_hinder_each_other_get_no_more_of_them() -> None:
    chooser = auto(100)
    play(chooser, World(0.03, 0.006, useful=2))
    assert chooser.num_workers < 10
    assert "each takes longer for a batch" in chooser.report().why


def test_a_worker_that_nobody_joined_is_not_hindered_where_batches_become_slower() -> None:
    chooser = auto(16)
    for _ in range(20):  # one long wait, and a worker with time: no worker is added
        chooser.note((0.005, 0.002, 0.003))
    assert (chooser.num_workers, chooser.settled) == (1, False)
    play(chooser, World(0.03, 0.006), 20)
    assert chooser.num_workers > 4, chooser.report()


def test_a_program_that_is_slow_at_first_gets_its_workers_by_the_second_decision() -> None:
    """A first period in which it compiles its model shows no wait."""
    chooser = auto(16)
    play(chooser, World(0.03, 1.0), 20)
    assert (chooser.num_workers, chooser.settled) == (1, False)
    play(chooser, World(0.03, 0.0065), 20)
    assert 5 <= chooser.num_workers <= 7
    assert chooser.settled


def test_there_are_at_most_two_decisions() -> None:
    chooser = auto(100, tunes_prefetch=True)
    play(chooser, World(0.03, 0.006, noise=2.0), 40)
    assert chooser.settled


def test_more_is_made_in_advance_where_one_batch_in_twenty_is_slow() -> None:
    chooser = auto(start=(2, 2), tunes_workers=False, tunes_prefetch=True)
    play(chooser, World(0.005, 0.004, slow_s=0.1))
    assert chooser.num_workers == 2
    assert chooser.prefetch_factor > 4, chooser.report()


@pytest.mark.parametrize("program_s", [0.0001, 0.01])
def test_no_more_is_made_in_advance_where_batches_take_equally_long(program_s: float) -> None:
    chooser = auto(start=(2, 2), tunes_workers=False, tunes_prefetch=True)
    play(chooser, World(0.01, program_s))
    assert chooser.prefetch_factor == 2


def test_batches_that_show_something_else_do_not_count() -> None:
    chooser = auto(16)
    for _ in range(MOST_BATCHES):
        chooser.note(None)
    assert (chooser.num_workers, chooser.settled) == (1, True)


def test_what_cannot_be_had_is_not_asked_for_again() -> None:
    chooser = auto(16, tunes_prefetch=True)
    play(chooser, World(0.03, 0.0001), 40)
    assert chooser.num_workers > 4
    assert not chooser.settled
    chooser.settle(4, 2, "no more workers fit in the memory")
    play(chooser, World(0.03, 0.0001))
    assert (chooser.num_workers, chooser.prefetch_factor, chooser.settled) == (4, 2, True)
    assert "no more workers fit in the memory" in chooser.report().why


@example(measured=[(0.0, 1.0, 1.0)], cores=1, start=(1, 17), prefetch=True)
@settings(max_examples=200 if LONG else 50, deadline=None)
@given(
    measured=st.lists(
        st.none() | st.tuples(*[st.floats(0, 1) | st.sampled_from([0.0, 1e-9, 1e-4])] * 3), max_size=60
    ),
    cores=st.integers(1, 64),
    start=st.tuples(st.integers(1, 70), st.integers(1, 20)),
    prefetch=st.booleans(),
)
def test_any_measurements_settle_in_time_within_the_bounds_and_only_add(
    measured: list[tuple[float, float, float] | None], cores: int, start: tuple[int, int], prefetch: bool
) -> None:
    chooser = auto(cores, start, tunes_prefetch=prefetch)
    before = (chooser.num_workers, chooser.prefetch_factor)
    for number in range(MOST_BATCHES + 5):
        settled = chooser.settled
        one = measured[number % len(measured)] if measured else None
        chooser.note(one)
        now = (chooser.num_workers, chooser.prefetch_factor)
        assert now == before if settled else now >= before
        assert 1 <= now[0] <= cores
        assert now[1] <= max(start[1], MOST_PREFETCH)
        before = now
    assert chooser.settled
    assert chooser.batches <= MOST_BATCHES
