"""The process that hands a host's shared object to ranks that come later. Runs as a script, on its own.

It holds only descriptors: the memory files of the object, one with its layout, and a connection to each
process that uses it. It ends, and the memory is freed, when the last of these processes has ended for any
reason. It is a fresh interpreter that imports neither this package nor torch, so it costs a few MB. It is not
a fork of the builder, since that would keep the builder's pages alive.

`docs/decisions/0013-one-process-builds-a-small-one-serves.md` says why there is such a process.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

HEADER = struct.Struct("<II")
"""The text of an answer: the kind, and the number of descriptors that come with it."""

READY, FAILED = 1, 2  # the object; the exception that building it raised

MOST_FDS = 250
"""The most descriptors of an answer: the kernel takes 253 with one message."""

_PEER = struct.Struct("3i")
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
RETRY_S = 0.02  # before what found no descriptor is tried again


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of a connection's other end, as the kernel noted them."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def answer(connection: socket.socket, kind: int, fds: Sequence[int]) -> None:
    """Send an answer. Waits while this user has too many descriptors on their way already."""
    while True:
        try:
            socket.send_fds(connection, [HEADER.pack(kind, len(fds))], list(fds))
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            time.sleep(RETRY_S)
        else:
            return


class Server:
    """Sends the same descriptors, the layout's first, to everyone who connects, while anyone is connected."""

    def __init__(self, listener: socket.socket, holder: socket.socket, fds: Sequence[int]) -> None:
        self._listener = listener
        self._fds = fds
        self._connections = {holder.fileno(): holder}
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)
        self._poller.register(holder, select.POLLIN)

    def serve(self) -> None:
        """Answer until no process is connected or waits for a connection."""
        while self._connections or self._accept():
            # A process that sends something breaks the rules; it is dropped like one that is gone.
            for fd, _ in self._poller.poll() if self._connections else ():
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._poller.unregister(fd)
                    self._connections.pop(fd).close()

    def _accept(self) -> bool:
        """Take one waiting connection and answer it; False if there was none."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in FULL:
                raise
            time.sleep(RETRY_S)  # it stays in the queue until a descriptor is free
            return True
        try:
            if peer_of(connection)[1] != os.geteuid():
                raise PermissionError
            answer(connection, READY, self._fds)
        except OSError:  # it is gone, or of another user
            connection.close()
            return True
        self._connections[connection.fileno()] = connection
        self._poller.register(connection, select.POLLIN)
        return True


def main(arguments: Sequence[str]) -> None:
    """Leave the builder's family and session, then serve the descriptors given by number.

    The builder waits for this process and finds it ended; the one forked off here is a child of init, which
    waits for it, and no signal to the builder's terminal or process group reaches it. In a container whose
    first process is the program itself, it stays a zombie when it has ended, until that program ends.
    """
    listener_fd, holder_fd, *fds = map(int, arguments)
    listener, holder = socket.socket(fileno=listener_fd), socket.socket(fileno=holder_fd)
    listener.setblocking(False)
    holder.setblocking(False)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):  # the builder's own may be pipes that somebody reads to their end
        os.dup2(null, standard)
    Server(listener, holder, fds).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
