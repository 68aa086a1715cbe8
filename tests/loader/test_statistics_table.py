"""statistics() prints as a table with units, below a sentence that names the bottleneck."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from shmloader import BadSample, DataLoader, LoaderStatistics
from shmloader.statistics import Counters

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Slow(Dataset):
    """Samples that take their time."""

    def __init__(self, sample_s: float, count: int = 40) -> None:
        self.sample_s, self.count = sample_s, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sample_s)
        return torch.tensor(index)


def iterated(dataset: Any, loop_s: float, epochs: int = 1, **arguments: Any) -> LoaderStatistics:
    """Statistics after a loop that takes so long for each batch, on a host whose quota is never used up."""
    with DataLoader(dataset, batch_size=4, **arguments) as loader:
        for _ in range(epochs):
            for _ in loader:
                time.sleep(loop_s)
        return replace(loader.statistics(), throttled_share=0.0)


def test_slow_workers_are_the_bottleneck() -> None:
    figures = iterated(Slow(0.025, 40), 0.0, num_workers=1, worker_type="thread")
    assert figures.verdict.startswith("The workers are the bottleneck: next() waited ")
    assert figures.iterating_s >= figures.wait_for_workers_s >= 0.5
    assert figures.wait_for_first_batches_s < figures.wait_for_workers_s / 2


def test_a_slow_loop_is_the_bottleneck() -> None:
    figures = iterated(Slow(0.0, 80), 0.2, num_workers=1, worker_type="thread")
    assert figures.verdict.startswith("Your loop is the bottleneck: next() waited ")
    assert figures.iterating_s >= 19 * 0.2  # the loop's work after the last batch is not between two calls


def start_slowly(_: int) -> None:
    time.sleep(0.5)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_start_of_the_workers_is_the_bottleneck(persistent: bool) -> None:
    figures = iterated(
        Slow(0.0), 0.0, epochs=2, num_workers=1, worker_init_fn=start_slowly, persistent_workers=persistent
    )
    assert figures.verdict.startswith("The start of the workers is the bottleneck: next() waited ")
    assert figures.verdict.endswith("; without persistent_workers=True they start in each epoch.")
    starts = 1 if persistent else 2
    assert starts * 0.5 - 0.1 <= figures.wait_for_starts_s <= figures.wait_for_first_batches_s


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("epochs", [1, 3])
def test_workers_that_make_one_batch_each_are_the_bottleneck(persistent: bool, epochs: int) -> None:
    """next() waits only for first batches, and the workers take that long to make them."""
    figures = iterated(
        Slow(0.3 / epochs, 12),
        0.0,
        epochs,
        num_workers=3,
        worker_type="thread",
        persistent_workers=persistent,
    )
    assert figures.verdict.startswith("The first batches of epochs are the bottleneck: next() waited ")
    assert figures.verdict.endswith(
        " s of it for them. Longer epochs would help, or quicker samples, and prefetch_epochs=True may."
    )
    assert figures.wait_for_first_batches_s >= 1.2 - 0.5
    assert figures.wait_for_starts_s < figures.wait_for_first_batches_s / 2


class Large(Slow):
    """Samples of 8 MiB that take their time; those under ``bad`` raise after it."""

    bad = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sample_s)
        if index < self.bad:
            raise ValueError(index)
        return torch.full((1 << 20,), index)


@pytest.mark.parametrize("bad", [0, 8])
def test_what_a_first_batch_takes_in_pieces_or_to_be_left_out_is_no_start(bad: int) -> None:
    dataset = Large(0.3, 12 if bad else 4)  # a verdict on so few batches needs a second
    dataset.bad = bad
    given: dict[str, Any] = {"on_error": "skip"} if bad else {"memory_budget_nbytes": 1 << 16}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bad samples, of batches in pieces
        figures = iterated(dataset, 0.0, num_workers=1, worker_type="thread", **given)
    assert figures.verdict.startswith("The first batches of epochs are the bottleneck: next() waited ")
    assert figures.wait_for_starts_s < 0.6
    assert figures.wait_for_first_batches_s >= (3.6 if bad else 1.2) - 0.5


def test_the_first_epoch_of_persistent_workers_counts_as_start_and_no_other() -> None:
    counters = Counters()
    for epoch in range(3):
        counters.begin_epoch(starts=epoch == 0)
        counters.wait_for_workers_ns += 500
        counters.note_first_batch(made_ns=400)
    assert counters.wait_for_first_batches_ns == 1500
    assert counters.wait_for_starts_ns == 100


def test_a_batch_that_took_longer_than_the_wait_for_it_leaves_no_start() -> None:
    counters = Counters()
    counters.begin_epoch(starts=True)
    counters.wait_for_workers_ns += 300
    counters.note_first_batch(made_ns=400)
    assert counters.wait_for_starts_ns == 0


def test_without_workers_next_makes_the_batches() -> None:
    figures = iterated(Slow(0.01), 0.0)
    assert figures.verdict.startswith("There are no workers: next() made the batches itself, in ")
    assert figures.iterating_s >= figures.in_process_s >= 0.4
    assert figures.wait_for_workers_s == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_time_outside_of_epochs_does_not_count(workers: int) -> None:
    with DataLoader(Slow(0.0), batch_size=4, num_workers=workers, persistent_workers=workers > 0) as loader:
        began_s = time.perf_counter()
        for _ in range(2):
            iterator = iter(loader)
            next(iterator)
            time.sleep(0.2)  # the epoch is left here, or continues without counting later batches
        list(loader)
        assert loader.statistics().iterating_s < time.perf_counter() - began_s - 2 * 0.2


def test_the_table_has_units_and_leaves_out_what_did_not_happen() -> None:
    figures = LoaderStatistics(
        slots_free=1,
        slots_leased=3,
        reserved_nbytes=160 << 20,
        used_nbytes=60 << 20,
        largest_batch_nbytes=20 << 20,
        batches=12345,
        spills=2,
        spilled_nbytes=40 << 20,
        bad_samples=5,
        bad_sample_list=tuple(BadSample(n, "ValueError", "<no>") for n in range(5)),
        iterating_s=40.0,
        wait_for_workers_s=31.2,
        wait_for_first_batches_s=0.7,
        wait_for_starts_s=0.004,
        workers_wait_for_slots_s=0.05,
    )
    verdict, *table = str(figures).splitlines()
    assert verdict == (
        "The workers are the bottleneck: next() waited 31.2 s of 40.0 s (78%); more workers or quicker "
        "samples would help. loader.profile() says what takes the workers' time."
    )
    assert table == [
        "batches returned                 12,345",
        "time in the loop                 40.0 s",
        (
            "next() waited for workers        "
            "31.2 s, 700 ms of it for first batches, 4.0 ms until workers started"
        ),
        "workers waited for slots         50 ms, summed over the workers",
        "slots                            1 free, 0 being written, 0 ready for next(), 3 held by the program",
        "shared memory                    160.0 MiB reserved, 60.0 MiB used",
        "largest batch                    20.0 MiB",
        "batches moved to private memory  2 (40.0 MiB)",
        "bad samples                      5",
        "  dataset[0]: ValueError: <no>",
        "  dataset[1]: ValueError: <no>",
        "  dataset[2]: ValueError: <no>",
    ]
    assert "dataset[0]: ValueError: &lt;no&gt;" in figures._repr_html_()
    assert repr(figures).startswith("LoaderStatistics(slots_free=1, slots_granted=0, ")


def test_small_batches_and_short_times_have_units_that_show_them() -> None:
    figures = LoaderStatistics(
        slots_leased=1,
        reserved_nbytes=4096,
        used_nbytes=700,
        largest_batch_nbytes=700,
        batches=3,
        iterating_s=0.05,
        wait_for_workers_s=0.038,
        wait_for_first_batches_s=0.0004,
    )
    verdict, _, loop, workers, _, _, memory, largest = str(figures).splitlines()
    assert verdict.endswith(": 3 batches in 50 ms; next() waited 38 ms of 50 ms (76%).")
    assert loop.split(maxsplit=4)[-1] == "50 ms"
    assert workers.endswith("38 ms, 0.4 ms of it for first batches, 0.0 s until workers started")
    assert memory.endswith("4.0 KiB reserved, 700 bytes used")
    assert largest.split() == ["largest", "batch", "700", "bytes"]


def test_before_the_first_batch_there_is_no_verdict() -> None:
    text = str(DataLoader(Slow(0.0), num_workers=1).statistics())
    assert text.startswith("No batch has been returned yet.\nbatches returned           0\n")


def test_the_largest_batch_stays_after_the_last_iterator() -> None:
    figures = iterated(Slow(0.0), 0.0, num_workers=1)
    assert figures.slots_free == 0
    assert f"largest batch              {figures.largest_batch_nbytes} bytes" in str(figures)


def test_an_owner_may_begin_to_count_while_the_figures_are_read() -> None:
    counters = Counters()

    class First:
        @property
        def __dict__(self) -> dict[str, int]:  # type: ignore[override]
            counters.of(Second)
            return {"bad_samples": 3}

    class Second:
        pass

    counters.of(First)
    assert counters.figures()["bad_samples"] == 3
