"""The server's end of a connection to a reader."""

from __future__ import annotations

import socket

from shmloader.serving.roster import Reader


class Connection:
    """A reader's connection. `reader` is None before it has greeted; it is deaf once it is let go."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.reader: Reader | None = None
        self.deaf = False
        self.ask = 0  # the number of its last request for an epoch
        self._unsent: list[bytes] = []

    def greet(self, reader: Reader) -> None:
        """Note that the reader has introduced itself."""
        self.reader = reader

    def note_ask(self, number: int) -> None:
        """Note that the reader has asked for an epoch."""
        self.ask = number

    def let_go(self) -> None:
        """Listen to it no more."""
        self.deaf = True

    def add(self, message: bytes) -> None:
        """Send a message with the next one, or at the next `flush`."""
        self._unsent.append(message)

    def flush(self) -> bool:
        """Send what was added, as one message; see `send`."""
        message = b"".join(self._unsent)
        self._unsent.clear()
        return not message or self.send(message)

    def send(self, message: bytes, fds: list[int] | None = None) -> bool:
        """Send a message; False if the reader does not read. Its end, if it is gone, is noticed elsewhere."""
        if self._unsent and not self.flush():
            return False
        try:
            if fds is None:
                self.end.send(message, socket.MSG_DONTWAIT)
            else:
                socket.send_fds(self.end, [message], fds, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True
