"""What a worker does before anything else: watch the main process, and leave Ctrl-C to it.

Standard library only: see `EarlyName`.

The closed task pipe alone does not tell a worker that the main process has ended: a process that the user's
program forked may hold its other end. PR_SET_PDEATHSIG would fire when the *thread* that started the worker
ends.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Any, Self

_THREAD_NAME = "shmloader-watch-main"


def leave_interrupts_to_main() -> None:
    """Ignore Ctrl-C, which a terminal sends to the workers too. Call it in the worker's main thread.

    A handler that does nothing, instead of SIG_IGN, is not inherited by programs that a dataset starts.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    if hasattr(signal, "pthread_sigmask"):  # the main process holds it back while it starts a process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def begin(main_pid: int) -> None:
    """Do both."""
    leave_interrupts_to_main()
    end_with(main_pid)


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

    __slots__ = ("main_pid",)

    main_pid: int

    def __new__(cls, name: str, main_pid: int) -> Self:
        """Make a name of ``name`` for a worker of the process ``main_pid``."""
        self = super().__new__(cls, name)
        self.main_pid = main_pid
        return self

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        source = _source()
        if source is None:
            return str, (str(self),)
        names = {"source": source, "space": {"__name__": __name__}, "pid": self.main_pid, "name": str(self)}
        return eval, ("(exec(source, space), space['begin'](pid), name)[2]", names)


def _source() -> str | None:
    loader: Any = globals().get("__loader__")
    try:
        source: str | None = loader.get_source(__name__)
    except (AttributeError, ImportError):
        return None
    return source
