"""statistics() prints as a table with units, below a sentence that names the bottleneck."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from shmloader import BadSample, DataLoader, LoaderStatistics

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
    """Statistics after a loop that takes so long for each batch."""
    with DataLoader(dataset, batch_size=4, **arguments) as loader:
        for _ in range(epochs):
            for _ in loader:
                time.sleep(loop_s)
        return loader.statistics()


def test_slow_workers_are_the_bottleneck() -> None:
    figures = iterated(Slow(0.025, 80), 0.0, num_workers=1, worker_type="thread")
    assert figures.verdict.startswith("The workers are the bottleneck: next() waited ")
    assert figures.iterating_s >= figures.wait_for_workers_s >= 1.0
    assert figures.wait_for_first_batches_s < figures.wait_for_workers_s / 2


def test_a_slow_loop_is_the_bottleneck() -> None:
    figures = iterated(Slow(0.0, 160), 0.05, num_workers=1, worker_type="thread")
    assert figures.verdict.startswith("Your loop is the bottleneck: next() waited ")
    assert figures.iterating_s >= 39 * 0.05  # the loop's work after the last batch is not between two calls


def test_the_start_of_epochs_is_the_bottleneck() -> None:
    class SlowToStart(IterableDataset):
        def __iter__(self) -> Any:
            time.sleep(0.5)
            yield from range(40)

    figures = iterated(SlowToStart(), 0.0, epochs=2, num_workers=1)
    assert figures.verdict.startswith("The start of the epochs is the bottleneck: next() waited ")
    assert figures.wait_for_first_batches_s >= 2 * 0.5 - 0.1


def test_without_workers_next_makes_the_batches() -> None:
    figures = iterated(Slow(0.01), 0.0)
    assert figures.verdict.startswith("There are no workers: next() made the batches itself, in ")
    assert figures.iterating_s >= figures.in_process_s >= 0.4
    assert figures.wait_for_workers_s == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_time_outside_of_epochs_does_not_count(workers: int) -> None:
    with DataLoader(Slow(0.0), batch_size=4, num_workers=workers, persistent_workers=workers > 0) as loader:
        for _ in range(2):
            iterator = iter(loader)
            next(iterator)
            time.sleep(0.5)  # the epoch is given up here, or goes on without counting what comes after
        before = loader.statistics().iterating_s
        list(loader)
        assert before < 0.5
        assert loader.statistics().iterating_s < before + 0.5


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
        workers_wait_for_slots_s=0.05,
    )
    verdict, *table = str(figures).splitlines()
    assert verdict == (
        "The workers are the bottleneck: next() waited 31.2 s of 40.0 s (78%); more workers or quicker "
        "samples would help."
    )
    assert table == [
        "batches returned                 12,345",
        "time in the loop                 40.0 s",
        "next() waited for workers        31.2 s, 0.7 s of it for first batches",
        "workers waited for slots         0.1 s, summed over the workers",
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


def test_before_the_first_batch_there_is_no_verdict() -> None:
    text = str(DataLoader(Slow(0.0), num_workers=1).statistics())
    assert text.startswith("No batch has been returned yet.\nbatches returned           0\n")
