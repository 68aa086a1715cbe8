"""Limits of this host, as they are now: memory, descriptors, cores; and the check that memory is left.

Limits that are unknown are None.
Inside a memory cgroup (version 1 or 2) the OOM killer, not an error, answers a request that is too large.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import operator
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from shmloader.errors import SharedMemoryExhausted
from shmloader.messages import page

SURE_NBYTES = 4 << 20
"""Bytes that are taken without asking for the headroom first: reading a cgroup's files would cost more."""

_MOST_SPARE_NBYTES = 64 << 20
_ADVICE = "Use a smaller batch_size, fewer workers or a smaller prefetch_factor, or raise the limit."

_CGROUPS = Path("/sys/fs/cgroup")  # where systemd and containers mount them
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2**63
_PROCESSOR_TIMES = Path("/proc/stat")
_RANKS = "LOCAL_WORLD_SIZE"  # the environment variable in which torchrun gives the ranks of this machine


class Headroom(NamedTuple):
    """Memory that this process could still take."""

    available_nbytes: int  # the least over the machine and all cgroups that contain the process
    limit_nbytes: int  # what bounds it (a cgroup's limit, or the machine's memory)
    source: str  # name of the bound, for people


_last_known: Headroom | None = None
_unchecked_nbytes = 0  # taken by this process since it last asked for the headroom


def memory_headroom(pid: int | None = None) -> Headroom:
    """Memory that this process, or another one, can take now without the kernel killing something for it.

    What the kernel reclaims before it kills counts as available in a cgroup too: the pages of files that were
    read, and its own caches. While the process has no descriptor left, the answer is the last one that there
    was. Raises `OSError` if there is no descriptor left, and never was when this was asked.
    """
    global _last_known  # noqa: PLW0603 - the same for all loaders of this process
    try:
        machine = _machine_headroom()
    except OSError:
        if _last_known is None:
            raise
        return _last_known
    rooms = [machine, *filter(None, map(_cgroup_headroom, _cgroups("memory", pid)))]
    least = min(rooms, key=operator.attrgetter("available_nbytes"))
    if pid is None:
        _last_known = least
    return least


def _machine_headroom() -> Headroom:
    """The machine's memory; where that is not told (no /proc), the part of it that is free."""
    try:
        memory = psutil.virtual_memory()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        page_nbytes, *pages = map(os.sysconf, ("SC_PAGE_SIZE", "SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        return Headroom(pages[0] * page_nbytes, pages[1] * page_nbytes, "the machine's memory (free pages)")
    return Headroom(memory.available, memory.total, "the machine's memory")


def check_headroom(nbytes: int, purpose: str, *, spare: int = 0, advice: str = _ADVICE) -> None:
    """Refuse to take more memory than the host has, before anything is taken.

    The last of the memory is left to the program; otherwise its next allocation would bring the OOM killer.
    Taken bytes are summed up, and compared with the host's memory every ``SURE_NBYTES``.

    ``purpose`` begins the message, such as "a slot needs 8,192 more bytes of shared memory", and ``advice``
    ends it. ``spare`` bytes are left to the program, if that is more than `spare_nbytes`. Raises
    `SharedMemoryExhausted` if the host has less.
    """
    global _unchecked_nbytes  # noqa: PLW0603 - what this process takes, whatever it is for
    if _unchecked_nbytes + nbytes < SURE_NBYTES:
        _unchecked_nbytes += max(0, nbytes)
        return
    room = memory_headroom()
    if nbytes + max(spare, spare_nbytes(room)) > room.available_nbytes:
        raise exhausted(purpose, nbytes, room, spare=spare, advice=advice)
    _unchecked_nbytes = 0


def exhausted(
    what: str,
    nbytes: int,
    room: Headroom | None = None,
    *,
    spare: int = 0,
    advice: str = _ADVICE,
    code: int = 0,
) -> SharedMemoryExhausted:
    """The error for memory that the host lacks, or refuses with a ``code``; see `check_headroom`."""
    if code == errno.EFBIG:
        limited = "shared memory is a file, and the size of files is limited: ulimit -f unlimited"
        return SharedMemoryExhausted(f"{what}: {limited}", needed_nbytes=nbytes)
    room = room or memory_headroom()
    spare = max(spare, spare_nbytes(room))
    is_free = nbytes + spare <= room.available_nbytes
    why = " The kernel promises no more (sysctl vm.overcommit_memory)." if is_free and code else ""
    return SharedMemoryExhausted(
        f"{what}, {'though' if is_free else 'but only'} {room.available_nbytes:,} of {room.limit_nbytes:,} "
        f"bytes are available in {room.source}, of which {spare:,} are left to the program.{why} {advice} "
        f"Causes and cures: {page('docs/messages.md')}",
        needed_nbytes=nbytes,
        available_nbytes=room.available_nbytes,
    )


def spare_nbytes(room: Headroom) -> int:
    """Bytes of the host's memory that are never taken for slots and copies."""
    return min(_MOST_SPARE_NBYTES, room.limit_nbytes // 16)


def _cgroups(controller: str, pid: int | None = None) -> list[Path]:
    """Folders of the cgroups of a controller that contain this process, or ``pid``; innermost first."""
    try:
        lines = Path("/proc", str(pid or "self"), "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, whose place is another one where version 1 is there too
            top = _CGROUPS / "unified" if (_CGROUPS / "unified").is_dir() else _CGROUPS
        elif controller in controllers.split(","):
            top = (_CGROUPS / controller).resolve()
        else:
            continue
        folder = (top / path.lstrip("/")).resolve()
        if not folder.is_relative_to(top) or not folder.is_dir():
            folder = top  # in a container: the path is the host's, of which only a part is visible
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]
    return folders


def _cgroup_headroom(folder: Path) -> Headroom | None:
    # Shared memory is in none of these figures of ``memory.stat``. A file that was read twice is "active".
    for limit_name, usage_name, reclaimed in (
        ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ):
        try:
            limit_text = (folder / limit_name).read_text().strip()
            if limit_text == "max" or int(limit_text) >= _UNLIMITED:
                return None
            limit, usage = int(limit_text), int((folder / usage_name).read_text())
        except (OSError, ValueError):
            continue
        figures = _fields(folder / "memory.stat")
        available = limit - usage + sum(figures.get(name, 0) for name in reclaimed)
        return Headroom(max(0, available), limit, f"the memory cgroup {folder}")
    return None


def oom_kills() -> int | None:
    """Processes of this memory cgroup, else of the machine, that the kernel has killed for memory."""
    names = ("memory.events", "memory.oom_control")
    paths = [*(folder / name for folder in _cgroups("memory") for name in names), Path("/proc/vmstat")]
    counts = (_fields(path).get("oom_kill") for path in paths)
    return next((count for count in counts if count is not None), None)


def _fields(path: Path) -> dict[str, int]:
    """The numbers in a file of lines ``name number``; empty if there is no such file."""
    try:
        pairs = map(str.split, path.read_text().splitlines())
        return {name: int(number) for name, number in pairs}
    except (OSError, ValueError):
        return {}


class Cores(NamedTuple):
    """Processor cores that this process may use."""

    machine: int  # logical cores of the machine
    affinity: int  # those that this process may run on (``taskset``, a cpuset)
    # Cores' worth of time that the tightest cgroup grants (2.5: two and a half seconds of processor time per
    # second), or None if there is no quota.
    quota: float | None
    launcher: int | None = None  # those that the launcher of ranks may run on; None for all of the machine

    @property
    def ranks(self) -> int:
        """The ranks that share these cores: all of this machine, unless their launcher gave each its own."""
        ranks, given = os.environ.get(_RANKS, ""), self.launcher or self.machine
        return max(1, int(ranks)) if ranks.isdecimal() and self.affinity == given else 1

    @property
    def usable(self) -> int:
        """Whole cores that can be kept busy, at least 1; of cores that ranks share, the part of one."""
        return max(1, min(self.affinity, int(self.quota or self.affinity)) // self.ranks)


def cores() -> Cores:
    """Cores of the machine, of this process's affinity, and of its cgroups' quotas."""
    return _cores(_affinity(), _quotas())


def _cores(affinity: frozenset[int], quotas: dict[Path, float]) -> Cores:
    machine = os.cpu_count() or 1
    launcher = _launchers_cores() if affinity and _RANKS in os.environ else None
    return Cores(machine, len(affinity) or machine, min(quotas.values(), default=None), launcher)


def _affinity() -> frozenset[int]:
    """The numbers of the cores that this process may run on; empty if it is not Linux."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


@functools.cache
def _launchers_cores() -> int | None:
    """The number of cores that the launcher of this rank may run on; None if it has ended.

    Between the two may be a shell, or a rank whose child this is. They have a rank's environment, as the
    launcher itself has not; nor can one be read that belongs to another user.
    """
    with contextlib.suppress(psutil.Error, OSError):
        launcher = psutil.Process().parent()
        while launcher is not None:
            environment: dict[str, str] = {}
            with contextlib.suppress(psutil.AccessDenied, PermissionError):
                environment = launcher.environ()
            above = launcher.parent() if _RANKS in environment else None
            if above is None:
                return len(os.sched_getaffinity(launcher.pid))
            launcher = above
    return None


def _quotas() -> dict[Path, float]:
    """The quotas of this process's cgroups, by their folders."""
    return {folder: quota for folder in _cgroups("cpu") if (quota := _cpu_quota(folder)) is not None}


def _cpu_quota(folder: Path) -> float | None:
    """Quota over period of one cgroup: of ``cpu.max`` (version 2) or of the two files of version 1."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # version 2 has "max" for no quota
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            return int(quota) / int(period) if int(quota) > 0 else None  # and version 1 has -1
    return None


class ProcessorUse(NamedTuple):
    """Processor time used up to a moment; the difference of two tells what a span of time used."""

    at_s: float  # the moment, by ``time.monotonic()``
    own_s: float  # seconds of this process, of children and workers that have ended, and of given ones
    # Seconds of everything on the cores that this process may use, and of time that the machine's host has
    # given to others. None if it may use only a part of that time (by a quota, or beside other ranks): whose
    # the rest is cannot be told.
    busy_s: float | None
    affinity: frozenset[int]  # the cores that this process may use; empty if unknown
    cores: Cores
    periods: int  # periods of the scheduler in which a cgroup with a quota ran; 0 without a quota
    throttled: int  # those in which its quota was used up

    def shares_since(self, before: ProcessorUse) -> dict[str, float]:
        """Cores that were busy, on average, since an earlier moment, by this program and by all others.

        Returns ``own_cores``, ``foreign_cores``, and ``throttled_share`` of the scheduler's periods.
        """
        seconds = max(self.at_s - before.at_s, 1e-9)
        own_s, busy_s = max(0.0, self.own_s - before.own_s), 0.0
        # The time of other cores began with the machine.
        if self.busy_s is not None and before.busy_s is not None and self.affinity == before.affinity:
            busy_s = self.busy_s - before.busy_s
        return {
            "own_cores": own_s / seconds,
            "foreign_cores": max(0.0, busy_s - own_s) / seconds,
            "throttled_share": (self.throttled - before.throttled) / max(1, self.periods - before.periods),
        }


_ended_s = 0.0  # seconds of processes that `note_end` was told of


def note_end(pid: int) -> None:
    """Count the processor time of a process that is about to end, and is no child of this one."""
    global _ended_s  # noqa: PLW0603 - as the system counts that of children, for the whole process
    _ended_s += _process_s(pid)


def _process_s(pid: int | None) -> float:
    """The processor time so far of a process and of its children that have ended; 0.0 if it is gone."""
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except (psutil.Error, OSError):
        return 0.0


def processor_use(pids: Iterable[int | None] = ()) -> ProcessorUse:
    """The processor time used so far, also by the live processes ``pids``."""
    user_s, system_s, childrens_user_s, childrens_system_s, _ = os.times()
    own_s = user_s + system_s + childrens_user_s + childrens_system_s + _ended_s
    own_s += sum(map(_process_s, pids))
    affinity, quotas = _affinity(), _quotas()
    found = _cores(affinity, quotas)
    busy_s = _busy_s(affinity) if affinity and found.usable == found.affinity else None
    stats = [_fields(folder / "cpu.stat") for folder in quotas]
    most = max(stats, key=lambda stat: stat.get("nr_throttled", 0), default={})
    periods, throttled = most.get("nr_periods", 0), most.get("nr_throttled", 0)
    return ProcessorUse(time.monotonic(), own_s, busy_s, affinity, found, periods, throttled)


def _busy_s(usable: frozenset[int]) -> float | None:
    """Seconds for which cores were busy so far; None if unknown."""
    try:
        lines = _PROCESSOR_TIMES.read_text().splitlines()
    except OSError:
        return None
    ticks = 0
    for name, *times in map(str.split, lines):
        if name[:3] == "cpu" and name[3:].isdecimal() and int(name[3:]) in usable:
            ticks += sum(map(int, times[:3] + times[5:8]))  # without idle, iowait, and guests, who are users
    return ticks / os.sysconf("SC_CLK_TCK")


def open_files() -> tuple[int | None, int | None]:
    """Descriptors that are open now, if they can be counted, and the most there may be (``ulimit -n``)."""
    used: int | None = None
    with contextlib.suppress(OSError, psutil.Error, AttributeError):  # none left to count them with; Windows
        used = psutil.Process().num_fds() - 1  # without the one by which they are counted
    return used, _limits("RLIMIT_NOFILE")[0]


def locked_memory_limits() -> tuple[str, str]:
    """The limits of locked memory (``ulimit -l``), soft and hard, for people."""
    limits = _limits("RLIMIT_MEMLOCK")
    soft, hard = ("none" if limit is None else f"{limit:,} bytes" for limit in limits)
    return soft, hard


def _limits(name: str) -> tuple[int | None, int | None]:
    """The soft and the hard limit of a resource, each None for no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    limits = resource.getrlimit(getattr(resource, name))
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return soft, hard
