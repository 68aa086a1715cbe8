"""on_error: a loader continues when samples raise, with the batches of an oracle in plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flawed_datasets import MODES, Flawed, cut, quiet, rows
from loading import KeepsBatches
from torch.utils.data import Dataset, Sampler, default_collate

from shmloader import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class FlawedInBulk(Flawed):
    """Fetches a batch at once, and raises for the whole batch."""

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


def oracle(indices: list[list[int]], bad: set[int], mode: str) -> list[list[int]]:
    """The batches that the documentation promises for `indices`."""
    batches = []
    for batch in indices:
        good = [index for index in batch if index not in bad]
        if mode == "replace" and good:
            ring = batch + batch
            good = [next(index for index in ring[place:] if index not in bad) for place in range(len(batch))]
        if good:
            batches.append(good)
    return batches


PATTERNS: dict[str, set[int]] = {
    "one": {5},
    "first and last of a batch": {8, 11},
    "in a row, to the batch's end": {13, 14, 15},
    "whole batches": {0, 1, 2, 3, 12, 13, 14, 15, 36, 37},
    "all but one": set(range(38)) - {22},
    "all": set(range(38)),
    "at random": set(random.Random(7).sample(range(38), 15)),
}


@pytest.mark.each_value
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


def add_places(samples: list[torch.Tensor]) -> torch.Tensor:
    """Changes its samples in place."""
    return torch.stack([sample.add_(place) for place, sample in enumerate(samples)])


@quiet
def test_a_sample_in_a_bad_ones_place_is_a_copy() -> None:
    loader = DataLoader(Flawed(4, {1, 3}), batch_size=4, on_error="replace", collate_fn=add_places)
    assert [batch[:, 0].tolist() for batch in loader] == [[0, 2 + 1, 2 + 2, 0 + 3]]


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
        # Batches dropped with the abandoned epoch are not counted; its first batch that came is {4, 5, 6, 7}.
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
    """Batches with a report lie in slots like any others."""
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
    """A record has a flag for each, so both may be set."""
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
    """A sampler whose indices are tensors."""

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
    """A batch without a bad sample is encoded as it is, not in a report."""

    class Knows(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            from shmloader.codec import encoder

            if not hasattr(encoder, "kinds"):
                encode, encoder.kinds = encoder.Encoder.encode, []

                def noting(self: Any, batch: Any, *found: Any) -> Any:
                    encoder.kinds.append(type(batch).__name__)
                    return encode(self, batch, *found)

                encoder.Encoder.encode = noting
            return {"kinds": " ".join(encoder.kinds)}

    loader = DataLoader(Knows(), batch_size=4, num_workers=1, multiprocessing_context="fork", on_error="skip")
    assert list(loader)[-1]["kinds"][-1].split() == ["dict"] * 15
