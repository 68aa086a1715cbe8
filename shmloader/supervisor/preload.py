"""In the fork server: import what workers will need, before it forks them.

The modules are the program's. One whose import raises leaves the error to the workers, who import it as they
would have anyhow. One whose import leaves behind what processes must not share by a fork (a thread, an open
descriptor, a lock of processes, a random generator), or that takes too long, is not imported here: the server
begins again without it, by a second ``exec`` in the same process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import multiprocessing
import os
import random
import signal
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.synchronize import SemLock
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

VARIABLE = "SHMLOADER_PRELOAD"
_MOST_S = 30.0  # for all modules together: the main process waits meanwhile
_NOT_TO_BE_SHARED = (  # random generators, and what a fork shares without a descriptor
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
    SemLock,
    mmap.mmap,
)


class Wish(NamedTuple):
    """What the main process has the fork server do.

    Attributes:
        modules: What to import.
        sys_path: The main process's ``sys.path``, which Python does not give to the server before 3.12.8.
        sys_argv: Its ``sys.argv``, likewise: modules may look at it when they are imported.
        python_path: The environment variable ``PYTHONPATH`` as it is in the main process.
        server_python_path: The same, with the folder of this package where it needs that.
        holds_interrupts: Whether SIGINT is blocked, for the server to unblock at the end.
        begun_again: Whether the server has begun again before.
    """

    modules: list[str]
    sys_path: list[str]
    sys_argv: list[str]
    python_path: str | None
    server_python_path: str | None
    holds_interrupts: bool
    begun_again: bool = False

    def to_text(self) -> str:
        """For the environment."""
        return json.dumps(self)

    @classmethod
    def from_text(cls, text: str) -> Wish:
        """The inverse of `to_text`."""
        return cls(*json.loads(text))


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable of this process, or remove it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def fulfil(wish: Wish) -> None:
    """Import the modules. May begin the whole process again, and then does not return."""
    try:
        set_variable("PYTHONPATH", wish.python_path)
        sys.path[:], sys.argv[:] = wish.sys_path, wish.sys_argv
        _close_input()
        with _another_name():
            _import_all(wish)
        # A fork would copy what is buffered, and each worker would print it once more.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        if wish.holds_interrupts:
            _let_interrupts_through()


def _import_all(wish: Wish) -> None:
    done: list[str] = []
    timer = threading.Timer(_MOST_S, lambda: _begin_again(wish, list(done)))
    timer.daemon = True
    timer.start()
    shared = SharedByFork()
    # OpenMP's threads would not be there after a fork, and it would wait for them for ever.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in wish.modules:
        with contextlib.suppress(BaseException):  # SystemExit too: the workers' import says it, to the user
            importlib.import_module(name)
        if shared.has_more():
            # The second time only what was seen to do no harm: each time costs seconds.
            later = [] if wish.begun_again else wish.modules[len(done) + 1 :]
            _begin_again(wish, done + [other for other in later if _package(other) != _package(name)])
        done.append(name)
    torch.set_num_threads(threads)
    timer.cancel()
    timer.join()


def _package(name: str) -> str:
    return name.partition(".")[0]


def _begin_again(wish: Wish, modules: list[str]) -> None:
    """Run the server's command line again in this process, which ends its threads and closes its files.

    Process id and inherited descriptors stay, so the main process need not know. Python 3.14 reads one of the
    descriptors to its end before it imports anything: there the server dies, and another takes its place.
    """
    set_variable("PYTHONPATH", wish.server_python_path)
    set_variable(VARIABLE, wish._replace(modules=modules, begun_again=True).to_text())
    os.execv(sys.orig_argv[0], sys.orig_argv)


class SharedByFork:
    """What processes forked from this one would share, or have equal, and should not."""

    def __init__(self) -> None:
        self._looked_into: set[str] = set()
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()
        known = _unshareable_in(self._modules_not_looked_into(), deep=False)
        self._known = set(map(id, known))

    def has_more(self) -> bool:
        """Whether there is more of it than at the beginning."""
        return (
            not set(threading.enumerate()) <= self._threads
            or not _descriptors() <= self._descriptors
            or bool(self._new_unshareable())
        )

    def _new_unshareable(self) -> list[object]:
        """What is such, not known before, in modules that were not looked into yet."""
        found = _unshareable_in(self._modules_not_looked_into(), deep=True)
        return [value for value in found if id(value) not in self._known]

    def _modules_not_looked_into(self) -> list[ModuleType | None]:
        names = sys.modules.keys() - self._looked_into
        self._looked_into |= names
        return [sys.modules.get(name) for name in names]


def _unshareable_in(modules: Iterable[ModuleType | None], *, deep: bool) -> list[object]:
    """What is `_NOT_TO_BE_SHARED` among globals of the modules or, if ``deep``, attributes of such."""
    found: list[object] = []
    for module in modules:
        for value in _attributes_of(module):
            if _is_unshareable(value):
                found.append(value)
            elif deep and not _is_elsewhere(value, module):
                found += filter(_is_unshareable, _attributes_of(value))
    return found


def _is_unshareable(value: object) -> bool:
    # The type, since to ask an object for its class may run code of its own. SystemRandom has no state.
    return issubclass(type(value), _NOT_TO_BE_SHARED) and not issubclass(type(value), random.SystemRandom)


def _is_elsewhere(value: object, module: ModuleType | None) -> bool:
    """Whether a global is a module, a function, or a class that another module defines."""
    if issubclass(type(value), type):
        return type.__getattribute__(value, "__module__") != getattr(module, "__name__", None)  # type: ignore[no-any-return]
    return issubclass(type(value), ModuleType | FunctionType)


def _attributes_of(value: object) -> list[Any]:
    # Nothing of the value's own may run: there are objects that import things, or raise, when looked at.
    try:
        return list(object.__getattribute__(value, "__dict__").values())
    except Exception:  # noqa: BLE001 - it has none
        return []


def _descriptors() -> set[tuple[int, int, int]]:
    """The open descriptors of this process, by number, device and inode, but for harmless ones."""
    found = set()
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - names, not paths
        try:
            status = os.fstat(int(name))
        except OSError:  # the one that listed them
            continue
        if not (stat.S_ISCHR(status.st_mode) and status.st_rdev in _harmless_devices()):
            found.add((int(name), status.st_dev, status.st_ino))
    return found


def _harmless_devices() -> set[int]:
    return {os.stat(path).st_rdev for path in (os.devnull, "/dev/urandom")}  # noqa: PTH116 - two strings


@contextlib.contextmanager
def _another_name() -> Iterator[None]:
    """Modules that do something in the main process only know it by this name."""
    process = multiprocessing.current_process()
    name, process.name = process.name, "shmloader-fork-server"
    try:
        yield
    finally:
        process.name = name


def _close_input() -> None:
    """Let an import that reads the standard input find its end, as in a worker; it is the program's."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _let_interrupts_through() -> None:
    """Unblock SIGINT, without being ended by one that has come; the server itself ignores it from now on."""
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)
