"""The server's end of a connection to a reader."""

from __future__ import annotations

import socket

from shmloader.host_sockets import not_inherited, send_descriptors
from shmloader.slots import ByteArray
from shmloader.store.host_server import peer_of


class Connection:
    """A process that is connected: a reader, while it is in the roster."""

    def __init__(self, end: socket.socket) -> None:
        self.held: dict[int, ByteArray] = {}  # what it has not let go: leases on slots, by ``seq``
        self.end = not_inherited(end)
        self.pid, self.uid = peer_of(end)
        self.request = 0  # the number of its last one for an epoch
        self.unsent: list[bytes] = []
        self.was_let_go = False  # it is served no more; what it holds stays until it closes its end

    def note_request(self, number: int) -> None:
        """Note that it has asked for an epoch."""
        self.request = number

    def dismiss(self, closed: bytes) -> None:
        """Serve it no more, and tell it so, now or once it reads."""
        self.was_let_go = True
        if self.send(closed):
            self.unsent.append(closed)

    def send(self, message: bytes = b"", fds: list[int] | None = None) -> str:
        """Send what was ``unsent``, as one message, and another one.

        Returns why that was not possible, or "". The process's end, if it is gone, is noticed elsewhere.
        """
        before = b"".join(self.unsent)
        self.unsent.clear()
        try:
            if before:
                self.end.send(before, socket.MSG_DONTWAIT)
            if fds:
                send_descriptors(self.end, message, fds, socket.MSG_DONTWAIT)
            elif message:
                self.end.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return "this process does not read what it is sent"
        except ConnectionError:
            pass
        except OSError as error:  # no memory, or this user has too many descriptors on their way
            return f"a message could not be sent to this process ({error.strerror})"
        return ""
