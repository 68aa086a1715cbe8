"""on_error: a loader goes on where samples raise, and says so. Compared with an oracle in plain Python."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loading import KeepsBatches
from parity.compare import assert_same
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import shmloader
from shmloader import BadSampleWarning, DataLoader

MODES = ["skip", "replace"]
quiet = pytest.mark.filterwarnings("ignore::shmloader.BadSampleWarning")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Flawed(Dataset):
    """Sample i is three times i; those in `bad` raise, each index its own kind of error."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if int(index) in self.bad:
            raise [ValueError, KeyError, OSError, StopIteration][int(index) % 4](f"no {index}")
        return torch.full((3,), int(index))


class FlawedInBulk(Flawed):
    """Fetches a batch at once, and raises for the whole of it."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [Flawed.__getitem__(self, index) for index in indices]


class OnlyInBulk(Dataset):
    """Has no __getitem__ of its own."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.samples = Flawed(length, bad)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self.samples[index] for index in indices]


class BulkIsBroken(Flawed):
    """Only __getitems__ raises."""

    def __init__(self, length: int, error: Exception) -> None:
        super().__init__(length, set())
        self.error = error

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        raise self.error


class Raising(Dataset):
    """Sample 5 raises what `make` makes; samples 1 and 4 a ValueError."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise self.make()
        if index in {1, 4}:
            raise ValueError(index)
        return index


class FlawedStream(IterableDataset):
    """Worker k's samples are 100 k, 100 k + 1 and so on; its iterator goes on after it has raised."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self.length, self.bad = length, bad

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return self.Steps(self, 0 if info is None else 100 * info.id)

    class Steps:
        def __init__(self, stream: FlawedStream, base: int) -> None:
            self.stream, self.base, self.step = stream, base, -1

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.step += 1
            if self.step >= self.stream.length:
                raise StopIteration
            if self.step in self.stream.bad:
                raise ValueError(f"no {self.step}")
            return self.base + self.step


class FlawedGenerator(FlawedStream):
    """A generator, which ends where it raises."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


def oracle(indices: list[list[int]], bad: set[int], mode: str) -> list[list[int]]:
    """What the batches of `indices` become, by the words of the documentation."""
    batches = []
    for batch in indices:
        good = [index for index in batch if index not in bad]
        if mode == "replace" and good:
            ring = batch + batch
            good = [next(index for index in ring[place:] if index not in bad) for place in range(len(batch))]
        if good:
            batches.append(good)
    return batches


def rows(loader: Any) -> list[list[int]]:
    """All batches, as what their samples' first items are; nothing is held, so slots are used again."""
    return [batch.reshape(len(batch), -1)[:, 0].tolist() for batch in loader]


def cut(indices: list[int], size: int) -> list[list[int]]:
    return [indices[begin : begin + size] for begin in range(0, len(indices), size)]


PATTERNS: dict[str, set[int]] = {
    "one": {5},
    "first and last of a batch": {8, 11},
    "in a row, to the batch's end": {13, 14, 15},
    "whole batches": {0, 1, 2, 3, 12, 13, 14, 15, 36, 37},
    "all but one": set(range(38)) - {22},
    "all": set(range(38)),
    "at random": set(random.Random(7).sample(range(38), 15)),
}


@quiet
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_batches_are_the_oracles_whatever_the_number_of_workers(pattern: str, mode: str) -> None:
    bad = PATTERNS[pattern]
    expected = oracle(cut(list(range(38)), 4), bad, mode)
    for workers in (0, 1, 3):
        loader = DataLoader(Flawed(38, bad), batch_size=4, num_workers=workers, on_error=mode)
        assert rows(loader) == expected
        figures = loader.statistics()
        assert figures.bad_samples == len(bad)
        assert [sample.index for sample in figures.bad_sample_list] == sorted(bad)
        assert figures.batches_left_out == 10 - len(expected)
        assert figures.batches == len(expected)
        assert (figures.failures, figures.spills, figures.detached) == (0, 0, 0)


@quiet
def test_it_is_the_same_under_every_start_method_and_in_every_epoch(start_method: str) -> None:
    bad, mode = PATTERNS["whole batches"], "replace"
    loader = DataLoader(
        Flawed(38, bad),
        batch_size=4,
        num_workers=1,
        on_error=mode,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    with loader:
        expected = oracle(cut(list(range(38)), 4), bad, mode)
        assert [rows(loader) for _ in range(3)] == [expected] * 3
        next(iter(loader))  # and once more, left in the middle
        assert rows(loader) == expected
        # What was dropped with the abandoned epoch is not counted; its first batch that came is {4, 5, 6, 7}.
        assert loader.statistics().bad_samples == 4 * len(bad) + 4


@quiet
@pytest.mark.parametrize("mode", MODES)
def test_shuffled_batches_are_the_same_with_and_without_workers(mode: str) -> None:
    def epochs(workers: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(
            Flawed(50, PATTERNS["at random"]),
            batch_size=4,
            shuffle=True,
            generator=generator,
            num_workers=workers,
            on_error=mode,
        )
        return [rows(loader), rows(loader)], loader.statistics().bad_sample_list

    assert epochs(0) == epochs(2) == epochs(3)


@quiet
@pytest.mark.parametrize("mode", MODES)
def test_out_of_order_all_batches_come(mode: str) -> None:
    bad = PATTERNS["whole batches"]
    loader = DataLoader(Flawed(38, bad), batch_size=4, num_workers=2, on_error=mode, in_order=False)
    for _ in range(3):
        assert sorted(rows(loader)) == sorted(oracle(cut(list(range(38)), 4), bad, mode))


@quiet
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_without_batches_bad_samples_are_left_out(mode: str, workers: int) -> None:
    loader = DataLoader(Flawed(9, {0, 4, 8}), batch_size=None, num_workers=workers, on_error=mode)
    assert [int(sample[0]) for sample in loader] == [1, 2, 3, 5, 6, 7]
    assert loader.statistics().batches_left_out == 3


@quiet
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [FlawedInBulk, OnlyInBulk])
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_cannot_be_fetched_at_once_is_fetched_one_by_one(
    mode: str, kind: type, workers: int
) -> None:
    bad = PATTERNS["first and last of a batch"] | PATTERNS["whole batches"]
    loader = DataLoader(kind(38, bad), batch_size=4, num_workers=workers, on_error=mode)
    assert rows(loader) == oracle(cut(list(range(38)), 4), bad, mode)
    figures = loader.statistics()
    assert [sample.index for sample in figures.bad_sample_list] == sorted(bad)
    assert figures.batches_one_by_one == sum(bool(bad & set(batch)) for batch in cut(list(range(38)), 4))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_getitems_that_fails_for_no_samples_fault_is_counted(workers: int) -> None:
    dataset = BulkIsBroken(8, RuntimeError("bulk"))
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, on_error="skip")
    assert rows(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    figures = loader.statistics()
    assert (figures.batches_one_by_one, figures.bad_samples) == (2, 0)


def test_a_getitems_that_runs_out_of_memory_is_not_tried_again() -> None:
    loader = DataLoader(BulkIsBroken(8, MemoryError("bulk")), batch_size=4, num_workers=1, on_error="skip")
    with pytest.raises(MemoryError, match="bulk"):
        next(iter(loader))


# --- streams


def stream_oracle(length: int, bad: set[int], size: int, mode: str) -> list[list[int]]:
    """Batches of one worker's stream that goes on where it has raised."""
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
    # The bad sample of the batch that came to nothing counts.
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


# --- batches


class Records(Flawed):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": super().__getitem__(index), "name": str(index)}


def takes_apart(samples: list[dict[str, Any]]) -> Any:
    """Changes the samples that it is given, as many collate functions do."""
    return default_collate([sample.pop("x") for sample in samples]), [s.pop("name") for s in samples]


@quiet
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_stands_for_two_may_be_changed(workers: int) -> None:
    loader = DataLoader(
        Records(8, {1, 2, 7}), batch_size=4, collate_fn=takes_apart, num_workers=workers, on_error="replace"
    )
    assert [names for _, names in loader] == [["0", "3", "3", "3"], ["4", "5", "6", "4"]]


@quiet
def test_held_batches_with_a_report_stay_as_they_are() -> None:
    """They lie in slots like any others, whatever goes to the statistics with them."""
    bad = set(range(0, 400, 7))
    loader = DataLoader(
        Records(400, bad), batch_size=4, num_workers=2, on_error="skip", persistent_workers=True
    )
    with loader:
        held = list(loader)
        names = [int(name) for batch in held for name in batch["name"]]
        assert names == [index for index in range(400) if index % 7]
        assert torch.cat([batch["x"] for batch in held])[:, 0].tolist() == names
        assert loader.statistics().bad_samples == 58
        assert loader.statistics().slots_leased > 60


@quiet
def test_batches_with_a_report_may_be_kept_by_the_worker_too() -> None:
    """What a record says of a batch besides: its flags are apart."""
    expected = oracle(cut(list(range(38)), 4), {5, 6, 20}, "skip")
    loader = DataLoader(
        Flawed(38, {5, 6, 20}), batch_size=4, collate_fn=KeepsBatches(), num_workers=1, on_error="skip"
    )
    assert rows(loader) == expected
    assert loader.statistics().detached > 0


class Large(Flawed):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index)[:1].repeat(20_000)


@quiet
@pytest.mark.filterwarnings("ignore::shmloader.SpillWarning")
def test_batches_with_a_report_may_be_larger_than_their_slots() -> None:
    loader = DataLoader(
        Large(38, {5, 6, 20}), batch_size=4, num_workers=1, on_error="skip", memory_budget_nbytes=1 << 18
    )
    assert rows(loader) == oracle(cut(list(range(38)), 4), {5, 6, 20}, "skip")
    assert loader.statistics().spills > 0
    assert loader.statistics().bad_samples == 3


class Tensors(Sampler):
    """Its indices are tensors."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8))


@quiet
def test_what_is_kept_of_a_bad_sample_holds_no_slot() -> None:
    loader = DataLoader(Flawed(8, {1, 4}), batch_size=4, sampler=Tensors(), num_workers=1, on_error="skip")
    with loader:
        assert rows(loader) == [[0, 2, 3], [5, 6, 7]]
        assert [int(sample.index) for sample in loader.statistics().bad_sample_list] == [1, 4]
        iterator = iter(loader)
        assert len(next(iterator)) == 3
        assert loader.statistics().slots_leased == 0


# --- statistics


@quiet
@pytest.mark.parametrize("workers", [0, 1])
def test_the_statistics_say_what_was_wrong(workers: int) -> None:
    loader = DataLoader(Flawed(9, {4, 5}), batch_size=3, num_workers=workers, on_error="skip")
    list(loader)
    first, second = loader.statistics().bad_sample_list
    assert first == shmloader.BadSample(index=4, error="ValueError", message="no 4")
    assert str(first) == "dataset[4]: ValueError: no 4"
    assert (second.index, second.error, second.message) == (5, "KeyError", "'no 5'")


@quiet
def test_a_thousand_bad_samples_are_listed_and_all_are_counted() -> None:
    loader = DataLoader(Flawed(3000, set(range(0, 3000, 2))), batch_size=16, num_workers=2, on_error="skip")
    list(loader)
    figures = loader.statistics()
    assert figures.bad_samples == 1500
    assert [sample.index for sample in figures.bad_sample_list] == list(range(0, 2000, 2))


class Unspeakable(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("str")


def unspeakable() -> BaseException:
    return Unspeakable()


def long_winded() -> BaseException:
    return ValueError("x" * 10_000)


@quiet
def test_messages_are_bounded_and_may_be_missing() -> None:
    for make, message in (
        (unspeakable, "<str() of this Unspeakable raises"),
        (long_winded, "x" * 497 + "..."),
    ):
        loader = DataLoader(Raising(make), batch_size=4, num_workers=1, on_error="skip")
        list(loader)
        sample = loader.statistics().bad_sample_list[2]
        assert sample.message.startswith(message)
        assert len(sample.message) <= 500


# --- the warning


def summaries(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if one.category is BadSampleWarning]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_warning_sums_up_at_the_end_of_the_epoch(workers: int) -> None:
    loader = DataLoader(Flawed(20, {1, 4, 5, 6, 7}), batch_size=4, num_workers=workers, on_error="skip")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        assert not caught
        assert next(iterator, None) is None
        next(iterator, None)
        list(loader)
        loader.close()
    (text,) = summaries(caught)
    assert text.startswith("5 bad sample(s) raised and were left out of their batches (on_error='skip'): ")
    assert "dataset[1]: KeyError: 'no 1'; dataset[4]: ValueError: no 4; dataset[5]" in text
    assert "and 2 more. 1 batch(es) had no good sample" in text
    assert caught[0].filename == __file__


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", ["close", "with", "iter"])
def test_an_epoch_that_is_not_finished_is_summed_up_by_what_comes_next(how: str, workers: int) -> None:
    loader = DataLoader(Flawed(20, {1}), batch_size=4, num_workers=workers, on_error="replace")
    next(iter(loader))
    with pytest.warns(BadSampleWarning, match=r"1 bad sample\(s\) raised and were replaced") as caught:
        if how == "close":
            loader.close()
        elif how == "iter":
            iter(loader)
        else:
            with loader:
                pass
    assert [one.filename for one in caught] == [__file__]
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_warning_that_is_an_error_breaks_nothing(persistent: bool, workers: int) -> None:
    loader = DataLoader(
        Flawed(20, {1}),
        batch_size=4,
        num_workers=workers,
        on_error="skip",
        persistent_workers=persistent and workers > 0,
    )
    iterator = iter(loader)
    got = [next(iterator)[0, 0].item() for _ in range(5)]
    with pytest.raises(BadSampleWarning):
        next(iterator)
    assert got == [0, 4, 8, 12, 16]
    assert next(iterator, None) is None
    assert len(rows(loader)) == 5
    assert loader.statistics().bad_samples == 2
    loader.close()


def test_a_with_block_that_raises_raises_what_it_raised() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        DataLoader(Flawed(8, {1}), batch_size=4, num_workers=1, on_error="skip") as loader,
    ):
        next(iter(loader))
        raise ZeroDivisionError


def test_without_bad_samples_there_is_no_warning() -> None:
    for mode in MODES:
        with DataLoader(Flawed(8, set()), batch_size=4, num_workers=1, on_error=mode) as loader:
            assert len(rows(loader)) == 2


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
    """An iterator that never comes on."""

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


# --- the argument


def test_the_default_raises_and_says_which_sample() -> None:
    for workers in (0, 1):
        loader = DataLoader(Flawed(8, {5}), batch_size=4, num_workers=workers)
        assert loader.on_error == "raise"
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(KeyError) as caught:
            next(iterator)
        assert "raised by dataset[5]" in caught.value.__notes__
        assert loader.statistics().bad_samples == 0


@pytest.mark.parametrize("value", ["ignore", None, "Skip", True])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="on_error must be one of 'raise', 'skip', 'replace', not"):
        DataLoader(Flawed(8, set()), on_error=value)


@quiet
def test_frameworks_that_rebuild_the_loader_keep_it() -> None:
    loader = DataLoader(Flawed(8, {1}), batch_size=4, num_workers=1, on_error="skip")
    public = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    for name in ("batch_sampler", "sampler", "drop_last", "batch_size"):
        public.pop(name)
    again = DataLoader(**public, batch_size=4)
    assert rows(again) == rows(loader) == [[0, 2, 3], [4, 5, 6, 7]]


def test_it_costs_nothing_while_nothing_fails() -> None:
    """The codec remembers headers only for what the collation made itself: a report would undo that."""

    class Knows(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            from shmloader.codec import encoder

            if not hasattr(encoder, "pickled"):
                pickler, encoder.pickled = encoder.BatchPickler.dump, 0

                def counting(self: Any, batch: Any) -> None:
                    encoder.pickled += 1
                    pickler(self, batch)

                encoder.BatchPickler.dump = counting
            return {"pid": torch.tensor(os.getpid()), "pickled": torch.tensor(encoder.pickled)}

    loader = DataLoader(Knows(), batch_size=4, num_workers=1, multiprocessing_context="fork", on_error="skip")
    assert int(list(loader)[-1]["pickled"].max()) == 0


def test_datapipes_without_workers_are_shuffled_and_sharded_as_by_torch() -> None:
    """They are iterated by our fetcher too."""

    def epochs(kind: type) -> list[Any]:
        torch.manual_seed(5)
        pipe = IterableWrapper(range(20)).shuffle().sharding_filter().map(torch.tensor)
        loader = kind(pipe, batch_size=3)
        return [list(loader), list(loader), torch.get_rng_state()]

    assert_same(epochs(DataLoader), epochs(TorchLoader))
