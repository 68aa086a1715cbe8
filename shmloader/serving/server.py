"""`serve`: the process that iterates over a loader for others, in one thread without locks.

iterator.next() ──▶ Source: where the batch lies ──▶ Held: the lease, while any reader holds it
│ STORED to each reader in the epoch
Roster: who may have how many  ◀── NEXT, ASK, LEAVE ────┘ maps the slot, reads, lets go
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from shmloader.errors import LoaderError, NotReady, ResumeError
from shmloader.host_sockets import not_inherited
from shmloader.serving import meeting, records
from shmloader.serving.connection import Connection
from shmloader.serving.held import Held
from shmloader.serving.records import Request, Stored
from shmloader.serving.roster import Join, Policy, Reader, Roster
from shmloader.serving.source import Item, Source
from shmloader.store.host_server import peer_of

_log = logging.getLogger(__name__)

WINDOW, MOST_WINDOW = 4, 32
_KEPT = 16  # so many things may readers hold beside those in the window before they copy what they get
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_S = 0.02


class Server:
    """Serves one loader at one name; see `serve`."""

    def __init__(
        self, source: Source, name: str, roster: Roster, about: dict[str, Any], listener: socket.socket
    ) -> None:
        self._source, self._name, self._roster, self._about = source, name, roster, about
        self._held = Held()
        self._listener = listener
        listener.setblocking(False)
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._of_readers: dict[int, Connection] = {}  # by the reader's number
        self._poller = select.poll()
        self._poller.register(listener, select.POLLIN)
        self._number = 0  # batches of this epoch so far
        self._loaded: bytes | None = None  # a state that a reader has loaded since the last epoch

    def run(self, epochs: int | None) -> None:
        """Serve until all is over, see `serve`."""
        while not self._is_over(epochs):
            # Without a wait as long as anything can go on: its turn may come by what was done, not said.
            goes_on = self._go_on(epochs)
            if not goes_on:
                self._flush()
            self._look(0 if goes_on else None)

    def _go_on(self, epochs: int | None) -> bool:
        """Do what is due; False if there is nothing to do before a reader says something."""
        roster = self._roster
        if roster.epoch_is_due():
            self._begin_epoch(epochs)
        elif slow := roster.too_slow():
            for reader in slow:
                behind = reader.sent - reader.asked
                self._let_go(
                    self._connection_of(reader),
                    f"this process was {behind} batches behind the fastest reader of {self._name!r}, and was "
                    "let go: no more are kept for it (policy='drop', window)",
                )
        elif roster.batch_is_due():
            self._make_batch()
        elif roster.running and not roster.active():
            roster.end_epoch()
            self._source.leave()
        else:
            return False
        return True

    def _is_over(self, epochs: int | None) -> bool:
        roster = self._roster
        if self._connections:
            return False
        return roster.is_over or (epochs is not None and roster.epoch + 1 >= epochs and not roster.running)

    # --- connections

    def _look(self, timeout_s: float | None) -> None:
        """Take what readers say; waits for it, unless ``timeout_s`` is 0."""
        for fd, event in self._poller.poll(timeout_s):
            if fd == self._listener.fileno():
                self._accept()
            elif (connection := self._connections.get(fd)) is not None:
                if connection.deaf or not event & select.POLLIN:
                    self._end(connection)
                else:
                    self._receive(connection)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _FULL:
                time.sleep(_RETRY_S)  # it stays in the queue until a descriptor is free
            return
        pid, uid = peer_of(end)
        connection = Connection(not_inherited(end))
        if uid != os.geteuid():
            why = f"{self._name!r} is served to processes of user {os.geteuid()} only; this one is user {uid}"
            connection.send(bytes([records.REFUSED]) + why.encode())
            end.close()
            _log.warning("serve %r: process %d of user %d was refused", self._name, pid, uid)
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
            elif connection.reader is None:
                self._greet(connection, message)
            else:
                self._answer(connection, connection.reader, records.unpack_request(message))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning(
                "serve %r: nonsense from process %d: %s", self._name, peer_of(connection.end)[0], error
            )
            if connection.reader is None:
                self._end(connection)
            else:
                self._let_go(connection, f"the server of {self._name!r} could not understand this process")

    def _greet(self, connection: Connection, message: bytes) -> None:
        its = json.loads(message)
        why, reader = meeting.why_refused(self._about, its, self._name), None
        if why is None:
            join: Join = "now" if its["join"] == "now" else "next"
            reader = self._roster.add(peer_of(connection.end)[0], join)
            if reader is None:
                pids = ", ".join(str(reader.pid) for reader in self._roster)
                why = f"{self._name!r} has its {self._roster.readers} readers already: processes {pids}"
        if reader is None:
            connection.send(bytes([records.REFUSED]) + str(why).encode())
            self._end(connection)
            return
        connection.greet(reader)
        self._of_readers[reader.number] = connection
        welcome = {"length": self._source.length, "tell_every": self._roster.tell_every}
        connection.send(bytes([records.WELCOME]) + json.dumps(welcome).encode(), [self._source.fd])

    def _connection_of(self, reader: Reader) -> Connection:
        return self._of_readers[reader.number]

    def _let_go(self, connection: Connection, why: str) -> None:
        """Serve a reader no more. What it holds stays as it is until its process, or its connection, ends."""
        if connection.reader is not None:
            _log.warning("serve %r: process %d: %s", self._name, connection.reader.pid, why)
            self._roster.remove(connection.reader)
        connection.send(bytes([records.CLOSED]) + why.encode())
        connection.let_go()
        self._poller.modify(connection.end, 0)  # its end is still reported

    def _end(self, connection: Connection) -> None:
        """A connection has ended: nothing reads what its reader held."""
        self._poller.unregister(connection.end)
        del self._connections[connection.end.fileno()]
        connection.end.close()
        if connection.reader is not None:
            self._roster.remove(connection.reader)
            self._held.release_all(connection.reader.number)
            del self._of_readers[connection.reader.number]

    # --- requests

    def _answer(self, connection: Connection, reader: Reader, request: Request) -> None:
        for seq in request.released:
            self._held.release(seq, reader.number)
        kind, value = request.kind, request.value
        if kind == records.NEXT:
            if not reader.ask_next(value):
                raise ValueError(f"it asks for batch {value} after {reader.asked}, and has {reader.sent}")
        elif kind == records.ASK:
            connection.note_ask(request.number)
            reader.ask(None if value < 0 else value)
            if self._roster.joins_now(reader):
                self._tell_of_epoch(connection)
        elif kind == records.LEAVE:
            reader.leave()
        elif kind == records.STATE:
            self._reply(connection, request.number, lambda: self._state(reader, value))
        else:
            self._reply(connection, request.number, lambda: self._load(request.text))

    def _reply(self, connection: Connection, number: int, make: Callable[[], Any]) -> None:
        """Send a reader what a function returns or raises."""
        try:
            item = self._source.store(make())
        except Exception as error:  # noqa: BLE001 - the reader's
            item = self._source.store_error(error, f"Raised in process {os.getpid()}, which serves")
        self._reply_with(item, connection, number)

    def _state(self, reader: Reader, taken: int) -> Any:
        if taken >= 0 and reader.epoch != self._roster.epoch:
            raise ResumeError("the readers have begun the next epoch: there is no state of the last one now")
        if taken < 0 and self._roster.running:
            raise ResumeError(
                "this process has no place in the epoch that other readers are in: ask for its state in an "
                "epoch that it takes part in"
            )
        return self._source.state(None if taken < 0 else taken)

    def _load(self, packed: bytes) -> None:
        if self._roster.running:
            raise ResumeError("a state is loaded between epochs, and readers are in one")
        if self._loaded not in (None, packed):
            raise ResumeError("another reader has loaded another state for the next epoch")
        self._source.load(json.loads(packed))
        self._loaded = packed

    # --- epochs and batches

    def _begin_epoch(self, epochs: int | None) -> None:
        readers = [reader for reader in self._roster if reader.waits]
        waiting = [self._connection_of(reader) for reader in readers]
        wanted = sorted({reader.wants for reader in readers if reader.wants is not None})
        try:
            if epochs is not None and self._roster.epoch + 1 >= epochs:
                raise LoaderError(f"{self._name!r} was served for {epochs} epochs, and there are no more")
            if len(wanted) > 1:
                raise ValueError(f"readers of {self._name!r} want different epochs: {wanted}")
            self._source.begin(wanted[0] if wanted else None)
        except Exception as error:  # noqa: BLE001 - every reader's
            for reader in readers:
                reader.leave()
            where = f"Raised in process {os.getpid()}, which serves {self._name!r}, when an epoch began"
            for connection in waiting:
                item = self._source.store_error(error, where)
                self._reply_with(item, connection, connection.ask)
            return
        self._number, self._loaded = 0, None
        for reader in self._roster.begin_epoch():
            self._tell_of_epoch(self._connection_of(reader))

    def _tell_of_epoch(self, connection: Connection) -> None:
        connection.send(records.pack_epoch(connection.ask, self._number), self._source.epoch_fds)

    def _make_batch(self) -> None:
        try:
            try:
                item = self._source.next(waits=False)
            except NotReady:
                self._flush()
                item = self._source.next()
        except StopIteration:
            for reader in self._roster.end_epoch():
                self._connection_of(reader).send(bytes([records.END]))
            return
        except Exception as error:  # noqa: BLE001 - in the batch's place, for every reader
            where = f"Raised in process {os.getpid()}, which serves {self._name!r}"
            item = self._source.store_error(error, where)
        self._number += 1
        active = self._roster.active()
        for reader in active:
            reader.send()
        room = self._roster.window + 2 * len(self._roster) + _KEPT
        flags = records.COPY if len(self._held) >= min(room, MOST_WINDOW + _KEPT) else 0
        connections = [self._connection_of(reader) for reader in active]
        message = self._hold(item, connections, flags, self._number)
        for connection in connections:
            connection.add(message)

    def _flush(self) -> None:
        """Send readers the batches that were made since: one message for all that needed no wait."""
        for connection in list(self._of_readers.values()):
            self._check_sent(connection, connection.flush())

    def _hold(self, item: Item, to: list[Connection], flags: int, number: int) -> bytes:
        """Let readers hold something from now on; returns the message that tells them."""
        readers = [connection.reader.number for connection in to if connection.reader is not None]
        seq, place = self._held.add(item.anchor, readers), item.place
        return records.pack_stored(
            Stored(
                item.flags | flags,
                seq,
                number,
                place.number,
                place.nbytes,
                place.header_begin,
                place.header_end,
            )
        )

    def _reply_with(self, item: Item, connection: Connection, number: int) -> None:
        message = self._hold(item, [connection], records.ANSWER, number)
        self._check_sent(connection, connection.send(message))

    def _check_sent(self, connection: Connection, was_sent: bool) -> None:
        if not was_sent and not connection.deaf:
            self._let_go(connection, "this process does not read what it is sent")

    def close(self, why: str) -> None:
        """Tell readers why there is no more, and end."""
        self._listener.close()
        for connection in self._connections.values():
            connection.send(bytes([records.CLOSED]) + why.encode())
            connection.end.close()
        self._connections.clear()
        self._source.close()


def serve(
    loader: Any,
    name: str,
    *,
    readers: int | None = None,
    window: int = WINDOW,
    policy: Policy = "wait",
    epochs: int | None = None,
    job: str | None = None,
) -> None:
    """Serve the batches of a loader to other processes of this host, which `attach` to the name.

    Each batch is made once, lies in shared memory once, and goes to every reader that is in the epoch; its
    memory is used again when the last of them has let it go. This call iterates over the loader in this
    process, as a training program does, and returns when it is over: see ``readers`` and ``epochs``. Ctrl-C
    ends it like any program; readers then get an error that says so, and after SIGTERM and SIGKILL one that
    names the process. Nothing is left behind however it ends. See docs/serving.md.

    An epoch begins when all readers that took part in the last one ask for it, by ``iter()``.

    Args:
        loader: A `DataLoader`, or any loader of torch's class; without ``pin_memory`` and ``device``, which
            are arguments of `attach`.
        name: Up to 64 bytes. Processes of the same user find the loader by it.
        readers: The number of readers, which go in step: the first epoch waits for all of them, and each gets
            each batch. Further ones are refused. The call returns when all have come and left. None: any
            number, which may come and go at any time; the call returns after ``epochs``.
        window: Most batches, 1 to 32, that are made for a reader beyond the one that it has.
        policy: What happens when the fastest reader waits for one that has not taken so many: ``"wait"``, it
            goes on waiting; ``"drop"``, the slow one is let go with a `LoaderClosed`.
        epochs: Most epochs to serve; None for any number. The call returns when readers have left after that.
        job: A text that stands for the run, if processes of different runs are to read one loader. Without
            it, ranks of another run than this one are refused.

    Raises:
        LoaderError: If another process serves that name, or this platform has no abstract sockets.
        TypeError: If it is no loader.
        ValueError: For wrong arguments.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"serve takes a loader, and not a {type(loader).__name__}: pass a shmloader.DataLoader"
        )
    if getattr(loader, "pin_memory", False) or getattr(loader, "device", None) not in (None, "cpu"):
        raise ValueError(
            "a loader that is served has neither pin_memory nor device, since another process reads its "
            "batches: pass them to attach"
        )
    if not 1 <= window <= MOST_WINDOW:
        raise ValueError(f"window is 1 to {MOST_WINDOW} batches, and got {window}")
    if policy not in ("wait", "drop"):
        raise ValueError(f'policy is "wait" or "drop", and got {policy!r}')
    if readers is not None and readers < 1:
        raise ValueError(f"readers is 1 or more, or None, and got {readers}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs is 1 or more, or None, and got {epochs}")
    run_server(loader, name, Roster(readers, window, policy), meeting.introduction(job), epochs)


def run_server(
    loader: Any, name: str, roster: Roster, about: dict[str, Any], epochs: int | None = None
) -> None:
    """Serve, and end: `serve` with checked arguments, and an introduction of this process."""
    listener = meeting.listen(name)
    why = f"process {os.getpid()}, which served {name!r}, has ended"
    with listener:
        server = Server(Source(loader), name, roster, about, listener)
        try:
            server.run(epochs)
        except BaseException as error:
            why += f": {type(error).__name__}"
            raise
        finally:
            server.close(why)
