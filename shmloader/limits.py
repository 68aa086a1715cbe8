"""What this host allows: memory of the machine and of its cgroups, /dev/shm, cores.

Read before shared memory is asked for. Inside a memory cgroup a request that is too large is answered by
the OOM killer, not by an error, so the cgroup's limit and usage are compared first (versions 1 and 2).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2**63


class Headroom(NamedTuple):
    """Memory that this process could still take.

    Attributes:
        available_nbytes: Bytes, the least over the machine and all cgroups that contain the process.
        limit_nbytes: Bytes that bound it (a cgroup's limit, or the machine's memory).
        source: What the bound is, for people.
    """

    available_nbytes: int
    limit_nbytes: int
    source: str


def memory_headroom() -> Headroom:
    """Memory that can be had now without the kernel having to kill something.

    A cgroup's usage counts page cache that would be dropped under pressure; its inactive file pages are
    therefore taken off (``memory.stat``), as the kernel's own reclaim would.
    """
    memory = psutil.virtual_memory()
    best = Headroom(memory.available, memory.total, "the machine's memory")
    for folder in _memory_cgroups():
        room = _cgroup_headroom(folder)
        if room is not None and room.available_nbytes < best.available_nbytes:
            best = room
    return best


def _memory_cgroups() -> list[Path]:
    """Folders of the memory cgroups that contain this process, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        wanted = "cgroup2" if controllers == "" else "cgroup"
        if wanted == "cgroup" and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            fields, _, tail = mount.partition(" - ")
            kind, _, options = tail.split(" ", 2)
            if kind == wanted and (kind == "cgroup2" or "memory" in options.split(",")):
                folders += _walk_up(Path(fields.split()[4]), fields.split()[3], path)
    return folders


def _walk_up(mount_point: Path, mount_root: str, path: str) -> list[Path]:
    """The cgroup at ``path`` and its parents, as folders below ``mount_point``.

    In a container the mount shows a subtree (``mount_root``) or a namespace whose paths begin with "/..";
    then only what lies below the mount point can be read.
    """
    relative = os.path.relpath(path, mount_root) if path.startswith(mount_root) else "."
    folder = (mount_point / relative).resolve()
    if not folder.is_relative_to(mount_point) or not folder.is_dir():
        folder = mount_point
    return [folder, *(p for p in folder.parents if p.is_relative_to(mount_point))]


def _cgroup_headroom(folder: Path) -> Headroom | None:
    for limit_name, usage_name, inactive_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit_text = (folder / limit_name).read_text().strip()
            if limit_text == "max" or int(limit_text) >= _UNLIMITED:
                return None
            limit, usage = int(limit_text), int((folder / usage_name).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        available = max(0, limit - usage + int(stat.get(inactive_key, 0)))
        return Headroom(available, limit, f"the memory cgroup {folder}")
    return None


def shm_free_nbytes(path: str = "/dev/shm") -> int | None:
    """Bytes free in the tmpfs that named shared memory lives in, or None where there is none."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
