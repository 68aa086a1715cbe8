"""What `Autotune` chooses of measurements: no clock, no process, no loader."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shmloader.scheduling.autotune import MOST_BATCHES, MOST_PREFETCH, Autotune
from shmloader.scheduling.trials import Bounds, Choice, Sample, Trial

NO_BOUNDS = Bounds(1 << 20, 1 << 20)


class World:
    """What a choice leads to: samples, one for each batch.

    Args:
        batch_s: What a batch takes one worker.
        program_s: What it takes the program.
        useful: Workers beyond so many do not make it faster (memory is too slow, say).
        noise: Up to so much more the machine takes.
        slow_s: What one batch in twenty takes a worker more.
    """

    def __init__(
        self,
        batch_s: float,
        program_s: float,
        useful: int = 1000,
        noise: float = 0.3,
        slow_s: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.batch_s, self.program_s, self.useful, self.slow_s = batch_s, program_s, useful, slow_s
        self.noise = noise
        self.chance = random.Random(seed)

    def sample(self, choice: Choice, number: int) -> Sample:
        batch_s = self.batch_s / min(choice.num_workers, self.useful)
        wait_s = max(0.0, batch_s - self.program_s)
        idle_s = choice.num_workers * max(0.0, self.program_s - batch_s)
        if self.slow_s and number % 20 == 10:
            in_advance_s = choice.tasks * max(batch_s, self.program_s)
            wait_s = max(wait_s, self.slow_s - in_advance_s)
            idle_s = (choice.num_workers - 1) * wait_s
        factor = 1 + self.noise * self.chance.random()
        return Sample(self.program_s * factor, wait_s * factor, idle_s * factor, 1)


def play(
    autotune: Autotune, world: World, batches: int = 2 * MOST_BATCHES, bounds: Bounds = NO_BOUNDS
) -> list[Choice]:
    """The choice in effect for each batch."""
    choices = []
    for number in range(batches):
        choices.append(autotune.choice)
        autotune.note(world.sample(autotune.choice, number), lambda: bounds)
    return choices


def chooser(
    cores: int = 2, start: tuple[int, int] = (1, 2), *, workers: bool = True, prefetch: bool = False
) -> Autotune:
    return Autotune(Choice(*start), workers=workers, prefetch=prefetch, most_workers=cores)


WORKLOADS: dict[str, tuple[World, int, range]] = {
    "all cores of two": (World(0.03, 0.0001), 2, range(2, 3)),
    "all cores of many": (World(0.03, 0.0001), 16, range(16, 17)),
    "as many as the program needs": (World(0.03, 0.0065), 16, range(5, 8)),
    "one is enough": (World(0.001, 0.005), 16, range(1, 2)),
    "a second one does not help": (World(0.03, 0.0001, useful=1), 2, range(1, 2)),
    "a hundred do not help more than ten": (World(0.03, 0.0001, useful=10), 100, range(10, 20)),
    "one core": (World(0.03, 0.0001), 1, range(1, 2)),
    "a machine that is busy with other things": (World(0.03, 0.0065, noise=1.5), 16, range(5, 13)),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_number_of_workers_is_what_the_program_can_use(name: str) -> None:
    world, cores, expected = WORKLOADS[name]
    autotune = chooser(cores)
    play(autotune, world)
    report = autotune.report()
    assert report.settled
    assert report.num_workers in expected, report
    assert report.prefetch_factor == 2
    assert "ms" in report.why


def test_too_many_workers_to_begin_with_become_fewer() -> None:
    autotune = chooser(16, (12, 2))
    play(autotune, World(0.03, 0.0101))
    assert autotune.choice.num_workers in range(3, 6)


def test_more_is_made_in_advance_where_one_batch_in_twenty_is_slow() -> None:
    """Two workers; the others' batches must last for 100 ms."""
    autotune = chooser(start=(2, 2), workers=False, prefetch=True)
    play(autotune, World(0.005, 0.004, slow_s=0.1))
    assert autotune.choice.num_workers == 2
    assert autotune.choice.prefetch_factor >= 8
    assert "were faster" in autotune.report().why


@pytest.mark.parametrize("program_s", [0.0001, 0.02])
def test_no_more_is_made_in_advance_where_batches_take_equally_long(program_s: float) -> None:
    """Neither where the workers are too slow nor where the program is."""
    autotune = chooser(start=(2, 2), prefetch=True)
    play(autotune, World(0.01, program_s))
    assert autotune.choice.prefetch_factor == 2


def test_one_disturbance_of_the_machine_changes_nothing() -> None:
    """A second in which nothing happened, at any moment."""
    calm = chooser(16)
    expected = play(calm, World(0.03, 0.0065, noise=0.0))
    for moment in range(0, calm.batches, 7):
        autotune = chooser(16)
        world = World(0.03, 0.0065, noise=0.0)
        for number in range(MOST_BATCHES):
            sample = world.sample(autotune.choice, number)
            if number == moment:
                sample = sample._replace(wait_s=1.0)
            autotune.note(sample, lambda: NO_BOUNDS)
        assert autotune.choice == expected[-1], moment


def test_a_machine_that_becomes_slow_during_a_trial_does_not_hide_that_workers_help() -> None:
    """The second worker doubles the speed while something else halves it: what was before is tried again."""
    autotune = chooser(2)
    number = 0
    fast, slow = World(0.02, 0.0, noise=0.0), World(0.04, 0.0, noise=0.0)
    while not autotune.settled:
        world = fast if number < 23 else slow
        autotune.note(world.sample(autotune.choice, number), lambda: NO_BOUNDS)
        number += 1
    assert autotune.choice.num_workers == 2


def test_batches_too_quick_to_try_are_gone_by_as_they_were_measured() -> None:
    """Sixty batches of 50 us are over before the machine has switched between two processes."""
    autotune = chooser(4)
    for number in range(MOST_BATCHES):
        quick = World(1e-4, 2.5e-5, useful=1 if number > 62 else 9, noise=0.0)
        autotune.note(quick.sample(autotune.choice, number), lambda: NO_BOUNDS)
    assert autotune.choice.num_workers == 4
    slow = chooser(4)
    play(slow, World(0.01, 0.0025, useful=1, noise=0.0))
    assert slow.choice.num_workers == 1


def test_without_time_to_try_them_workers_are_chosen_as_measured_and_depth_is_not() -> None:
    """Further workers are still being started when the 200 batches are over."""
    autotune = chooser(8)
    world = World(0.03, 0.0001, noise=0.0)
    for number in range(MOST_BATCHES):
        there = autotune.choice.num_workers == 1
        autotune.note(world.sample(autotune.choice, number) if there else None, lambda: NO_BOUNDS)
    assert autotune.settled
    assert autotune.choice == (8, 2)
    deep = chooser(start=(2, 2), workers=False, prefetch=True)
    world = World(0.005, 0.004, slow_s=0.1)
    for number in range(MOST_BATCHES):
        there = deep.choice.prefetch_factor == 2
        deep.note(world.sample(deep.choice, number) if there else None, lambda: NO_BOUNDS)
    assert deep.settled
    assert deep.choice == (2, 2)


def test_fewer_are_made_in_advance_rather_than_by_fewer_workers() -> None:
    """With room for four tasks, four workers with one each."""
    autotune = chooser(8, prefetch=True)
    play(autotune, World(0.03, 0.0001), bounds=Bounds(8, 4))
    assert autotune.choice == (4, 1)
    fixed = chooser(8)
    play(fixed, World(0.03, 0.0001), bounds=Bounds(8, 5))
    assert fixed.choice == (2, 2)


TIMES = st.one_of(st.just(0.0), st.floats(0, 10), st.floats(0, 1e-5))
SAMPLES = st.lists(
    st.one_of(st.none(), st.builds(Sample, TIMES, TIMES, TIMES, st.integers(0, 5))),
    min_size=1,
    max_size=40,
)


@settings(max_examples=120, deadline=None, database=None, derandomize=True)
@given(
    samples=SAMPLES,
    start=st.builds(Choice, st.integers(1, 9), st.integers(1, 4)),
    cores=st.integers(1, 80),
    tunes=st.sampled_from([(True, True), (True, False), (False, True)]),
    tasks=st.lists(st.integers(1, 200), min_size=1, max_size=5),
    limits=st.dictionaries(st.integers(0, MOST_BATCHES + 39), st.integers(1, 100), max_size=3),
)
def test_any_measurements_settle_in_time_and_within_the_bounds(
    samples: list[Sample | None],
    start: Choice,
    cores: int,
    tunes: tuple[bool, bool],
    tasks: list[int],
    limits: dict[int, int],
) -> None:
    """Nothing new is more than the bounds of its moment, and once it is settled only a limit changes it."""
    autotune = Autotune(start, workers=tunes[0], prefetch=tunes[1], most_workers=cores)
    least = (1 if tunes[0] else start.num_workers) * (1 if tunes[1] else start.prefetch_factor)
    limit = math.inf
    before = autotune.choice
    had = {before}
    for number in range(MOST_BATCHES + 40):
        settled = autotune.settled
        bounds = Bounds(cores, tasks[number % len(tasks)])
        autotune.note(samples[number % len(samples)], lambda bounds=bounds: bounds)
        now = autotune.choice
        if settled:
            assert now == before
        assert now.tasks <= max(before.tasks, bounds.tasks, least) or now in had
        if number in limits:
            limit = min(limit, limits[number])
            autotune.limit(why="a test", tasks=limits[number])
        assert 1 <= autotune.choice.num_workers <= (cores if tunes[0] else start.num_workers)
        assert tunes[1] or autotune.choice.prefetch_factor == start.prefetch_factor
        assert autotune.choice.prefetch_factor <= max(MOST_PREFETCH, start.prefetch_factor)
        assert autotune.choice.tasks <= max(limit, least)
        before = autotune.choice
        had.add(before)
    assert autotune.settled
    assert autotune.batches <= MOST_BATCHES


def test_of_a_trial_the_slowest_and_the_fastest_part_do_not_count() -> None:
    samples = (
        [Sample(0.0, 9.0, 0.0, 1)] * 2 + [Sample(0.01, 0.03, 0.02, 1)] * 6 + [Sample(0.0, 0.0, 0.0, 1)] * 2
    )
    trial = Trial.of(Choice(2, 2), samples)
    assert trial.batches == 6
    assert trial.rate == pytest.approx(25)
    assert trial.waits == pytest.approx(0.75)
    assert trial.idles == pytest.approx(0.25)
    assert trial.busy_s == pytest.approx(0.06)
    assert trial.workers_needed == 7  # 6, and a tenth more
    assert trial.longest_s == pytest.approx(0.03)
    assert trial.total_s == pytest.approx(18.24)
