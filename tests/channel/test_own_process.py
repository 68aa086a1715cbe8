"""`shmloader.OwnProcess`: what a dataset gives in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from robustness.processes import has_ended, start_python
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import shmloader
from shmloader import OwnProcess, PeerDied, QueueClosed


class Numbers(IterableDataset[Any]):
    """Gives tensors, and what it was told to do in between."""

    def __init__(self, count: int, raises_at: int = -1, dies_at: int = -1) -> None:
        self.count, self.raises_at, self.dies_at = count, raises_at, dies_at

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            if number == self.raises_at:
                raise KeyError(number)
            if number == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield {"x": torch.full((100, 100), number), "pid": os.getpid()}


@pytest.mark.parametrize("maxsize", [1, 16])
def test_items_come_in_order_from_another_process_and_len_is_known(start_method: str, maxsize: int) -> None:
    dataset = OwnProcess(Numbers(30), maxsize, multiprocessing_context=start_method)
    for _ in range(2):
        items = list(DataLoader(dataset, batch_size=None))
        assert [int(item["x"][0, 0]) for item in items] == list(range(30))
        assert os.getpid() not in {item["pid"] for item in items}
    assert len(dataset) == 30


def test_a_dataset_may_give_nothing() -> None:
    assert list(DataLoader(OwnProcess(Numbers(0)), batch_size=None)) == []


def test_random_numbers_differ_from_epoch_to_epoch_and_come_again_with_the_seed() -> None:
    class Draws(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from (torch.rand(()).item() for _ in range(3))

    def run() -> list[Any]:
        torch.manual_seed(3)
        dataset = OwnProcess(Draws())
        return [list(dataset), list(dataset)]

    first, second = run(), run()
    assert first == second
    assert first[0] != first[1]


def test_an_exception_arrives_as_it_was_raised_after_the_items_before_it() -> None:
    items = iter(OwnProcess(Numbers(10, raises_at=3)))
    assert [int(next(items)["x"][0, 0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError) as raised:
        next(items)
    assert raised.value.args == (3,)
    assert "Raised in the process (pid " in raised.value.__notes__[-1]


class ReadsAQueue(IterableDataset[Any]):
    """Raises what a queue of its own raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        yield 1
        raise self.error


@pytest.mark.parametrize("error", [QueueClosed("the dataset's queue"), PeerDied("the dataset's queue")])
def test_what_a_queue_of_the_datasets_raises_arrives_too(error: Exception) -> None:
    items = iter(OwnProcess(ReadsAQueue(error)))
    assert next(items) == 1
    with pytest.raises(type(error), match="the dataset's queue"):
        next(items)


def test_a_killed_process_is_named() -> None:
    items = iter(OwnProcess(Numbers(10, dies_at=2)))
    next(items), next(items)
    with pytest.raises(PeerDied, match="was killed by signal 9"):
        next(items)


def test_a_process_that_ends_before_its_first_item_is_named_where_the_program_has_threads() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with pytest.raises(PeerDied, match=r"was killed by signal 9 .* before its first item") as raised:
            next(iter(OwnProcess(Numbers(10, dies_at=0))))
        assert raised.value.exit_code == -signal.SIGKILL
    finally:
        ended.set()
        thread.join()


def test_leaving_early_ends_the_process() -> None:
    items = iter(OwnProcess(Numbers(1000), 2))
    pid = next(items)["pid"]
    items.close()
    assert not psutil.pid_exists(pid)


def test_a_forked_process_leaves_the_items_to_this_one() -> None:
    """It has a copy of the iterator, but the dataset's process is not its child."""
    items = iter(OwnProcess(Numbers(5), 2))
    next(items)
    fork = multiprocessing.get_context("fork").Process(target=items.close)
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    assert len(list(items)) == 4


def test_each_item_comes_once_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        items = shmloader.DataLoader(OwnProcess(Numbers(8)), batch_size=None, shard="auto")
        got.append([int(item["x"][0, 0]) for item in items])
    assert got == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_data_pipe_is_refused_since_its_sharding_filter_would_not_apply() -> None:
    for pipe in (IterableWrapper(range(4)).sharding_filter(), SequenceWrapper(range(4))):
        with pytest.raises(TypeError, match=r"a DataPipe \(.*an IterableDataset of your own, or .* workers"):
            OwnProcess(pipe)


def test_a_worker_is_told_to_do_without() -> None:
    with pytest.raises(RuntimeError, match="use num_workers=0"):
        list(shmloader.DataLoader(OwnProcess(Numbers(3)), batch_size=None, num_workers=1))


def test_it_ends_with_the_program() -> None:
    program = start_python(
        """
        import os, torch
        from shmloader import OwnProcess

        class Slow(torch.utils.data.IterableDataset):
            def __iter__(self):
                import time
                yield os.getpid()
                time.sleep(600)

        for pid in OwnProcess(Slow()):
            print(pid, flush=True)
        """
    )
    pid = int(program.stdout.readline())
    program.kill()
    program.communicate()
    deadline_s = time.monotonic() + 60
    while not has_ended(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert has_ended(pid)
