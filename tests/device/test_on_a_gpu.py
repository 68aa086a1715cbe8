"""Pinned slots, the guard and device batches on a real CUDA device. `make gpu` runs these tests."""

import contextlib
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from loading import Numbered

from shmloader import DataLoader
from shmloader.device import pinned
from shmloader.errors import LoaderError
from shmloader.exchange import delivery as device_delivery

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the benchmarks are a package of the checkout

from benchmarks import device as benchmark

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here (make gpu)"),
]


@pytest.fixture(scope="module", autouse=True)
def _device_in_use():
    """Let the driver first open what it keeps: pipes, descriptors of events, threads."""
    value = torch.zeros(1, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.zeros(1 << 20).pin_memory().to("cuda", non_blocking=True)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        value.add_(1)
    graph.replay()
    for options in ({"pin_memory": True}, {"device": "cuda"}):
        with DataLoader(Numbered(8), batch_size=4, num_workers=1, **options) as loader:
            list(loader)
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def _nothing_stays_locked():
    yield
    torch.cuda.synchronize()
    pinned.release_postponed()  # what ended while a graph was captured
    assert pinned.pinned_nbytes() == 0


def test_slots_are_pinned_and_nothing_is_copied(start_method: str) -> None:
    with DataLoader(
        Numbered(80), batch_size=4, num_workers=2, pin_memory=True, multiprocessing_context=start_method
    ) as loader:
        for count, batch in enumerate(loader):
            assert batch.is_pinned()
            assert batch.to("cuda", non_blocking=True)[:, 0].tolist() == list(range(4 * count, 4 * count + 4))
            del batch
        assert loader.statistics().pin_copies == 0


@pytest.mark.parametrize("captures", [False, True])
def test_dropped_batches_arrive_whole(captures: bool) -> None:
    assert benchmark.wrong_batches(2, 200, 4 << 20, guarded=True, captures=captures) == 0


def test_without_the_guard_they_do_not() -> None:
    """This proves that the test above can fail."""
    assert benchmark.wrong_batches(2, 200, 4 << 20, guarded=False, captures=False) > 0


def test_poisoned_slots_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMLOADER_DEBUG", "1")
    assert benchmark.wrong_batches(2, 100, 1 << 20, guarded=True, captures=False) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_on_the_device(workers: int) -> None:
    with DataLoader(Numbered(80), batch_size=4, num_workers=workers, device="cuda") as loader:
        for count, batch in enumerate(loader):
            torch.cuda._sleep(1_000_000)
            assert batch.device == torch.device("cuda", torch.cuda.current_device())
            assert batch[:, 0].tolist() == list(range(4 * count, 4 * count + 4))


def test_many_small_leaves_and_one_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_delivery, "to_device", None)  # for batches that were not copied ahead

    def collate(samples: list) -> dict:
        small = {str(leaf): torch.full((leaf % 7, 3), float(samples[0])) for leaf in range(300)}
        return small | {"large": torch.full((1 << 20,), samples[0])}

    with DataLoader(range(60), num_workers=2, collate_fn=collate, device="cuda") as loader:
        for count, batch in enumerate(loader):
            torch.cuda._sleep(1_000_000)
            assert all((leaf == count).all() for leaf in batch.values())


def test_held_batches_and_memory_that_is_used_again() -> None:
    with DataLoader(Numbered(400, items=1 << 16), batch_size=4, num_workers=2, device="cuda") as loader:
        kept, sums = [], []
        for count, batch in enumerate(loader):
            torch.cuda._sleep(500_000)
            sums.append(batch.sum())
            if count % 10 == 0:
                kept.append((count, batch))
    expected = [sum(range(4 * count, 4 * count + 4)) << 16 for count in range(100)]
    assert torch.stack(sums).tolist() == expected
    for count, batch in kept:
        assert batch[:, -1].tolist() == list(range(4 * count, 4 * count + 4))


def test_inside_a_capture() -> None:
    with DataLoader(Numbered(80), batch_size=4, num_workers=2, device="cuda") as loader:
        iterator, static = iter(loader), torch.zeros(4, device="cuda")
        next(iterator)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.add_(1)
            with pytest.raises(LoaderError, match="Take the batch before"):
                next(iterator)
        graph.replay()
        assert static.tolist() == [1] * 4
        assert next(iterator)[0, 0].item() == 4


def test_a_thread_that_loads_beside_one_that_captures() -> None:
    taken = []
    begins = threading.Lock()  # a capture that begins while the loader records its event is invalidated

    def load() -> None:
        with DataLoader(Numbered(400), batch_size=4, num_workers=2, pin_memory=True) as loader:
            with begins:
                iterator = iter(loader)
            while True:
                with begins:
                    batch = next(iterator, None)
                if batch is None:
                    break
                taken.append(int(batch.to("cuda", non_blocking=True)[0, 0]))

    thread = threading.Thread(target=load)
    thread.start()
    value, graphs, beside = torch.zeros(1, device="cuda"), [], 0
    while thread.is_alive():
        graphs.append(torch.cuda.CUDAGraph())
        with contextlib.ExitStack() as stack:
            with begins:
                stack.enter_context(torch.cuda.graph(graphs[-1], capture_error_mode="thread_local"))
            value.add_(1)
            time.sleep(0.002)
            beside += 0 < len(taken) < 100
    assert beside, "no graph was captured while the thread had batches"
    for graph in graphs:
        graph.replay()
    assert value.item() == len(graphs)
    assert taken == list(range(0, 400, 4))


def test_a_batch_outlives_its_loader() -> None:
    with DataLoader(Numbered(40), batch_size=4, num_workers=1, pin_memory=True) as loader:
        batch = next(iter(loader))
    assert batch.is_pinned()
    torch.cuda._sleep(10_000_000)
    copied = batch.to("cuda", non_blocking=True)
    del batch
    assert copied[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, 64])
def test_a_default_device_with_a_generator_of_it(batch_size: int, workers: int) -> None:
    def make(kind: type = DataLoader) -> torch.utils.data.DataLoader:
        generator = torch.Generator("cuda").manual_seed(3)
        options = {"multiprocessing_context": "spawn"} if workers else {}
        return kind(
            Numbered(640), batch_size, shuffle=True, generator=generator, num_workers=workers, **options
        )

    def first_of(batches) -> list[list[float]]:
        return [batch[:, 0].tolist() for batch in batches]

    torch.set_default_device("cuda")
    try:
        wanted = [first_of(loader) for loader in [make(torch.utils.data.DataLoader)] for _ in range(2)]
        loader = make()
        assert [first_of(loader), first_of(loader)] == wanted
        iterator = iter(loader)
        next(iterator)
        state, rest = loader.state_dict(), first_of(iterator)
        other = make()
        other.load_state_dict(state)
        assert first_of(other) == rest
    finally:
        torch.set_default_device(None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_devices() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaders = [
            DataLoader(Numbered(80), batch_size=4, num_workers=1, device=f"cuda:{one}") for one in (0, 1)
        ]
        for first, second in zip(*loaders, strict=True):
            assert (first.device.index, second.device.index) == (0, 1)
            assert torch.equal(first.cpu(), second.cpu())
        for loader in loaders:
            loader.close()
