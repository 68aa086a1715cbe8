"""Who has which end of a queue: forks, pids that come again, and processes that only pass a queue on."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from queue_processes import claim_getting, claim_putting
from spent_descriptors import descriptors_left

from shmloader import PeerDied, Queue
from shmloader.channel.consumer import Consumer
from shmloader.channel.roles import Party, Role, Roles


def run(target: Any, *arguments: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def end(process: Any) -> None:
    process.join(60)
    assert process.exitcode == 0
    process.close()


def test_the_first_of_many_that_claim_at_once_has_the_role_for_all() -> None:
    roles, answers = Roles(), Queue(1)
    ends = [os.pipe() for _ in range(8)]

    def claims(write: int) -> None:
        os.write(write, str(roles.claim(Role.PRODUCER).pid).encode())

    processes = [run(claims, write) for _, write in ends]
    told = {os.read(read, 20) for read, _ in ends}
    assert len(told) == 1
    assert int(told.pop()) in {process.pid for process in processes}
    for process in processes:
        end(process)
    for pair in ends:
        for fd in pair:
            os.close(fd)
    roles.close()
    answers.close()


def test_a_later_process_of_the_same_pid_is_another_one() -> None:
    mine = Roles()
    party = mine.claim(Role.PRODUCER)
    assert party.is_alive()
    fd = party.watch()
    assert fd >= 0
    os.close(fd)
    earlier = party._replace(started=party.started - 1)
    assert not earlier.is_alive()
    assert earlier.watch() == -1
    assert not Party(Role.PRODUCER, 1 << 22, 0, "never").is_alive()
    mine.close()


def test_a_process_whose_name_is_no_text_is_followed_too() -> None:
    def puts(one: Queue) -> None:
        Path("/proc/self/comm").write_bytes(b"\xff\xfe")
        one.put(1)

    one = Queue(1)
    process = run(puts, one)
    assert one.get(timeout=60) == 1
    end(process)
    one.close()


def test_a_forked_child_has_neither_end_of_its_parent_and_disturbs_nothing() -> None:
    one, answers = Queue(3), Queue(2)
    one.put(torch.full((50_000,), 1))
    one.put(torch.full((50_000,), 2))
    kept = one.get()
    process = run(claim_putting, one, answers)
    assert "another one puts into this queue, MainProcess" in answers.get(timeout=60)
    end(process)
    other = Queue(2)
    process = run(claim_getting, one, other)
    assert "another one gets from this queue, MainProcess" in other.get(timeout=60)
    end(process)
    for number in range(2, 6):
        one.put(torch.full((50_000,), number + 1))
        assert (one.get() == number).all()
    assert (kept == 1).all()
    for each in (one, answers, other):
        each.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_other_threads_make_queues() -> None:
    """What a function raises that is called after a fork is only printed: pytest makes an error of it."""
    kept, ended, interval_s = [Queue(1) for _ in range(150)], threading.Event(), sys.getswitchinterval()

    def make() -> None:
        while not ended.is_set():
            assert [Queue(1) for _ in range(20)]

    makers = [threading.Thread(target=make) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    try:
        for maker in makers:
            maker.start()
        for _ in range(60):
            if not (pid := os.fork()):
                os._exit(0)
            os.waitpid(pid, 0)
    finally:
        sys.setswitchinterval(interval_s)
        ended.set()
        for maker in makers:
            maker.join()
    assert len(kept) == 150


def test_a_fork_while_other_threads_use_the_queue() -> None:
    """A child has no lock that a thread of its parent held."""
    one, stop = Queue(4), threading.Event()

    def puts() -> None:
        number = 0
        while not stop.is_set():
            one.put((number, torch.full((3000,), number)))
            number += 1

    threads = [
        threading.Thread(target=puts),
        threading.Thread(target=lambda: [one.get() for _ in range(200)]),
    ]
    one.put(0)  # so that this process puts, and none of those below
    for thread in threads:
        thread.start()
    for _ in range(10):
        answers = Queue(1)
        process = run(claim_putting, one, answers)
        assert "another one puts" in answers.get(timeout=60)
        end(process)
        answers.close()
    stop.set()
    while threads[1].is_alive():
        with contextlib.suppress(queue.Full):
            one.put(0, timeout=0.01)
    while threads[0].is_alive():
        with contextlib.suppress(queue.Empty):
            one.get(timeout=0.01)
    one.close()


def test_the_process_that_made_it_may_close_its_own_and_leave_the_rest_to_others() -> None:
    one, answers = Queue(3), Queue(1)

    def produces() -> None:
        for number in range(50):
            one.put(torch.full((2000,), number))
        one.close()

    def consumes() -> None:
        answers.put(sum(int(one.get()[0]) for _ in range(50)))

    processes = [run(produces), run(consumes)]
    one.close()
    assert answers.get(timeout=60) == sum(range(50))
    for process in processes:
        end(process)
    answers.close()


@pytest.mark.parametrize("count", [3])
def test_descriptors_of_a_queue(count: int) -> None:
    """Six for a queue, a few more for each end that a process uses, and none once it is closed."""

    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    queues = [Queue(2) for _ in range(count)]
    assert opened() - before == 6 * count
    for one in queues:
        one.put(1)
        one.get()
    assert opened() - before <= 10 * count
    for one in queues:
        one.close()
    assert opened() == before


@pytest.mark.parametrize("spare", range(10))
def test_without_descriptors_a_queue_is_an_error_that_says_so_and_leaves_none(spare: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    one = None
    with descriptors_left(spare):
        try:
            one = Queue(2)
            one.put(1)
        except OSError as error:
            assert error.errno == errno.EMFILE  # noqa: PT017 - some need no more
        else:
            assert spare >= 8
    if one is not None:
        one.close()
    del one
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_without_a_descriptor_takes_no_other_one_for_dead() -> None:
    """Neither while it waits for the first object, of whomever, nor for one of a producer that it knows."""

    def puts(one: Queue) -> None:
        for number in range(2):
            time.sleep(1.5)
            one.put(number)

    one = Queue(2)
    one._end(Consumer)
    process = run(puts, one)
    with descriptors_left(0):
        assert [one.get(timeout=30) for _ in range(2)] == [0, 1]
    end(process)
    with pytest.raises(PeerDied):
        one.get()
    one.close()
