"""`share_on_host`: one process of a host builds a shared object, all others attach to the same memory.

The processes meet at an abstract Unix socket, whose name stands for user, job and object. The process that
binds it builds. When that process ends, for any reason, the kernel frees the name, and the next in line binds
it. A finished object is handed to a small process (`host_server`) that keeps answering at that name, so no
thread runs here and late processes find the object too. No files are involved.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar, overload

from shmloader.errors import LoaderError, ShareTimeout
from shmloader.failures.exceptions import capture, restore
from shmloader.host_sockets import bind, receive_descriptors
from shmloader.store import host_server, share
from shmloader.store.handles import pack, unpack
from shmloader.store.host_server import FAILED, HEADER, MOST_FDS
from shmloader.store.job import fingerprint_of, job_of_process
from shmloader.store.sealed_buffer import BufferBuilder, SharedBuffer

if TYPE_CHECKING:
    from shmloader.store.base import Store

_log = logging.getLogger(__name__)

_Object = TypeVar("_Object")
_Rows = Sequence[_Object] | Iterator[_Object]

_PROTOCOL = 3
_MOST_COPIED_NBYTES = 16 << 20  # of contents that are not in shared memory, in each rank
_RETRY_S = 0.005
_MOST_WAIT_MS = (1 << 31) - 1  # that ``poll`` takes: 24 days

_building = threading.local()  # the names that this thread is building


@overload
def share_on_host(
    build: Callable[[], _Rows[_Object]], *, name: str, job: str | None = ..., timeout_s: float = ...
) -> Store[_Object]: ...
@overload
def share_on_host(
    build: Callable[[], _Object], *, name: str, job: str | None = ..., timeout_s: float = ...
) -> _Object: ...
def share_on_host(
    build: Callable[[], Any], *, name: str, job: str | None = None, timeout_s: float = 1800.0
) -> Any:
    """Build an object in one process of this host and attach to it in all others.

    Every rank calls this with the same ``name``. The first one to come runs ``build`` and shares what it
    returns, as `share` does; the others wait, then map the same memory. It works with or without an
    initialised process group: no collective is called, and ranks may be missing. Later processes attach too,
    for as long as any process of this host holds a part of the object.

    Runs in each rank's main process. One small process (a few MB) answers later ranks; it ends when the last
    rank has dropped the object or is gone. Nothing is left after that, also when processes are killed.

    Args:
        build: Called without arguments in the process that comes first. What it returns is passed to
            `share` unless it is shared already, and must be picklable apart from its shared memory.
        name: Stands for the object within the run.
        job: Stands for the run, if its launcher gives it no identity: a text that all of its ranks know and
            no other run has. Runs are told apart under torchrun, srun, ``multiprocessing``, Lightning's
            launcher and other launchers that are written in Python, and by ``MASTER_ADDR`` and
            ``MASTER_PORT``. A process that is not a rank is a run of its own.
        timeout_s: Most seconds that a rank waits for the building one. The death of that process needs
            no timeout: the next in line builds instead.

    Returns:
        The shared object. In the processes that attach it is a copy whose stores and shared arrays are
        over the same memory.

    Raises:
        Exception: What ``build`` raised, in every rank that waited for it, with the builder's traceback as
            a note. Ranks that come after the failure build anew.
        ShareTimeout: The building process lives, but was not done in time; the message names it.
        PermissionError: Another user's process holds the name.
        LoaderError: This platform has no abstract sockets and memory files (it is not Linux); ``build``
            itself asks for its own ``name``; the run cannot be told from others, and there is no ``job``;
            another rank built the object in another way; or large parts of it are not in shared memory.
    """
    _check_platform()
    address = _address(name, [job] if job is not None else job_of_process(name))
    way = fingerprint_of(build)
    deadline_s = time.monotonic() + timeout_s
    with _never_within_itself(name):
        while True:
            listener = bind(address)
            if listener is not None:
                return _build_and_hand_over(build, name, listener, way)
            answer = _ask(address, name, deadline_s, timeout_s)
            if answer is not None:
                return _take(answer, name, way)


def _check_platform() -> None:
    if not sys.platform.startswith("linux") or getattr(sys, "frozen", False):
        raise LoaderError(
            "share_on_host starts a Python interpreter beside the ranks, on Linux; this is a frozen program, "
            f"or another system ({sys.executable}, {sys.platform}): save the store to a file and open it in "
            "each rank (shmloader.open)"
        )


def _address(name: str, job: Sequence[str]) -> str:
    """The abstract socket that stands for the object: user, job, Python version and name."""
    if not name:
        raise ValueError("share_on_host needs a name for the object, and got an empty one")
    key = [_PROTOCOL, os.geteuid(), list(sys.version_info[:2]), list(job), name]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return f"\0shmloader-{os.geteuid()}-{digest[:32]}"


@contextlib.contextmanager
def _never_within_itself(name: str) -> Iterator[None]:
    """Refuse a ``build`` that waits for its own result."""
    names: set[str] = _building.__dict__.setdefault("names", set())
    if name in names:
        raise LoaderError(f"build of share_on_host(name={name!r}) calls share_on_host with the same name")
    names.add(name)
    try:
        yield
    finally:
        names.remove(name)


# The process that builds.


def _build_and_hand_over(build: Callable[[], Any], name: str, listener: socket.socket, way: str) -> Any:
    began_s = time.monotonic()
    try:
        try:
            shared = share(build())
            _give_back_freed_memory()
            packed, buffers = _pack(shared, name, way)
            layout = _buffer_of(packed)
            holder = _start_server(listener, [layout.fd, *(buffer.fd for buffer in buffers)])
        except Exception as error:
            with contextlib.suppress(Exception):  # of telling, as without descriptors: the others build then
                _tell_failure(listener, error, name)
            raise
    finally:
        listener.close()
    _hold(holder, buffers)
    nbytes = sum(buffer.nbytes for buffer in buffers)
    _log.info("share_on_host %r: built %s bytes in %.1f s", name, f"{nbytes:,}", time.monotonic() - began_s)
    return shared


def _give_back_freed_memory() -> None:
    """Return freed memory that allocators keep to the system; this rank alone would hold it."""
    if (pyarrow := sys.modules.get("pyarrow")) is not None:
        pyarrow.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _pack(shared: Any, name: str, way: str) -> tuple[bytes, list[SharedBuffer]]:
    try:
        packed, buffers = pack((way, shared))
    except Exception as error:
        error.add_note(
            f"The other processes of the host get the {type(shared).__qualname__} by pickling, without its "
            "shared memory. Whatever else it holds must be picklable: no lambdas, open files or locks."
        )
        raise
    if len(packed) > _MOST_COPIED_NBYTES:
        raise LoaderError(
            f"share_on_host {name!r}: {len(packed):,} bytes of the {type(shared).__qualname__} that build "
            "returned are not in shared memory, and would be copied into every rank. shmloader.share of it "
            "warns of what could not be shared; leave that out, or keep it in arrays, lists or dicts"
        )
    if len(buffers) >= MOST_FDS:  # one more is the layout
        raise LoaderError(
            f"share_on_host {name!r}: what build returned lies in {len(buffers)} pieces of shared memory, "
            f"and ranks can be given {MOST_FDS - 1} at most. Share what belongs together in one call: all "
            "that shmloader.share(object) shares is one piece"
        )
    return packed, buffers


def _start_server(listener: socket.socket, fds: Sequence[int]) -> socket.socket:
    """Start the process that answers from now on; returns this process's connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    passed = [listener.fileno(), theirs.fileno(), *fds]
    # Without site and environment: it starts in a few ms and runs nothing that a user configured.
    command = [sys.executable, "-I", "-S", host_server.__file__, *map(str, passed)]
    with theirs:
        try:
            subprocess.run(
                command, pass_fds=passed, stdin=subprocess.DEVNULL, capture_output=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            ours.close()
            said = getattr(error, "stderr", b"").decode(errors="replace")
            raise LoaderError(
                "the process that serves a shared object to other ranks could not be started: "
                f"{error}\n{said}".rstrip()
            ) from error
    return ours


def _tell_failure(listener: socket.socket, error: Exception, name: str) -> None:
    """Send an exception to all processes that wait now."""
    where = f"Raised in process {os.getpid()}, which built {name!r} for all ranks of this host"
    layout = _buffer_of(capture(error, where, "there"))
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                if host_server.peer_of(connection)[1] == os.geteuid():
                    host_server.answer(connection, FAILED, [layout.fd])


# The processes that wait.


def _ask(address: str, name: str, deadline_s: float, timeout_s: float) -> tuple[int, list[int], Any] | None:
    """Ask for the object and wait: the kind of answer, its descriptors and the connection to hold.

    None if the process at this name ended, or has not begun to listen, so that the name has to be tried anew.
    """
    with contextlib.ExitStack() as unless_answered:
        connection = unless_answered.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.setblocking(False)
        try:
            connection.connect(address)
        except (ConnectionRefusedError, BlockingIOError):  # not listening yet, or very many wait
            if time.monotonic() > deadline_s:
                raise _timeout(name, None, timeout_s) from None
            time.sleep(_RETRY_S)
            return None
        pid, uid = host_server.peer_of(connection)
        if uid != os.geteuid():
            raise PermissionError(
                errno.EPERM,
                f"share_on_host {name!r}: process {pid} of user {uid} holds its name; objects are shared "
                "between processes of one user only. Use another name",
            )
        answer = _receive(connection, name, pid, deadline_s, timeout_s)
        if answer is None:
            return None
        unless_answered.pop_all()
        return *answer, connection


def _receive(
    connection: socket.socket, name: str, pid: int, deadline_s: float, timeout_s: float
) -> tuple[int, list[int]] | None:
    """The kind of answer and its descriptors; None if the connection ends before they are there."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if not poller.poll(min(max(0.0, deadline_s - time.monotonic()) * 1000, _MOST_WAIT_MS)):
        raise _timeout(name, pid, timeout_s)
    try:
        text, fds, is_short = receive_descriptors(connection, HEADER.size, MOST_FDS)
    except ConnectionError:
        text, fds, is_short = b"", [], False
    if not text:
        _log.info("share_on_host %r: process %d ended before it was done", name, pid)
        return None
    kind, due = HEADER.unpack(text)
    if is_short:
        for fd in fds:
            os.close(fd)
        raise OSError(
            errno.EMFILE,
            f"share_on_host {name!r}: attaching needs {due} descriptors, more than this process may still "
            "open. Raise the limit (ulimit -n), or share fewer, larger objects",
        )
    return kind, fds


def _timeout(name: str, pid: int | None, timeout_s: float) -> ShareTimeout:
    who = "the process that holds its name" if pid is None else f"process {pid}, which builds it,"
    return ShareTimeout(
        f"share_on_host {name!r}: {who} was not done after {timeout_s:g} s. If building takes that long, "
        "raise timeout_s; if build() waits for other ranks (a barrier, a collective), it must not: they "
        "wait here for it"
    )


def _take(answer: tuple[int, list[int], socket.socket], name: str, way: str) -> Any:
    """Attach to what was received."""
    kind, fds, connection = answer
    with connection:
        layout, *buffers = _attach(fds)
        if kind == FAILED:
            raise restore(bytes(layout.view))
        built, shared = unpack(layout.view, buffers)
        if built != way:
            raise LoaderError(
                f"share_on_host {name!r}: another rank built this object with another function, or other "
                "arguments. All ranks have to build the same: give different objects different names"
            )
        _hold(connection, buffers)
    nbytes = sum(buffer.nbytes for buffer in buffers)
    _log.info("share_on_host %r: attached to %s bytes", name, f"{nbytes:,}")
    return shared


def _attach(fds: list[int]) -> list[SharedBuffer]:
    """The buffers of descriptors, all of which are theirs from now on, or closed."""
    todo = fds[::-1]
    try:
        return [SharedBuffer(todo.pop(), os.fstat(fd).st_size) for fd in fds]
    finally:
        for fd in todo:
            os.close(fd)


# What keeps the server alive.


def _hold(connection: socket.socket, buffers: Sequence[SharedBuffer]) -> None:
    """Keep this process's connection to the server open until the last buffer of the object is gone."""
    fd = connection.detach()
    if not buffers:  # there is no end to wait for: it stays open as long as this process
        return
    hold = Connection(fd)  # closes it at its end; a socket that is not closed warns then
    for buffer in buffers:
        # The finalizer's arguments are what holds: nothing runs when it is called.
        weakref.finalize(buffer, lambda _: None, hold).atexit = False


def _buffer_of(data: bytes) -> SharedBuffer:
    """A buffer with ``data``, whose descriptor can be sent."""
    with BufferBuilder() as out:
        out.append(data)
        return out.seal()
