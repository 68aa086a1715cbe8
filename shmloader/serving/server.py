"""`serve`: the process that iterates over a loader for others, in one thread without locks.

iterator.next() ──▶ Source: where the batch lies ──▶ Connection.held: the lease, while any reader holds it
│ STORED to each reader in the epoch
Roster: who may have how many  ◀── NEXT, ASK, LEAVE ────┘ maps the slot, reads, lets go
"""

from __future__ import annotations

import bisect
import json
import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from shmloader.errors import LoaderError, ResumeError
from shmloader.indices.samplers import length_of
from shmloader.serving import meeting, records
from shmloader.serving.connection import Connection
from shmloader.serving.records import Request, Stored
from shmloader.serving.roster import Roster
from shmloader.serving.source import Item, Source
from shmloader.slots import RETAINED_SLOTS
from shmloader.store.host_server import FULL, RETRY_S

_log = logging.getLogger(__name__)

WINDOW, MOST_WINDOW = 4, 32
PATIENCE_S = 60.0
"""So long does a reader wait for others: to load a state, and at an epoch's end if ``policy`` is "drop"."""

_KEPT = 16  # so many things may readers hold beside those in the window before they copy what they get


class Server:
    """Serves one loader at one name; see `serve`."""

    def __init__(
        self,
        source: Source,
        name: str,
        roster: Roster[Connection],
        about: dict[str, Any],
        listener: socket.socket,
    ) -> None:
        self._source, self._name, self._roster, self._about = source, name, roster, about
        self._where = f"Raised in process {os.getpid()}, which serves {name!r}"
        self._listener = listener
        listener.setblocking(False)
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)
        self._seq = 0  # things that were stored for readers
        # Which of the epoch's things were exceptions in place of a batch: the loader's states count none.
        self._raised: list[int] = []
        self._loaded: bytes | None = None  # a state that a reader has loaded since the last epoch
        # Of readers that have left the epoch before others, each with the time until which it waits.
        self._loads: dict[Connection, tuple[Request, float]] = {}
        self._moved_s = 0.0  # when a reader has last asked for something, or something was done

    def run(self, epochs: int | None) -> None:
        """Serve until all is over, see `serve`."""
        while not self._is_over(epochs):
            # Without a wait as long as anything can go on: its turn may come by what was done, not said.
            goes_on = self._go_on(epochs) or self._flush()
            if goes_on:
                self._moved_s = time.monotonic()
            if not self._look(0 if goes_on else self._patience_s()):  # else one may have come just now
                self._let_late_go()

    def _go_on(self, epochs: int | None) -> bool:
        """Do what is due; False if there is nothing to do before a reader says something."""
        roster = self._roster
        if (reader := self._load_is_due()) is not None:
            self._load(reader, self._loads.pop(reader)[0])
        elif roster.batch_is_due():
            self._make_batch()
        elif roster.running and not roster.active:
            roster.end_epoch()
            self._source.leave()
        elif roster.epoch_is_due():
            self._begin_epoch(epochs)
        elif slow := roster.too_slow():
            for reader in slow:
                behind = f"{roster.made - roster.active[reader]} batches behind the fastest reader of"
                why = f"this process was {behind} {self._name!r}, and was let go: no more are kept for it"
                self._let_go(reader, f"{why} (policy='drop', window)")
        else:
            return False
        return True

    def _load_is_due(self) -> Connection | None:
        """A reader whose state can be loaded now, or that waits for that no longer."""
        for reader, (_, until_s) in self._loads.items():
            if not self._roster.running or until_s <= time.monotonic():
                return reader
        return None

    def _patience_s(self) -> float | None:
        """The seconds until readers wait for others no longer; None if none wait."""
        ends = [until_s for _, until_s in self._loads.values()]
        if self._roster.late():
            ends.append(self._moved_s + PATIENCE_S)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _let_late_go(self) -> None:
        """Let go of those that others wait for at an epoch's end, if nothing has happened for long."""
        if self._moved_s + PATIENCE_S > time.monotonic():
            return
        for reader in self._roster.late():
            pids = ", ".join(str(other.pid) for other in self._roster.waiting)
            why = f"processes {pids} have waited {PATIENCE_S:g} s for this one to ask for the next epoch of"
            self._let_go(reader, f"{why} {self._name!r}, and it was let go (policy='drop')")

    def _is_over(self, epochs: int | None) -> bool:
        roster = self._roster
        if self._connections:
            return False
        return roster.is_over or (epochs is not None and roster.epoch + 1 >= epochs and not roster.running)

    # --- connections

    def _look(self, timeout_s: float | None) -> bool:
        """Take what readers say, and wait for it so long; whether one has said something."""
        events = self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))
        for fd, event in events:
            connection = self._connections.get(fd)
            if connection is None:
                self._accept()
            elif event == select.POLLOUT:  # it has read, so it can be told that it was let go
                connection.send()
                self._poller.modify(connection.end, select.POLLIN)
            else:
                self._receive(connection)
        return bool(events)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError as error:
            if error.errno in FULL:
                time.sleep(RETRY_S)  # it stays in the queue until a descriptor is free
            return
        connection = Connection(end)
        if connection.uid != os.geteuid():
            why = f"{self._name!r} is served to processes of user {os.geteuid()} only"
            connection.send(bytes([records.REFUSED]) + f"{why}; this one is user {connection.uid}".encode())
            end.close()
            _log.warning(
                "serve %r: process %d of user %d was refused", self._name, connection.pid, connection.uid
            )
            return
        self._connections[end.fileno()] = connection
        self._poller.register(end, select.POLLIN)

    def _receive(self, connection: Connection) -> None:
        try:
            message = connection.end.recv(records.MOST_REQUEST_NBYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):  # reset: its last messages are still here
            return
        try:
            if not message:
                self._end(connection)
            elif connection.was_let_go:
                return  # what is not taken would have it wait for ever
            elif connection in self._roster:
                self._answer(connection, message)
            else:
                self._greet(connection, json.loads(message))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("serve %r: nonsense from process %d: %s", self._name, connection.pid, error)
            if connection in self._roster:
                self._let_go(connection, f"the server of {self._name!r} could not understand this process")
            else:
                self._end(connection)

    def _greet(self, connection: Connection, its: dict[str, Any]) -> None:
        why = meeting.why_refused(self._about, its, self._name)
        if why is None and not self._roster.add(connection, its["join"]):
            pids = ", ".join(str(reader.pid) for reader in self._roster)
            why = f"{self._name!r} has its {self._roster.readers} readers already: processes {pids}"
        if why is not None:
            connection.send(bytes([records.REFUSED]) + why.encode())
            self._end(connection)
            return
        welcome = {"length": length_of(self._source.loader), "tell_every": self._roster.tell_every}
        message = bytes([records.WELCOME]) + json.dumps(welcome).encode()
        self._send(connection, message, [self._source.fd])

    def _let_go(self, connection: Connection, why: str) -> None:
        """Serve a reader no more. What it holds stays as it is until its process, or its connection, ends."""
        _log.warning("serve %r: process %d: %s", self._name, connection.pid, why)
        self._roster.remove(connection)
        connection.dismiss(bytes([records.CLOSED]) + why.encode())
        self._poller.modify(connection.end, select.POLLIN | (select.POLLOUT if connection.unsent else 0))

    def _end(self, connection: Connection) -> None:
        """A connection is closed at the other end: nothing reads what its reader held."""
        self._poller.unregister(connection.end)
        del self._connections[connection.end.fileno()]
        connection.end.close()
        self._loads.pop(connection, None)
        self._roster.remove(connection)
        connection.held.clear()

    # --- requests

    def _answer(self, connection: Connection, message: bytes) -> None:
        request = records.unpack_request(message)
        kind, value = request.kind, request.value
        for seq in request.released:  # the last reader's lease on a slot frees it
            connection.held.pop(seq, None)
        if kind != records.STATE:
            self._moved_s = time.monotonic()
        if kind == records.NEXT:
            if not self._roster.ask_next(connection, value):
                raise ValueError(f"it asks for batch {value} in an epoch of {self._roster.made} so far")
        elif kind == records.ASK:
            connection.note_request(request.number)
            self._loads.pop(connection, None)  # it was interrupted while it waited for that
            if self._roster.ask(connection, None if value < 0 else value):
                self._tell_of_epoch(connection)
        elif kind == records.LEAVE:
            self._roster.leave(connection)
        elif kind == records.STATE:
            self._reply(connection, request.number, lambda: self._state(connection, value))
        elif self._roster.running and connection not in self._roster.active:
            self._loads[connection] = request, self._moved_s + PATIENCE_S  # or until all have left the epoch
        else:
            self._load(connection, request)

    def _reply(self, connection: Connection, number: int, make: Callable[[], Any]) -> None:
        """Send a reader what a function returns or raises."""
        try:
            item = self._source.store(make())
        except Exception as error:  # noqa: BLE001 - the reader's
            item = self._source.store_error(error, self._where)
        self._send(connection, self._hold(item, [connection], records.ANSWER, number))

    def _state(self, reader: Connection, taken: int) -> Any:
        if taken >= 0 and self._roster.epochs[reader] != self._roster.epoch:
            raise ResumeError("the readers have begun the next epoch: there is no state of the last one now")
        if taken < 0 and self._roster.running:
            raise ResumeError(
                "this process has no place in the epoch that other readers are in: ask for its state in an "
                "epoch that it takes part in"
            )
        return self._source.state(None if taken < 0 else taken - bisect.bisect(self._raised, taken))

    def _load(self, connection: Connection, request: Request) -> None:
        def load() -> None:
            active = self._roster.active
            if connection in active:
                raise ResumeError("a state is loaded between epochs, and this process is in one: leave it")
            if self._roster.running:
                pids = ", ".join(str(reader.pid) for reader in active)
                raise ResumeError(
                    "a state is loaded between epochs, and other readers have been in one for "
                    f"{PATIENCE_S:g} s since: have processes {pids} end or drop their iterators"
                )
            if self._loaded not in (None, request.text):
                raise ResumeError("another reader has loaded another state for the next epoch")
            self._source.load(json.loads(request.text))
            self._loaded = request.text

        self._reply(connection, request.number, load)

    # --- epochs and batches

    def _begin_epoch(self, epochs: int | None) -> None:
        readers = list(self._roster.waiting)
        wanted = sorted({wants for wants in self._roster.waiting.values() if wants is not None})
        try:
            if epochs is not None and self._roster.epoch + 1 >= epochs:
                raise LoaderError(f"{self._name!r} was served for {epochs} epochs, and there are no more")
            if len(wanted) > 1:
                raise ValueError(f"readers of {self._name!r} want different epochs: {wanted}")
            self._source.begin(wanted[0] if wanted else None)
        except Exception as error:  # noqa: BLE001 - every reader's
            for reader in readers:
                self._roster.leave(reader)
                item = self._source.store_error(error, f"{self._where}, when an epoch began")
                self._send(reader, self._hold(item, [reader], records.ANSWER, reader.request))
            return
        self._loaded = None
        self._raised.clear()
        self._roster.begin_epoch()
        for reader in readers:
            self._tell_of_epoch(reader)

    def _tell_of_epoch(self, reader: Connection) -> None:
        message = records.pack_epoch(reader.request, self._roster.made)
        self._send(reader, message, self._source.epoch_fds)

    def _make_batch(self) -> None:
        returned = self._source.returned
        try:
            item = self._source.next_if_here()
            if item is None:
                self._flush()
                item = self._source.next()
        except StopIteration:
            for reader in self._roster.end_epoch():
                self._send(reader, bytes([records.END]))
            return
        except Exception as error:  # noqa: BLE001 - in the batch's place, for every reader
            item = self._source.store_error(error, self._where)
            if self._source.returned == returned:
                self._raised.append(self._roster.made + 1)
        held = set[int]().union(*(connection.held for connection in self._connections.values()))
        window, count = self._roster.window, len(self._roster)
        # A window of what they copy is held too, and an answer for each; a table of slots leases no more.
        room = min(min(window + 2 * count, MOST_WINDOW) + _KEPT, RETAINED_SLOTS - window - count)
        flags = records.COPY if len(held) >= room else 0
        readers = list(self._roster.active)
        message = self._hold(item, readers, flags, self._roster.add_batch())
        for reader in readers:
            reader.unsent.append(message)

    def _flush(self) -> bool:
        """Send readers the batches that were made since: one message for all that needed no wait.

        Returns whether one was let go, so that the others may go on.
        """
        before = len(self._roster)
        for connection in list(self._roster):
            if connection.unsent:
                self._send(connection)
        return len(self._roster) < before

    def _hold(self, item: Item, readers: list[Connection], flags: int, number: int) -> bytes:
        """Let readers hold something from now on; returns the message that tells them."""
        self._seq = seq = self._seq + 1
        for reader in readers:
            reader.held[seq] = item.anchor
        place = item.place
        where = place.number, place.nbytes, place.header_begin, place.header_end
        return records.pack_stored(Stored(item.flags | flags, seq, number, *where))

    def _send(self, connection: Connection, message: bytes = b"", fds: list[int] | None = None) -> None:
        """Send a message, after what is ``unsent``; a reader that cannot be told is let go."""
        if why := connection.send(message, fds):
            self._let_go(connection, why)

    def close(self, why: str) -> None:
        """Tell readers why there is no more, and end."""
        self._listener.close()
        for connection in self._connections.values():
            connection.send(bytes([records.CLOSED]) + why.encode())
            connection.end.close()
        self._source.close()  # before leases end: a place that is free gives its memory back
        self._connections.clear()
