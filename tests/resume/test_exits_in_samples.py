"""What a sample raises in a worker that is no `Exception`: `SystemExit`, or a library's cancelled task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:to resume, .* samples of the stream are drawn again")


class Exits(Dataset[int]):
    """Sample 3 raises."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise SystemExit(index)
        return index


class ExitsInStream(IterableDataset[int]):
    """An iterator that goes on after it."""

    def __iter__(self) -> Iterator[int]:
        return map(Exits().__getitem__, range(10))


def values(iterator: Iterator[Any]) -> Iterator[int]:
    """The values; -1 in place of one that raised."""
    while True:
        try:
            yield int(next(iterator))
        except StopIteration:
            return
        except SystemExit:
            yield -1


@pytest.mark.parametrize("dataset", [Exits, ExitsInStream])
@pytest.mark.parametrize("taken", [4, 6])
def test_a_program_that_has_caught_it_is_resumed_behind_it(dataset: Any, taken: int) -> None:
    with DataLoader(dataset(), num_workers=1) as loader:
        batches = values(iter(loader))
        assert [next(batches) for _ in range(taken)] == [0, 1, 2, -1, 4, 5][:taken]
        state, rest = loader.state_dict(), list(batches)
    assert rest == list(range(taken, 10))
    with DataLoader(dataset(), num_workers=1) as other:
        other.load_state_dict(state)
        assert list(values(iter(other))) == rest


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_that_pass_over_it_lose_none_of_their_own_samples(workers: int) -> None:
    with DataLoader(ExitsInStream(), batch_size=2, num_workers=workers, shard="auto") as loader:
        iterator, had = iter(loader), []
        for _ in range(5):
            try:
                had.append(next(iterator).tolist())
            except SystemExit:
                had.append([])
    assert had == [[0, 1], [], [5, 6], [7, 8], [9]]  # number 4 is lost with the one that raised
