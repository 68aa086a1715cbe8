"""share_on_host refuses impossible requests and strangers, and says why."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from host_ranks import FORK, ROWS, Box, Building, build, build_never, servers
from numpy.lib.stride_tricks import as_strided
from spent_descriptors import descriptors_left

from shmloader import LoaderError, ShareTimeout
from shmloader.store import host, share
from shmloader.store.handles import reduce_array
from shmloader.store.host import share_on_host
from shmloader.store.job import job_of_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs abstract sockets")

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


class Unpicklable:
    def __init__(self) -> None:
        self.rows = ROWS
        self.function = lambda: None


def test_what_cannot_be_pickled_is_an_error_that_says_why_it_was_tried(name: str) -> None:
    with pytest.raises((AttributeError, TypeError)) as caught:
        share_on_host(Building(Unpicklable), name=name)
    assert "must be picklable" in "".join(caught.value.__notes__)
    assert not servers()


def test_a_name_that_is_bound_and_never_served_is_a_timeout(name: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(host._address(name, job_of_process(name)))
        with pytest.raises(ShareTimeout, match="the process that holds its name"):
            share_on_host(Building(build), name=name, timeout_s=0.1)


def test_a_build_that_waits_for_itself_is_refused(name: str) -> None:
    with pytest.raises(LoaderError, match="with the same name"):
        share_on_host(lambda: share_on_host(Building(build), name=name), name=name)


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        share_on_host(Building(build), name="")


def test_a_frozen_program_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting the server would start the program a second time, instead of an interpreter."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(LoaderError, match="frozen program"):
        share_on_host(Building(build), name=name)


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/ls")
    with pytest.raises(LoaderError, match=r"could not be started: .*\n.*ls: "):
        share_on_host(Building(build), name=name)
    monkeypatch.undo()
    assert share_on_host(Building(build), name=name) == ROWS


def as_nobody(pipe: Any, action: Callable[[], Any]) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        pipe.send(action())
        pipe.recv()
    except Exception as error:
        pipe.send(repr(error))


@contextlib.contextmanager
def another_user(action: Callable[[], Any]) -> Iterator[Any]:
    """Runs `action` as another user, yields what it returned, and lets the process end."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=as_nobody, args=(theirs, action))
    process.start()
    try:
        assert ours.poll(60)
        yield ours.recv()
    finally:
        with contextlib.suppress(BrokenPipeError):
            ours.send("end")
        process.join()
        process.close()
        ours.close()
        theirs.close()


@as_root
def test_another_users_process_cannot_attach(name: str) -> None:
    shared = share_on_host(Building(build), name=name)
    address = host._address(name, job_of_process(name))

    def connect() -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            connection.connect(address)
            data, fds, _, _ = socket.recv_fds(connection, 100, 10)
            return data, len(fds)

    with another_user(connect) as received:
        assert received == (b"", 0)
    assert share_on_host(Building(build_never), name=name) == shared  # it continues to serve


@as_root
def test_another_user_that_takes_the_name_is_an_error(name: str) -> None:
    """That user could send us any pickle."""
    address = host._address(name, job_of_process(name))
    held = []

    def squat() -> str:
        held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        held[0].bind(address)
        held[0].listen()
        return "bound"

    with another_user(squat) as done:
        assert done == "bound"
        with pytest.raises(PermissionError, match=f"of user {NOBODY} holds its name"):
            share_on_host(Building(build), name=name, timeout_s=5)


def test_too_few_descriptors_is_an_error_with_the_number_needed(name: str) -> None:
    built = share_on_host(Building(lambda: Box([share([n]) for n in range(30)])), name=name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, hard))
    try:
        with pytest.raises(OSError, match="needs 31 descriptors"):
            share_on_host(Building(build_never), name=name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(built.content) == 30


def test_what_build_raises_is_raised_when_no_descriptor_is_left_to_tell_others(name: str) -> None:
    with contextlib.ExitStack() as spent:

        def fail() -> Any:
            spent.enter_context(descriptors_left(0))
            raise KeyError("no such split")

        with pytest.raises(KeyError, match="no such split"):
            share_on_host(fail, name=name)


@as_root
def test_a_read_only_array_goes_by_handle_where_the_system_does_not_tell_what_was_written() -> None:
    """As in a daemon that has dropped its rights; what may have been written to goes by its contents."""
    numbers, weights = share(np.zeros(1 << 18)), share(torch.zeros(1 << 18))
    own: list[Any] = [numbers, numbers[5:], np.frombuffer(numbers.data), as_strided(numbers, (1 << 17,))]
    octets: Any = weights.numpy().data.toreadonly()
    views = [*own, np.broadcast_to(weights.numpy(), (2, 1 << 18)), np.frombuffer(octets)]

    def are_by_handle() -> list[bool]:
        assert not os.access("/proc/self/pagemap", os.R_OK)
        return [reduce_array(view, None) is not None for view in views]

    with another_user(are_by_handle) as received:
        assert received == [True] * 4 + [False] * 2
