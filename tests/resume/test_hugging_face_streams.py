"""Hugging Face's streaming datasets: sharded by their files, or dealt out if there are too few files."""

from __future__ import annotations

import itertools
import json
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
    """The dataset's own division among workers leaves out no further rows."""
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


@pytest.mark.parametrize(
    ("files", "shard", "workers"), [(4, "auto", [2, 0, 3]), (1, "auto", [2, 3, 0]), (4, None, [2, 2, 2])]
)
def test_its_own_states_resume_it(files: int, shard: Any, workers: list[int]) -> None:
    """Streams are divided by files, dealt out, or divide themselves; runs are stopped after three batches."""
    rows: list[int] = []
    state: dict[str, Any] = {}
    for number, stop in zip(workers, (3, 3, 100), strict=True):
        loader = DataLoader(stream(files), 3, num_workers=number, shard=shard, collate_fn=identity)
        loader.load_state_dict(state)
        for batch in itertools.islice(loader, stop):
            rows += [row["a"] for row in batch]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
    assert sorted(rows) == list(range(48))
    assert state["finished"]


@pytest.mark.filterwarnings("ignore:IterableDataset has set_epoch")
def test_workers_that_persist_give_the_next_epoch_whole() -> None:
    """The state that the dataset was set to belongs to the epoch that was resumed."""
    for workers in (0, 2):
        given = {"num_workers": workers, "persistent_workers": workers > 0, "collate_fn": identity}
        loader = DataLoader(stream(4), 4, **given)
        next(iter(loader))
        state = loader.state_dict()
        loader.close()
        again = DataLoader(stream(4), 4, **given)
        again.load_state_dict(state)
        assert len(list(again)) == 11
        assert sorted(row["a"] for batch in again for row in batch) == list(range(48))
        again.close()
