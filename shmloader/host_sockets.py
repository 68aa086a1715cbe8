"""Sockets by which the processes of a host meet: bound to an abstract name, and never left to a forked child.

The kernel frees the name when the process that has bound it ends, for any reason; no files are involved.
``socket.send_fds`` and ``recv_fds`` ignore their ``flags`` (Python 3.11 to 3.13): those here replace them.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import weakref
from collections.abc import Sequence

_here_only: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def bind(address: str) -> socket.socket | None:
    """Take a name, and listen; None if another process has it."""
    listener = not_inherited(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def send_descriptors(connection: socket.socket, message: bytes, fds: Sequence[int], flags: int) -> None:
    """Send a message with descriptors, of which the receiver gets its own."""
    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds)
    connection.sendmsg([message], [rights], flags)


def receive_descriptors(connection: socket.socket, nbytes: int, most: int) -> tuple[bytes, list[int], bool]:
    """Receive a message of up to ``nbytes`` bytes, and up to ``most`` descriptors that are sent with it.

    Programs that this process starts do not inherit them. The third value is whether some are missing, since
    this process may open no more (``ulimit -n``).
    """
    fds = array.array("i")
    message, rights, flags, _ = connection.recvmsg(
        nbytes, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for _, _, received in rights:
        fds.frombytes(received[: len(received) // fds.itemsize * fds.itemsize])
    return message, fds.tolist(), bool(flags & socket.MSG_CTRUNC)


def not_inherited(connection: socket.socket) -> socket.socket:
    """Have a socket closed in children that are forked: they would hide this process's death from peers."""
    _here_only.add(connection)
    return connection


def _close_in_forked_child() -> None:
    for connection in list(_here_only):
        connection.close()
    _here_only.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_forked_child)
