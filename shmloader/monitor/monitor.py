"""Follows the memory of a program over time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shmloader.memory.limits import Headroom, memory_headroom
from shmloader.monitor.findings import About, Finding, Growth, find
from shmloader.monitor.inside import Report, listen, read_reports
from shmloader.monitor.processes import ProcessMemory, ProcessTree, shared_nbytes

_WINDOW_S = 60.0  # of which growth is told
_LEAST_WINDOW_S = 2.0
_LEAST_FOLLOWED_S = 10.0  # until a process's growth tells when the limit is reached
_MOST_OF_A_CORE = 0.015  # that reading may take
_MOST_READINGS = 2000


@dataclass(frozen=True)
class Reading:
    """The memory of a program at one moment.

    Attributes:
        time_s: When, in seconds since the monitor began.
        processes: Each process, parents before children.
        shared: Bytes of shared memory by owner, each counted once.
        room: What the program could still take, and the limit of that.
    """

    time_s: float
    processes: tuple[ProcessMemory, ...]
    shared: dict[str, int]
    room: Headroom

    @property
    def pss_nbytes(self) -> int:
        """Bytes of all processes together."""
        return sum(process.pss_nbytes for process in self.processes)


class Monitor:
    """Follows the memory of a program: of processes and all that descend from them.

    As a context manager it reads in a thread of its own until the block ends. Call `read` in between as you
    like, or without the block.
    The time between two readings grows with their cost, so that they take 1.5 % of a core.

    Args:
        pids: The processes; without any this one, whose loaders then report on their datasets.
        every_s: Least seconds between two readings.
        reports: The file to which loaders of the program append reports; None without.

    Raises:
        psutil.NoSuchProcess: If there is no such process.

    Attributes:
        last: The last reading.
        readings: What was read while a process lived. Of a long run every second, fourth, ... one is kept.
        peak: The reading in which all processes together had most.
        cost_s: Processor time that all readings took.
    """

    def __init__(self, *pids: int, every_s: float = 1.0, reports: Path | None = None) -> None:
        self._is_own = not pids
        self._pids = pids or (os.getpid(),)
        self._tree = ProcessTree(self._pids)
        self._every_s = every_s
        self._path, self._offset = reports, 0
        self._reports: dict[tuple[int, int], Report] = {}
        self._findings: dict[About, Finding] = {}
        self._first: dict[int, ProcessMemory] = {}
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._reading, self._pid = threading.Lock(), os.getpid()  # only one thread reads
        self._thread = threading.Thread(target=self._run, name="shmloader-monitor", daemon=True)
        self._stop_listening: Callable[[], None] = lambda: None
        self.readings: list[Reading] = []
        self.last = self.peak = Reading(0.0, (), {}, memory_headroom())
        self.cost_s = 0.0
        self.wait_s = every_s

    def read(self) -> Reading:
        """Read all processes now, and set ``wait_s``, the seconds to wait until the next reading."""
        if self._pid != os.getpid():  # forked, maybe while the thread was reading
            self._reading, self._pid = threading.Lock(), os.getpid()
        with self._reading:
            return self._read()

    def _read(self) -> Reading:
        began_s = time.thread_time()
        processes = tuple(self._tree.read())
        shared = shared_nbytes([process.pid for process in processes])
        room = memory_headroom(None if self._is_own else self._pids[0])
        reading = Reading(time.monotonic() - self._began_s, processes, shared, room)
        if processes:
            self.add(reading)
        if self._path is not None:
            found, self._offset = read_reports(self._path, self._offset)
            for report in found:
                self._note(report)
        self._find(reading)
        cost_s = time.thread_time() - began_s
        self.cost_s += cost_s
        self.wait_s = max(self._every_s, cost_s / _MOST_OF_A_CORE)
        return reading

    def add(self, reading: Reading) -> None:
        """Take up a reading, which may come from elsewhere."""
        alive = {process.pid for process in self.last.processes}
        # Also if the number is an old one's.
        self._first |= {process.pid: process for process in reading.processes if process.pid not in alive}
        if len(self.readings) >= _MOST_READINGS:
            self.readings = self.readings[::2]
        self.readings.append(reading)
        self.last = reading
        if reading.pss_nbytes >= self.peak.pss_nbytes:
            self.peak = reading

    def _note(self, report: Report) -> None:
        self._reports[report.pid, report.loader] = report

    def growths(self, at: Reading) -> dict[int, Growth]:
        """Growth of each process's private memory: since it was first read, and per minute lately."""
        recent = [one for one in self.readings if at.time_s - _WINDOW_S <= one.time_s < at.time_s] + [at]
        oldest = {process.pid: (one, process) for one in reversed(recent) for process in one.processes}
        growths = {}
        for process in at.processes:
            then, before = oldest[process.pid]
            seconds = at.time_s - then.time_s
            per_min = 60 / seconds if seconds >= _LEAST_WINDOW_S else 0.0
            more = process.private_nbytes - before.private_nbytes
            resident = more + process.shared_nbytes - before.shared_nbytes
            nbytes = process.private_nbytes - self._first[process.pid].private_nbytes
            growths[process.pid] = Growth(process, nbytes, more * per_min, resident * per_min, seconds)
        return growths

    def time_to_limit_s(self, at: Reading) -> float | None:
        """Seconds until the limit is reached at the growth of all processes then.

        None without growth. Processes that were followed for less than ten seconds may only be starting.
        """
        lasting = [one for one in self.growths(at).values() if one.seconds >= _LEAST_FOLLOWED_S]
        rate = sum(growth.nbytes_per_min for growth in lasting) / 60
        least_rate = 1e5  # bytes per second, under which it is noise
        return at.room.available_nbytes / rate if rate > least_rate else None

    def findings(self) -> list[Finding]:
        """The findings so far: growth, its cause if a loader has reported it, and the cure."""
        return list(self._findings.values())

    def _find(self, reading: Reading) -> None:
        looks_inside = self._is_own or self._path is not None
        for new in find(list(self._reports.values()), self.growths(reading), looks_inside=looks_inside):
            known = self._findings.get(new.about)
            if known is None or new.nbytes >= 0.9 * known.nbytes:  # workers of a new epoch have copied less
                self._findings[new.about] = new

    def names(self) -> dict[int, str]:
        """Names of the workers that loaders have reported, by process id."""
        return {
            pid: f"worker {number} of {report.dataset}"
            for report in list(self._reports.values())  # a thread that calls iter() may add one
            for number, pid in enumerate(report.workers)
        }

    def __enter__(self) -> Self:
        """Begin to read in a thread."""
        if self._is_own:
            self._stop_listening = listen(self._note)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Read a last time, and end the thread."""
        self._ended.set()
        self._thread.join()
        self._stop_listening()

    def _run(self) -> None:
        self.read()
        while not self._ended.wait(self.wait_s):
            self.read()
        self.read()
