"""Who is refused, who is let go, and what a death of server, reader or worker means to the others."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest
from robustness.processes import python
from serving_programs import (
    WAIT_S,
    Ending,
    Numbers,
    new_name,
    numbers,
    plain,
    served,
    served_by_thread,
    wait_until,
)

import shmloader
from shmloader.host_sockets import receive_descriptors
from shmloader.serving import connection, meeting, records
from shmloader.serving.connection import Connection
from shmloader.serving.mapped import MappedSlots
from shmloader.serving.source import Source
from shmloader.slots import PlaceState, PlaceTable

NOBODY = 65534
KILLS = 500 if os.environ.get("SHMLOADER_LONG") == "1" else 6


def epoch_of(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


# --- deaths


def test_the_servers_death_is_an_error_that_names_it() -> None:
    expected = epoch_of(numbers())
    with served(numbers, readers=1, fails=True) as (name, process), shmloader.attach(name) as reader:
        batches = iter(reader)
        got = [next(batches)]
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(shmloader.ServerDied, match=f"process {process.pid}, which served") as caught:
            got.extend(batches)
        assert caught.value.pid == process.pid
        assert [plain(batch) for batch in got] == expected[: len(got)]
        with pytest.raises(shmloader.ServerDied):
            next(iter(reader))
        with pytest.raises(shmloader.ServerDied):
            reader.state_dict()


def test_a_server_that_ends_before_it_takes_a_connection_is_named() -> None:
    name, greet = new_name(), meeting.greet
    with meeting.listen(name) as listener, pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "greet", lambda *given: listener.close() or greet(*given))
        with pytest.raises(shmloader.ServerDied, match=f"process {os.getpid()}, .*ended before it answered"):
            shmloader.attach(name)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, shmloader.ServerDied), (signal.SIGINT, shmloader.LoaderClosed)]
)
def test_a_server_that_is_told_to_end_says_so(number: signal.Signals, error: type[Exception]) -> None:
    with served(numbers, readers=1, fails=True) as (name, process), shmloader.attach(name) as reader:
        batches = iter(reader)
        next(batches)
        os.kill(process.pid, number)
        with pytest.raises(error, match=f"process {process.pid}.* has ended"):
            list(batches)


def test_what_one_holds_that_was_let_go_outlives_a_server_that_is_told_to_end() -> None:
    make = functools.partial(numbers, dataset=Numbers(400))
    with served(make, fails=True, window=3, policy="drop") as (name, process):
        slow, fast = shmloader.attach(name), shmloader.attach(name, join="now")
        slow_batches, fast_batches = iter(slow), iter(fast)
        next(slow_batches)
        kept = next(slow_batches)
        right = plain(kept)
        for _ in range(50):
            next(fast_batches)
        with pytest.raises(shmloader.LoaderClosed, match="behind the fastest reader"):
            list(slow_batches)
        os.kill(process.pid, signal.SIGINT)
        process.join(WAIT_S)
        assert plain(kept) == right
        slow.close()
        fast.close()


@pytest.mark.parametrize("ends", ["let go, closes", "closes", "is collected"])
def test_what_is_held_stays_while_its_reader_closes(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that it has not written to are the server's, until it has copied them."""
    with served_by_thread(numbers(dataset=Numbers(400)), epochs=1, window=3, policy="drop") as name:
        slow = shmloader.attach(name)
        slow_batches = iter(slow)
        kept = [next(slow_batches) for _ in range(4)]
        right = plain(kept)
        fast = shmloader.attach(name, join="now")
        fast_batches = iter(fast)
        next(fast_batches)
        if ends == "let go, closes":
            for _ in range(20):
                next(fast_batches)
            with pytest.raises(shmloader.LoaderClosed, match="behind the fastest reader"):
                list(slow_batches)
        close = MappedSlots.close

        def late(slots: MappedSlots) -> None:
            for _ in range(30):
                next(fast_batches)
            close(slots)

        with monkeypatch.context() as patch:
            patch.setattr(MappedSlots, "close", late)
            if ends == "is collected":
                circle: list[Any] = [slow]
                circle.append(circle)
                del slow, slow_batches, circle
                gc.collect()
            else:
                slow.close()
        assert plain(kept) == right
        assert len(list(fast_batches)) > 10
        assert plain(kept) == right
        fast.close()


def read_and_hold(name: str, ready: Any) -> None:
    batches = iter(shmloader.attach(name))
    held = [next(batches) for _ in range(6)]
    ready.put(len(held))
    time.sleep(WAIT_S)


def test_a_reader_that_is_killed_lets_go_what_it_held() -> None:
    loader = numbers(dataset=Numbers(160), persistent_workers=True)
    with served_by_thread(loader, readers=2, window=8) as name, shmloader.attach(name) as reader:
        ready = multiprocessing.SimpleQueue()
        other = multiprocessing.Process(target=read_and_hold, args=(name, ready))
        other.start()
        batches = iter(reader)
        for _ in range(8):
            next(batches)
        assert ready.get() == 6
        wait_until(lambda: loader.statistics().slots_leased >= 8)
        other.kill()
        other.join()
        other.close()
        assert len(list(batches)) == 40 - 8
        next(iter(reader))
        wait_until(lambda: loader.statistics().slots_leased <= 10)


def test_a_dead_worker_is_each_readers_error_and_the_next_epoch_begins_anew() -> None:
    loader = numbers(dataset=Ending(64), shuffle=False)
    with (
        served_by_thread(loader, readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        for _ in range(2):
            readers = [iter(one), iter(other)]
            for each in readers:
                with pytest.raises(shmloader.WorkerDied, match="SIGKILL"):
                    for _ in range(8):
                        next(each)


def read_until_the_end(name: str, seed: int) -> None:
    """Check each batch while others die; 0 if all was right until an error that names the server."""
    choose, held = random.Random(seed), list[Any]()
    try:
        with shmloader.attach(name, join="now", timeout_s=20) as reader:
            for _ in range(3):
                for batch in reader:
                    held.append((batch, batch["index"].tolist()))
                    if choose.random() < 0.2:
                        batch["noise"].fill_(7)
                    while len(held) > choose.randrange(1, 12):
                        held.pop(choose.randrange(len(held)))
                    for kept, indices in held:
                        assert kept["index"].tolist() == indices
                        assert kept["x"][:, 0].tolist() == kept["x"][:, -1].tolist() == indices
    except (shmloader.ServerDied, shmloader.ShareTimeout, shmloader.WorkerDied, shmloader.LoaderClosed):
        pass
    for kept, indices in held:
        assert kept["x"][:, 0].tolist() == indices


@pytest.mark.parametrize("seed", range(KILLS))
def test_nothing_hangs_and_no_batch_is_wrong_where_anyone_is_killed(seed: int) -> None:
    choose = random.Random(seed)
    make = functools.partial(numbers, dataset=Numbers(160), persistent_workers=choose.random() < 0.5)
    policy = choose.choice(["wait", "drop"])
    with served(make, fails=True, window=choose.randrange(1, 6), policy=policy) as (name, server):
        readers = [
            multiprocessing.Process(target=read_until_the_end, args=(name, seed + number))
            for number in range(3)
        ]
        for reader in readers:
            reader.start()
        killed = set()
        for _ in range(choose.randrange(1, 3)):
            time.sleep(choose.random() * 0.7)
            who = choose.choice(["server", "reader", "worker"])
            victim = server.pid if who == "server" else choose.choice(readers).pid
            if who == "worker":
                victim = next(iter(_children_of(server.pid)), None)
            with contextlib.suppress(ProcessLookupError):  # it has ended
                if victim is not None:
                    os.kill(victim, signal.SIGKILL)
                    killed.add(victim)
        for reader in readers:
            reader.join(WAIT_S)
            assert reader.exitcode is not None, "a reader hangs"
            assert reader.exitcode == 0 or reader.pid in killed
            reader.close()
        server.terminate()


def _children_of(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def test_closing_a_reader_ends_a_wait_in_another_thread() -> None:
    with served_by_thread(numbers(), readers=2) as name, shmloader.attach(name) as other:
        reader, errors = shmloader.attach(name), []
        batches = iter(reader)

        def waits() -> None:
            try:
                next(batches)  # the epoch begins when the other one asks, too
            except shmloader.LoaderClosed as error:
                errors.append(str(error))

        thread = threading.Thread(target=waits)
        thread.start()
        time.sleep(0.3)
        reader.close()
        thread.join(WAIT_S)
        assert errors == [f"{name!r}: close() of this reader was called"]
        assert len(list(other)) == 16


def test_a_batch_that_may_not_be_held_once_it_is_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    source, answers = Source(numbers(0)), [True, False]
    with monkeypatch.context() as patch:
        patch.setattr(PlaceTable, "can_lease", lambda _, *, waits=True: answers.pop(0))
        with pytest.raises(shmloader.SharedMemoryExhausted, match=r"no shared memory for .* bytes"):
            source.store([1, 2])
    assert source.store([1, 2]).place.state is PlaceState.LEASED
    source.close()


@pytest.mark.parametrize("kind", [shmloader.SharedMemoryExhausted, MemoryError])
def test_a_batch_for_which_a_reader_lacks_memory_is_there_again(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise kind("no memory")

    with served_by_thread(numbers(), epochs=1) as name, shmloader.attach(name) as reader:
        batches, got = iter(reader), []
        for _ in range(16):
            with monkeypatch.context() as patch:
                patch.setattr("shmloader.serving.mapped.MappedSlots.lease", fails)
                with pytest.raises(MemoryError):
                    next(batches)
            got.append(plain(next(batches)))
        with pytest.raises(StopIteration):
            next(batches)
    assert got == epoch_of(numbers())


def test_what_there_is_no_memory_for_is_an_error_and_no_signal() -> None:
    """The error is written to the slot for which there was no memory: that is not larger than it is."""
    python(
        """
        import pytest, torch
        from serving_programs import numbers
        from shmloader import SharedMemoryExhausted
        from shmloader.memory import Segment
        from shmloader.serving.source import Source

        source, reserve = Source(numbers(0)), Segment.reserve
        held = [source.store(torch.ones(1 << 20))]

        def fails(*_):
            raise SharedMemoryExhausted("no memory")

        for what in ("reserve", "grow"):
            Segment.reserve = fails if what == "reserve" else lambda *given: (
                reserve(*given) if given[3] < 1 << 20 else fails()
            )
            with pytest.raises(SharedMemoryExhausted):
                source.store(torch.ones(1 << 20))
            Segment.reserve = reserve
            held.append(source.store_error(ValueError("small"), "here"))
        source.close()
        """
    )


# --- refusals


def test_one_reader_too_many_is_refused_and_its_place_is_taken_after_it_has_gone() -> None:
    with served_by_thread(numbers(), readers=1) as name:
        reader = shmloader.attach(name)
        with pytest.raises(
            shmloader.LoaderError, match=f"has its 1 readers already: processes {os.getpid()}"
        ):
            shmloader.attach(name)
        assert len(list(reader)) == 16
        reader.close()


def test_a_loader_whose_device_is_the_cpu_is_not_refused() -> None:
    with (
        served_by_thread(numbers(device="cpu"), epochs=1) as name,
        shmloader.attach(name, device="cpu") as reader,
    ):
        assert len(list(reader)) == 16


def test_two_servers_of_one_name() -> None:
    with served(numbers, readers=1) as (name, process), shmloader.attach(name):
        there = f"served already, by process {process.pid} of user"
        with pytest.raises(shmloader.LoaderError, match=there):
            shmloader.serve(numbers(0), name)


def test_nobody_serves_the_name() -> None:
    name = new_name()
    with pytest.raises(shmloader.ShareTimeout, match=f"no process of this user has served '{name}'"):
        shmloader.attach(name, timeout_s=0.1)
    with pytest.raises(TimeoutError):
        shmloader.attach(name, timeout_s=0)


def test_a_name_whose_server_was_killed_is_free_again() -> None:
    with served(numbers, readers=1, fails=True) as (name, process):
        shmloader.attach(name).close()
        process.kill()
        process.join()
        with pytest.raises(shmloader.ShareTimeout):
            shmloader.attach(name, timeout_s=0)
        meeting.listen(name).close()


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with served_by_thread(numbers(0), readers=1) as name:
        meeting.connect(name, WAIT_S)[0].close()  # the server has begun
        with monkeypatch.context() as patched:
            patched.setattr(meeting, "PROTOCOL", 99)
            with pytest.raises(shmloader.LoaderError, match=f"protocol {records.PROTOCOL} there and 99 here"):
                shmloader.attach(name)
        shmloader.attach(name).close()


def test_another_run_is_refused_unless_both_name_it() -> None:
    with served_by_thread(numbers(0), readers=1, job="one") as name:
        with pytest.raises(
            shmloader.LoaderError, match=r"in another run \(job one\) than this one \(job two\)"
        ):
            shmloader.attach(name, job="two")
        shmloader.attach(name, job="one").close()


def test_ranks_of_another_run_under_torchrun_are_refused() -> None:
    code = (
        "import sys, shmloader\n"
        "for job in (None, 'a'):\n"
        "    try: shmloader.attach(sys.argv[1], job=job).close()\n"
        "    except shmloader.LoaderError as error: print(error)\n"
        "    else: print('attached')"
    )
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "b", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    with served_by_thread(numbers(0), readers=1, job="a") as name:
        command = [sys.executable, "-c", code, name]  # its first environment counts
        refused, attached = subprocess.check_output(command, text=True, env=environment).splitlines()
    assert "in another run (job a) than this one (torchrun b" in refused
    assert attached == "attached"


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


def as_nobody(action: Any) -> str:
    """What an action prints, or the error that it raises, in a child that is another user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setuid(NOBODY)
        try:
            said = str(action())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


@needs_root
def test_another_user_is_refused_by_name() -> None:
    with served_by_thread(numbers(0), readers=1) as name:
        said = as_nobody(lambda: shmloader.attach(name, timeout_s=5))
        assert said.startswith("PermissionError")
        assert f"{name!r} is served by a process that is user 0 to itself, and this process is user" in said
        said = as_nobody(lambda: speak(f"\0shmloader-serve-0-{name}", b"{}"))
        assert "is served to processes of user 0 only; this one is user 65534" in said
        shmloader.attach(name).close()


@needs_root
def test_another_users_server_at_this_users_name_is_refused() -> None:
    name = new_name()
    squatter = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.setuid(NOBODY)
        squatter.bind(f"\0shmloader-serve-0-{name}")
        squatter.listen()
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    squatter.close()
    os.read(ready[0], 1)
    with pytest.raises(PermissionError, match=f"served by process {pid} of user {NOBODY}"):
        shmloader.attach(name, timeout_s=5)
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    for fd in (*ready, *go):
        os.close(fd)


# --- nonsense


def speak(address: str, *messages: bytes, until: bytes = b"") -> bytes:
    """What a server says to messages, up to the end or ``until``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(address)
        end.settimeout(WAIT_S)
        said, ends = b"", 0
        for message in messages:
            with contextlib.suppress(BrokenPipeError):
                end.send(message)
        while ends < 2 and not (until and until in said):
            try:
                part = end.recv(1 << 16)
            except ConnectionResetError:  # once, if it has not read all; what it said is still here
                part, ends = b"", ends + 1
                continue
            said += part
            ends += 2 * (not part)
        return said


def requests() -> list[bytes]:
    noise = random.Random(0)
    return [
        b"x",
        noise.randbytes(500),
        records.pack_request(9, 0, 0, []),
        records.pack_request(records.NEXT, -5, 0, []),
        records.pack_request(records.NEXT, 7, 0, [])[:-1],
        records.pack_request(records.ASK, 0, 0, [], b"text"),
        struct.pack("<BHqq", records.ASK, 60_000, 0, 0),
    ]


def test_nonsense_is_refused_and_others_go_on() -> None:
    greeting = json.dumps(meeting.introduction(None) | {"join": "next"}).encode()
    before_greeting = [b"\xff\xfe", b"[]", b"{}", b"3", b'{"versions": 3, "run": [], "join": 1}', b"[" * 8000]
    with served(numbers, epochs=2) as (name, process), shmloader.attach(name) as reader:
        address = f"\0shmloader-serve-{os.geteuid()}-{name}"
        batches = iter(reader)
        next(batches)
        fds = len(os.listdir(f"/proc/{process.pid}/fd"))
        for message in before_greeting:
            assert speak(address, message)[:1] in (b"", bytes([records.REFUSED])), message
        for message in requests():
            refused = b"could not understand"
            assert refused in speak(address, greeting, message, until=refused), message
        assert len(list(batches)) == 15
        assert len(list(reader)) == 16
        wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) <= fds)


def test_letting_go_what_one_does_not_hold_changes_nothing() -> None:
    greeting = json.dumps(meeting.introduction(None) | {"join": "next"}).encode()
    with served_by_thread(numbers(), epochs=1) as name, shmloader.attach(name) as reader:
        batches = iter(reader)
        held = [next(batches) for _ in range(3)]
        right = plain(held)
        address = f"\0shmloader-serve-{os.geteuid()}-{name}"
        request = records.pack_request(records.LEAVE, 0, 0, list(range(50)))
        welcome = bytes([records.WELCOME])
        assert speak(address, greeting, request, until=welcome)[:1] == welcome
        for _ in batches:
            pass
        assert plain(held) == right


def test_a_reader_that_reads_nothing_holds_nobody_up_for_ever() -> None:
    greeting = json.dumps(meeting.introduction(None) | {"join": "next"}).encode()
    with (
        served_by_thread(numbers(), epochs=1, policy="drop") as name,
        meeting.connect(name, WAIT_S)[0] as silent,
    ):
        silent.send(greeting)
        silent.send(records.pack_request(records.ASK, -1, 1, []))
        with shmloader.attach(name, join="now") as reader:
            assert len(list(reader)) > 8


def test_one_that_was_let_go_may_ask_as_often_as_it_likes() -> None:
    """Its requests are taken, and say nothing any more."""
    with (
        served_by_thread(numbers(dataset=Numbers(400)), epochs=1, window=3, policy="drop") as name,
        shmloader.attach(name) as slow,
        shmloader.attach(name, join="now") as fast,
    ):
        batches, others = iter(slow), iter(fast)
        next(batches)
        assert len(list(others)) > 90
        for _ in range(1000):
            with pytest.raises(shmloader.LoaderClosed, match="behind the fastest reader"):
                slow.state_dict()


def test_one_that_reads_nothing_is_told_so_once_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Connection.__init__

    def connect_with_little_room(self: Connection, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # a host's own may be megabytes
        connect(self, end)

    monkeypatch.setattr(Connection, "__init__", connect_with_little_room)
    with served_by_thread(numbers(0), readers=1) as name, shmloader.attach(name) as reader:
        for _ in range(2000):
            batches = iter(reader)
        with pytest.raises(shmloader.LoaderClosed, match="does not read what it is sent"):
            next(batches)


def test_a_descriptor_is_sent_without_waiting_and_not_inherited() -> None:
    """Else a reader that reads nothing would hold up all others."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, contextlib.ExitStack() as stack:
        held_up = threading.Timer(10, there.shutdown, [socket.SHUT_RDWR])
        held_up.start()
        stack.callback(held_up.cancel)
        reader = Connection(here)
        assert not reader.send(b"epoch", [here.fileno()])
        while not reader.send(b"batch"):
            pass
        assert reader.send(b"epoch", [here.fileno()]) == "this process does not read what it is sent"
        message, (fd,), is_short = receive_descriptors(there, 100, 1)
        assert (message, is_short, os.get_inheritable(fd)) == (b"epoch", False, False)
        os.close(fd)


class Slow(Numbers):
    """Takes its time, so that each batch is sent before the next one is made."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.02)
        return super().__getitem__(index)


def test_the_others_go_on_when_one_is_let_go_for_whom_they_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says anything after that which would wake the server."""
    sends, flushes, first = Connection.send, [], list[Connection]()

    def send(self: Connection, message: bytes = b"", fds: list[int] | None = None) -> str:
        if not first:
            first.append(self)  # the one that is silent
        if self is first[0] and not message:
            flushes.append(len(self.unsent))
            if len(flushes) == 4:  # as many as the window
                self.unsent.clear()
                return "it does not read"
        return sends(self, message, fds)

    monkeypatch.setattr(Connection, "send", send)
    greeting = json.dumps(meeting.introduction(None) | {"join": "now"}).encode()
    with (
        served_by_thread(numbers(0, Slow()), readers=2, window=4) as name,
        meeting.connect(name, WAIT_S)[0] as silent,
    ):
        silent.send(greeting)
        silent.send(records.pack_request(records.ASK, -1, 1, []))
        with shmloader.attach(name) as reader:
            assert len(list(reader)) == 16
    assert flushes == [1] * 4


@pytest.mark.parametrize("message", [0, 1])
def test_a_reader_that_cannot_be_sent_a_descriptor_is_told(
    message: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it greets, and when an epoch begins; it waits for neither for ever."""
    sends, sent = connection.send_descriptors, []

    def send_descriptors(*given: Any) -> None:
        sent.append(given)
        if len(sent) == message + 1:
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        sends(*given)

    with served_by_thread(numbers(), epochs=1 + message) as name:
        monkeypatch.setattr(connection, "send_descriptors", send_descriptors)
        with (
            pytest.raises(shmloader.LoaderError, match=r"could not be sent to this process \(Too many ref"),
            shmloader.attach(name) as reader,
        ):
            next(iter(reader))
        with shmloader.attach(name) as reader:
            assert len(list(reader)) == 16


def test_a_request_is_made_once_however_much_is_let_go_with_it() -> None:
    """A second one would have the reader leave the epoch that it has just entered."""
    with served_by_thread(numbers(), epochs=1) as name, shmloader.attach(name) as first:
        batches = iter(first)
        next(batches)
        with shmloader.attach(name, join="now") as reader:
            released = reader._link.slots.released()
            released += range(10**9, 10**9 + 3 * records.MOST_RELEASED)
            joined = iter(reader)
            reader._link.begun()
            del batches  # else it would have to take turns with the other one
            assert len(list(joined)) > 8
            assert not released


def test_a_reader_lets_go_as_soon_as_nothing_refers_to_it() -> None:
    """Neither the end of its epoch nor the server's end leaves a cycle, for the garbage collector to find."""
    gc.disable()
    try:
        with served_by_thread(numbers(), readers=1, epochs=1) as name:
            reader = shmloader.attach(name)
            watch = weakref.ref(reader)
            for _ in reader:
                pass
            del reader
            was_gone = watch() is None
            gc.collect()
            assert was_gone
        with served(numbers, readers=1, fails=True) as (name, process):
            reader = shmloader.attach(name)
            watch = weakref.ref(reader)
            batches = iter(reader)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(shmloader.ServerDied):
                list(batches)
            with pytest.raises(shmloader.ServerDied):
                list(batches)
            del reader, batches
            assert watch() is None
    finally:
        gc.enable()


def test_a_reader_that_the_garbage_collector_finds_closes_each_descriptor_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It calls finalizers in any order: another thread may have got the number meanwhile."""
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    with served_by_thread(numbers(), readers=1, epochs=1) as name:
        reader = shmloader.attach(name)
        assert len(list(reader)) == 16
        held = [reader]
        held.append(held)
        fd, close, are_open = reader._link._end.fileno(), MappedSlots.close, list[bool]()

        def checks(slots: MappedSlots) -> None:
            are_open.append(os.path.exists(f"/proc/self/fd/{fd}"))
            close(slots)

        monkeypatch.setattr(MappedSlots, "close", checks)
        del reader, held
        gc.collect()
    assert are_open == [True]  # the server does not hear of it before
    assert not errors
