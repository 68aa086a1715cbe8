"""Looking at datasets inside the program: names, sizes, and what is left alone. In this process."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

import shmloader
from shmloader.monitor import inside
from shmloader.monitor.inside import Report, listen

FORK = multiprocessing.get_context("fork")


def rows(count: int = 20_000) -> list[dict[str, Any]]:
    return [{"path": f"folder/image-{number}.jpeg", "label": number + 1000} for number in range(count)]


class Samples(torch.utils.data.Dataset[int]):
    def __init__(self, samples: Any, **more: Any) -> None:
        self.samples = samples
        vars(self).update(more)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def reports() -> Iterator[list[Report]]:
    found: list[Report] = []
    stop = listen(found.append)
    yield found
    stop()


def loader_of(dataset: Any, method: str = "fork", **arguments: Any) -> Any:
    return TorchLoader(dataset, num_workers=1, multiprocessing_context=method, **arguments)


def test_a_local_variable_is_the_name(reports: list[Report]) -> None:
    train = Samples(rows())
    list(loader_of(train))
    assert reports[0].owner == "train.samples"


def test_listeners_that_end_in_any_order_leave_nothing_behind() -> None:
    before, found = TorchLoader.__iter__, list[Report]()
    stop = listen(found.append)
    for _ in range(3):
        stop_last, stop = stop, listen(found.append)
        list(loader_of(Samples([])))
        stop_last()
    stop()
    assert TorchLoader.__iter__ is before
    assert len(found) == 6, "each listener is told once"


def test_what_locals_gave_the_program_stays(reports: list[Report]) -> None:
    train = Samples(rows())
    config = locals()
    list(loader_of(train))
    assert config["train"] is train
    assert reports[0].owner == "train.samples"


def test_an_attribute_of_self_is_the_name(reports: list[Report]) -> None:
    class Module:
        def __init__(self) -> None:
            self.validation = Samples(rows())

        def epoch(self) -> None:
            list(loader_of(self.validation))

    Module().epoch()
    assert reports[0].owner == "self.validation.samples"


def test_without_a_name_it_is_the_loaders_dataset(reports: list[Report]) -> None:
    batches = loader_of(Samples(rows()))
    list(batches)
    assert reports[0].owner == "batches.dataset.samples"


def test_what_a_dataset_without_a_name_was_given_has_the_name_of_its_own_variable(
    reports: list[Report],
) -> None:
    samples = rows()
    batches = loader_of(Samples(samples))
    list(batches)
    assert (reports[0].dataset, reports[0].owner) == ("batches.dataset", "samples")


def test_a_plain_list_is_its_own_owner(reports: list[Report]) -> None:
    data = rows()
    list(loader_of(data, sampler=range(4), collate_fn=len))
    assert reports[0].owner == "data"


def test_variables_of_the_program_die_as_ever(reports: list[Report]) -> None:
    train, kept = Samples(rows()), Samples([])
    list(loader_of(train))
    died = weakref.ref(kept)
    del kept
    assert died() is None  # a snapshot of the variables would hold it until this function returns
    assert reports


def test_an_iterator_ends_when_the_program_drops_it(reports: list[Report]) -> None:
    train = Samples(rows())
    gc.collect()
    gc.disable()
    try:
        batches = iter(loader_of(train))
        died = weakref.ref(batches)
        del batches
        assert died() is None  # and with it its workers
    finally:
        gc.enable()
    assert reports


def test_nothing_is_remembered_of_loaders_that_have_ended(reports: list[Report]) -> None:
    gc.collect()
    before = len(inside._seen)
    loaders = [TorchLoader([1, 2]) for _ in range(20)]
    for loader in loaders:
        list(loader)
    assert len(inside._seen) == before + 20 == before + len(reports)
    del loader, loaders
    gc.collect()
    assert len(inside._seen) <= before


def test_a_store_is_no_owner(reports: list[Report]) -> None:
    train = Samples(shmloader.share(rows()))
    list(loader_of(train))
    assert reports[0].nbytes < 100_000


@pytest.mark.parametrize("in_place", [False, True])
def test_a_list_that_was_shared_and_is_still_held_is_named(reports: list[Report], in_place: bool) -> None:
    samples = rows()
    if in_place:
        train: Any = Samples(samples)
        shmloader.DataLoader(train, share_dataset=True)
    else:
        train = Samples(shmloader.share(samples))
    list(loader_of(train))
    assert reports[-1].original == "samples"
    assert reports[-1].original_nbytes > 1_000_000
    del samples
    others = rows()  # which may lie at the same place
    list(loader_of(train))
    assert (reports[-1].original, len(others)) == ("", 20_000)


def test_spawned_workers_copy_arrays_and_no_tensors(reports: list[Report]) -> None:
    train = Samples(None, boxes=np.zeros(1 << 20), images=torch.zeros(1 << 22))
    list(loader_of(train, "spawn"))
    assert [report.owner for report in reports] == ["train.boxes", "train.boxes"]
    assert reports[0].nbytes == pytest.approx(8 << 20, rel=0.01)
    assert [len(report.workers) for report in reports] == [0, 1]  # before they are sent it, and after


def test_forked_workers_copy_no_arrays(reports: list[Report]) -> None:
    train = Samples(rows(), boxes=np.zeros(1 << 22))
    list(loader_of(train))
    assert reports[0].owner == "train.samples"


def test_a_dataset_that_cannot_be_looked_at_is_said(
    reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr("shmloader.monitor.inside.Graph", fail)
    assert len(list(loader_of(Samples(rows())))) == 4
    assert reports[0].error == "RecursionError('too deep')"


def test_threads_are_no_processes_that_copy(reports: list[Report]) -> None:
    list(shmloader.DataLoader(Samples(rows()), num_workers=1, worker_type="thread"))  # type: ignore[arg-type]
    assert (reports[0].start_method, reports[0].workers) == ("", ())


class Equal(TorchLoader[Any]):
    """Has no hash, as a dataclass has none."""

    __hash__: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


def test_loaders_that_are_equal_are_looked_at_one_by_one(reports: list[Report]) -> None:
    train, validation = Samples(rows()), Samples(rows())
    loaders = [
        Equal(dataset, num_workers=1, multiprocessing_context="fork") for dataset in (train, validation)
    ]
    for loader in loaders:
        list(loader)
    assert [report.owner for report in reports] == ["train.samples", "validation.samples"]
    known = len(inside._seen)
    del loader, loaders
    gc.collect()
    assert len(inside._seen) == known - 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_is_owned_is_the_same_in_loaders_made_anew_and_another_in_each_dataset(
    reports: list[Report], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_epoch(loader: Any) -> None:
        iter(loader)

    if method == "spawn":  # its workers are not needed
        monkeypatch.setattr(TorchLoader, "_get_iterator", lambda loader: iter(()))
    datasets = [Samples(rows()), Samples(rows())]
    loaders = [loader_of(dataset, method) for dataset in datasets * 2]
    for each in loaders:
        run_epoch(each)
    owned = list(dict.fromkeys((report.loader, report.owned) for report in reports))
    assert [owner for _, owner in owned] == [id(dataset.samples) for dataset in datasets] * 2


def test_a_dataset_that_cannot_be_looked_at_is_known_by_itself(
    reports: list[Report], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmloader.monitor.inside.Graph", None)
    train = Samples([])
    list(loader_of(train))
    assert reports[0].error
    assert reports[0].owned == id(train)


def test_after_stop_nothing_is_reported() -> None:
    before = vars(TorchLoader)["__iter__"]
    found: list[Report] = []
    listen(found.append)()
    assert vars(TorchLoader)["__iter__"] is before
    list(TorchLoader(Samples(rows())))
    assert found == []
    gc.collect()
