"""The process that has imported torch, and forks a program for each client."""

import contextlib
import ctypes
import gc
import json
import multiprocessing.process
import os
import selectors
import signal
import socket
import sys
import tempfile
import types
import warnings
from pathlib import Path

import numpy as np
import psutil  # noqa: F401
import torch.utils.data  # noqa: F401
from cheap_forks import collapse_pages

STATUS_NBYTES = 8
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def next_program() -> types.CodeType:
    """Fork programs for clients until the parent ends; it returns in each fork, with the program."""
    _, name, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit()
    gc.collect()
    gc.freeze()  # else each fork's collections copy the memory of torch's modules
    collapse_pages()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(64)
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    programs: dict[int, tuple[int, socket.socket]] = {}  # by pid, their pidfds and clients
    while True:
        for key, _ in ready.select():
            if key.fileobj is not listener:
                if key.data in programs:
                    pidfd, client = programs.pop(key.data)
                    ready.unregister(pidfd)
                    ready.unregister(client)
                    _end(key.data, pidfd, client, was_killed=key.fileobj is client)
                continue
            client, _ = listener.accept()
            size, files, _, _ = socket.recv_fds(client, STATUS_NBYTES, 3)
            request = client.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads of libraries
                child = os.fork()
            if not child:
                ready.close()
                for other in (listener, client, *(one for _, one in programs.values())):
                    other.close()
                for pidfd, _ in programs.values():
                    os.close(pidfd)
                return _become(*json.loads(request), files)
            for file in files:
                os.close(file)
            programs[child] = os.pidfd_open(child), client
            for end in programs[child]:
                ready.register(end, selectors.EVENT_READ, child)


def _end(child: int, pidfd: int, client: socket.socket, *, was_killed: bool) -> None:
    """Tell a client how its program ended, or end the program of a client that was killed."""
    if was_killed:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(pidfd)
    with client, contextlib.suppress(OSError):  # the client may be killed meanwhile
        if not was_killed:
            client.send(status.to_bytes(STATUS_NBYTES, "big", signed=True))


def _become(
    arguments: list[str], folder: str, environment: dict[str, str], files: list[int]
) -> types.CodeType:
    """Take over what a client has, as an interpreter that starts; the program that its arguments name."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    tempfile.tempdir = None
    np.random.seed()  # from the system's entropy; torch's seed is the same in every program
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings._setoption(arguments[1])  # type: ignore[attr-defined]
        arguments = arguments[2:]
    how = arguments[0]
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if not name.startswith("__")]:
        del main[name]
    sys.argv = arguments if not how.startswith("-") else [how, *arguments[2:]]
    beside = folder if how == "-m" else "" if how == "-c" else os.path.dirname(os.path.abspath(how))
    added = [os.path.abspath(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:2] = [beside, *added]  # in place of this folder and ""
    if how == "-m":
        return compile(f"import runpy; runpy._run_module_as_main({arguments[1]!r})", "<string>", "exec")
    if how == "-c":
        return compile(arguments[1], "<string>", "exec")
    main["__file__"] = how
    return compile(Path(how).read_bytes(), how, "exec")
