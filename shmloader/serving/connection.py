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
        self._text = b""  # of a state that comes in pieces
        self._rest_nbytes = 0  # that are still to come

    def greet(self, reader: Reader) -> None:
        """Note that the reader has introduced itself."""
        self.reader = reader

    def note_ask(self, number: int) -> None:
        """Note that the reader has asked for an epoch."""
        self.ask = number

    def add(self, piece: bytes, rest_nbytes: int) -> bytes | None:
        """Take a piece of a state; returns all of it once there is no more to come."""
        goes_on = self._rest_nbytes == rest_nbytes + len(piece)
        self._text = self._text + piece if goes_on else piece
        self._rest_nbytes = rest_nbytes
        return None if rest_nbytes else self._text

    def let_go(self) -> None:
        """Listen to it no more."""
        self.deaf = True

    def send(self, message: bytes, fds: list[int] | None = None) -> bool:
        """Send a message; False if the reader does not read. Its end, if it is gone, is noticed elsewhere."""
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
