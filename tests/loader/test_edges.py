"""Edge cases in which batches were once lost, copied needlessly or never came."""

import os
import resource
import signal
import time
import warnings
import weakref

import psutil
import pytest
import torch
from loading import Growing, HeldAt, Numbered
from torch.utils.data import default_collate
from when_waiting import when_waiting

import shmloader
from shmloader import DataLoader


def test_long_index_batches_survive_the_growth_of_their_slot() -> None:
    loader = DataLoader(Numbered(2560, items=100), batch_size=128, num_workers=2)
    assert [int(batch[0, 0]) for batch in loader] == list(range(0, 2560, 128))


def test_an_interrupted_start_of_an_epoch_does_not_hang_the_next() -> None:
    dataset = HeldAt(200, at=4)
    loader = DataLoader(dataset, batch_size=1, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    assert dataset.inside.wait(60)
    interrupting = when_waiting(iterator, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        iter(loader)  # waits for the worker that is held
    interrupting.join()
    dataset.released.set()
    time.sleep(0.5)  # its answer comes before the next epoch
    assert [int(sample[0, 0]) for sample in loader] == list(range(200))
    loader.close()


def test_parts_are_asked_for_although_the_pipe_is_full_of_tasks() -> None:
    loader = DataLoader(
        Numbered(900, items=4096),
        num_workers=1,
        prefetch_factor=300,
        memory_budget_nbytes=1 << 20,
        timeout=30,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shmloader.SpillWarning)
        assert [int(sample[0, 0]) for sample in loader] == list(range(900))
    assert loader.statistics().spills > 0


def test_batches_that_fit_the_budget_spill_once_at_most() -> None:
    loader = DataLoader(
        Growing([1 << 18] * 30), batch_size=None, num_workers=2, memory_budget_nbytes=24 << 20
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shmloader.SpillWarning)
        for index, sample in enumerate(loader):
            assert bool((sample == index).all())
    assert loader.statistics().spills <= 4  # those that were outstanding when the size became known


def test_index_batches_of_tensors_do_not_carry_the_storage_that_they_view() -> None:
    chunks = torch.arange(1_000_000)[:600].split(50)
    loader = DataLoader(Numbered(600), batch_sampler=list(chunks), num_workers=2)
    for number, batch in enumerate(loader):
        assert batch[:, 0].tolist() == list(range(50 * number, 50 * number + 50))
        assert loader.statistics().reserved_nbytes < 6 * 16384


class Bfloat(Numbered):
    """Samples of a dtype that NumPy lacks."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index).bfloat16()


def test_a_default_device_does_not_disturb_batches() -> None:
    iterator = iter(DataLoader(Bfloat(8), batch_size=4, num_workers=1))
    torch.set_default_device("meta")
    try:
        batch = next(iterator)
    finally:
        torch.set_default_device(None)
    assert batch.device.type == "cpu"
    assert batch[:, 0].tolist() == [0, 1, 2, 3]


def test_a_part_of_a_larger_storage_arrives_without_the_rest() -> None:
    (part,) = DataLoader([torch.arange(10)[3:6]], batch_size=None, num_workers=1)
    assert part.tolist() == [3, 4, 5]
    assert part.storage_offset() == 0


class Marked(torch.Tensor):
    """Stacking it with anything gives ones."""

    @classmethod
    def __torch_function__(cls, function, kinds, arguments=(), keywords=None):
        if function is torch.stack:
            return torch.ones(len(arguments[0]))
        return super().__torch_function__(function, kinds, arguments, keywords or {})


class Second(Numbered):
    """Every second sample is ``Marked``."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = torch.zeros(1)
        return sample.as_subclass(Marked) if index % 2 else sample


@pytest.mark.parametrize("collate", [None, default_collate])
def test_what_stacking_a_subclass_gives_is_the_batch(collate) -> None:
    for batch in DataLoader(Second(40), batch_size=2, num_workers=1, collate_fn=collate):
        assert batch.tolist() == [1, 1]


class Threads(Numbered):
    """Each sample is the number of threads of the worker, a moment after it started."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.3)
        return torch.tensor(psutil.Process().num_threads())


def test_workers_watch_the_main_process_also_beyond_descriptor_1023() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("not more than 1023 descriptors may be had here (ulimit -n)")
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        counts = [int(count) for count in DataLoader(Threads(2), num_workers=1)]
    finally:
        for fd in opened:
            os.close(fd)
    assert counts == [2, 2]


def test_data_in_headers_is_not_remembered() -> None:
    iterator = iter(DataLoader(Numbered(40), num_workers=1, collate_fn=list_of_many))
    for batch in iterator:
        assert len(batch[1]) == 20_000
    decoder = iterator._decoder
    assert sum(map(len, [*decoder._headers, *decoder._tables])) < 1000


def list_of_many(samples: list[torch.Tensor]) -> list:
    """A batch whose header holds data."""
    return [samples[0], list(range(20_000))]


def test_slots_for_kept_batches_are_given_back_within_the_epoch() -> None:
    loader = DataLoader(Numbered(400, items=1 << 14), num_workers=2)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(40)]
    assert loader.statistics().reserved_nbytes > 40 << 17
    kept.clear()
    for _ in range(20):
        next(iterator)
    assert loader.statistics().reserved_nbytes < 10 << 17


def test_a_copy_of_a_loaders_attributes_does_not_own_its_iterators() -> None:
    loader = DataLoader(Numbered(40), num_workers=1)
    iterator = iter(loader)
    next(iterator)
    copied = object.__new__(DataLoader)
    copied.__dict__.update(loader.__dict__)
    copied.close()
    assert int(next(iterator)[0, 0]) == 1


class Alarming:
    """A sampler that raises SIGALRM, in the middle of ``next()``, before its tenth index."""

    def __iter__(self):
        for index in range(100):
            if index == 10:
                signal.raise_signal(signal.SIGALRM)
            yield index


def test_a_signal_handler_that_closes_the_loader_ends_next_with_loader_closed() -> None:
    loader = DataLoader(Numbered(100), sampler=Alarming(), num_workers=2, persistent_workers=True)
    before = signal.signal(signal.SIGALRM, lambda *_: loader.close())
    try:
        with pytest.raises(shmloader.LoaderClosed, match=r"loader.close\(\)"):
            list(loader)
    finally:
        signal.signal(signal.SIGALRM, before)


class Order:
    """An iterator over index batches that can be told from others."""

    def __init__(self) -> None:
        self._batches = iter([[0, 1], [2, 3], [4, 5]])

    def __iter__(self):
        return self

    def __next__(self) -> list[int]:
        return next(self._batches)


def test_of_a_samplers_two_iterators_one_is_kept() -> None:
    """Torch asks it twice too. An iterator may hold all indices."""
    made: list[weakref.ref] = []

    class Batches:
        def __iter__(self) -> Order:
            order = Order()
            made.append(weakref.ref(order))
            return order

    with DataLoader(Numbered(6), batch_sampler=Batches(), num_workers=1, prefetch_factor=1) as loader:
        iterator = iter(loader)
        assert [order() is None for order in made] == [True, False]
        assert [int(batch[0, 0]) for batch in iterator] == [0, 2, 4]
