"""Ranks of torch.distributed: each item comes once; epochs are equally long, or an error comes in time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stream_datasets import ByShard, Numbers, identity

from shmloader import DataLoader, LoaderError

FORK = multiprocessing.get_context("fork")
RANKS = 2
Result = tuple[list[Any], str]
"""The batches that a rank had, and the text of the exception that ended it."""


def play(program: Callable[..., None], path: Path, *given: Any) -> list[Result]:
    """Run a program on two ranks; a rank that does not end is killed and fails the test."""
    pipes = [FORK.Pipe(duplex=False) for _ in range(RANKS)]
    arguments = [(program, str(path / "store"), rank, pipes[rank][1], given) for rank in range(RANKS)]
    processes = [FORK.Process(target=_rank, args=one) for one in arguments]
    for process in processes:
        process.start()
    try:
        for _, theirs in pipes:
            theirs.close()
        deadline = time.monotonic() + 60
        results = []
        for ours, _ in pipes:
            assert ours.poll(max(deadline - time.monotonic(), 0)), "a rank hangs"
            results.append(ours.recv())
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
        for ours, _ in pipes:
            ours.close()


def _rank(program: Callable[..., None], path: str, rank: int, pipe: Any, given: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    batches: list[Any] = []
    error = ""
    try:
        program(batches, *given)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    pipe.send((batches, error))
    time.sleep(0 if error else 1)  # the store goes with its process


def two_epochs(batches: list[Any], dataset: Any, workers: int) -> None:
    loader = DataLoader(dataset, 2, num_workers=workers, shard="auto", collate_fn=identity, timeout=0)
    for _ in range(2):
        batches += loader


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [ByShard, Numbers])
def test_each_item_comes_exactly_once_in_each_epoch(kind: Any, workers: int, tmp_path: Path) -> None:
    """Ranks are asked of torch.distributed, not of the environment."""
    results = play(two_epochs, tmp_path, kind(24), workers)
    assert [error for _, error in results] == ["", ""]
    found = [item for batches, _ in results for batch in batches for item in batch]
    assert sorted(found) == sorted([*range(24)] * 2)


def with_collectives(batches: list[Any], timeout_s: float) -> None:
    loader = DataLoader(ByShard(0, uneven=True), 1, num_workers=1, shard="auto", timeout=timeout_s)
    for batch in loader:
        dist.all_reduce(torch.ones(1))
        batches.append(batch)


def test_a_rank_that_runs_out_early_is_an_error_in_time(tmp_path: Path) -> None:
    """The other rank waits for it in a collective operation, which the error ends."""
    began = time.monotonic()
    (short, error), (_, other_error) = play(with_collectives, tmp_path, 10.0)
    assert short == []
    assert error.startswith(
        "LoaderError: rank 0 came to the end of its epoch after 0 batches, and rank 1 did not"
    )
    assert "within 10 s. A rank that has more batches than rank 0 now waits for rank 0 in a " in error
    assert error.endswith("If the others are only slower, give the loader a timeout of more than 10 s.")
    assert other_error, "rank 1 went on without rank 0"
    assert time.monotonic() - began < 60


def without_collectives(batches: list[Any], kind: Any) -> None:
    batches += DataLoader(kind(0, uneven=True), 1, shard="auto", collate_fn=identity)


def test_ranks_that_do_not_wait_for_each_other_are_told_at_the_end(tmp_path: Path) -> None:
    """Both ranks get the error, with the numbers."""
    results = play(without_collectives, tmp_path, ByShard)
    for _, error in results:
        assert "rank 0 ran out after 0 batches, before others (rank 1: 2)" in error


def again_after_the_end(batches: list[Any]) -> None:
    iterator = iter(DataLoader(ByShard(8), 2, shard="auto", collate_fn=identity, num_workers=1))
    batches += iterator
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)


def test_the_end_is_compared_once(tmp_path: Path) -> None:
    """A rank that asks again for a batch does not wait for the others."""
    assert [error for _, error in play(again_after_the_end, tmp_path)] == ["", ""]


def test_one_process_compares_nothing() -> None:
    """The process needs no torch.distributed."""
    assert len(list(DataLoader(ByShard(5), shard="auto"))) == 5
    assert issubclass(LoaderError, RuntimeError)
