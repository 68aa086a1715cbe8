"""The server's end of a connection to a reader."""

from __future__ import annotations

import socket

from shmloader.host_sockets import not_inherited
from shmloader.serving.roster import Join, Reader
from shmloader.store.host_server import peer_of


class Connection(Reader):
    """A process that is connected: a reader, once it has greeted and until it is let go."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self.end = not_inherited(end)
        self.pid, self.uid = peer_of(end)
        self.greeted = self.deaf = False
        self.request = 0  # the number of its last one for an epoch
        self.unsent: list[bytes] = []

    def greet(self, join: Join) -> None:
        """Note that it has introduced itself."""
        self.join, self.greeted = join, True

    def note_request(self, number: int) -> None:
        """Note that it has asked for an epoch."""
        self.request = number

    def turn_deaf(self) -> None:
        """Listen to it no more."""
        self.deaf = True

    def send(self, message: bytes = b"", fds: list[int] | None = None) -> bool:
        """Send what was ``unsent``, as one message, and another one.

        False if the process does not read. Its end, if it is gone, is noticed elsewhere.
        """
        before = b"".join(self.unsent)
        self.unsent.clear()
        try:
            if before:
                self.end.send(before, socket.MSG_DONTWAIT)
            if fds:
                socket.send_fds(self.end, [message], fds, socket.MSG_DONTWAIT)
            elif message:
                self.end.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True
