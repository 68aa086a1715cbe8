"""``num_workers="auto"`` and ``prefetch_factor="auto"``: what is chosen, and within which bounds."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from loading import Numbered
from robustness.processes import assert_dies_with_its_last_reference
from test_slots import BUDGET_NBYTES, PoolMachine
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, MapDataPipe, get_worker_info

from shmloader import DataLoader, WorkerDied
from shmloader.limits import Cores, Headroom
from shmloader.segment import PAGE_NBYTES, MemfdSegment
from shmloader.slots import SlotPool
from shmloader.trials import AutoCount

MIB = 1 << 20

# three workers on two cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that says so: sleeping workers need none."""
    monkeypatch.setattr("shmloader.tuning.cores", lambda: Cores(3, 3, None))


class Draws(Dataset):
    """Sample ``i`` is what it draws from each global generator, after ``delay_s``."""

    def __init__(self, length: int, delay_s: float = 0.0) -> None:
        self.length, self.delay_s = length, delay_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if self.delay_s:
            time.sleep(self.delay_s)
        return index, float(torch.rand(1)), float(np.random.random()), random.random()


class Sized(Dataset):
    """Sample ``i`` has ``nbytes[i]`` bytes."""

    def __init__(self, nbytes: list[int], delay_s: float = 0.0) -> None:
        self.nbytes, self.delay_s = nbytes, delay_s

    def __len__(self) -> int:
        return len(self.nbytes)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        return torch.full((self.nbytes[index],), index % 256, dtype=torch.uint8)


class Jitter(Draws):
    """One sample in twenty takes 80 ms, the others 4 ms."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        time.sleep(0.08 if index % 20 == 10 else 0.004)
        return super().__getitem__(index)


class Busy(Dataset):
    """Each sample keeps a core busy for 2 ms, as far as the machine lets it."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> int:
        until_s = time.thread_time() + 0.002
        while time.thread_time() < until_s:
            pass
        return index


def plain(batch: Any) -> Any:
    return [value.tolist() if isinstance(value, torch.Tensor) else plain(value) for value in batch]


def epochs(loader: DataLoader, number: int = 1, seed: int = 7) -> list[Any]:
    torch.manual_seed(seed)
    return [[plain(batch) for batch in loader] for _ in range(number)]


def processes(loader: DataLoader) -> int:
    return len(loader._iterator._workers)


# --- what is chosen


def test_slow_samples_get_as_many_workers_as_there_are_cores(three_cores: None) -> None:
    """The program does nothing; each batch takes a worker 12 ms."""
    with DataLoader(Draws(120, 0.012), num_workers="auto", persistent_workers=True) as loader:
        assert loader.num_workers == 1
        assert loader.statistics().autotune is None  # nothing was begun
        list(loader)
        chosen = loader.statistics().autotune
        assert chosen.settled, chosen
        assert chosen.num_workers == loader.num_workers == processes(loader) == 3
        assert chosen.batches <= 120
        assert chosen.prefetch_factor == loader.prefetch_factor == 2
        assert chosen.why.startswith("one worker for each of 3 usable cores; a batch takes a worker")
        pids = [process.pid for process in loader._iterator._workers]
        list(loader)
        assert loader.statistics().autotune == chosen  # for good
        assert [process.pid for process in loader._iterator._workers] == pids


def test_a_program_that_is_slower_keeps_one_worker(three_cores: None) -> None:
    """Nothing is started in vain."""
    with DataLoader(Draws(100), num_workers="auto", persistent_workers=True) as loader:
        for _ in loader:
            time.sleep(0.003)
            assert processes(loader) == 1
        chosen = loader.statistics().autotune
        assert chosen.settled
        assert chosen.num_workers == 1
        assert "keep up" in chosen.why


def test_workers_that_have_nothing_to_do_end(three_cores: None) -> None:
    """A loader that is told to begin with three, as one built from another one's attributes."""
    before = psutil.Process().children()  # the fork server, perhaps, and the resource tracker
    with DataLoader(Draws(220), num_workers=AutoCount(3), persistent_workers=True) as loader:
        most = 0
        for _ in loader:
            time.sleep(0.008)
            most = max(most, processes(loader))
        chosen = loader.statistics().autotune
        assert most == 3
        assert chosen.num_workers == loader.num_workers == processes(loader) == 1, chosen
        deadline = time.monotonic() + 5
        while sum(_runs(child) for child in psutil.Process().children() if child not in before) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(list(loader)) == 220


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def test_real_work_settles_within_the_cores_of_this_machine() -> None:
    """Whatever the machine is busy with; and the batches are those of the dataset."""
    with DataLoader(
        Busy(), batch_size=2, num_workers="auto", prefetch_factor="auto", persistent_workers=True
    ) as loader:
        found = [[int(i) for i in batch] for _ in range(2) for batch in loader]
        assert found == [[i, i + 1] for i in range(0, 320, 2)] * 2
        chosen = loader.statistics().autotune
        assert chosen.settled
        assert chosen.batches <= 200
        assert 1 <= chosen.num_workers <= len(os.sched_getaffinity(0))
        assert processes(loader) == chosen.num_workers


def test_one_slow_batch_in_twenty_makes_more_be_made_in_advance() -> None:
    """Workers take turns, as torch's do: the batches and what they draw are torch's, whatever was chosen."""
    given: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "timeout": 60}
    with DataLoader(Jitter(200), prefetch_factor="auto", **given) as loader:
        seen = []
        torch.manual_seed(7)
        for batch in loader:
            seen.append(plain(batch))
            time.sleep(0.004)
        chosen = loader.statistics().autotune
        assert chosen.settled
        assert chosen.num_workers == 2
        assert chosen.prefetch_factor == loader.prefetch_factor > 4, chosen
        assert len(loader._iterator._exchange.outstanding) == 0
        again = epochs(loader)[0]
    torch.manual_seed(7)
    theirs = TorchLoader(Draws(200), **given)
    assert [plain(batch) for batch in theirs] == seen
    assert len(again) == 200


def test_short_epochs_settle_together_and_later_ones_begin_with_what_was_chosen(three_cores: None) -> None:
    """Workers end with each epoch of 12 batches."""
    loader = DataLoader(Draws(12, 0.012), num_workers="auto")
    begun_with = []
    while not (loader.statistics().autotune and loader.statistics().autotune.settled):
        iterator = iter(loader)
        begun_with.append(len(iterator._workers))
        list(iterator)
        assert len(begun_with) <= 17
    assert begun_with[0] == 1
    assert loader.num_workers == 3, loader.statistics().autotune
    iterator = iter(loader)
    assert len(iterator._workers) == 3
    list(iterator)
    loader.close()


def test_epochs_too_short_to_measure_settle_too() -> None:
    """Of one batch each, 200 of them."""
    with DataLoader(
        Numbered(1), num_workers="auto", prefetch_factor="auto", persistent_workers=True
    ) as loader:
        for _ in range(200):
            list(loader)
        chosen = loader.statistics().autotune
    assert chosen.settled
    assert chosen.batches == 200
    assert (chosen.num_workers, chosen.prefetch_factor) == (1, 2)


def test_ranks_that_share_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun says how many there are; ranks that were given cores of their own keep them."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for host, expected in ((Cores(8, 8, None), 2), (Cores(8, 2, None), 2), (Cores(2, 2, None), 1)):
        monkeypatch.setattr("shmloader.tuning.cores", lambda host=host: host)
        loader = DataLoader(Info(2), num_workers="auto")
        assert {int(batch[0, 1]) for batch in loader} == {expected}


# --- the same batches


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_and_draws_do_not_depend_on_what_was_chosen(three_cores: None, in_order: bool) -> None:
    """One, two and three workers from the start, and a number that grows meanwhile."""

    def play(**given: Any) -> list[Any]:
        with DataLoader(
            Draws(90, 0.002), batch_size=1, shuffle=True, persistent_workers=True, in_order=in_order, **given
        ) as loader:
            torch.manual_seed(7)
            found, seen = [], set()
            for _ in range(2):
                found.append([])
                for batch in loader:
                    found[-1].append(plain(batch))
                    seen.add(int(loader.num_workers))
            tried.append(seen)
        return found if in_order else [sorted(epoch) for epoch in found]

    tried: list[set[int]] = []
    expected = play(num_workers=1, dispatch="dynamic")
    for start in (1, 2, 3):
        assert play(num_workers=AutoCount(start)) == expected
    assert play(num_workers="auto", prefetch_factor="auto") == expected
    assert tried[0] == {1}
    assert len(tried[-1]) > 1


def test_workers_that_are_not_forked_join_too(three_cores: None, warm_helpers: None) -> None:
    with DataLoader(
        Numbered(150, delay_s=0.015),
        num_workers="auto",
        multiprocessing_context="forkserver",
        persistent_workers=True,
    ) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(150))
        assert loader.num_workers == processes(loader) == 3


class WaitForFile:
    """A ``worker_init_fn`` for which all but the first worker wait until a file is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, worker_id: int) -> None:
        while worker_id > 0 and not self.path.exists():
            time.sleep(0.01)


def test_nobody_waits_for_a_worker_that_is_being_started(tmp_path: Path, three_cores: None) -> None:
    """It gets no task, or the program would wait for it: the file comes only after 70 batches."""
    wait = WaitForFile(tmp_path / "now")
    with DataLoader(
        Draws(150, 0.003), num_workers="auto", worker_init_fn=wait, timeout=30, persistent_workers=True
    ) as loader:
        most = 0
        for number, batch in enumerate(loader):
            most = max(most, loader._iterator._balance.serving)
            assert int(batch[0]) == number
            if number == 70:
                assert loader._iterator._exchange.joining == {1, 2}
                assert loader._iterator._balance.serving == 1
                wait.path.touch()
        assert not loader._iterator._exchange.joining
        assert most == 3


def test_an_epoch_may_be_left_while_workers_are_being_started(tmp_path: Path, three_cores: None) -> None:
    """Further epochs begin without them, and have them when they come."""
    length = 60
    with DataLoader(
        Draws(length, 0.003), num_workers=1, dispatch="dynamic", persistent_workers=True
    ) as fixed:
        expected = epochs(fixed, 4)
    wait = WaitForFile(tmp_path / "now")
    with DataLoader(
        Draws(length, 0.003), num_workers="auto", worker_init_fn=wait, timeout=30, persistent_workers=True
    ) as loader:
        torch.manual_seed(7)
        for epoch, leave in enumerate((50, 2, length, length)):
            iterator = iter(loader)
            assert [plain(next(iterator)) for _ in range(leave)] == expected[epoch][:leave]
            if epoch == 1:
                assert loader._iterator._exchange.joining == {1, 2}
                wait.path.touch()
        assert not loader._iterator._exchange.joining


def test_worker_threads_are_chosen_too(three_cores: None) -> None:
    with DataLoader(
        Numbered(120, delay_s=0.012), num_workers="auto", worker_type="thread", persistent_workers=True
    ) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(120))
        assert loader.num_workers == 3
        assert sum(thread.name.startswith("shmloader") for thread in threading.enumerate()) == 3


def test_worker_threads_that_have_nothing_to_do_end(three_cores: None) -> None:
    with DataLoader(
        Numbered(220), num_workers=AutoCount(3), worker_type="thread", persistent_workers=True
    ) as loader:
        for _ in loader:
            time.sleep(0.008)
        until_s = time.monotonic() + 5
        while count_threads() > 1 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert count_threads() == loader.num_workers == 1


def count_threads() -> int:
    return sum(thread.name.startswith("shmloader") for thread in threading.enumerate())


def test_no_thread_is_started_in_the_program(three_cores: None) -> None:
    threads = threading.active_count()
    with DataLoader(Draws(80, 0.008), num_workers="auto", persistent_workers=True) as loader:
        most = 0
        for _ in loader:
            assert threading.active_count() == threads
            most = max(most, processes(loader))
        assert most == 3


# --- the memory budget


def within_budget(loader: DataLoader, budget_nbytes: int, most: list[int]) -> None:
    """What the slots have, and what they would have if all were as large as the largest batch."""
    iterator = loader._iterator
    reserved_nbytes = sum(slot.nbytes for slot in iterator.pool.slots)
    most[0] = max(most[0], reserved_nbytes)
    assert reserved_nbytes <= budget_nbytes
    slots = loader.prefetch_factor * loader.num_workers + 2
    largest_nbytes = loader.statistics().largest_batch_nbytes
    if loader.num_workers > 1 or (
        loader.prefetch_factor > 1 and isinstance(loader.prefetch_factor, AutoCount)
    ):
        assert slots * largest_nbytes <= budget_nbytes
    assert iterator.pool.most_tasks <= loader.prefetch_factor * loader.num_workers


@pytest.mark.parametrize(
    ("slots", "prefetch", "expected"),
    [
        pytest.param(4, 2, (1, 2), marks=pytest.mark.long),
        (5, 2, (1, 2)),
        (6, 2, (2, 2)),
        pytest.param(8, 2, (3, 2), marks=pytest.mark.long),
        pytest.param(4, "auto", (2, 1), marks=pytest.mark.long),
        (5, "auto", (3, 1)),
    ],
)
def test_a_budget_for_so_many_slots_is_not_exceeded(
    three_cores: None, slots: int, prefetch: Any, expected: tuple[int, int]
) -> None:
    """Three workers would be faster; nothing is copied, nobody is warned."""
    nbytes = MIB // 4
    budget_nbytes = slots * (nbytes * 5 // 4 + 8192)
    dataset = Sized([nbytes] * 200, 0.01)
    most = [0]
    with DataLoader(
        dataset,
        num_workers="auto",
        prefetch_factor=prefetch,
        persistent_workers=True,
        memory_budget_nbytes=budget_nbytes,
    ) as loader:
        for number, batch in enumerate(loader):
            within_budget(loader, budget_nbytes, most)
            assert int(batch[0, 0]) == int(batch[0, -1]) == number % 256
        now = loader.statistics()
        assert (now.autotune.num_workers, now.autotune.prefetch_factor) == expected, now.autotune
        assert now.autotune.settled
        assert now.spills == 0
        assert expected == (3, 2) or "memory" in now.autotune.why
    assert most[0] > budget_nbytes // 3


@pytest.mark.filterwarnings("ignore::shmloader.SpillWarning")
@pytest.mark.parametrize("prefetch", [2, "auto"])
def test_batches_that_grow_make_the_choice_smaller_and_never_exceed_the_budget(
    three_cores: None, prefetch: Any
) -> None:
    """Twenty times as large in the end, when it has long settled; some batches are kept meanwhile."""
    budget_nbytes = 4 * MIB
    sizes = [100_000] * 200 + [100_000 + 10_000 * i for i in range(190)]
    most = [0]
    kept: list[torch.Tensor] = []
    with DataLoader(
        Sized(sizes, 0.004),
        num_workers="auto",
        prefetch_factor=prefetch,
        persistent_workers=True,
        memory_budget_nbytes=budget_nbytes,
    ) as loader:
        choices = []
        for number, batch in enumerate(loader):
            within_budget(loader, budget_nbytes, most)
            assert batch.shape == (1, sizes[number])
            assert int(batch[0, 0]) == int(batch[0, -1]) == number % 256
            kept = [*kept[-(number % 3) :], batch] if number % 3 else []
            if number == 199:
                assert loader.statistics().autotune.settled
            if number >= 199:
                choices.append((int(loader.num_workers), int(loader.prefetch_factor)))
        tasks = [workers * in_advance for workers, in_advance in choices]
        assert tasks[0] > 2
        assert tasks == sorted(tasks, reverse=True)  # only ever less, once it has settled
        assert choices[-1] == ((1, 2) if prefetch == 2 else (1, 1))
        assert processes(loader) == 1
        assert "memory" in loader.statistics().autotune.why
        assert loader.statistics().batches == len(sizes)


def test_workers_that_the_memory_has_no_room_for_are_not_started(
    three_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take as much for itself as the first one; half of the memory has room for one more."""
    with DataLoader(Draws(20, 0.004), num_workers="auto", persistent_workers=True) as loader:
        iterator = iter(loader)
        next(iterator)
        taken_nbytes = psutil.Process(iterator._workers[0].pid).memory_full_info().uss
    room = Headroom(int(taken_nbytes * 3), taken_nbytes * 9, "a test")
    monkeypatch.setattr("shmloader.tuning.memory_headroom", lambda: room)
    with DataLoader(Draws(90, 0.012), num_workers="auto", persistent_workers=True) as loader:
        assert len(list(loader)) == 90
        assert loader.num_workers == processes(loader) == 2
        assert "no more workers fit in the memory" in loader.statistics().autotune.why


class HoldsArray(Draws):
    def __init__(self, length: int, delay_s: float) -> None:
        super().__init__(length, delay_s)
        self.array = np.zeros(25_000_000, np.float32)


def test_arrays_that_each_further_worker_is_given_are_reckoned(
    three_cores: None, warm_helpers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are pickled for it alone, into memory that none of its pages shows before it is read."""
    room = Headroom(180_000_000, 400_000_000, "a test")
    monkeypatch.setattr("shmloader.tuning.memory_headroom", lambda: room)
    given: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "forkserver"}
    with DataLoader(HoldsArray(90, 0.012), num_workers="auto", **given) as loader:
        assert len(list(loader)) == 90
        assert loader.num_workers == processes(loader) == 1
        assert "no more workers fit in the memory" in loader.statistics().autotune.why


def test_kept_batches_leave_room_for_what_is_chosen(three_cores: None) -> None:
    """All of them, with room for all: they and the choice are as without keeping."""
    with DataLoader(
        Sized([50_000] * 130, 0.01),
        num_workers="auto",
        memory_budget_nbytes=64 * MIB,
        persistent_workers=True,
    ) as loader:
        kept = list(loader)
        assert loader.num_workers == 3
        assert all(int(batch[0, 0]) == int(batch[0, -1]) == number for number, batch in enumerate(kept))


class ResizedPool(PoolMachine):
    """The pool's own machine, with another number of tasks now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.pool.close()
        self.pool = SlotPool(self.segment_again(), 2, BUDGET_NBYTES, planned_tasks=6)

    def segment_again(self) -> Any:
        self.segment = type(self.segment)()
        return self.segment

    @precondition(lambda self: len(self.granted) + len(self.published) < self.pool.most_tasks)
    @rule()
    def grant(self) -> None:
        slot = self.pool.grant()
        assert slot not in self.granted
        self.granted.append(slot)

    @rule(tasks=st.integers(1, 6))
    def resize(self, tasks: int) -> None:
        before = self.pool.most_tasks
        done = self.pool.resize(tasks)
        assert self.pool.most_tasks == (tasks if done else before)
        assert done or tasks > before

    @rule()
    def plan_no_more(self) -> None:
        self.pool.planned_tasks = self.pool.most_tasks
        self.pool.resize(self.pool.most_tasks)

    @precondition(lambda self: self.pool.largest_nbytes and not (self.granted or self.published or self.held))
    @rule()
    def what_fits_can_be_had(self) -> None:
        tasks = min(6, self.pool.tasks_that_fit())
        assert tasks <= self.pool.most_tasks or self.pool.planned_tasks < 6 or self.pool.resize(tasks)


def test_a_pool_does_not_promise_again_what_slots_have_or_may_take() -> None:
    """40 pages: four slots with 9 each, and one that was granted while it might have 10."""
    pool = SlotPool(MemfdSegment(), 2, BUDGET_NBYTES)
    kept = []
    for _ in range(4):
        slot = pool.grant()
        pool.reserve(slot, 9 * PAGE_NBYTES)
        pool.publish(slot, slot.version, slot.nbytes, 9 * PAGE_NBYTES)
        kept.append(pool.lease(slot)[0])
    assert not pool.resize(4)  # six slots: the two new ones would have 2 pages each
    kept.clear()
    assert pool.resize(1)
    assert sum(slot.nbytes for slot in pool.slots) == 27 * PAGE_NBYTES
    pool.close()

    pool = SlotPool(MemfdSegment(), 2, BUDGET_NBYTES, planned_tasks=18)
    first, second = pool.grant(), pool.grant()
    assert second.limit_nbytes == 10 * PAGE_NBYTES
    pool.reserve(first, 1)
    pool.publish(first, first.version, first.nbytes, 1)
    assert pool.quota_nbytes <= 2 * PAGE_NBYTES
    assert not pool.resize(38)  # 40 slots of a page, and 9 more pages that were promised
    pool.revoke(second)
    assert pool.resize(18)
    pool.give_back(first)
    pool.close()


TestResizedPool = ResizedPool.TestCase
TestResizedPool.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


# --- trouble


class Ends(Draws):
    """The worker that is asked for a sample of ``deadly`` for the first time is killed."""

    def __init__(self, length: int, folder: Path, deadly: tuple[int, ...]) -> None:
        super().__init__(length, 0.003)
        self.folder, self.deadly = folder, deadly

    def __getitem__(self, index: int) -> Any:
        if index in self.deadly and not (self.folder / str(index)).exists():
            (self.folder / str(index)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_dies_while_this_is_chosen_is_an_error(tmp_path: Path, three_cores: None) -> None:
    with DataLoader(Ends(80, tmp_path, (33,)), num_workers="auto") as loader:
        with pytest.raises(WorkerDied, match=r"signal 9.*33"):
            list(loader)
        assert [int(batch[0]) for batch in loader] == list(range(80))


def test_dead_workers_are_replaced_meanwhile(tmp_path: Path, three_cores: None) -> None:
    expected = epochs(DataLoader(Draws(90), num_workers=1, dispatch="dynamic"))
    with DataLoader(
        Ends(90, tmp_path, (3, 27, 28, 60)), num_workers="auto", worker_restarts=4, persistent_workers=True
    ) as loader:
        assert epochs(loader) == expected
        assert loader.statistics().worker_restarts == 4
        assert processes(loader) >= loader.num_workers


def end_the_second(worker_id: int) -> None:
    if worker_id == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_before_it_is_there_is_an_error(three_cores: None) -> None:
    with (
        DataLoader(Draws(90, 0.003), num_workers="auto", worker_init_fn=end_the_second) as loader,
        pytest.raises(WorkerDied, match=r"worker 1 .*signal 9"),
    ):
        list(loader)


def fail_in_the_second(worker_id: int) -> None:
    if worker_id == 1:
        raise ArithmeticError("worker 1 does not want to")


def test_an_error_of_worker_init_fn_is_raised(three_cores: None) -> None:
    with (
        DataLoader(Draws(90, 0.003), num_workers="auto", worker_init_fn=fail_in_the_second) as loader,
        pytest.raises(ArithmeticError, match="worker 1 does not"),
    ):
        list(loader)


def test_where_no_further_worker_can_be_started_those_that_are_there_go_on(
    three_cores: None, caplog: pytest.LogCaptureFixture
) -> None:
    """There are no descriptors left for it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with DataLoader(Draws(60, 0.003), num_workers="auto", persistent_workers=True) as loader:
        iterator = iter(loader)
        found = [int(next(iterator)[0])]
        filled = [os.open(os.devnull, os.O_RDONLY) for _ in range(30)]  # no gap below the last
        resource.setrlimit(resource.RLIMIT_NOFILE, (filled[-1] + 1, limits[1]))
        try:
            found += [int(batch[0]) for batch in iterator]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in filled:
                os.close(fd)
        assert found == list(range(60))
        assert processes(loader) == loader.num_workers == 1
        assert "no more workers could be started" in loader.statistics().autotune.why
    assert "could not start one more worker" in caplog.text


class OpensSomething(Draws):
    """After a call in the main process it cannot be pickled any more."""

    lock: Any = None

    def open(self) -> None:
        self.lock = threading.Lock()


def test_a_dataset_that_cannot_be_pickled_any_more_ends_no_epoch(
    three_cores: None, warm_helpers: None, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = OpensSomething(60, 0.003)
    with DataLoader(dataset, num_workers="auto", multiprocessing_context="forkserver") as loader:
        found = []
        for batch in loader:
            dataset.open()
            found.append(int(batch[0]))
        assert found == list(range(60))
        assert "no more workers could be started" in loader.statistics().autotune.why
    assert "cannot pickle" in caplog.text


def test_an_epoch_ends_without_waiting_for_a_worker_that_is_still_starting(
    tmp_path: Path, three_cores: None
) -> None:
    """It has nothing to finish; others are given five seconds."""
    wait = WaitForFile(tmp_path / "never")
    loader = DataLoader(Draws(40, 0.003), num_workers="auto", worker_init_fn=wait, timeout=30)
    iterator = iter(loader)
    assert len([next(iterator) for _ in range(40)]) == 40
    assert iterator._exchange.joining == {1, 2}
    began_s = time.monotonic()
    loader.close()
    assert time.monotonic() - began_s < 4


class SomeBad(Draws):
    def __getitem__(self, index: int) -> Any:
        if index % 9 == 4:
            raise ValueError(index)
        return super().__getitem__(index)


def test_bad_samples_are_left_out_as_always(three_cores: None) -> None:
    found = []
    for workers in (1, "auto"):
        loader = DataLoader(
            SomeBad(180, 0.002), batch_size=2, num_workers=workers, dispatch="dynamic", on_error="skip"
        )
        with loader, pytest.warns(RuntimeWarning, match="20 bad sample"):
            found.append(epochs(loader))
    assert found[0] == found[1]


def test_a_loader_may_be_closed_or_forgotten_at_any_moment(three_cores: None) -> None:
    """Nothing is left behind (the leak guard looks), and nothing keeps the iterator alive."""
    for batches in (1, 22, 24, 26, 60):
        loader = DataLoader(Draws(100, 0.005), num_workers="auto")
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        loader.close()
    assert_dies_with_its_last_reference(DataLoader(Draws(100, 0.005), num_workers="auto"), batches=80)


def test_two_iterators_at_once_have_what_is_chosen(three_cores: None) -> None:
    loader = DataLoader(Draws(80, 0.002), num_workers="auto")
    found = [(int(one[0]), int(other[0])) for one, other in zip(loader, loader, strict=True)]
    assert found == [(i, i) for i in range(80)]
    loader.close()


# --- the attributes


def test_the_numbers_are_plain_to_read_and_mean_auto_to_a_new_loader(three_cores: None) -> None:
    """Frameworks build loaders from the attributes of others, and copy them."""
    with DataLoader(
        Draws(100, 0.012), num_workers="auto", prefetch_factor="auto", persistent_workers=True
    ) as loader:
        list(loader)
        assert isinstance(loader.num_workers, int)
        assert f"{loader.num_workers}" == "3"
        assert loader.dispatch == "dynamic"
        public = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
        for name in ("batch_size", "sampler", "drop_last"):
            del public[name]
        loader.close()  # live iterators are not pickled
        for other in (DataLoader(**public), copy.copy(loader), pickle.loads(pickle.dumps(loader))):
            assert (other.num_workers, other.prefetch_factor) == (3, loader.prefetch_factor)
            assert other.statistics().autotune is None
            next(iter(other))
            assert other.statistics().autotune.batches == 1
            assert not other.statistics().autotune.settled
            other.close()
        fixed = DataLoader(Draws(10), num_workers=int(loader.num_workers))
        next(iter(fixed))
        assert fixed.statistics().autotune is None
        assert fixed.dispatch == "static"
        fixed.close()


def test_a_number_that_the_program_sets_is_not_changed(three_cores: None) -> None:
    """torch lets it be set; it holds from the next iterator on."""
    loader = DataLoader(Draws(60, 0.003), num_workers="auto")
    iterator = iter(loader)
    next(iterator)
    loader.num_workers = 2
    list(iterator)
    assert loader.num_workers == 2
    iterator = iter(loader)
    assert len(iterator._workers) == 2
    assert len(list(iterator)) == 60
    assert loader.statistics().autotune is None
    loader.close()
    deep = DataLoader(Draws(60, 0.003), num_workers=2, prefetch_factor="auto")
    list(deep)
    deep.num_workers = 3
    assert len(list(deep)) == 60
    assert deep.statistics().autotune.num_workers == 3
    deep.close()


def test_worker_info_tells_the_most_workers_there_may_be(three_cores: None) -> None:
    """An array with a place for each worker has room for all."""
    with DataLoader(Info(100), num_workers="auto", persistent_workers=True) as loader:
        found = torch.cat(list(loader))
        assert set(found[:, 1].tolist()) == {3}
        assert {0, 1} <= set(found[:, 0].tolist()) <= {0, 1, 2}


class Info(Draws):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.003)
        info = get_worker_info()
        return torch.tensor([info.id, info.num_workers])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        yield from range(30)


def test_arguments_are_checked() -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: DataLoader(Stream(), num_workers="auto"),
            "num_workers='auto' needs a map-style dataset: each",
        ),
        (lambda: DataLoader(Numbered(4), num_workers="auto", dispatch="static"), "needs dispatch='dynamic'"),
        (
            lambda: DataLoader(Numbered(4), prefetch_factor="auto"),
            "could only be specified in multiprocessing",
        ),
    ]
    for build, match in refused:
        with pytest.raises(ValueError, match=match):
            build()
    with pytest.raises(TypeError):
        DataLoader(Numbered(4), num_workers="some")
    assert DataLoader(Numbered(4), num_workers="auto", dispatch="dynamic").dispatch == "dynamic"
    with pytest.raises(ValueError, match="map-style"):
        DataLoader(Pipe(), num_workers="auto")


class Pipe(MapDataPipe):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


def test_a_stream_may_have_its_batches_in_advance_chosen() -> None:
    with DataLoader(Stream(), num_workers=2, prefetch_factor="auto") as loader:
        found = [int(value) for _ in range(5) for batch in loader for value in batch]
        assert sorted(found) == sorted(list(range(30)) * 10)
        assert loader.statistics().autotune.settled


def test_a_later_epoch_begins_early_with_what_was_chosen() -> None:
    """``prefetch_epochs``, where workers take turns: as many of its tasks are sent as are chosen by then."""
    given: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "prefetch_epochs": True}
    with DataLoader(Jitter(100), prefetch_factor="auto", **given) as loader:
        found = epochs(loader, 3)
        assert loader.statistics().epochs_prefetched == 2
        assert loader.statistics().autotune.settled
    torch.manual_seed(7)
    theirs = TorchLoader(Draws(100), num_workers=2, persistent_workers=True)
    assert [[plain(batch) for batch in theirs] for _ in range(3)] == found
