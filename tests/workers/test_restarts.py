"""``worker_restarts``: a dead or silent worker is replaced, and no batch is lost or comes twice."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from loading import Numbered
from setup_datasets import Opens, calls
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shmloader import DataLoader, LoaderClosed, WorkerDied, WorkerTimeout
from shmloader.workers.processes import ProcessWorker


class Fatal(Dataset):
    """Kills, ends or stalls its worker at the indices of ``fatal``, as many times as given there."""

    def __init__(self, folder: Path, fatal: dict[int, int], how: str = "kill", items: int = 3) -> None:
        self.folder, self.fatal, self.how, self.items = folder, fatal, how, items

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.fatal and get_worker_info() is not None:
            done = len(list(self.folder.glob(f"{index}-*")))
            if done < self.fatal[index]:
                (self.folder / f"{index}-{done}").touch()
                self.happen()
        return torch.full((self.items,), index)

    def happen(self) -> None:
        if self.how == "hang":
            self.hang_here()
        elif self.how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)

    def hang_here(self) -> None:
        time.sleep(60)


EXPECTED = [[[i] * 3 for i in range(k, k + 4)] for k in range(0, 64, 4)]


def _batches(loader: DataLoader) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("fork", "exit"),
        ("fork", "kill"),
        ("forkserver", "exit"),
        ("forkserver", "kill"),
        pytest.param("spawn", "kill", marks=pytest.mark.long),
    ],
)
def test_an_epoch_is_whole_though_workers_die(
    tmp_path: Path, method: str, how: str, warm_helpers: None
) -> None:
    deadly = {2: 1, 21: 1, 60: 1} if method != "spawn" else {21: 1}
    dataset = Fatal(tmp_path, deadly, how)
    with DataLoader(
        dataset, batch_size=4, num_workers=2, multiprocessing_context=method, worker_restarts=3
    ) as loader:
        assert _batches(loader) == EXPECTED
        assert loader.statistics().worker_restarts == len(deadly)
        assert loader.statistics().batches == 16


def test_large_batches_are_made_again_in_slots_that_the_dead_worker_had_grown(tmp_path: Path) -> None:
    dataset = Fatal(tmp_path, {2: 1, 6: 1, 33: 1}, items=50_000)  # six slots fit in a /dev/shm of 16 MB
    with DataLoader(dataset, batch_size=4, num_workers=2, worker_restarts=3) as loader:
        assert [batch[:, -1].tolist() for batch in loader] == [list(range(k, k + 4)) for k in range(0, 64, 4)]


def test_a_batch_in_parts_is_begun_again(tmp_path: Path) -> None:
    dataset = Fatal(tmp_path, {5: 1, 14: 1}, items=50_000)
    with (
        DataLoader(
            dataset, batch_size=4, num_workers=2, worker_restarts=3, memory_budget_nbytes=200_000
        ) as loader,
        pytest.warns(RuntimeWarning, match="budget"),
    ):
        assert [batch[:, -1].tolist() for batch in loader] == [list(range(k, k + 4)) for k in range(0, 64, 4)]
        assert loader.statistics().spills > 0


def test_long_index_batches_are_sent_again(tmp_path: Path) -> None:
    """Long index batches lie in the slot, and the dead worker has begun to write its batch over them."""
    dataset = Fatal(tmp_path, {63: 1})
    batches = [[i % 64 for i in range(k, k + 4000)] for k in range(3)]
    with DataLoader(dataset, batch_sampler=batches, num_workers=1, worker_restarts=1) as loader:
        assert [batch[:, 0].tolist() for batch in loader] == batches


def test_without_restarts_a_death_is_an_error(tmp_path: Path) -> None:
    with DataLoader(Fatal(tmp_path, {21: 1}), batch_size=4, num_workers=2) as loader:
        with pytest.raises(WorkerDied, match=r"signal 9.*20, 21, 22, 23") as caught:
            _batches(loader)
        assert caught.value.indices[0] == [20, 21, 22, 23]
        assert _batches(loader) == EXPECTED


def test_more_deaths_than_restarts_are_an_error(tmp_path: Path) -> None:
    with (
        DataLoader(Fatal(tmp_path, {2: 1, 21: 1}), batch_size=4, num_workers=2, worker_restarts=1) as loader,
        pytest.raises(WorkerDied, match=r"20, 21, 22, 23"),
    ):
        _batches(loader)


def test_a_batch_that_ends_its_worker_twice_is_an_error(tmp_path: Path) -> None:
    with DataLoader(
        Fatal(tmp_path, {21: 2}), batch_size=4, num_workers=2, worker_restarts=100, persistent_workers=True
    ) as loader:
        with pytest.raises(WorkerDied, match="2 workers have ended at the first") as caught:
            _batches(loader)
        assert caught.value.indices[0] == [20, 21, 22, 23]
        assert _batches(loader) == EXPECTED


def test_a_silent_worker_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "shmloader"),
        DataLoader(
            Fatal(tmp_path, {21: 1}, "hang"), batch_size=4, num_workers=2, worker_restarts=1, timeout=5
        ) as loader,
    ):
        assert _batches(loader) == EXPECTED
    assert "silent for 5" in caplog.text
    assert "hang_here" in caplog.text


@pytest.mark.parametrize("restarts", [0, pytest.param(5, marks=pytest.mark.long)])
def test_the_error_for_a_silent_worker_shows_its_stack(tmp_path: Path, restarts: int) -> None:
    with (
        DataLoader(
            Fatal(tmp_path, {1: 2}, "hang"), batch_size=4, num_workers=2, worker_restarts=restarts, timeout=5
        ) as loader,
        pytest.raises(WorkerTimeout, match=r"timed out after 5.*worker 0 \(pid \d+\)") as caught,
    ):
        _batches(loader)
    assert "hang_here" in str(caught.value)
    assert "test_restarts.py" in str(caught.value)
    told = "Another worker has ended at the first of its index batches before." in str(caught.value)
    assert told is (restarts > 0)


class FailsToStart:
    """A ``worker_init_fn`` that ends or stalls its worker, ``times`` times."""

    def __init__(self, folder: Path, times: int, how: str) -> None:
        self.folder, self.times, self.how = folder, times, how

    def __call__(self, _: int) -> None:
        done = len(list(self.folder.iterdir()))
        if done < self.times:
            (self.folder / str(done)).touch()
            if self.how == "exit":
                os._exit(3)
            time.sleep(60)


def fails_to_start(folder: Path, times: int, how: str, **given: Any) -> DataLoader:
    """A loader with one worker, which fails to start a given number of times."""
    init_fn = FailsToStart(folder, times, how)
    return DataLoader(Numbered(64), batch_size=4, num_workers=1, worker_init_fn=init_fn, **given)


@pytest.mark.parametrize(("how", "timeout_s"), [("exit", 60), ("hang", 5)])
def test_workers_that_have_not_begun_a_batch_take_none_of_its_tries(
    how: str, timeout_s: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "shmloader"),
        fails_to_start(tmp_path, 2, how, worker_restarts=2, timeout=timeout_s) as loader,
    ):
        assert len(list(loader)) == 16
        assert loader.statistics().worker_restarts == 2
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert " while it made no batch and was replaced by pid " in record.getMessage()


@pytest.mark.parametrize(
    ("how", "timeout_s", "error"), [("exit", 60, WorkerDied), ("hang", 1, WorkerTimeout)]
)
def test_the_error_blames_no_batch_that_was_not_begun(
    how: str, timeout_s: int, error: type[Exception], tmp_path: Path
) -> None:
    with (
        fails_to_start(tmp_path, 9, how, worker_restarts=1, timeout=timeout_s) as loader,
        pytest.raises(error) as caught,
    ):
        list(loader)
    assert "ended at the first of its index batches" not in str(caught.value)


def test_a_first_batch_that_ends_its_worker_twice_is_an_error(tmp_path: Path) -> None:
    """Neither worker had reported anything, but both had begun the batch."""
    with (
        DataLoader(Fatal(tmp_path, {1: 2}), batch_size=4, num_workers=2, worker_restarts=100) as loader,
        pytest.raises(WorkerDied, match="2 workers have ended at the first") as caught,
    ):
        _batches(loader)
    assert caught.value.indices[0] == [0, 1, 2, 3]


def test_a_worker_that_dies_between_epochs_is_replaced() -> None:
    dataset = Numbered(32)
    with DataLoader(
        dataset, batch_size=4, num_workers=2, persistent_workers=True, worker_restarts=4
    ) as loader:
        expected = _batches(loader)
        for _ in range(2):
            victim = loader._iterator._workers[1].pid
            os.kill(victim, signal.SIGKILL)
            assert _batches(loader) == expected
        assert loader.statistics().worker_restarts == 2


def test_a_worker_that_dies_while_an_abandoned_epoch_ends_is_replaced(tmp_path: Path) -> None:
    """Its slots, granted for batches that are no longer wanted, become free again."""
    with DataLoader(
        Fatal(tmp_path, {9: 1, 13: 1}),
        batch_size=4,
        num_workers=2,
        persistent_workers=True,
        worker_restarts=4,
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        assert _batches(loader) == EXPECTED
        assert _batches(loader) == EXPECTED
        now = loader.statistics()
        assert now.worker_restarts == 2
        assert now.slots_granted == now.slots_published == 0


class Told(Numbered):
    """Sample ``i`` is the epoch that its worker's dataset has heard of."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.epoch)


@pytest.mark.parametrize(("method", "persistent"), [("fork", True), ("forkserver", False)])
def test_a_new_worker_hears_of_the_epoch_that_its_batches_belong_to(
    method: str, persistent: bool, warm_helpers: None
) -> None:
    """While the program's dataset has heard of the next one."""
    options = {"num_workers": 2, "worker_restarts": 4, "persistent_workers": persistent}
    options |= {"multiprocessing_context": method}
    with DataLoader(Told(64), batch_size=4, **options) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            iterator = iter(loader)
            found = {int(value) for value in next(iterator)}
            loader.set_epoch(7)
            loader.set_epoch(epoch + 1)
            os.kill(iterator._workers[1].pid, signal.SIGKILL)
            for batch in iterator:
                found |= set(batch.tolist())
            assert found == {epoch}
            assert loader.statistics().worker_restarts == epoch + 1


def test_a_worker_is_not_replaced_if_its_epoch_was_never_told() -> None:
    with DataLoader(Told(64), batch_size=4, num_workers=2, worker_restarts=4) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(1)
        os.kill(iterator._workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"Call loader.set_epoch\(\) before each epoch"):
            list(iterator)
        assert {int(value) for batch in loader for value in batch} == {1}


def test_a_worker_that_cannot_be_replaced_is_an_error_that_ends_all_workers(tmp_path: Path) -> None:
    """No descriptors are left for its successor."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with DataLoader(
        Fatal(tmp_path, {21: 1}), batch_size=4, num_workers=2, worker_restarts=3, persistent_workers=True
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        sibling = iterator._workers[0]
        filled = [os.open(os.devnull, os.O_RDONLY) for _ in range(30)]  # no gap below the last
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files") as caught:
                list(iterator)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in filled:
                os.close(fd)
        assert "[20, 21, 22, 23]" in caught.value.__notes__[-1]
        assert not sibling.is_alive()
        with pytest.raises(LoaderClosed, match="worker 1 could not be replaced"):
            next(iterator)
        assert _batches(loader) == EXPECTED


class SlowToPickle(Fatal):
    """The second time, which is for a worker's successor, pickling takes long and says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {21: 1}, "exit")
        self.pickles = 0
        self.begun: Any = threading.Event()
        self.closing: Any = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        self.pickles += 1
        if self.pickles == 2:
            self.begun.set()
            assert self.closing.wait(60)
            time.sleep(1)  # in which the other thread closes
        return self.__dict__ | {"begun": None, "closing": None}


def test_closing_from_another_thread_while_a_worker_is_replaced_leaves_nothing(
    tmp_path: Path, warm_helpers: None
) -> None:
    """The new process, which the closing thread has not seen, ends too."""
    dataset = SlowToPickle(tmp_path)
    loader = DataLoader(
        dataset, batch_size=4, num_workers=2, worker_restarts=3, multiprocessing_context="forkserver"
    )
    errors: list[BaseException] = []

    def close() -> None:
        dataset.begun.wait()
        dataset.closing.set()
        try:
            loader.close()
        except BaseException as error:
            errors.append(error)

    closer = threading.Thread(target=close)
    closer.start()
    try:
        with pytest.raises(LoaderClosed):
            list(loader)
    finally:
        dataset.begun.set()
        closer.join()
    assert not errors
    assert dataset.pickles == 2


def test_restarts_out_of_order(tmp_path: Path) -> None:
    with DataLoader(
        Fatal(tmp_path, {2: 1, 21: 1}), batch_size=4, num_workers=2, worker_restarts=3, in_order=False
    ) as loader:
        assert sorted(_batches(loader)) == EXPECTED


class Counting(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="worker_restarts must be at least 0, not -1"):
        DataLoader(Numbered(4), worker_restarts=-1)
    with pytest.raises(ValueError, match="map-style"):
        DataLoader(Counting(), worker_restarts=1)
    with pytest.raises(ValueError, match="worker_restarts needs num_workers"):
        DataLoader(Numbered(4), worker_restarts=1)


class Refills:
    """A batch sampler that yields the same list again and again, with other indices in it."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[list[int]]:
        indices = [0] * 4
        for first in range(0, 64, 4):
            indices[:] = range(first, first + 4)
            yield indices


def test_a_sampler_that_refills_one_list_loses_no_batch_with_a_worker(tmp_path: Path) -> None:
    dataset = Fatal(tmp_path, {9: 1})
    assert (
        _batches(DataLoader(dataset, batch_sampler=Refills(), num_workers=1, worker_restarts=1)) == EXPECTED
    )


def test_a_dead_workers_indices_are_those_that_it_was_sent(tmp_path: Path) -> None:
    loader = DataLoader(Fatal(tmp_path, {9: 1}), batch_sampler=Refills(), num_workers=1)
    with pytest.raises(WorkerDied) as caught:
        list(loader)
    assert caught.value.indices == ([8, 9, 10, 11], [12, 13, 14, 15])


def test_a_process_forked_while_a_worker_is_replaced_closes_no_others_descriptors() -> None:
    """At each line that closes: another thread may fork there, after it has opened what has that number."""
    lines = 0

    def fork_at_each_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code not in (ProcessWorker.close_pipes.__code__, ProcessWorker.close_descriptors.__code__):
            return None
        if event == "line":
            lines += 1
            raised: list[Any] = []
            sys.unraisablehook = raised.append  # that something is closed twice
            pid = os.fork()
            if pid == 0:
                os._exit(len(raised))
            assert os.waitpid(pid, 0)[1] == 0
        return fork_at_each_line

    with DataLoader(Numbered(64), batch_size=4, num_workers=2, worker_restarts=1) as loader:
        iterator = iter(loader)
        os.kill(iterator._workers[0].pid, signal.SIGKILL)
        before, hook = sys.gettrace(), sys.unraisablehook
        sys.settrace(fork_at_each_line)
        try:
            assert [batch[0, 0].item() for batch in iterator] == list(range(0, 64, 4))
        finally:
            sys.settrace(before)
            sys.unraisablehook = hook
    assert lines > 6


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_that_another_thread_forks_keep_no_worker_from_its_end(tmp_path: Path) -> None:
    """A worker ends when its pipe is closed, of which a process that is forked at any moment holds no end."""
    children: list[int] = []
    ended = threading.Event()

    def fork_often() -> None:
        while not ended.is_set() and len(children) < 400:
            pid = os.fork()
            if pid == 0:
                signal.pause()
            children.append(pid)
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        forking = pool.submit(fork_often)
        try:
            for _ in range(6):
                list(DataLoader(Opens(tmp_path), batch_size=4, num_workers=2, multiprocessing_context="fork"))
        finally:
            ended.set()
            forking.result()
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    assert len(calls(tmp_path, "teardown")) == 12
    assert len(children) > 6
