"""Hugging Face's streaming datasets: sharded by their files, or dealt out where there are too few."""

from __future__ import annotations

from typing import Any

import pytest
from stream_datasets import identity

from shmloader import DataLoader

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")


def stream(files: int) -> Any:
    return datasets.Dataset.from_dict({"a": list(range(48))}).to_iterable_dataset(num_shards=files)


def batches_of(
    patch: pytest.MonkeyPatch, dataset: Any, rank: int, ranks: int, workers: int
) -> list[list[int]]:
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(ranks))
    loader = DataLoader(dataset, 2, num_workers=workers, shard="auto", collate_fn=identity)
    return [[row["a"] for row in batch] for batch in loader]


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("files", [1, 4, 5])
def test_each_row_comes_exactly_once(
    files: int, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own division among workers, which it does in every worker, does not leave out rows again."""
    dataset = stream(files)
    by_rank = [batches_of(monkeypatch, dataset, rank, ranks, workers) for rank in range(ranks)]
    assert sorted(row for batches in by_rank for batch in batches for row in batch) == list(range(48))
    assert len({len(batches) for batches in by_rank}) == 1


def test_a_shard_is_shuffled_by_the_epoch_of_its_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """``shard()`` makes a dataset whose epoch is 0."""
    dataset = stream(4).shuffle(seed=1, buffer_size=10)
    epochs = []
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        epochs.append(batches_of(monkeypatch, dataset, 0, 1, 2))
    assert epochs[0] != epochs[1]
    for batches in epochs:
        assert sorted(row for batch in batches for row in batch) == list(range(48))
