"""``worker_setup(info)`` and ``worker_teardown()``: once in each worker, at its beginning and at its end."""

import logging
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from robustness.processes import ENVIRONMENT
from setup_datasets import FailsToSetUp, FailsToTearDown, Forks, Opens, Streams, by_worker, calls, note
from thread_loaders import join_workers
from torch.utils.data import ConcatDataset, Dataset, Subset, get_worker_info
from warm_python import warm_python

from shmloader import DataLoader, LoaderClosed

WHOLE = ["init", "setup", "sample", "teardown"]


def _init(folder: Path, _: int) -> None:
    note(folder, "init")


def _epochs(dataset: Any, epochs: int = 2, **options: Any) -> None:
    with DataLoader(dataset, 4, **{"num_workers": 2, **options}) as loader:
        for _ in range(epochs):
            assert sum(len(batch) for batch in loader) == 24
    join_workers()


@pytest.mark.parametrize("persistent", [True, False])
def test_once_in_each_worker(start_method: str, persistent: bool, tmp_path: Path) -> None:
    options = {"multiprocessing_context": start_method, "worker_init_fn": partial(_init, tmp_path)}
    _epochs(Opens(tmp_path), persistent_workers=persistent, **options)
    starts, workers = 1 if persistent else 2, by_worker(tmp_path)
    assert list(workers.values()) == [WHOLE] * 2 * starts
    assert os.getpid() not in {pid for pid, _ in workers}
    assert sorted(call.worker for call in calls(tmp_path, "setup")) == [0] * starts + [1] * starts
    assert len(calls(tmp_path, "sample")) == 48


@pytest.mark.parametrize("persistent", [True, False])
def test_in_worker_threads_too(persistent: bool, tmp_path: Path) -> None:
    _epochs(Opens(tmp_path), persistent_workers=persistent, worker_type="thread")
    assert list(by_worker(tmp_path).values()) == [WHOLE[1:]] * (2 if persistent else 4)


def test_threads_that_share_an_object_set_it_up_once(tmp_path: Path) -> None:
    class Shared(Opens):
        def __copy__(self) -> "Shared":
            return self

    _epochs(Shared(tmp_path), 1, worker_type="thread")
    assert [call.what for call in calls(tmp_path, "setup", "teardown")] == ["setup", "teardown"]
    assert calls(tmp_path)[-1].what == "teardown", "the last thread calls it"


class ToldOfEpochs(Opens):
    """Threads begin an epoch of which they are told with new copies of it."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_a_new_copy_of_a_thread_is_set_up_after_the_old_one_is_torn_down(tmp_path: Path) -> None:
    options = {"num_workers": 1, "persistent_workers": True, "worker_type": "thread"}
    with DataLoader(ToldOfEpochs(tmp_path), 4, **options) as loader:
        for epoch in range(2):
            loader.set_epoch(epoch)
            assert len(list(loader)) == 6
    join_workers()
    assert list(by_worker(tmp_path).values()) == [WHOLE[1:] * 2]


def test_a_loop_that_is_left_tears_down(start_method: str, tmp_path: Path) -> None:
    with DataLoader(Opens(tmp_path), 2, num_workers=2, multiprocessing_context=start_method) as loader:
        for number, _ in enumerate(loader):
            if number == 1:  # both have begun
                break
    assert [told[-1] for told in by_worker(tmp_path).values()] == ["teardown"] * 2
    assert len(calls(tmp_path, "setup")) == len(calls(tmp_path, "teardown")) == 2


def test_a_restarted_worker_sets_up_again(tmp_path: Path) -> None:
    with DataLoader(Opens(tmp_path), 2, num_workers=2, worker_restarts=1) as loader:
        batches = iter(loader)
        next(batches)
        os.kill(batches._workers[0].pid, signal.SIGKILL)
        assert len(list(batches)) == 11
    assert sorted(call.worker for call in calls(tmp_path, "setup")) == [0, 0, 1]
    assert sorted(call.worker for call in calls(tmp_path, "teardown")) == [0, 1]


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from setup_datasets import Opens
from shmloader import DataLoader, LoaderClosed
if __name__ == "__main__":
    os.setsid()  # a process group of its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = DataLoader(Opens(Path(sys.argv[1])), 2, num_workers=2, multiprocessing_context=sys.argv[2])
    for number, _ in enumerate(loader):
        if number == 1:  # both workers have begun
            print(os.getpid(), flush=True)
            while True:  # in steps: a signal just before a long sleep is seen after it
                time.sleep(0.05)
"""


def test_ctrl_c_tears_down(start_method: str, tmp_path: Path) -> None:
    """It reaches the workers too, which leave it to the main process."""
    command = [*warm_python(), "-c", PROGRAM, str(tmp_path), start_method]
    ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, **ends) as program:
        os.killpg(int(program.stdout.readline()), signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1
    assert [told[-1] for told in by_worker(tmp_path).values()] == ["teardown"] * 2


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_an_exception_of_setup_comes_with_the_first_batch(worker_type: str, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir()
    dataset = ConcatDataset([Opens(good, 12), FailsToSetUp(tmp_path, 12)])
    options = {"num_workers": 2, "persistent_workers": True, "worker_type": worker_type}
    with DataLoader(dataset, 4, **options) as loader:
        batches = iter(loader)
        with pytest.raises(ConnectionError, match="no server") as caught:
            next(batches)
        assert "raised by FailsToSetUp.worker_setup()" in caught.value.__notes__[0]
        assert "Raised in shmloader worker 0 (" in caught.value.__notes__[1]
        with pytest.raises(RuntimeError, match="its first batch says why"):
            list(batches)
        assert [call.worker for call in calls(good, "teardown")] == [0], "what was set up before it"
        assert sum(len(batch) for batch in loader) == 24, "it is tried again in the next epoch"
    join_workers()
    assert sorted(call.worker for call in calls(good, "setup")) == [0, 0, 1]
    assert sorted(call.worker for call in calls(tmp_path, "teardown")) == [0, 1]


def test_an_exception_of_teardown_is_logged_by_processes(tmp_path: Path) -> None:
    """A program of its own: pytest's handler would take what its workers log."""
    program = f"""
from pathlib import Path
from setup_datasets import FailsToTearDown
from shmloader import DataLoader, LoaderClosed
assert len(list(DataLoader(FailsToTearDown(Path({str(tmp_path)!r})), 4, num_workers=2))) == 6
"""
    command = [*warm_python(), "-c", program]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr.count("FailsToTearDown.worker_teardown() failed in process ") == 2
    assert result.stderr.count("ConnectionError: the server has gone") == 2


@pytest.mark.parametrize("options", [{"worker_type": "thread"}, {"num_workers": 0}])
def test_an_exception_of_teardown_is_logged(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _epochs(FailsToTearDown(tmp_path), 1, **options)
    told = {record.getMessage().partition(" in ")[0] for record in caplog.records}
    assert told == {"FailsToTearDown.worker_teardown() failed"}
    assert len(caplog.records) == len(calls(tmp_path, "setup"))
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("left", [True, False])
def test_a_stream_ends_before_it_is_torn_down(num_workers: int, left: bool, tmp_path: Path) -> None:
    with DataLoader(Streams(tmp_path), 4, num_workers=num_workers) as loader:
        for _ in loader:
            if left:
                break
    expected = [["setup", "ends", "teardown"]] * max(1, num_workers)
    assert list(by_worker(tmp_path).values()) == expected


def test_a_process_that_the_dataset_forks_tears_nothing_down(tmp_path: Path) -> None:
    _epochs(Forks(tmp_path), 1)
    assert list(by_worker(tmp_path).values()) == [WHOLE[1:]] * 2


class Inner(Dataset):
    """Wraps another one, as a transform does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def test_wrapped_datasets_are_found_and_the_outermost_is_called(tmp_path: Path) -> None:
    class Outer(Inner):
        def worker_setup(self, info: Any) -> None:
            assert info is get_worker_info()
            note(tmp_path, "outer-setup")
            self.inner.worker_setup(info)

        def worker_teardown(self) -> None:
            self.inner.worker_teardown()
            note(tmp_path, "outer-teardown")

    first, second = (Opens(tmp_path, 12) for _ in range(2))
    _epochs(Subset(ConcatDataset([Outer(first), second]), range(24)), 1, num_workers=1)
    (told,) = by_worker(tmp_path).values()
    assert told == ["outer-setup", "setup", "sample", "teardown", "outer-teardown"]
    assert len(calls(tmp_path, "setup")) == len(calls(tmp_path, "teardown")) == 2


# --- without workers


def test_without_workers_around_each_pass(tmp_path: Path) -> None:
    dataset = Opens(tmp_path)
    _epochs(dataset, num_workers=0)
    assert list(by_worker(tmp_path).values()) == [WHOLE[1:] * 2]
    assert {call.pid for call in calls(tmp_path)} == {os.getpid()}
    assert dataset.file is None
    for _ in DataLoader(dataset):
        break
    assert dataset.file is None, "a pass that is left"
    batch = DataLoader(dataset, 4).batch(0, 1)
    assert batch.tolist() == [4, 5, 6, 7]
    assert dataset.file is None


@pytest.mark.parametrize("kind", [Opens, Streams])
def test_close_ends_a_pass_without_workers(kind: Any, tmp_path: Path) -> None:
    with DataLoader(kind(tmp_path), 4) as loader:
        iterator, over = iter(loader), iter(loader)
        assert len(list(over)) == 6
        assert next(iterator).tolist() == [0, 1, 2, 3]
    told = [call.what for call in calls(tmp_path)]
    assert told[-2:] == (["ends", "teardown"] if kind is Streams else ["sample", "teardown"])
    for _ in range(2):
        with pytest.raises(LoaderClosed, match=r"loader.close\(\) was called. Call iter\(loader\)"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(over)
    assert len(list(loader)) == 6


class ClosesAt(Opens):
    """Its sample 5 closes the loader, as another thread may do meanwhile."""

    loader: Any = None

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            self.loader.close()
        return super().__getitem__(index)


def test_a_call_that_makes_a_batch_meanwhile_has_the_dataset_until_its_end(tmp_path: Path) -> None:
    dataset = ClosesAt(tmp_path)
    dataset.loader = DataLoader(dataset, 4)
    iterator = iter(dataset.loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dataset.file is None
    with pytest.raises(LoaderClosed):
        next(iterator)


def test_passes_at_the_same_time_share_what_is_set_up(tmp_path: Path) -> None:
    dataset = Opens(tmp_path)
    one, other = iter(DataLoader(dataset, 4)), iter(DataLoader(dataset, 4))
    assert len(list(one)) == 6
    assert len(list(other)) == 6, "the end of one has left the file open"
    assert [call.what for call in calls(tmp_path, "setup", "teardown")] == ["setup", "teardown"]


_PASSES: list[Any] = []  # of the main process, which forked workers have copies of


class DropsParents(Opens):
    """Each worker sets up what it has from its parent, and lets the parent's pass go in its first sample."""

    def worker_setup(self, info: Any) -> None:
        self.file = None  # the parent's
        super().worker_setup(info)

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            _PASSES.clear()
        return super().__getitem__(index)


def test_forked_workers_set_up_and_tear_down_their_own(tmp_path: Path) -> None:
    dataset = DropsParents(tmp_path)
    _PASSES.append(iter(DataLoader(dataset, 4)))
    next(_PASSES[0])
    _epochs(dataset, 1)
    assert [told for (pid, _), told in by_worker(tmp_path).items() if pid != os.getpid()] == [WHOLE[1:]] * 2
    assert not calls(tmp_path, "teardown")[2:]
    assert len(list(_PASSES.pop())) == 5
    assert calls(tmp_path, "teardown")[2].pid == os.getpid()
