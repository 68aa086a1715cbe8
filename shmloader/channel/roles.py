"""The processes at the ends of a queue: a file that all of them append to, and the death of each.

The first record of a role is its holder's: an append is atomic, so no lock can be left taken by a process
that is killed. The first page of the file has the counts.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import mmap
import multiprocessing
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from shmloader.errors import LoaderError
from shmloader.memory import PAGE_NBYTES, Descriptor, Extent
from shmloader.memory.mapping import order_memory
from shmloader.memory.segment import OwnDescriptor

_RECORD = struct.Struct("<B3xIQ48s")
_OPEN, _GIVEN_UP = 3, 4  # words of the first page, behind the counts: see `set_open`
_CODE_S = 1.0  # how long the fork server may take to tell the exit code of a process that has ended


class Role(enum.IntEnum):
    """The role of a process in a queue."""

    HOLDER = 0  # it has the queue, and has used it in neither way yet
    PRODUCER = 1
    CONSUMER = 2

    @property
    def does(self) -> str:
        """The words for its work in messages."""
        return ("has this queue", "puts into this queue", "gets from this queue")[self]


class Party(NamedTuple):
    """A process that has a queue."""

    role: Role
    pid: int
    started: int  # clock ticks from the machine's start to its own, which tell it from a later one of its pid
    name: str  # of the ``multiprocessing`` process

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def is_this_process(self) -> bool:
        """Whether it is the process that asks."""
        return self.pid == os.getpid()

    def is_alive(self) -> bool:
        """Whether it has not ended, or that cannot be told now: this process has no descriptor left, say."""
        with contextlib.suppress(OSError):
            return self._is_there()
        return True

    def _is_there(self) -> bool:
        state, started = _stat(self.pid)
        return started == self.started and state not in ("Z", "X")

    def watch(self) -> int:
        """A descriptor that becomes readable at its end; -1 if there is none (before Linux 5.3, or ended)."""
        try:
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return -1
        with contextlib.suppress(OSError):
            if self._is_there():
                return fd
        os.close(fd)  # it may be of another process, of the same pid
        return -1


def _stat(pid: int) -> tuple[str, int]:
    """The state of a process and its start time; ``("X", -1)`` if there is none.

    Raises `OSError` if this process has not the descriptor or the memory to ask.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return "X", -1
    return fields[0], int(fields[19])


def exit_code_of(pid: int, started: Iterable[Any]) -> int | None:
    """The exit code of a process that has ended, as in ``Process.exitcode``, if this one can know it.

    It stays there for others to take. ``started`` are ``Popen`` objects of ``multiprocessing``.
    """
    for process in started:
        if getattr(process, "pid", None) == pid:
            code: int | None = process.poll()
            return process.wait(_CODE_S) if code is None else code
    with contextlib.suppress(OSError):  # not a child of this process, or its code was taken
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is not None:
            return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
    return None


def has_children() -> bool:
    """Whether this process has child processes that have not ended, or that cannot be told now."""
    with contextlib.suppress(OSError):
        return any(_stat(child.pid)[0] not in ("Z", "X") for child in psutil.Process().children())
    return True


class Roles:
    """The holders of the ends of one queue, and the counts of its objects; the same in all processes."""

    def __init__(self, descriptor: Descriptor | None = None) -> None:
        if _stat(os.getpid())[1] < 0:
            raise LoaderError(
                "shmloader.Queue learns from /proc which processes have ended, and this one is not there: "
                "/proc is not mounted, or hidden. Mount it, or use multiprocessing.Queue"
            )
        if descriptor is None:
            descriptor = OwnDescriptor(os.memfd_create("shmloader-queue"))
            os.ftruncate(descriptor.fd, PAGE_NBYTES)
            fcntl.fcntl(descriptor.fd, fcntl.F_SETFL, fcntl.fcntl(descriptor.fd, fcntl.F_GETFL) | os.O_APPEND)
        self.descriptor = descriptor
        self._counts = Extent(PAGE_NBYTES, mmap.MAP_SHARED, descriptor.fd).view.cast("Q")
        self._read_nbytes = PAGE_NBYTES
        self._first: dict[Role, Party] = {}
        self._parties: dict[tuple[int, int], Party] = {}
        self.forks = False  # whether this process has forked since, so that others may have the queue
        self._note(Role.HOLDER)

    def count(self, role: Role) -> None:
        """Count an object that was put, or got; by the process that has the role alone."""
        self._counts[role] += 1

    def waiting(self) -> int:
        """Objects that were put and not got yet; about, while another process puts or gets."""
        return max(0, self._counts[Role.PRODUCER] - self._counts[Role.CONSUMER])

    def set_open(self, slot: int = -1) -> bool:
        """Note which slot the producer has open, if any; returns whether the consumer has given up others.

        Each side writes its own word before it reads the other's, so one of them sees both: see `give_up`.
        """
        self._counts[_OPEN] = slot + 1
        return bool(self._counts[_GIVEN_UP])

    def give_up(self) -> int:
        """Note that the consumer gives up all slots but the one that the producer has open; returns that."""
        self._counts[_GIVEN_UP] = 1
        # Without a fence a processor may read before others see what it has written; this is one for both.
        order_memory()
        return self._counts[_OPEN] - 1

    def claim(self, role: Role) -> Party:
        """Take a role for this process, if none has it; returns the process that has it."""
        if self.who(role) is None:
            self._note(role)
            self._read()
        return self._first[role]

    def who(self, role: Role) -> Party | None:
        """The process that has a role; None if none has used the queue in this way yet."""
        self._read()
        return self._first.get(role)

    def others(self) -> list[Party]:
        """All other processes that have, or had, the queue."""
        self._read()
        return [party for party in self._parties.values() if not party.is_this_process]

    def has_forked(self) -> None:
        """Note that this process has forked another one, which notes itself unless it is killed before."""
        self.forks = True

    def forked(self) -> None:
        """Note that this process has the queue too, because it was forked."""
        self.forks = False
        with contextlib.suppress(OSError):  # no descriptor is left: it is noted once it puts or gets
            self._note(Role.HOLDER, "a fork of ")  # it has its parent's name still

    def _note(self, role: Role, of: str = "") -> None:
        pid = os.getpid()
        name = (of + multiprocessing.current_process().name).encode()[:48]
        os.write(self.descriptor.fd, _RECORD.pack(role, pid, _stat(pid)[1], name))

    def _read(self) -> None:
        begin = self._read_nbytes  # several threads may read
        while records := os.pread(self.descriptor.fd, _RECORD.size * 64, begin):
            begin += len(records)
            for number, pid, started, name in _RECORD.iter_unpack(records):
                party = Party(Role(number), pid, started, name.rstrip(b"\0").decode(errors="replace"))
                self._first.setdefault(party.role, party)
                self._parties[pid, started] = party
        self._read_nbytes = begin

    def close(self) -> None:
        """Close this process's descriptor; the counts can still be read."""
        self.descriptor.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Roles, (self.descriptor,)
