"""The fork server of start method ``forkserver``: what it imports before it forks the first worker.

There is one for all of a program, and it starts with the first process that needs it. Until then, `begin`
has it import torch, this package and the modules of what the workers are given, beside what the program
chose by ``multiprocessing.set_forkserver_preload``. A server that runs already is left as it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import site
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from shmloader.supervisor.launch import named_parts
from shmloader.supervisor.preload import VARIABLE, Wish, set_variable

_ENTRY = "shmloader.supervisor.in_server"
_MAIN = ("__main__", "__mp_main__")  # the server's own business, and not imported by name
_NOTICE_S = 10.0  # how long it may take until a process whose files are closed has ended

_met_in_pid = -1


def begin(objects: Iterable[object]) -> None:
    """Start the fork server, unless it runs, and have it import what workers need; returns at once.

    Args:
        objects: What workers will be given. The modules of their classes and functions are imported.
    """
    chosen = _chosen_by_program()
    if not chosen:  # set_forkserver_preload([]): nothing at all
        return
    python_path = os.environ.get("PYTHONPATH")
    wish = Wish(
        modules=modules_of(objects),
        sys_path=[str(entry or os.curdir) for entry in sys.path],
        sys_argv=list(map(str, getattr(sys, "argv", []))),  # an embedded interpreter may have none
        python_path=python_path,
        server_python_path=_with_this_package(python_path),
        # Without this package nobody would unblock them.
        holds_interrupts=not sys.flags.ignore_environment,
    )
    try:
        set_variable(VARIABLE, wish.to_text())
        set_variable("PYTHONPATH", wish.server_python_path)
        # Last: all that comes before is protected from Ctrl-C too.
        forkserver.set_forkserver_preload([*chosen, _ENTRY])
        resource_tracker.ensure_running()  # unblocks SIGINT where it starts
        with _interrupts_held_back() if wish.holds_interrupts else contextlib.nullcontext():
            forkserver.ensure_running()
    finally:
        forkserver.set_forkserver_preload(chosen)
        set_variable("PYTHONPATH", python_path)
        set_variable(VARIABLE, None)


def wait_until_ready(context: Any) -> None:
    """Wait until the server has imported everything, at its first start; Ctrl-C may interrupt this.

    A worker's start would wait as well, but holds back Ctrl-C. If the server dies of its imports, this waits
    for a new one, which imports only what the program chose.

    Args:
        context: The ``multiprocessing`` context of start method forkserver.
    """
    global _met_in_pid  # noqa: PLW0603 - there is one server for a process
    if _met_in_pid == os.getpid():
        return
    deaths, deadline = 0, time.monotonic() + _NOTICE_S
    while deaths < 2 and time.monotonic() < deadline:
        process = context.Process(target=os.getpid, daemon=True)
        try:
            process.start()  # returns when the server has forked it
        except ConnectionRefusedError:  # it has died, and is not known yet to have
            time.sleep(0.01)
        except (OSError, EOFError):
            deaths += 1
            deadline = time.monotonic() + _NOTICE_S
        else:
            process.kill()  # before it imports the program's main module for nothing
            process.join()
            process.close()
            break
    _met_in_pid = os.getpid()


def modules_of(objects: Iterable[object]) -> list[str]:
    """The modules that unpickling the objects would import, as far as a look at them shows."""
    names = (str(getattr(part, "__module__", "")) for each in objects for part in named_parts(each))
    found = dict.fromkeys(names)
    return [name for name in found if name not in _MAIN and _can_be_imported(name)]


def _can_be_imported(name: str) -> bool:
    return getattr(sys.modules.get(name), "__spec__", None) is not None


def _chosen_by_program() -> list[str] | None:
    """What ``set_forkserver_preload`` has set, or its default; None if this Python keeps it elsewhere.

    The one private name of multiprocessing in this package: there is a public way to set the list and none to
    read it, and what the program chose must not be lost. docs/decisions/0022 has what else was considered.
    """
    server = getattr(forkserver.set_forkserver_preload, "__self__", None)
    chosen = getattr(server, "_preload_modules", None)
    return None if chosen is None else [name for name in chosen if name != _ENTRY]


def _with_this_package(python_path: str | None) -> str | None:
    """``PYTHONPATH`` with which a fresh interpreter finds this package."""
    folder = str(Path(__file__).resolve().parents[2])
    if folder in (*site.getsitepackages(), site.getusersitepackages()):
        return python_path
    return os.pathsep.join(filter(None, (python_path, folder)))


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Start what is started inside with SIGINT blocked: a terminal's Ctrl-C comes to the server too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
