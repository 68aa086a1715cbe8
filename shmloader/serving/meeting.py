"""The meeting of readers with the server of a name, and the checks of both before anything is served.

A server is found at an abstract socket that its name and its user stand for. The kernel frees it with the
server, so none is ever stale, and tells each side the other one's process and user.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shmloader.errors import LoaderError, ServerDied, ShareTimeout
from shmloader.host_sockets import bind, not_inherited, receive_descriptors
from shmloader.serving.records import MOST_NBYTES, PROTOCOL, WELCOME
from shmloader.store.host_server import peer_of
from shmloader.store.job import job_of_process

_MOST_CHARACTERS = 64
_RETRY_S = 0.02
_ANSWER_S = 600.0  # a server that makes a slow batch answers after it
_LAUNCHED = ("torchrun", "slurm", "address")  # runs with an identity of their own


def introduction(job: str | None) -> dict[str, Any]:
    """The introduction of a process: what both sides have to have in common, and their run."""
    try:
        run = ["job", job] if job is not None else job_of_process("")
    except LoaderError:
        run = []
    if job is None and run[:1] not in [[kind] for kind in _LAUNCHED]:
        run = []  # such a process may be of any run
    versions = {
        "protocol": PROTOCOL,
        "Python": "{}.{}".format(*sys.version_info),
        "torch": torch.__version__,
        "NumPy": np.__version__.partition(".")[0],
    }
    return {"versions": versions, "run": run}


def why_refused(own: dict[str, Any], its: dict[str, Any], name: str) -> str | None:
    """The reason why a reader that introduces itself so is refused; None if it is not."""
    ours, theirs = own["versions"], its["versions"]
    if ours != theirs:
        differing = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
        there = ", ".join(f"{key} {ours.get(key)} there and {theirs.get(key)} here" for key in differing)
        return f"{name!r} is served by other versions: {there}. Use the same environment in both."
    if own["run"] and its["run"] and own["run"] != its["run"]:
        return (
            f"{name!r} is served in another run ({' '.join(own['run'])}) than this one "
            f"({' '.join(its['run'])}). Give each run's loader a name of its own; or, if both are to read "
            "one loader, pass the same job=... to serve and to attach."
        )
    if own.get("loader") != its.get("loader"):
        return (
            "with shared_by='host' all ranks of a host make the same loader, for they get the same batches. "
            f"Local rank 0 has: {own.get('loader')}; and this rank: {its.get('loader')}"
        )
    return None


def listen(name: str) -> socket.socket:
    """Take a name, as its server. Raises `LoaderError` if it is taken, naming by whom."""
    address = _address(name)
    listener = bind(address)
    if listener is not None:
        return listener
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(address)
        except OSError:
            who = "another process"
        else:
            who = "process {} of user {}".format(*peer_of(probe))
    raise LoaderError(f"{name!r} is served already, by {who}: end that, or use another name")


def connect(name: str, timeout_s: float) -> tuple[socket.socket, int]:
    """Find the server of a name, waiting for it to begin; returns a connection to it, and its process id.

    Raises:
        ShareTimeout: If there was none in time.
        PermissionError: If it is another user's.
    """
    address, deadline_s = _address(name), time.monotonic() + timeout_s
    while True:
        connection = not_inherited(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            connection.connect(address)
            pid, uid = peer_of(connection)
            break
        except ConnectionRefusedError:
            connection.close()
        except BaseException:
            connection.close()
            raise
        if (other := _other_user_of(name)) is not None:
            raise _of_another_user(name, other)
        if time.monotonic() > deadline_s:
            raise ShareTimeout(
                f"no process of this user has served {name!r} on this host for {timeout_s:g} s. Start one, "
                "with shmloader.serve(loader, name) or `python -m shmloader serve`, or raise timeout_s."
            )
        time.sleep(_RETRY_S)
    if uid != os.geteuid():
        connection.close()
        raise _of_another_user(name, f"process {pid} of user {uid}")
    return connection, pid


def greet(
    connection: socket.socket, pid: int, name: str, about: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """Introduce this process to a server; returns its answer, and the descriptor of its segment.

    Raises `LoaderError` if it refuses.
    """
    connection.settimeout(_ANSWER_S)
    answer, fds = b"", list[int]()
    try:
        # It has refused already; or it has ended, and never took this connection.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(json.dumps(about).encode())
        for _ in range(2):  # the first may say only that it has ended without reading; what it said is here
            with contextlib.suppress(ConnectionResetError):
                answer, fds, _ = receive_descriptors(connection, MOST_NBYTES, 1)
                break
    except TimeoutError:
        raise ShareTimeout(
            f"process {pid}, which serves {name!r}, has not answered for {_ANSWER_S:g} s"
        ) from None
    connection.settimeout(None)
    if not answer:
        raise ServerDied(f"process {pid}, which serves {name!r}, has ended before it answered", pid=pid)
    if answer[0] != WELCOME:
        raise LoaderError(answer[1:].decode())
    if not fds:
        raise no_descriptor(name)
    return json.loads(answer[1:]), fds[0]


def no_descriptor(name: str) -> LoaderError:
    """The error of a process to which no descriptor could be sent."""
    return LoaderError(f"{name!r}: this process may not open more files (ulimit -n)")


def _address(name: str) -> str:
    if not sys.platform.startswith("linux"):
        raise LoaderError(f"serve and attach need Linux's abstract sockets; this is {sys.platform}")
    if not 0 < len(name.encode()) <= _MOST_CHARACTERS or "\0" in name:
        raise ValueError(f"a name of 1 to {_MOST_CHARACTERS} bytes is needed for a loader, and got {name!r}")
    return f"\0shmloader-serve-{os.geteuid()}-{name}"


def _other_user_of(name: str) -> str | None:
    """The other user who serves a name, or this one as another container sees it; None if nobody does."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        user, _, its_name = line.partition("@shmloader-serve-")[2].partition("-")
        if its_name == name and user != str(os.geteuid()):
            return f"a process that is user {user} to itself"
    return None


def _of_another_user(name: str, who: str) -> PermissionError:
    return PermissionError(
        errno.EPERM,
        f"{name!r} is served by {who}, and this process is user {os.geteuid()}: loaders are served to the "
        "same user only, in containers that map users alike",
    )
