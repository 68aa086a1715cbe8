"""``iterator._workers`` are process objects that answer after the end; an error begins with torch's words."""

import multiprocessing.process
import multiprocessing.util
import os
import signal

import pytest
from loading import Ends, Numbered

from shmloader import DataLoader, WorkerDied


@pytest.mark.usefixtures("late_exit_codes")
def test_they_answer_after_the_end_and_hold_no_descriptor(start_method: str) -> None:
    with DataLoader(Numbered(8), num_workers=2, multiprocessing_context=start_method) as loader:
        iterator = iter(loader)
        processes = iterator._workers
        assert all(isinstance(process, multiprocessing.process.BaseProcess) for process in processes)
        assert all(process.is_alive() and process.exitcode is None for process in processes)
        pids = [process.pid for process in processes]
        held = {process.sentinel for process in processes}
        assert len(list(iterator)) == 8
        assert iterator._workers == processes
    assert [process.pid for process in processes] == pids
    assert [process.is_alive() for process in processes] == [False, False]
    assert [process.exitcode for process in processes] == [0, 0]
    for process in processes:
        process.join()
        process.terminate()  # nothing happens
    pipes = {fd for fd in held if os.path.exists(f"/proc/self/fd/{fd}")}
    assert not pipes, "their sentinels are open while the objects live"
    assert not set(processes) & set(multiprocessing.active_children())


def test_a_killed_one_tells_by_what() -> None:
    loader = DataLoader(Numbered(80), num_workers=2, batch_size=2)
    iterator = iter(loader)
    next(iterator)
    first, second = iterator._workers
    first.kill()
    with pytest.raises(WorkerDied) as caught:
        list(iterator)
    assert str(caught.value).startswith(f"DataLoader worker (pid {first.pid}) is killed by signal: Killed. ")
    assert f"shmloader worker 0 (pid {first.pid}) was killed by signal 9 (SIGKILL)" in str(caught.value)
    assert first.exitcode == -signal.SIGKILL
    assert not second.is_alive()


def test_one_that_exits_is_told_in_torchs_words_too() -> None:
    iterator = iter(DataLoader(Ends(1000, at=21, how=7), batch_size=4, num_workers=2))
    with pytest.raises(WorkerDied) as caught:
        list(iterator)
    pid = caught.value.pid
    assert str(caught.value).startswith(f"DataLoader worker (pid(s) {pid}) exited unexpectedly. ")
    assert "exited with code 7" in str(caught.value)


def test_one_that_was_replaced_is_replaced_in_the_list() -> None:
    with DataLoader(
        Numbered(32), batch_size=4, num_workers=2, persistent_workers=True, worker_restarts=1
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        victim = iterator._workers[1]
        victim.kill()
        list(iterator)
        assert [process.is_alive() for process in iterator._workers] == [True, True]
        assert victim.exitcode == -signal.SIGKILL
        assert victim not in iterator._workers


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12
def test_a_forked_process_that_ends_leaves_them_to_its_parent() -> None:
    with DataLoader(Numbered(24), batch_size=4, num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                multiprocessing.util._exit_function()  # what multiprocessing does at a process's end
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(list(iterator)) == 5
