"""Workers that are started together get one pickle, and everything in it reaches each of them."""

import gc
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading import Numbered
from robustness.processes import python
from startup_datasets import (
    Collects,
    CountsPickles,
    EndsOnce,
    HoldsArrays,
    HoldsHandles,
    memory_files,
    open_files,
)
from torch.utils.data import default_collate

from shmloader import DataLoader, WorkerDied, share

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")


@pytest.mark.filterwarnings("ignore::shmloader.NotSharedWarning")  # forked workers copy the ballast
@pytest.mark.parametrize("start_method", ["fork", "forkserver"], indirect=True)
def test_the_dataset_is_pickled_once_for_all_workers(start_method: str) -> None:
    """A ballast of several MB, which all workers read from one file at once, is whole in each."""
    dataset = CountsPickles(24, ballast=1_000_000)
    with DataLoader(dataset, 2, num_workers=3, multiprocessing_context=start_method) as loader:
        rows = [row for batch in loader for row in torch.stack(batch, dim=1).tolist()]
    expected_sum = 999_999 * 1_000_000 // 2
    assert rows == [[index, index // 2 % 3, expected_sum] for index in range(24)]
    assert dataset.pickles == (start_method != "fork")


def test_a_worker_in_anothers_place_is_given_the_dataset_as_it_is_then(
    tmp_path: Path, warm_helpers: None
) -> None:
    dataset = EndsOnce(tmp_path)
    with DataLoader(
        dataset, 2, num_workers=2, multiprocessing_context="forkserver", worker_restarts=1
    ) as loader:
        batches = iter(loader)
        first = next(batches)
        dataset.numbers = [7]
        rows = [row for batch in [first, *batches] for row in torch.stack(batch, dim=1).tolist()]
    assert [row[:2] for row in rows] == [[index, index // 2 % 2] for index in range(16)]
    assert {row[2] for row in rows if row[1] == 1} == {0}, "the worker that lived on"
    assert rows[-4][1:] == [0, 7]
    assert dataset.pickles == 2


def test_handles_inside_a_dataset_reach_every_worker(start_method: str) -> None:
    context = multiprocessing.get_context(start_method)
    dataset = HoldsHandles(8, context)
    dataset.event.set()
    try:
        with DataLoader(dataset, 1, num_workers=2, multiprocessing_context=context) as loader:
            assert [int(batch) for batch in loader] == list(range(8))
        assert dataset.pickles == (start_method != "fork")
        assert dataset.value.value == 8
        assert dataset.tensor.tolist() == [1] * 8
        assert sorted(dataset.queue.get(timeout=60) for _ in range(8)) == list(range(8))
        assert sorted(dataset.reads.recv() for _ in range(8)) == list(range(8))
    finally:
        dataset.close()


@pytest.mark.parametrize("method", ["forkserver"])
def test_a_store_reaches_every_worker(method: str, warm_helpers: None) -> None:
    rows = share([{"number": index, "text": str(index)} for index in range(12)])
    with DataLoader(rows, 2, num_workers=3, multiprocessing_context=method) as loader:
        assert [batch["text"] for batch in loader] == [[str(i), str(i + 1)] for i in range(0, 12, 2)]


def test_too_large_a_file_is_an_error_with_advice(
    warm_helpers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on the size of files applies to the pickle for workers, too."""
    loader = DataLoader(CountsPickles(8, 1_000_000), num_workers=1, multiprocessing_context="forkserver")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            iter(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert any("ulimit -f" in note for note in caught.value.__notes__)


@pytest.mark.long
def test_tensors_in_named_files_last_for_more_than_one_epoch() -> None:
    """Torch counts the receivers of such a file: one pickle for two of them would end it."""
    # A program of its own: torch's helper process for such files lives as long as the program.
    output = python(
        """
        import multiprocessing
        import torch
        from shmloader import DataLoader
        from startup_datasets import HasTensor
        if __name__ == "__main__":
            torch.multiprocessing.set_sharing_strategy("file_system")
            loader = DataLoader(HasTensor(), 4, num_workers=2, multiprocessing_context="forkserver")
            for _ in range(3):
                assert torch.cat(list(loader)).tolist() == list(range(0, 160, 10))
            print("good")
        """
    )
    assert output == "good\n"


def test_large_arrays_are_mapped_by_workers_and_theirs_to_change(warm_helpers: None) -> None:
    dataset = HoldsArrays()
    with DataLoader(
        dataset, 1, num_workers=2, multiprocessing_context="forkserver", worker_init_fn=None
    ) as loader:
        rows = [[int(column) for column in batch] for batch in loader]
    assert rows == [[index % 2, 100 + index % 2, True, True] for index in range(8)]
    assert dataset.array[0] == 0


def test_files_of_the_start_are_gone_after_it(warm_helpers: None) -> None:
    """In the main process all are gone; in a worker the file of large arrays is mapped, and none is open."""
    dataset = HoldsArrays()
    with DataLoader(
        dataset, 4, num_workers=2, multiprocessing_context="forkserver", collate_fn=memory_files
    ) as loader:
        memory = list(loader)
        held = open_files()
    assert not [name for name in held if "shmloader-arguments" in name or "shmloader-arrays" in name]
    for files in memory:
        assert [name for name in files if "arguments" in name or "arrays" in name] == [
            "map /memfd:shmloader-arrays (deleted)"
        ]


def test_small_arrays_need_no_file_of_their_own(warm_helpers: None) -> None:
    dataset = Numbered(8, ballast_nbytes=1000)
    with DataLoader(
        dataset, 4, num_workers=2, multiprocessing_context="forkserver", collate_fn=memory_files
    ) as loader:
        assert not [name for memory in loader for name in memory if "shmloader-arr" in name]


class _Unwilling(Numbered):
    def __getstate__(self) -> Any:
        raise ValueError("not to be pickled")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_an_error_in_the_pickling_is_itself_with_advice_and_leaves_nothing(
    method: str, warm_helpers: None
) -> None:
    before = sorted(open_files())
    with (
        DataLoader(_Unwilling(8), num_workers=2, multiprocessing_context=method) as loader,
        pytest.raises(ValueError, match="not to be pickled") as caught,
    ):
        iter(loader)
    assert any("multiprocessing_context='fork'" in note for note in caught.value.__notes__)
    del caught
    assert sorted(open_files()) == before


def test_objects_that_are_no_arrays_keep_their_memory_in_the_pickle(warm_helpers: None) -> None:
    """A class of the program's may rely on bytes, which it would not get from a file of arrays."""
    with DataLoader(HoldsBuffer(), 2, num_workers=1, multiprocessing_context="forkserver") as loader:
        assert [batch.tolist() for batch in loader] == [[1 << 17, 1 << 17]] * 2


class HoldsBuffer(Numbered):
    def __init__(self) -> None:
        super().__init__(4)
        self.text = Text(b"a" * (1 << 17))

    def __getitem__(self, index: int) -> Any:
        return np.int64(len(self.text.contents.decode()))


class Text:
    def __init__(self, contents: bytes) -> None:
        self.contents = contents

    def __reduce_ex__(self, protocol: Any) -> Any:
        import pickle

        return Text, (pickle.PickleBuffer(self.contents),)


def test_fork_pickles_nothing() -> None:
    with DataLoader(_Unwilling(8), 4, num_workers=2, multiprocessing_context="fork") as loader:
        assert torch.equal(torch.cat(list(loader)), default_collate([torch.full((8,), i) for i in range(8)]))


def test_a_collection_in_a_worker_leaves_alone_what_it_was_started_with(start_method: str) -> None:
    rows = 200_000  # of some 20 MB
    with DataLoader(Collects(4, rows), num_workers=2, multiprocessing_context=start_method) as loader:
        visited, copied_nbytes = (torch.cat(column).tolist() for column in zip(*loader, strict=True))
    assert max(visited) < rows // 2
    assert max(copied_nbytes) < 8 << 20


def test_worker_threads_leave_the_programs_objects_to_its_collector() -> None:
    frozen = gc.get_freeze_count()
    with DataLoader(Numbered(8), num_workers=2, worker_type="thread") as loader:
        assert len(list(loader)) == 8
        assert gc.get_freeze_count() <= frozen


class CannotArrive(Numbered):
    def __setstate__(self, state: Any) -> None:
        raise LookupError("no licence on this host")


@pytest.mark.usefixtures("late_exit_codes")
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_what_a_worker_cannot_unpickle_is_told_by_the_error_and_nowhere_else(
    method: str, warm_helpers: None, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = DataLoader(CannotArrive(8), num_workers=2, multiprocessing_context=method)
    with pytest.raises(
        WorkerDied, match=r"exited with code 1.*\n(.*\n)*LookupError: no licence on this host"
    ):
        next(iter(loader))
    assert capfd.readouterr().err == ""


def test_without_another_process_the_error_says_which_limit_to_raise() -> None:
    """The limit does not hold for root."""
    python(
        """
        import multiprocessing.popen_fork, os, resource
        from loading import Numbered
        from shmloader import DataLoader, OwnProcess
        loader, own = DataLoader(Numbered(8), num_workers=2), OwnProcess([1, 2])
        is_root = os.geteuid() == 0
        if is_root:
            os.setresuid(65534, 65534, 0)
        limits = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, limits[1]))
        try:
            iter(loader)
        except BlockingIOError as error:
            note, = error.__notes__
            assert "Worker 0 has no process" in note and "pids.max" in note, note
        else:
            raise AssertionError
        try:
            next(iter(own))
        except BlockingIOError as error:
            assert "The list has no process" in error.__notes__[0], error.__notes__
        else:
            raise AssertionError
        resource.setrlimit(resource.RLIMIT_NPROC, limits)
        if is_root:
            os.seteuid(0)
            os.setresuid(0, 0, 0)
        assert len(list(loader)) == 8
        """
    )


def test_a_worker_that_cannot_start_its_threads_is_an_error_that_says_so() -> None:
    python(
        """
        import resource, threading
        from loading import Numbered
        from shmloader import DataLoader, WorkerDied
        loader = DataLoader(Numbered(8), num_workers=1)
        with open("/proc/self/statm") as file:
            used_nbytes = int(file.read().split()[0]) * 4096
        threading.stack_size(2 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (used_nbytes + (1 << 30), -1))
        try:
            list(loader)
        except WorkerDied as error:
            assert "This has ended it:" in str(error) and "can't start new thread" in str(error), error
        else:
            raise AssertionError
        """
    )


def test_an_exception_that_ends_a_worker_is_told_by_the_error_and_its_own_output() -> None:
    """It keeps its batches, and has no address space left to move them to."""
    printed = python(
        """
        import os, resource
        from loading import Numbered
        from shmloader import DataLoader, WorkerDied
        from torch.utils.data import default_collate

        kept = []

        def keep(samples):
            kept.append(default_collate(samples))
            if len(kept) == 3:
                with open("/proc/self/statm") as file:
                    used_nbytes = int(file.read().split()[0]) * 4096
                resource.setrlimit(resource.RLIMIT_AS, (used_nbytes + (8 << 20), -1))
            return kept[-1]

        os.dup2(1, 2)
        got = []
        try:
            for batch in DataLoader(Numbered(32, items=1 << 20), 4, num_workers=1, collate_fn=keep):
                got.append(int(batch[0, 0]))
        except WorkerDied as error:
            assert error.exit_code == 1, error
            assert got == [0, 4], got
            told = "This has ended it:", "SharedMemoryExhausted: mapping", "It held", "[8, 9, 10, 11]"
            assert all(words in str(error) for words in told), error
        else:
            raise AssertionError(got)
        """
    )
    assert "SharedMemoryExhausted: mapping" in printed
