"""Sockets by which the processes of a host meet: bound to an abstract name, and never left to a forked child.

The kernel frees the name when the process that has bound it ends, for any reason; no files are involved.
"""

from __future__ import annotations

import errno
import os
import socket
import weakref

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
