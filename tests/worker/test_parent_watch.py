"""A worker ends with the main process, and not before it, on systems that give no pidfd too."""

import errno
import os
import signal
import threading
import time

import psutil
import pytest

from shmloader.worker import parent_watch


def exit_code_of_grandchild(main: str) -> int:
    """The exit code of a process that a child starts, as a fork server does, and that watches this one."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    main_pid = os.getppid()
    watching = os.fork()
    if watching:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(watching, 0)[1]))
    try:
        parent_watch.begin(main_pid if main == "lives" else ended_process())
        time.sleep(1.2 if main == "lives" else 30)
    finally:
        os._exit(7)


def ended_process() -> int:
    """The id of a process that has ended."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize("error", [None, PermissionError])  # a seccomp filter refuses it
@pytest.mark.parametrize(("main", "code"), [("lives", 7), ("has ended", 1)])
def test_one_of_a_fork_server_watches_the_main_process(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None, main: str, code: int
) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(pid)

    if error is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    assert exit_code_of_grandchild(main) == code


def test_it_goes_on_where_it_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is free for a moment, say."""
    errors: list[Exception] = [psutil.AccessDenied(), OSError(errno.EMFILE, "")]
    own = psutil.Process

    def process(pid: int) -> psutil.Process:
        if errors:
            raise errors.pop()
        return own(pid)

    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(psutil, "Process", process)
    assert exit_code_of_grandchild("has ended") == 1


def test_a_worker_whose_watch_has_no_memory_to_begin_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a limit of address space (``ulimit -v``) there may be room for a thread's stack and no more."""

    def refuse(_: threading.Thread) -> None:
        raise MemoryError

    monkeypatch.setattr(threading.Thread, "_bootstrap", refuse)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        parent_watch.begin(os.getppid())
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
