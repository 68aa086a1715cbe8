"""on_error: errors that no sample causes are still raised, and so are endless failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from flawed_datasets import MODES, Flawed, FlawedStream, Raising, quiet, rows
from torch.utils.data import IterableDataset, Sampler, default_collate

import shmloader
from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# --- what is never skipped


def memory() -> BaseException:
    return MemoryError("5 bytes")


def died() -> BaseException:
    return shmloader.WorkerDied("inside", worker_id=3)


def leave() -> BaseException:
    return SystemExit(4)


def interrupt() -> BaseException:
    return KeyboardInterrupt("5")


def group() -> BaseException:
    return ExceptionGroup("two", [ValueError(), ExceptionGroup("in", [MemoryError()])])


@pytest.mark.each_value
@quiet
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make", [memory, died, leave, interrupt, group])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_samples_fault_is_raised(
    mode: str, make: Callable[[], BaseException], workers: int
) -> None:
    loader = DataLoader(Raising(make), batch_size=4, num_workers=workers, on_error=mode)
    iterator = iter(loader)
    assert next(iterator).tolist() == ([0, 2, 3] if mode == "skip" else [0, 2, 2, 3])
    with pytest.raises(type(make())) as caught:
        next(iterator)
    assert caught.value.args == make().args or isinstance(caught.value, ExceptionGroup)
    assert "raised by dataset[5]" in caught.value.__notes__
    assert next(iterator).tolist() == [8, 9, 10, 11]
    # The bad sample of the batch that was left out counts.
    assert [sample.index for sample in loader.statistics().bad_sample_list] == [1, 4]
    assert loader.statistics().failures == 1


@quiet
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_raises_what_is_not_its_samples_fault(workers: int) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise MemoryError

    iterator = iter(DataLoader(Stream(), batch_size=2, num_workers=workers, on_error="skip"))
    with pytest.raises(MemoryError) as caught:
        next(iterator)
    assert "raised by sample 1 of the stream, counted from 0" in caught.value.__notes__
    assert list(iterator) == []


class FailingIndices(Sampler):
    def __iter__(self) -> Iterator[int]:
        yield 0
        raise LookupError("sampler")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_samplers_error_is_raised(workers: int) -> None:
    loader = DataLoader(Flawed(4, set()), sampler=FailingIndices(), num_workers=workers, on_error="skip")
    with pytest.raises(LookupError, match="sampler"):
        list(loader)


def needs_four(samples: list[torch.Tensor]) -> torch.Tensor:
    if len(samples) != 4:
        raise ValueError(f"{len(samples)} samples")
    return default_collate(samples)


@quiet
@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_functions_error_is_raised_and_names_what_it_was_given(workers: int) -> None:
    loader = DataLoader(
        Flawed(8, {1}), batch_size=4, collate_fn=needs_four, num_workers=workers, on_error="skip"
    )
    iterator = iter(loader)
    with pytest.raises(ValueError, match="3 samples") as caught:
        next(iterator)
    assert "raised by collate_fn, given dataset[0], dataset[2], dataset[3]" in caught.value.__notes__
    assert rows(iterator) == [[4, 5, 6, 7]]
    assert loader.statistics().bad_samples == 1


# --- no end in sight


class EndlessIndices(Sampler):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle([1, 2, 3])


@quiet
def test_a_sampler_without_end_and_without_a_good_sample_is_an_error_and_no_hang() -> None:
    loader = DataLoader(
        Flawed(4, {1, 2, 3}), sampler=EndlessIndices(), batch_size=2, num_workers=1, on_error="skip"
    )
    with pytest.raises(shmloader.NoGoodSample, match=r"10,000 batches in a row.*dataset\[\d\]"):
        next(iter(loader))
    figures = loader.statistics()
    assert (figures.batches_left_out, len(figures.bad_sample_list)) == (10_000, 1000)
    loader.close()


@quiet
def test_left_out_batches_with_good_ones_between_are_no_row() -> None:
    loader = DataLoader(Flawed(20_010, set(range(0, 20_010, 2))), on_error="skip")
    assert sum(1 for _ in loader) == 10_005
    assert loader.statistics().batches_left_out == 10_005
    stream = FlawedStream(20_010, set(range(0, 20_010, 2)))
    assert [len(batch) for batch in DataLoader(stream, batch_size=20_000, on_error="replace")] == [10_005]


class Stuck(IterableDataset):
    """An iterator that raises at every sample, and never ends."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        raise ConnectionError("no route")


@quiet
@pytest.mark.parametrize(("mode", "workers"), [("skip", 0), ("replace", 1)])
def test_a_stream_that_only_raises_is_an_error_and_no_hang(mode: str, workers: int) -> None:
    loader = DataLoader(Stuck(), batch_size=2, num_workers=workers, on_error=mode)
    with pytest.raises(shmloader.NoGoodSample, match=r"10,000 \w+.* in a row"):
        next(iter(loader))
    assert loader.statistics().bad_samples == (20_000 if mode == "skip" else 10_000)
    loader.close()


class InterruptedIndices(Sampler):
    """Ctrl-C comes while the fourth index batch is drawn."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1], [2, 3], [4, 5])
        raise KeyboardInterrupt


def test_an_interrupt_behind_a_batch_that_was_left_out_loses_nothing_unsaid() -> None:
    loader = DataLoader(Flawed(8, {0, 1}), batch_sampler=InterruptedIndices(), num_workers=1, on_error="skip")
    iterator = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(shmloader.LoaderClosed, match="interrupted"):
        next(iterator)
