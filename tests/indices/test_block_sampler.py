"""`BlockSampler`: each sample once, samples from few blocks at a time, resumed on other ranks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from resume_settings import by_json, by_torch
from robustness.processes import LONG
from stream_datasets import identity

from shmloader import BlockSampler, DataLoader, ResumeError
from shmloader.indices.block_sampler import Layout

PROGRAMS = 500 if LONG else 30


class Blocks:
    """Samples that are their indices, in blocks."""

    def __init__(self, length: int, blocks: Any) -> None:
        self.length, self.blocks = length, blocks

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def in_blocks(length: int, seed: int = 0, count: int = 20) -> Blocks:
    dice = random.Random(seed)
    return Blocks(length, sorted({0, *(dice.randrange(length) for _ in range(count))}))


@pytest.mark.parametrize(
    ("length", "window", "lanes", "run_length"),
    [*itertools.product((1, 7, 1013), (1, 3, 50), (1, 2, 6), (1, 4))],
)
def test_each_sample_comes_once_on_any_number_of_ranks(
    length: int, window: int, lanes: int, run_length: int
) -> None:
    dataset = in_blocks(length)
    layout: Any = {"window": window, "lanes": lanes, "run_length": run_length}
    for ranks in (1, 2, 3):
        exact = [list(BlockSampler(dataset, ranks, rank, uneven="exact", **layout)) for rank in range(ranks)]
        assert sorted(itertools.chain(*exact)) == list(range(length))
        even = [BlockSampler(dataset, ranks, rank, **layout) for rank in range(ranks)]
        assert {len(list(one)) for one in even} == {-(-length // ranks)} == {len(one) for one in even}


def test_a_batch_lies_in_the_blocks_of_one_window_and_a_worker_reads_each_block_once() -> None:
    dataset = Blocks(4800, range(0, 4800, 100))
    for ranks, lanes in ((1, 1), (1, 4), (2, 4), (4, 4)):
        batches = [
            np.reshape(
                list(BlockSampler(dataset, ranks, rank, window=3, lanes=lanes, run_length=20)), (-1, 20)
            )
            for rank in range(ranks)
        ]
        for rank, worker in itertools.product(range(ranks), range(lanes // ranks)):
            own = batches[rank][worker :: lanes // ranks] // 100
            assert all(len(set(batch)) <= 3 for batch in own)
            assert len(set(own[0])) == 3
            assert len(set(own.ravel())) == 48 // lanes
            windows = np.reshape(own, (4800 // lanes // 300, 300))
            assert all(len(set(window)) == 3 for window in windows)


def test_a_run_lies_in_one_window_also_where_blocks_are_no_multiples_of_runs() -> None:
    sampler = BlockSampler(Blocks(1010, range(0, 1010, 101)), 1, 0, window=2, run_length=10)
    windows = np.reshape(list(sampler)[:1000], (5, 200)) // 101
    assert all(len(set(window)) <= 3 for window in windows)  # two, and that at the edge


def test_the_order_follows_from_seed_and_epoch_and_is_shuffled_in_both_ways() -> None:
    dataset = Blocks(1000, range(0, 1000, 50))
    sampler = BlockSampler(dataset, 1, 0, window=2)
    first = list(sampler)
    assert first == list(BlockSampler(dataset, 1, 0, window=2))
    assert first[:100] != sorted(first[:100])
    assert {index // 50 for index in first[:100]} != {0, 1}
    sampler.set_epoch(1)
    assert first != list(sampler)
    assert list(BlockSampler(dataset, 1, 0, shuffle=False)) == list(range(1000))
    assert sorted(BlockSampler(range(9), 1, 0, blocks=[0, 4], window=1)) == list(range(9))


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a range has no blocks: pass blocks=\[0"):
        BlockSampler(range(5), 1, 0)
    for blocks in ([1, 3], [0, 3, 3], [0, 5], []):
        with pytest.raises(ValueError, match="ascending from 0 to below 5"):
            BlockSampler(range(5), 1, 0, blocks=blocks)
    for name in ("window", "lanes", "run_length"):
        wrong: Any = {name: 0}
        with pytest.raises(ValueError, match=f"{name}=0"):
            BlockSampler(range(5), 1, 0, blocks=[0], **wrong)


def test_a_state_in_the_middle_of_a_run_is_refused() -> None:
    dataset = in_blocks(100)
    loader = DataLoader(dataset, 6, sampler=BlockSampler(dataset, 1, 0, run_length=4))  # type: ignore[arg-type]
    next(iter(loader))
    with pytest.raises(ResumeError, match=r"batch_size=6 and run_length=4 .* multiple"):
        loader.state_dict()


def run_program(seed: int) -> None:
    """Runs that each continue where the one before stopped, on other ranks and with another layout."""
    choose = random.Random(seed)
    dataset = in_blocks(choose.randrange(200, 600), seed)
    first = Layout(choose.choice([1, 4]), choose.choice([1, 2, 6]), choose.choice([1, 3]))
    epoch, seen, state, layout = choose.randrange(3), [], {}, first
    for run in range(runs := choose.randint(2, 4)):
        ranks, size = choose.choice([1, 2, 3, 6]), first.run_length * choose.randint(1, 5)
        steps = None if run == runs - 1 else choose.randint(0, 8)
        workers = choose.choice([0, 0, 0, 1])
        by_rank, states = [], []
        for rank in range(ranks):
            sampler = BlockSampler(dataset, ranks, rank, seed=3, uneven="exact", **layout._asdict())
            loader: DataLoader[Any] = DataLoader(
                dataset,
                size,
                sampler=sampler,
                collate_fn=identity,
                num_workers=workers,  # type: ignore[arg-type]
            )
            loader.set_epoch(epoch)
            loader.load_state_dict(state)
            by_rank.append(list(itertools.chain(*itertools.islice(loader, steps))))
            states.append(loader.state_dict())
            loader.close()
        seen += in_turn(by_rank, first.run_length)
        state = choose.choice([by_json, by_torch])(states[0])
        if steps is not None and len(by_rank[0]) < steps * size:
            break
        # What the program passes next holds from the next epoch on.
        layout = Layout(choose.choice([1, 9]), choose.choice([1, 3]), choose.choice([1, 5]))
        layout = layout._replace(run_length=1)
    whole = BlockSampler(dataset, 1, 0, seed=3, **first._asdict())
    whole.set_epoch(epoch)
    assert sorted(seen) == list(range(len(dataset))), f"program {seed}"
    assert seen == list(whole), f"program {seed}"


def in_turn(by_rank: list[list[int]], run_length: int) -> list[int]:
    """The samples of all ranks in the global order: whole runs in turn, then single samples."""
    found: list[int] = []
    whole = min(map(len, by_rank)) // run_length * run_length
    for begin in range(0, whole, run_length):
        found += itertools.chain(*(one[begin : begin + run_length] for one in by_rank))
    rests = itertools.zip_longest(*(one[whole:] for one in by_rank))
    return found + [index for index in itertools.chain(*rests) if index is not None]


@pytest.mark.parametrize("part", range(4))
def test_random_programs_go_on_exactly_on_other_ranks(part: int) -> None:
    for seed in range(part, PROGRAMS, 4):
        run_program(seed)
