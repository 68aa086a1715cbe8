"""First steps of a worker process: to leave Ctrl-C to the main process, and to end with it.

A process that the program forked may hold the other end of a worker's pipe, so the pipe does not show the
main process's death. A thread waits for that instead. It cannot run while C code holds the interpreter lock,
so the kernel is asked for a signal too, where that is safe.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import select
import signal
import threading
import time

import psutil

from shmloader.memory.mapping import libc

_PR_SET_PDEATHSIG = 1


def _go_on(grace_s: float, number: int, _: object) -> None:
    """Handle SIGTERM: end after the grace, unless the main process has ended this worker before."""

    def end() -> None:
        time.sleep(grace_s)
        os._exit(128 + number)

    # A handler, since a program that the dataset starts would inherit that the signal is ignored.
    signal.signal(number, lambda *_: None)
    threading.Thread(target=end, name="shmloader-sigterm", daemon=True).start()


def _has_not_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):  # it cannot be told now: no descriptor is free, say
        return True


def begin(main_pid: int, by_leader: bool = False, grace_s: float = 0.0) -> None:
    """Set up signals and the watch over the main process: first in a worker, in its main thread.

    After SIGTERM the worker goes on for ``grace_s`` seconds.
    """
    # Whatever a fork has inherited, and no signal is written to a descriptor.
    signal.signal(signal.SIGTERM, functools.partial(_go_on, grace_s) if grace_s > 0 else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    # A terminal sends Ctrl-C to the workers too. A handler that does nothing, instead of SIG_IGN, is not
    # inherited by programs that a dataset starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while the process was started
    # The kernel kills this process when the *thread* that made it ends: the main process's first one, if it
    # is ``by_leader``, which lives as long as the process.
    if by_leader and libc is not None and os.getppid() == main_pid:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != main_pid:  # it ended just before
            os._exit(1)
    is_child = os.getppid() == main_pid  # not of a fork server
    main_fd = -1
    with contextlib.suppress(AttributeError, OSError):  # before Linux 5.3, refused, or it has ended
        main_fd = os.pidfd_open(main_pid)

    def wait() -> None:
        if main_fd >= 0:
            poller = select.poll()  # select() knows no descriptor beyond 1023
            poller.register(main_fd, select.POLLIN)
            poller.poll()
        else:
            while os.getppid() == main_pid if is_child else _has_not_ended(main_pid):
                time.sleep(1.0)
        os._exit(1)

    # Not a `Thread`, whose start() waits for ever for a thread that had no memory to begin.
    _thread.start_new_thread(wait, ())
