"""Queues whose processes are killed: an error that names the dead, and nothing left, wherever it happens."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from interrupted_lines import interrupted_at, once_inside
from queue_processes import die, get_and_die, get_for_ever, item, put_and_die, put_for_ever, same
from robustness.processes import LONG, python

import shmloader
from shmloader import PeerDied, Queue
from shmloader.channel.consumer import Consumer
from shmloader.channel.end import End

METHODS = pytest.mark.parametrize(
    "method", ["fork", pytest.param("spawn", marks=pytest.mark.long), "forkserver"]
)
KILLS = 500 if LONG else 12


def start(method: str, target: Any, *arguments: Any) -> Any:
    process = multiprocessing.get_context(method).Process(target=target, args=arguments)
    process.start()
    return process


def end(process: Any) -> None:
    process.kill()
    process.join()
    process.close()


@METHODS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_that_a_killed_producer_had_put_comes_and_then_its_name(
    warm_helpers: None, method: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmloader.channel.roles._CODE_S", 60.0)
    one = Queue(8)
    process = start(method, put_and_die, one, 6, number)
    for made in range(6):
        assert (one.get(timeout=60) == made).all()
    with pytest.raises(
        PeerDied, match=rf"puts into this queue, .* \(pid {process.pid}\), was killed by signal"
    ) as raised:
        one.get()
    assert (raised.value.pid, raised.value.exit_code) == (process.pid, -number)
    with pytest.raises(PeerDied):
        one.get_nowait()
    assert shmloader.wait([one], timeout=60) == [one]
    end(process)
    one.close()


@METHODS
def test_a_killed_consumer_ends_a_put_that_waits(
    warm_helpers: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmloader.channel.roles._CODE_S", 60.0)
    one = Queue(2)
    process = start(method, get_and_die, one, 3, signal.SIGKILL)
    with pytest.raises(
        PeerDied, match=r"gets from this queue, .*SIGKILL.* had not got are lost: 2"
    ) as raised:
        while True:
            one.put(torch.ones(10_000))
    assert raised.value.pid == process.pid
    end(process)
    one.close()


@METHODS
def test_a_process_that_ends_before_its_first_use_is_an_error(warm_helpers: None, method: str) -> None:
    """In a program of its own: threads of the tests might put, for all that the queue knows."""
    python(
        f"""
        import multiprocessing, pytest
        from queue_processes import die
        from shmloader import PeerDied, Queue

        if __name__ == "__main__":
            one = Queue(2)
            process = multiprocessing.get_context({method!r}).Process(target=die, args=(one, 3))
            process.start()
            with pytest.raises(PeerDied, match="no process puts into this queue any more.*with code 3"):
                one.get()
            for _ in range(2):
                one.put(1)
        """
    )


def test_a_process_that_was_killed_before_it_could_note_itself() -> None:
    """Nobody has noted it; that this process forks, and has no living child, tells that nobody will come."""
    python(
        """
        import os, queue, signal, time

        dies = []
        os.register_at_fork(after_in_child=lambda: dies and os.kill(os.getpid(), signal.SIGKILL))
        import pytest
        import shmloader.channel.end
        from shmloader import PeerDied, Queue

        shmloader.channel.end.LOOK_S = 0.1
        if not (lives := os.fork()):
            time.sleep(600)
        one = Queue(2)
        dies.append(True)
        if not os.fork():
            raise AssertionError
        with pytest.raises(queue.Empty):  # a child lives, which may come
            one.get(timeout=0.4)
        os.kill(lives, signal.SIGKILL)
        with pytest.raises(PeerDied, match="no process puts into this queue any more"):
            one.get()
        """
    )


def test_a_thread_may_put_although_a_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it looks meanwhile whether somebody lives."""
    monkeypatch.setattr("shmloader.channel.end.LOOK_S", 0.02)
    one, got = Queue(2), []
    thread = threading.Thread(target=lambda: got.append(one.get()))
    thread.start()
    process = start("fork", die, one, 3)
    process.join()
    time.sleep(0.3)
    one.put(5)
    thread.join(60)
    assert got == [5]
    end(process)
    one.close()


def test_a_consumer_is_told_when_the_starting_process_is_gone() -> None:
    """A grandchild of the test waits; its parent, which made the queue, is killed before anything is put."""
    python(
        """
        import os, signal, sys, time
        import pytest
        from shmloader import PeerDied, Queue

        read, write = os.pipe()
        if os.fork() == 0:
            one = Queue(2)
            mine = os.getpid()
            if os.fork() == 0:
                with pytest.raises(PeerDied, match=f"before they used it: .*pid {mine}"):
                    one.get()
                os.write(write, b"told")
                os._exit(0)
            time.sleep(0.3)
            os.kill(mine, signal.SIGKILL)
        os.close(write)
        assert os.read(read, 10) == b"told"
        os.wait()
        """
    )


@pytest.mark.parametrize("victim", ["producer", "consumer"])
def test_kills_at_random_moments(victim: str) -> None:
    """Whoever is left gets all in order up to the death, unchanged, and an error that names the dead."""
    chance = random.Random(victim)
    for round_ in range(KILLS):
        one = Queue(chance.choice([1, 2, 5]))
        target = put_for_ever if victim == "producer" else get_for_ever
        process = start("fork", target, one, round_)
        killer = threading.Timer(chance.random() * 0.15, process.kill)
        number, held = 0, []
        with pytest.raises(PeerDied, match=rf"pid {process.pid}\).* was killed by signal 9"):
            while True:
                if victim == "producer":
                    got, made = one.get(timeout=60)
                    assert got == number
                    held = [*held[-4:], (number, made)]
                else:
                    one.put((number, item(round_, number)), timeout=60)
                number += 1
                if number == one.maxsize + 1:  # then the other end was used: deaths before are another test's
                    killer.start()
        killer.join()
        assert all(same(made, item(round_, old)) for old, made in held)
        end(process)
        one.close()


def test_a_death_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the next look: the other process is watched from the first sleep on."""
    monkeypatch.setattr("shmloader.channel.end.LOOK_S", 30.0)
    one = Queue(1)
    process = start("fork", put_for_ever, one, 0)
    for _ in range(20):
        one.get(timeout=60)
    killer = threading.Timer(0.1, process.kill)
    killer.start()
    began_s = time.monotonic()
    with pytest.raises(PeerDied):
        while True:
            one.get(timeout=60)
    assert time.monotonic() - began_s < 15
    killer.join()
    end(process)
    one.close()


def test_nothing_is_left_when_all_are_killed() -> None:
    """Both ends and the process that made the queue, while objects wait and are written."""
    mine = slots_of(os.getpid())
    for _ in range(3):
        maker = start("fork", _make_and_run)
        me = psutil.Process(maker.pid)
        wait_until(lambda me=me: len(me.children()) == 2 and all(slots_of(one.pid) for one in me.children()))
        family = [me, *me.children()]
        slots = set().union(*(slots_of(one.pid) for one in family)) - mine
        assert slots
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, as others had
                one.kill()
        maker.join()
        maker.close()
        wait_until(lambda slots=slots: not any(slots & slots_of(pid) for pid in psutil.pids()))


def _make_and_run() -> None:
    one = Queue(4)
    for target in (put_for_ever, get_for_ever):
        start("fork", target, one, 1)
    time.sleep(60)


def slots_of(pid: int) -> set[str]:
    """The files of slots that a process has open or mapped, by inode: nobody else's are among them."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        found = {line.split()[4] for line in lines if "/memfd:shmloader-slots" in line}
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if "/memfd:shmloader-slots" in os.readlink(link):
                found.add(str(link.stat().st_ino))
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


# --- interrupts


def test_an_exception_out_of_a_wait_loses_nothing() -> None:
    """A signal handler that raises while `get` and `put` sleep."""
    one = Queue(1)
    with pytest.raises(InterruptedError), once_inside(End.wait, raises(InterruptedError)):
        one.get()
    one.put(1)
    with pytest.raises(InterruptedError), once_inside(End.wait, raises(InterruptedError)):
        one.put(2)
    assert one.get() == 1
    with pytest.raises(queue.Empty):
        one.get_nowait()
    one.close()


def test_an_exception_within_the_records_ends_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost is not passed over in silence: later calls say so."""
    one = Queue(2)
    one.put(torch.ones(10_000))
    with monkeypatch.context() as patch:
        patch.setattr(
            "shmloader.slots.PlaceTable.arrive", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            one.get()
    with pytest.raises(shmloader.LoaderError, match="was interrupted within a call"):
        one.get()
    one.close()


def raises(error: BaseException | type[BaseException]) -> Any:
    def raising(*_: object) -> None:
        raise error

    return raising


def test_an_exception_within_the_records_ends_the_end_at_a_later_attempt_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An object for which there was no memory stays here, and the next call takes it."""
    one = Queue(2)
    one.put(torch.ones(10_000))
    for error in (shmloader.SharedMemoryExhausted("no memory"), KeyboardInterrupt()):
        with monkeypatch.context() as patch:
            patch.setattr("shmloader.slots.PlaceTable.take", raises(error))
            with pytest.raises(type(error)):
                one.get()
    with pytest.raises(shmloader.LoaderError, match="was interrupted within a call"):
        one.get()
    one.close()


def test_a_put_waits_for_a_slot_where_memory_has_become_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then fewer slots are granted than objects may wait; a small one needs none."""
    one, got = Queue(3), []
    one.put(torch.ones(10_000))
    one.get()
    consumer: Any = one._ends[Consumer]
    table = consumer._table
    monkeypatch.setattr(table.budget, "most_tasks", 1)
    monkeypatch.setattr(table, "window", 1)
    for number in range(3):
        one.put(torch.full((10_000,), number))
    assert [int(one.get()[0]) for _ in range(2)] == [0, 1]
    one.put("small")
    with once_inside(End.wait, lambda: got.append(one.get())):  # which grants one
        one.put(torch.full((10_000,), 3))
    assert int(got.pop()[0]) == 2
    assert one.get() == "small"
    with monkeypatch.context() as patch:
        patch.setattr("shmloader.channel.outbox.Outbox.finish", raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), once_inside(End.wait, lambda: got.append(one.get())):
            one.put(torch.full((10_000,), 4))
    assert int(got.pop()[0]) == 3
    with pytest.raises(shmloader.LoaderError, match="was interrupted within a call"):
        one.put(5)
    one.close()


def test_a_signal_handler_may_close_the_queue_that_sleeps() -> None:
    one = Queue(2)
    with (
        pytest.raises(shmloader.QueueClosed, match="this process has closed the queue"),
        once_inside(End.wait, one.close),
    ):
        one.get()


def test_an_end_that_was_cut_short_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    fds = os.listdir("/proc/self/fd")
    one = Queue(2)
    process = start("fork", put_for_ever, one, 0)
    while one.get(timeout=60) and one._ends[Consumer]._death.fd < 0:
        pass  # it watches the other process once it has slept
    with monkeypatch.context() as patch:
        for name in ("_take_slot", "_take_inline"):
            patch.setattr(Consumer, name, raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            one.get(timeout=60)
    end(process)
    one.close()
    del one, process
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(fds)


def test_a_call_in_a_signal_handler_while_the_queue_sleeps_works() -> None:
    one, got = Queue(2), []

    def puts() -> None:
        one.put(1)
        one.put(2)
        got.append(one.get())

    with once_inside(End.wait, puts):
        assert one.get() == 2
    assert got == [1]
    one.close()
    assert os.getpid()


def put_one(one: Queue) -> None:
    one.put(1)
    signal.pause()


def test_an_interrupt_while_the_other_end_is_found_hides_no_death() -> None:
    for line in range(30):
        one = Queue(2)
        process = start("fork", put_one, one)
        while not one.qsize():
            time.sleep(0.01)
        was_cut = interrupted_at(line, one._end(Consumer)._find_peer)
        end(process)
        assert one.get() == 1
        with pytest.raises(PeerDied):
            one.get(timeout=3)
        one.close()
        if not was_cut:
            assert line > 3
            return
    raise AssertionError("it never ends")
