"""What a worker does before anything else: watch the main process, and leave Ctrl-C to it.

Standard library only: see `EarlyName`.

The closed task pipe alone does not tell a worker that the main process has ended: a process that the user's
program forked may hold its other end. So a thread waits for that end. While some C code (an import, for
seconds) holds the interpreter lock it cannot run: where that is safe the kernel is asked for a signal too.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from typing import Any, Self

_THREAD_NAME = "shmloader-watch-main"
_PR_SET_PDEATHSIG = 1


def leave_interrupts_to_main() -> None:
    """Ignore Ctrl-C, which a terminal sends to the workers too. Call it in the worker's main thread.

    A handler that does nothing, instead of SIG_IGN, is not inherited by programs that a dataset starts.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):  # the main process holds it back while it starts a process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def begin(main_pid: int, by_leader: bool = False) -> None:
    """Leave Ctrl-C to the main process, and end with it.

    Args:
        main_pid: Its process id.
        by_leader: Whether the thread that started this process is one that lives as long as its process.
            In a forked process, its name knows that too (`EarlyName`).
    """
    leave_interrupts_to_main()
    if by_leader or getattr(multiprocessing.current_process().name, "by_leader", False):
        _die_with_parent(main_pid)
    end_with(main_pid)


def _die_with_parent(main_pid: int) -> None:
    """Have the kernel kill this process when its parent, if that is the main process, ends.

    The signal comes when the *thread* that made this process ends, so that must be the first thread of the
    main process. A fork server's children have another parent; they begin with everything imported.
    """
    if sys.platform != "linux" or os.getppid() != main_pid:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != main_pid:  # it ended just before
        os._exit(1)


def end_with(main_pid: int) -> None:
    """End this process when the main process ends, even in the middle of a user's ``__getitem__``.

    Starts a thread, unless it runs already. Call it in the worker.
    """
    if any(thread.name == _THREAD_NAME for thread in threading.enumerate()):
        return
    try:
        main_fd = os.pidfd_open(main_pid)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):
        main_fd = -1

    def wait() -> None:
        if main_fd >= 0:
            poller = select.poll()  # select() knows no descriptor beyond 1023
            poller.register(main_fd, select.POLLIN)
            poller.poll()
        else:
            while os.getppid() == main_pid:
                time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=wait, name=_THREAD_NAME, daemon=True).start()


class EarlyName(str):
    """A process name that, where it is unpickled, does what a worker does before anything else.

    A spawned process first unpickles a few settings, its name among them, then imports the user's main module
    and whatever the dataset needs, which may take half a minute, and only then runs what it was started for.
    The name comes with this module's source instead of a reference to it, because ``sys.path`` is one of
    those settings: nothing but the standard library can be imported yet.
    """

    __slots__ = ("by_leader", "main_pid")

    main_pid: int
    by_leader: bool

    def __new__(cls, name: str, main_pid: int) -> Self:
        """Make a name of ``name`` for a worker of the process ``main_pid``, in the thread that starts it."""
        self = super().__new__(cls, name)
        self.main_pid = main_pid
        self.by_leader = threading.get_native_id() == os.getpid()
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        source = _source()
        if source is None:
            return str, (str(self),)
        names: dict[str, Any] = {"source": source, "space": {"__name__": __name__}, "name": str(self)}
        names |= {"pid": self.main_pid, "by_leader": self.by_leader}
        return eval, ("(exec(source, space), space['begin'](pid, by_leader), name)[2]", names)


def _source() -> str | None:
    loader: Any = globals().get("__loader__")
    try:
        source: str | None = loader.get_source(__name__)
    except (AttributeError, ImportError):
        return None
    return source
