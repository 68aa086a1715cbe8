"""Loaders with real workers, whose accelerator is a scripted driver: batches pinned, and on a device."""

import gc
import itertools
import multiprocessing
import os
import random
import subprocess
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scripted_driver import ScriptedDriver, claim_an_accelerator
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from warm_python import warm_python

from shmloader import DataLoader, empty, errors, torch_private
from shmloader.device import DeviceBatches, guard, pinned
from shmloader.device.driver import DriverError, open_driver
from shmloader.errors import LoaderError
from shmloader.exchange import delivery
from shmloader.slots import Guard, PlaceState, PlaceTable

BATCHES = 30


class Samples(Dataset):
    """Images full of their index, a label, a name."""

    def __init__(self, length: int = 4 * BATCHES, raises: int = -1) -> None:
        self.length = length
        self.raises = raises

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict:
        if index == self.raises:
            raise LookupError(f"sample {index}")
        return {
            "image": torch.full((1000,), index % 200, dtype=torch.uint8),
            "label": index,
            "name": str(index),
        }


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.full((100,), index) for index in range(40)])


class Pair(NamedTuple):
    first: torch.Tensor
    second: list


def pairs(samples: list) -> Pair:
    images = torch.stack([sample["image"] for sample in samples])
    return Pair(images, [np.arange(3), "x"])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """An accelerator, as far as torch's loader and ours can see."""
    pinned._registered.clear()
    scripted = ScriptedDriver(devices=2)
    scripted.pins, scripted.moves = [], []

    def pin(batch, device=None):
        scripted.pins.append(type(batch))
        return batch

    def move(batch, device):
        scripted.moves.append(device)
        return batch

    claim_an_accelerator(monkeypatch)
    monkeypatch.setattr(delivery, "open_driver", lambda: scripted)
    monkeypatch.setattr(torch_private, "pin_memory", pin)
    monkeypatch.setattr(delivery, "to_device", move)
    yield scripted
    scripted.drain()
    assert scripted.violations == []
    assert scripted.registered == {}
    assert pinned.pinned_nbytes() == 0


def test_a_driver_that_cannot_record_events_is_not_relied_on(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise DriverError("cuCtxRecordEvent failed", 801)

    monkeypatch.setattr(driver, "record_all", fail)
    monkeypatch.setattr(errors, "_said", set())
    with DataLoader(torch.arange(8), batch_size=2, num_workers=1, pin_memory=True) as loader:
        with pytest.warns(RuntimeWarning, match="no event can be recorded on device 0 .cuCtxRecordEvent"):
            batches = list(loader)
        assert torch.cat(batches).tolist() == list(range(8))
        assert loader.statistics().pin_copies == 4


def _some(driver: ScriptedDriver, chance: random.Random) -> None:
    """Let the device do some of its work."""
    for _ in range(chance.randrange(6)):
        ready = [number for number in driver.streams if driver.can_advance(number)]
        if ready:
            driver.advance(chance.choice(ready))


def _label(driver: ScriptedDriver, batch: dict) -> int:
    """The first label, once the device has done its work."""
    driver.drain()
    return int(batch["label"][0])


def _with_the_third_batch_ahead(loader: DataLoader):
    """An iterator of one worker that has returned two batches, and has begun to copy the next."""
    iterator = iter(loader)
    next(iterator)
    while 2 not in iterator._exchange.table.arrived:
        iterator._exchange.look_at(0)
    next(iterator)
    return iterator


def _train(driver: ScriptedDriver, loader: DataLoader, first: int = 0) -> int:
    """Play a program that queues reads of its batches and drops them; returns the number of batches."""
    chance = random.Random(0)
    side = driver.new_stream()
    count = first
    for batch in loader:
        images = batch["image"] if isinstance(batch, dict) else batch
        for row, image in enumerate(images):
            number = (count * len(images) + row) % 200
            if loader.device is None:
                driver.read_late(side, image.data_ptr(), image.nbytes, number)
            else:
                driver.launch(driver.current[0], _reader(driver, image.data_ptr(), image.nbytes, number))
        count += 1
        del batch, images, image
        _some(driver, chance)
    driver.drain()
    return count


def _reader(driver: ScriptedDriver, address: int, nbytes: int, number: int):
    reads = SimpleNamespace(streams={0: driver.streams[0]}, violations=driver.violations)

    def read() -> None:
        import ctypes

        found = set(ctypes.string_at(address, nbytes))
        if found != {number}:
            reads.violations.append(f"a kernel read {sorted(found)[:3]} instead of {number}")

    return read


@pytest.mark.parametrize("device", [None, "cuda"])
def test_late_reads_of_an_epoch(driver: ScriptedDriver, start_method: str, device: str | None) -> None:
    with DataLoader(
        Samples(),
        batch_size=4,
        num_workers=2,
        pin_memory=device is None,
        device=device,
        multiprocessing_context=start_method,
        persistent_workers=True,
    ) as loader:
        for _ in range(2):
            assert _train(driver, loader) == BATCHES
        assert driver.registered
        statistics = loader.statistics()
        assert (statistics.pin_copies, statistics.spills, driver.pins, driver.moves) == (0, 0, [], [])
        assert len(driver.copied) == (0 if device is None else 2 * BATCHES)


def named(samples: list) -> dict:
    return {"image": torch.stack([sample["image"] for sample in samples]), "n": [len(samples), ("x", None)]}


def written_in_place(samples: list) -> torch.Tensor:
    return torch.stack(
        [sample["image"] for sample in samples], out=empty((len(samples), 1000), dtype=torch.uint8)
    )


def channels_last(samples: list) -> tuple:
    images = torch.stack([sample["image"].reshape(10, 10, 10) for sample in samples])
    return torch.tensor([sample["label"] for sample in samples]), images.to(memory_format=torch.channels_last)


def twice(samples: list) -> list:
    labels = torch.tensor([sample["label"] for sample in samples])
    return [labels, labels, labels.numpy()]


@pytest.mark.parametrize("collate", [named, written_in_place, channels_last, twice])
def test_batches_of_the_programs_own_collate_fn_are_copied_ahead(driver: ScriptedDriver, collate) -> None:
    """Their tensors lie in slots by another way than those of torch's default_collate."""
    options = {"batch_size": 4, "num_workers": 2, "collate_fn": collate}
    expected = list(DataLoader(Samples(), **options))
    with DataLoader(Samples(), device="cuda", **options) as loader:
        found = list(loader)
        driver.drain()
    assert (driver.moves, len(driver.copied) >= BATCHES) == ([], True)
    assert str(found) == str(expected)
    if collate is channels_last:
        assert found[0][1].is_contiguous(memory_format=torch.channels_last)
    if collate is twice:
        assert found[0][0] is found[0][1]


def test_single_samples_are_copied_ahead(driver: ScriptedDriver) -> None:
    with DataLoader(Samples(), batch_size=None, num_workers=2, device="cuda") as loader:
        for index, sample in enumerate(loader):
            driver.drain()
            assert (int(sample["image"][0]), sample["label"]) == (index % 200, index)
    assert (index, driver.moves) == (4 * BATCHES - 1, [])


def test_without_the_guard_batches_are_corrupted(driver: ScriptedDriver) -> None:
    """This proves that the test above can fail."""
    driver.all_is_late = True
    with DataLoader(Samples(), batch_size=4, num_workers=2, pin_memory=True) as loader:
        iterator = iter(loader)
        iterator.table.guard_with(Guard())
        side = driver.new_stream()
        for count, batch in enumerate(iterator):
            image = batch["image"][0]
            driver.read_late(side, image.data_ptr(), 1000, count * 4 % 200)
            del batch, image
            while len(driver.streams[side].queue) > 8:  # it is eight batches behind
                driver.advance(side)
    assert driver.violations
    driver.violations.clear()
    driver.streams[side].queue.clear()


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_are_the_same(driver: ScriptedDriver, in_order: bool) -> None:
    expected = list(DataLoader(Samples(), batch_size=4, num_workers=2))
    with DataLoader(Samples(), batch_size=4, num_workers=2, device="cuda:0", in_order=in_order) as loader:
        found = list(loader)
        driver.drain()
    found.sort(key=lambda batch: int(batch["label"][0]))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one["name"] == other["name"]
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["label"], other["label"])


def test_the_next_batch_is_copied_before_it_is_asked_for(driver: ScriptedDriver) -> None:
    with DataLoader(Samples(), batch_size=4, num_workers=1, prefetch_factor=4, device="cuda") as loader:
        _with_the_third_batch_ahead(loader)
        assert len(driver.copied) == 3


def test_a_break_and_another_epoch(driver: ScriptedDriver) -> None:
    with DataLoader(Samples(), batch_size=4, num_workers=2, device="cuda", persistent_workers=True) as loader:
        for stop in (1, 5, 0, 2):
            for count, _ in enumerate(loader):
                if count == stop:
                    break
        assert _train(driver, loader) == BATCHES


def test_states_count_what_the_program_has(driver: ScriptedDriver) -> None:
    """Batches on their way to the program do not count."""
    with DataLoader(Samples(), batch_size=4, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        state = loader.state_dict()
        assert state["batches"] == 7
    with DataLoader(Samples(), batch_size=4, num_workers=1, device="cuda") as loader:
        loader.load_state_dict(state)
        assert _train(driver, loader, 7) == BATCHES


def test_exceptions_come_in_their_place(driver: ScriptedDriver) -> None:
    with DataLoader(Samples(raises=21), batch_size=4, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        labels = [_label(driver, next(iterator)) for _ in range(5)]
        with pytest.raises(LookupError, match="sample 21"):
            next(iterator)
        labels += [_label(driver, batch) for batch in iterator]
    assert labels == [first for first in range(0, 4 * BATCHES, 4) if first != 20]


def test_bad_samples_and_streams(driver: ScriptedDriver) -> None:
    with (
        DataLoader(Samples(raises=21), batch_size=4, num_workers=2, device="cuda", on_error="skip") as loader,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        assert sum(len(batch["label"]) for batch in loader) == 4 * BATCHES - 1
        assert loader.statistics().bad_samples == 1
    with DataLoader(Stream(), batch_size=4, num_workers=2, device="cuda") as loader:
        batches = list(loader)
        driver.drain()
        assert sorted(int(batch[0, 0]) for batch in batches) == sorted(2 * list(range(0, 40, 4)))


class OneLong(IterableDataset):
    """One sample in worker 0, five in worker 1."""

    def __iter__(self):
        worker = get_worker_info().id
        return iter([torch.full((100,), 10 * worker + number) for number in range(1 + 4 * worker)])


@pytest.mark.parametrize("most_tasks", [1, 2])
def test_a_stream_that_ends_while_the_next_batch_is_looked_at_ends_no_other(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, most_tasks: int
) -> None:
    """Where memory is short, its task may be the only one that is out. Its place is free then."""
    with DataLoader(OneLong(), batch_size=None, num_workers=2, device="cuda", prefetch_factor=1) as loader:
        iterator = iter(loader)
        table, look_at = iterator.table, iterator._exchange.look_at

        def look_until_something_is_here(worker_id: int) -> None:
            due = table.due()
            while table.due() is due and due.state is PlaceState.MAKING:
                look_at(worker_id)

        def take(place: Any, **options: Any) -> Any:
            taken.append(place.state)
            return PlaceTable.take(table, place, **options)

        taken: list[PlaceState] = []
        monkeypatch.setattr(iterator._exchange, "look_at", look_until_something_is_here)
        monkeypatch.setattr(table, "take", take)
        monkeypatch.setattr(table.budget, "most_tasks", most_tasks)
        batches = list(iterator)
        driver.drain()
        assert set(taken) == {PlaceState.ARRIVED}
        assert [int(batch[0]) for batch in batches] == [0, 10, 11, 12, 13, 14]


def test_a_closed_loader_keeps_no_slot_for_the_next_batch(driver: ScriptedDriver) -> None:
    with DataLoader(Samples(), batch_size=4, num_workers=1, device="cuda", prefetch_factor=4) as loader:
        iterator = _with_the_third_batch_ahead(loader)
        assert iterator._delivery._taken
    driver.drain()
    assert driver.registered == {}
    del iterator


@pytest.mark.parametrize("arguments", [{"device": "cuda"}, {"pin_memory": True}], ids=str)
def test_a_loader_that_its_dataset_leads_to_is_freed(driver: ScriptedDriver, arguments: dict) -> None:
    samples = Samples()
    loader = DataLoader(samples, batch_size=4, num_workers=1, **arguments)
    samples.iterator = iter(loader)
    next(samples.iterator)
    alive = weakref.ref(samples)
    del samples, loader
    gc.collect()
    assert alive() is None  # and with the driver's work done nothing is page-locked: see `driver`


def test_the_batch_in_hand_does_not_wait_for_the_next_ones_slot(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []
    begin_next = delivery.Delivery._begin_next

    def while_all_slots_are_guarded(self, batches: DeviceBatches) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(PlaceTable, "can_lease", lambda table, *, waits=True: waited.append(waits))
            begin_next(self, batches)

    monkeypatch.setattr(delivery.Delivery, "_begin_next", while_all_slots_are_guarded)
    with DataLoader(Samples(), batch_size=4, num_workers=1, device="cuda") as loader:
        assert _train(driver, loader) == BATCHES
    assert waited
    assert not any(waited)


def test_an_error_while_the_next_batch_is_looked_at_does_not_cost_the_batch_in_hand(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's work has failed, perhaps: the program's next call of torch raises it."""
    begin_next = delivery.Delivery._begin_next

    def fail(*_: object) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def with_an_error(self, batches: DeviceBatches) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(driver, "is_capturing", fail)
            begin_next(self, batches)

    monkeypatch.setattr(delivery.Delivery, "_begin_next", with_an_error)
    with DataLoader(Samples(), batch_size=4, num_workers=1, device="cuda") as loader:
        assert _train(driver, loader) == BATCHES


def test_without_workers_the_device_is_the_one_at_the_beginning(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmloader.device.to_device", delivery.to_device)
    iterator = iter(DataLoader(Samples(), batch_size=4, device="cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    next(iterator)
    assert driver.moves == [torch.device("cuda", 0)]


def test_held_batches_do_not_change(driver: ScriptedDriver) -> None:
    with DataLoader(Samples(), batch_size=4, num_workers=2, device="cuda", batch_sampler=None) as loader:
        kept = list(itertools.islice(loader, 20))
    driver.drain()
    for count, batch in enumerate(kept):
        assert batch["image"][:, 0].tolist() == [(4 * count + row) % 200 for row in range(4)]


def test_two_loaders_and_two_devices(driver: ScriptedDriver) -> None:
    options = {"batch_size": 4, "num_workers": 1}
    with DataLoader(Samples(), device="cuda:0", **options) as one:
        with DataLoader(Samples(), device="cuda:1", **options) as two:
            for count, (first, second) in enumerate(zip(one, two, strict=True)):
                if count % 5 == 0:
                    driver.drain()
                    assert torch.equal(first["image"], second["image"])
        devices = {stream.device for number, stream in driver.streams.items() if number >= 100}
    assert devices == {0, 1}


def test_another_stream_than_at_the_copy(driver: ScriptedDriver) -> None:
    """The caching allocator is told, since the memory belongs to the first stream."""
    with DataLoader(Samples(), batch_size=4, num_workers=1, device="cuda", prefetch_factor=4) as loader:
        iterator = _with_the_third_batch_ahead(loader)
        driver.current[0] = driver.new_stream()
        assert not hasattr(driver, "_kept")
        next(iterator)
        assert driver._kept


def test_inside_a_capture(driver: ScriptedDriver) -> None:
    with DataLoader(Samples(), batch_size=4, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        next(iterator)
        driver.captured.add(0)
        with pytest.raises(LoaderError, match="Take the batch before the capture begins"):
            next(iterator)
        driver.captured.clear()
        assert _label(driver, next(iterator)) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_inside_a_capture_without_page_locked_slots(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """With an older driver, and without workers, copies and pinning would become a part of the graph."""
    captures = []
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(delivery, "open_driver", lambda: "the driver is too old")
    monkeypatch.setattr("shmloader.device.to_device", delivery.to_device)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(captures))
    monkeypatch.setattr(delivery, "warn_once", lambda text: None)
    for option in ({"device": "cuda"}, {"pin_memory": True}):
        with DataLoader(Samples(), batch_size=4, num_workers=workers, **option) as loader:
            iterator = iter(loader)
            next(iterator)
            pins = len(driver.pins)
            captures.append(1)
            if "device" in option:
                with pytest.raises(LoaderError, match="Take the batch before the capture begins"):
                    next(iterator)
                captures.clear()
            assert next(iterator)["label"].tolist() == [4, 5, 6, 7]
            assert len(driver.pins) == pins + ("device" in option)
            captures.clear()


def test_pinned_batches_inside_a_capture_are_copies(driver: ScriptedDriver) -> None:
    with DataLoader(Samples(), batch_size=4, num_workers=2, pin_memory=True) as loader:
        iterator = iter(loader)
        next(iterator)
        driver.captured.add(0)
        batch = next(iterator)
        assert (len(driver.pins), loader.statistics().spills) == (0, 1)
        driver.captured.clear()
        next(iterator)
        assert len(driver.pins) == 0
        assert batch["label"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("device", [None, "cuda"])
def test_nothing_is_pinned_while_another_thread_captures(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    """To pin would ask events and allocate, which ends a capture in the mode "global"."""
    monkeypatch.setattr(guard, "MOST_WAIT_S", 0.0)
    options = {"batch_size": 4, "num_workers": 1, "device": device, "pin_memory": device is None}
    with DataLoader(Samples(), memory_budget_nbytes=40_000, collate_fn=pairs, **options) as loader:
        iterator = iter(loader)
        next(iterator)
        driver.pins.clear()
        driver.captured.add(driver.new_stream())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            labels = [int(batch.first[0, 0]) for batch in iterator]
        assert loader.statistics().spills > 0
        assert driver.pins == []
        driver.captured.clear()
    pinned.release_postponed()
    assert labels == list(range(4, 4 * BATCHES, 4))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ValueError])
def test_a_copy_that_fails_ahead_fails_in_its_place(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    allocate, calls = driver.allocate, itertools.count()

    def refuse(shape: tuple[int, ...], dtype: torch.dtype, device: int) -> torch.Tensor:
        if next(calls) in {3, 4, 5}:
            raise kind("no memory on the device")
        return allocate(shape, dtype, device)

    monkeypatch.setattr(driver, "allocate", refuse)
    with DataLoader(Samples(), batch_size=4, num_workers=1, device="cuda", prefetch_factor=4) as loader:
        iterator, labels = iter(loader), []
        while True:
            try:
                labels.append(_label(driver, next(iterator)))
            except kind:
                labels.append(-1)
            except StopIteration:
                break
    assert len(labels) == BATCHES
    assert -1 in labels
    assert all(label in {4 * place, -1} for place, label in enumerate(labels))


def test_classes_of_the_programs_own(driver: ScriptedDriver) -> None:
    options = {"batch_size": 4, "num_workers": 1, "collate_fn": pairs}
    with DataLoader(Samples(), device="cuda", **options) as loader:
        for batch in loader:
            assert type(batch) is Pair
            driver.read_late(0, batch.first.data_ptr(), 1, int(batch.first[0, 0]))
            del batch
        assert driver.moves == [torch.device("cuda", 0)] * BATCHES
        assert driver.pins == []
        driver.drain()
    with DataLoader(Samples(), pin_memory=True, **options) as loader:
        assert sum(1 for _ in loader) == BATCHES
        assert len(driver.pins) == BATCHES  # torch's function: it calls methods pin_memory
        assert loader.statistics().pin_copies == 0


def test_empty_batches(driver: ScriptedDriver) -> None:
    data = [torch.zeros(0)] * 6
    for options in ({"device": "cuda"}, {"pin_memory": True}):
        with DataLoader(data, batch_size=2, num_workers=1, **options) as loader:
            assert [batch.shape for batch in loader] == [(2, 0)] * 3
            driver.drain()


@pytest.mark.parametrize("device", [None, "cuda"])
def test_cuda_is_initialised_after_workers_are_forked(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    workers = []

    def initialise(answer):
        def note():
            workers.append(len(multiprocessing.active_children()))
            return answer

        return note

    monkeypatch.setattr(delivery, "open_driver", initialise(driver))
    monkeypatch.setattr(torch.accelerator, "current_device_index", initialise(0))
    options = {"pin_memory": True, "device": device, "multiprocessing_context": "fork"}
    with DataLoader(Samples(), num_workers=2, **options) as loader:
        iter(loader)
    assert workers == [2] * (1 if device is None else 2)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_where_slots_cannot_be_locked(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    """One warning gives the reason; batches are copied to torch's pinned memory, and then to the device."""
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(delivery, "open_driver", lambda: "the driver is too old")
    with DataLoader(Samples(), batch_size=4, num_workers=2, pin_memory=True, device=device) as loader:
        with pytest.warns(RuntimeWarning, match="not page-locked: the driver is too old. Batches are copied"):
            iterator = iter(loader)
        assert sum(1 for _ in iterator) == BATCHES
        assert loader.statistics().pin_copies == len(driver.pins) == BATCHES
        assert len(driver.moves) == (0 if device is None else BATCHES)
        assert sum(1 for _ in loader) == BATCHES  # no second warning


def test_batches_in_ordinary_memory_are_pinned_before_they_go_to_the_device(
    driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning says so; the driver would wait for all queued work before it copied ordinary memory."""
    driver.refuse = 10**9
    monkeypatch.setattr(pinned, "_told", set())
    with DataLoader(Samples(), batch_size=4, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        first = next(iterator)
        with pytest.warns(RuntimeWarning, match="copied once more, to torch's pinned memory"):
            batches = [first, *iterator]
        assert [int(batch["label"][0]) for batch in batches] == list(range(0, 4 * BATCHES, 4))
        assert loader.statistics().pin_copies == len(driver.pins) == len(driver.moves) == BATCHES
    assert driver.copied == []


def test_torch_without_cuda_says_so() -> None:
    open_driver.cache_clear()
    if torch.version.cuda is None:
        assert "locked for CUDA only" in open_driver()
    open_driver.cache_clear()


def test_without_workers(driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmloader.device.to_device", delivery.to_device)
    loader = DataLoader(Samples(), batch_size=4, device="cuda")
    assert sum(1 for _ in loader) == BATCHES
    assert (len(driver.pins), len(driver.moves)) == (BATCHES, BATCHES)


def test_where_torchs_own_iterator_loads(driver: ScriptedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmloader.device.to_device", delivery.to_device)
    monkeypatch.setattr("shmloader.loading._must_load_as_torch", lambda loader: True)
    loader = DataLoader(Samples(), batch_size=4, device="cuda:1")
    assert sum(1 for _ in loader) == BATCHES
    assert driver.moves == [torch.device("cuda", 1)] * BATCHES


def test_devices_that_are_none() -> None:
    with pytest.raises(ValueError, match="device='nothing' is not a device"):
        DataLoader(Samples(), device="nothing")
    if not torch.accelerator.is_available():
        for workers in (0, 1):
            with pytest.raises(RuntimeError, match="device='cuda' is not available: no accelerator"):
                iter(DataLoader(Samples(), num_workers=workers, device="cuda"))


ENDS_WITH_A_BATCH = """
import sys
import pytest, torch
from scripted_driver import ScriptedDriver, claim_an_accelerator
from shmloader import DataLoader
from shmloader.exchange import delivery
patch = pytest.MonkeyPatch()
claim_an_accelerator(patch)
patch.setattr(delivery, "open_driver", lambda driver=ScriptedDriver(): driver)
given = {"device": "cuda"} if "device" in sys.argv else {"pin_memory": True}
loader = DataLoader(torch.arange(8), batch_size=2, num_workers=1, **given)
for batch in loader:
    break
"""


@pytest.mark.parametrize("option", ["pin_memory", "device"])
def test_a_program_that_still_has_a_batch_ends_without_a_word(option: str) -> None:
    command = [*warm_python(), "-c", ENDS_WITH_A_BATCH, option]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_device_with_a_number_that_is_too_high(driver: ScriptedDriver) -> None:
    for workers in (0, 1):
        with pytest.raises(RuntimeError, match="device='cuda:2' is not available: torch finds 2 device"):
            iter(DataLoader(Samples(), num_workers=workers, device="cuda:2"))


def test_a_forked_process_opens_the_driver_itself() -> None:
    """There torch says that CUDA cannot be used, and the parent's driver must not be."""
    open_driver.cache_clear()
    open_driver()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        os._exit(open_driver.cache_info().currsize)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert open_driver.cache_info().currsize == 1
    open_driver.cache_clear()


PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
from shmloader import DataLoader
for options in ({"pin_memory": True}, {"device": "cpu"}, {}):
    with DataLoader(list(range(8)), num_workers=1, **options) as loader:
        assert sum(map(int, loader)) == 28
print([name for name in sys.modules if name.startswith("shmloader.device")])
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, so it is used")
def test_without_an_accelerator_nothing_is_imported_in_a_fresh_interpreter() -> None:
    done = subprocess.run([*warm_python(), "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
