"""on_error: a stream continues after a sample that raises, unless its iterator ends there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from flawed_datasets import MODES, FlawedStream, cut, quiet, rows
from torch.utils.data import IterableDataset

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# --- streams


class FlawedGenerator(FlawedStream):
    """A generator, which ends when it raises."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


def stream_oracle(length: int, bad: set[int], size: int, mode: str) -> list[list[int]]:
    """Batches of one worker's stream that continues after it has raised."""
    steps = [None if step in bad else step for step in range(length)]
    if mode == "replace":
        return cut([step for step in steps if step is not None], size)
    drawn = [[step for step in batch if step is not None] for batch in cut(steps, size)]
    return [batch for batch in drawn if batch]


@quiet
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("bad", [{2}, {0}, {10}, {4, 5, 6, 7}, set(range(11))], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_can_goes_on_with_its_next_sample(mode: str, bad: set[int], workers: int) -> None:
    loader = DataLoader(FlawedStream(11, bad), batch_size=4, num_workers=workers, on_error=mode)
    expected = stream_oracle(11, bad, 4, mode)
    for epoch in (1, 2):
        assert rows(loader) == expected
        figures = loader.statistics()
        assert [sample.index for sample in figures.bad_sample_list] == sorted(bad) * epoch
        assert {sample.worker_id for sample in figures.bad_sample_list} == {0 if workers else None}


@quiet
@pytest.mark.parametrize("mode", MODES)
def test_two_workers_streams_go_on_each_by_itself(mode: str) -> None:
    loader = DataLoader(FlawedStream(11, {2, 4, 5, 6, 7}), batch_size=4, num_workers=2, on_error=mode)
    one = stream_oracle(11, {2, 4, 5, 6, 7}, 4, mode)
    two = [[100 + step for step in batch] for batch in one]
    assert rows(loader) == [batch for pair in zip(one, two, strict=True) for batch in pair]
    assert loader.statistics().bad_samples == 10
    assert {str(sample).split(":")[0] for sample in loader.statistics().bad_sample_list} == {
        f"sample {step} of worker {worker}'s stream" for step in (2, 4, 5, 6, 7) for worker in (0, 1)
    }


@quiet
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_stream_without_batches_goes_on(mode: str, workers: int) -> None:
    loader = DataLoader(FlawedStream(6, {0, 3, 5}), batch_size=None, num_workers=workers, on_error=mode)
    assert list(loader) == [1, 2, 4]
    assert loader.statistics().bad_samples == 3


class Rewinds(IterableDataset[int]):
    """Its own iterator, which raises at its last sample and begins anew after its end."""

    def __init__(self) -> None:
        self._step = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._step == 5:
            self._step = 0
            raise StopIteration
        self._step += 1
        if self._step == 5:
            raise ValueError("bad")
        return self._step


@quiet
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_an_end_behind_a_bad_sample_ends_the_epoch(mode: str, workers: int) -> None:
    loader = DataLoader(Rewinds(), batch_size=None, num_workers=workers, on_error=mode)
    assert list(islice(loader, 20)) == [1, 2, 3, 4]


@quiet
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_generator_that_raised_has_ended_and_its_sample_is_counted(
    mode: str, drop_last: bool, workers: int
) -> None:
    def load(bad: int) -> tuple[list[list[int]], int]:
        loader = DataLoader(
            FlawedGenerator(9, {bad}), batch_size=4, drop_last=drop_last, num_workers=workers, on_error=mode
        )
        return rows(loader), loader.statistics().bad_samples

    rest = [] if drop_last else [[4, 5]]
    assert load(6) == ([[0, 1, 2, 3], *rest], 1)
    assert load(4) == ([[0, 1, 2, 3]], 1)  # there is a bad sample, and no batch for it to come with
    assert load(0) == ([], 1)


@quiet
def test_drop_last_drops_a_streams_last_batch_and_none_that_is_only_smaller() -> None:
    loader = DataLoader(FlawedStream(10, {1}), batch_size=4, drop_last=True, on_error="skip")
    assert rows(loader) == [[0, 2, 3], [4, 5, 6, 7]]
