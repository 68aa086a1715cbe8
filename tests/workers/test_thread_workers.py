"""Worker threads give the same as torch's workers, in parallel: batches, order, draws, streams."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import loading
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity.compare import differences
from parity.run import Build
from robustness.processes import LONG
from thread_datasets import (
    AllOwnDraws,
    Compressed,
    Counting,
    Facts,
    GlobalDraws,
    Meeting,
    Mixed,
    OwnDraws,
    Pipes,
    SetPart,
    Sharded,
    Timed,
    set_part,
)
from thread_loaders import assert_same, threads
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, get_worker_info

from shmloader import DataLoader, share

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# --- batches and order


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 4},
        {"batch_size": 4, "shuffle": True, "drop_last": True},
        {"batch_size": None},
        {"batch_size": 3, "collate_fn": list},
        {"batch_sampler": [[0, 5], [1], [9, 8, 7, 6]]},
        {"batch_size": 2, "prefetch_factor": 5, "persistent_workers": True},
    ],
    ids=",".join,
)
def test_epochs_equal_torchs(arguments: dict[str, Any]) -> None:
    """In two epochs, values, types, order and the global generators' state afterwards are equal."""

    def play(build: Build) -> Any:
        loader = build(Mixed(23), num_workers=2, **arguments)
        return [list(loader) for _ in range(2)]

    assert len(assert_same(play)) == 2


@settings(max_examples=25 if LONG else 10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    length=st.integers(0, 40),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(1, 5),
    prefetch_factor=st.integers(1, 4),
    drop_last=st.booleans(),
    in_order=st.booleans(),
    taken=st.integers(0, 40),
)
def test_any_epoch_equals_torchs(
    length: int,
    batch_size: int,
    num_workers: int,
    prefetch_factor: int,
    drop_last: bool,
    in_order: bool,
    taken: int,
) -> None:
    """Epochs have any length and number of workers; the one before may have been left in the middle."""
    dataset = loading.Numbered(length)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(taken)).tolist()
    arguments: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "sampler": order}
    expected = list(TorchLoader(dataset, **arguments))
    with threads(
        dataset,
        **arguments,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        in_order=in_order,
        persistent_workers=True,
    ) as loader:
        for _, _ in zip(range(taken), loader, strict=False):
            pass
        batches = list(loader)
    if not in_order:
        batches, expected = (
            sorted(which, key=lambda batch: batch[:, 0].tolist()) for which in (batches, expected)
        )
    assert not differences(batches, expected)


def test_order_is_the_samplers_however_long_batches_take() -> None:
    """The first batch is the slowest."""
    with threads(loading.Sleeps(24, 0.2, at=0), batch_size=2, num_workers=3) as loader:
        assert torch.cat(list(loader))[:, 0].tolist() == list(range(24))


def test_batches_are_collated_into_slots() -> None:
    """A user's function that calls default_collate, or shmloader.empty, writes there too."""
    for collate_fn in (None, lambda samples: {"x": default_collate(samples)}, loading.into_empty):
        with threads(loading.Numbered(40), batch_size=4, num_workers=2, collate_fn=collate_fn) as loader:
            iterator = iter(loader)
            held = list(iterator)
            statistics = loader.statistics()
            del iterator
        assert statistics.slots_leased == len(held) == 10
        assert statistics.spills == statistics.detached == 0


def test_sources_that_give_whole_batches_equal_torchs() -> None:
    """Columns, parts of them, and a shared list, which are gathered with one call per leaf."""
    columns = TensorDataset(torch.arange(300).reshape(100, 3), torch.rand(100))
    rows = [{"x": index, "name": f"row {index}"} for index in range(100)]
    for dataset, same in ((columns, columns), (Subset(columns, range(90, 10, -2)),) * 2, (share(rows), rows)):
        loader = threads(dataset, batch_size=7, num_workers=3, persistent_workers=True)
        expected = list(TorchLoader(same, batch_size=7))  # type: ignore[arg-type]
        for _ in range(2):
            assert not differences(list(loader), expected)
        loader.close()


@pytest.mark.parametrize("arguments", [{"dispatch": "dynamic"}, {"prefetch_epochs": True}], ids=str)
def test_other_schedules_give_the_same_batches(arguments: dict[str, Any]) -> None:
    """Three epochs in the sampler's order, of batches that take unequally long."""
    with threads(
        loading.Sleeps(30, 0.1, at=4), batch_size=2, num_workers=3, persistent_workers=True, **arguments
    ) as loader:
        for _ in range(3):
            assert torch.cat(list(loader))[:, 0].tolist() == list(range(30))


# --- identity


def test_worker_info_is_each_threads_own() -> None:
    """It has id, seed and dataset; worker_init_fn has run; torch uses one core. The main thread has none."""

    def init(worker_id: int) -> None:
        get_worker_info().dataset.note = f"of {worker_id}"

    dataset, cores = Facts(), torch.get_num_threads()
    torch.manual_seed(3)
    loader = threads(dataset, batch_size=None, num_workers=2, worker_init_fn=init)
    iterator = iter(loader)
    base_seed = iterator._base_seed
    seen = []
    for facts in iterator:
        assert get_worker_info() is None
        assert torch.utils.data.get_worker_info() is None
        seen.append(facts)
    assert seen == [
        {
            "id": worker_id,
            "num_workers": 2,
            "seed": base_seed + worker_id,
            "method": "thread",
            "is_dataset": True,
            "note": f"of {worker_id}",
            "cores": 1,
            "thread": f"shmloader-worker-{worker_id}",
        }
        for worker_id in (0, 1) * 4
    ]
    assert dataset.note == "unset", "what a worker assigns to its dataset is its own"
    assert torch.get_num_threads() == cores
    in_new_thread: list[Any] = []
    thread = threading.Thread(
        target=lambda: in_new_thread.extend((torch.get_num_threads(), get_worker_info()))
    )
    thread.start()
    thread.join()
    assert in_new_thread == [cores, None]


def test_wrapped_datasets_are_each_workers_own_too() -> None:
    """A Subset's dataset may open its file when it is first asked, as for worker processes."""

    class Opens(Dataset[int]):
        opened_by: int | None = None

        def __getitem__(self, index: int) -> bool:
            if self.opened_by is None:
                self.opened_by = threading.get_ident()
            return self.opened_by == threading.get_ident()

    dataset = Opens()
    wrapped = Subset(dataset, range(12)) + Subset(dataset, range(12))
    with threads(wrapped, batch_size=None, num_workers=3) as loader:
        assert list(loader) == [True] * 24
    assert dataset.opened_by is None


def test_a_dataset_that_cannot_be_copied_says_what_to_do() -> None:
    """The error comes before any thread is left."""

    class Single(loading.Numbered):
        def __reduce__(self) -> Any:
            raise TypeError("there is one of these")

    with pytest.raises(TypeError, match="there is one") as caught:
        iter(threads(Single(8), num_workers=2))
    assert "__copy__ that returns self" in caught.value.__notes__[0]
    Single.__copy__ = lambda self: self  # type: ignore[attr-defined]
    with threads(Single(8), num_workers=2, batch_size=8) as loader:
        assert next(iter(loader))[:, 0].tolist() == list(range(8))


# --- random numbers


def test_own_generators_draw_what_torchs_worker_processes_draw() -> None:
    """Two epochs with shuffling: the same numbers, and the same state of the global generators after."""

    def play(build: Build) -> Any:
        dataset = OwnDraws(20) if build is threads else GlobalDraws(20)
        loader = build(dataset, batch_size=3, num_workers=3, shuffle=True)
        return [list(loader) for _ in range(2)]

    assert_same(play)


def test_own_generators_are_the_same_in_processes_and_threads() -> None:
    """One dataset for both, NumPy's generator included; each worker draws other numbers."""

    def draws(worker_type: str) -> Any:
        torch.manual_seed(5)
        with DataLoader(AllOwnDraws(12), batch_size=2, num_workers=2, worker_type=worker_type) as loader:
            return list(loader)

    in_threads = draws("thread")
    assert not differences(in_threads, draws("process"))
    assert not torch.equal(in_threads[0]["numpy"], in_threads[1]["numpy"])


def test_the_programs_generators_are_not_touched() -> None:
    """Threads start, draw, and are seeded for each sample meanwhile."""

    def states() -> Any:
        return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()

    for dispatch in ("static", "dynamic"):
        loader = threads(AllOwnDraws(9), num_workers=2, generator=torch.Generator(), dispatch=dispatch)
        before = states()
        assert len(list(loader)) == 9
        assert not differences(states(), before)


# --- iterable-style datasets


def test_streams_are_sharded_by_worker_info() -> None:
    """Batches are those of torch's worker processes, to the last one."""
    for dataset, init in ((Sharded(20), None), (SetPart(20), set_part)):

        def play(build: Build, dataset: Any = dataset, init: Any = init) -> Any:
            loader = build(dataset, batch_size=3, num_workers=3, worker_init_fn=init)
            return [list(loader) for _ in range(2)]

        assert_same(play)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_with_its_position_in_attributes_is_each_workers_own(persistent: bool) -> None:
    """The stream of a persistent worker goes on from epoch to epoch."""

    def play(build: Build) -> Any:
        loader = build(Counting(7), batch_size=2, num_workers=2, persistent_workers=persistent)
        return [list(loader) for _ in range(3)]

    assert_same(play)


# --- at the same time


def test_workers_run_at_the_same_time() -> None:
    """Three samples wait for one another."""
    with threads(Meeting(12, 3), batch_size=1, num_workers=3) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(12))


def test_samples_without_the_interpreter_lock_overlap() -> None:
    """Sleeping and decompressing are tried."""
    for dataset in (Timed(24), Compressed(24)):
        for _ in range(20):
            with threads(dataset, batch_size=2, num_workers=2) as loader:
                assert len(list(loader)) == 12
            if dataset.overlaps():
                break
        assert dataset.overlaps(), type(dataset).__name__
        assert len({ident for _, _, ident in dataset.intervals}) > 1


def test_files_are_read_at_the_same_time(tmp_path: Path) -> None:
    """Each is a named pipe: opening it to write waits until it is opened to read."""
    paths = [tmp_path / str(index) for index in range(2)]
    for path in paths:
        os.mkfifo(path)
    with threads(Pipes(paths), batch_size=None, num_workers=2) as loader:
        iterator = iter(loader)
        files = [path.open("wb") for path in paths]
        for file in files:
            file.write(os.fsencode(file.name))
            file.close()
        assert list(iterator) == [bytes(path) for path in paths]
