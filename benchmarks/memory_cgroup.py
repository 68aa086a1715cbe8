"""Memory cgroups to run measurements in, versions 1 and 2."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

REMOVAL_S = 5.0


class NoCgroupError(Exception):
    """Memory cgroups cannot be made here."""


def own_folder() -> tuple[Path, int]:
    """Finds the memory cgroup of this process: its folder and the version."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for mount in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = mount.split()
        for _, controllers, path in groups:
            if kind == "cgroup" and "memory" in options.split(",") and "memory" in controllers.split(","):
                return Path(folder, path.lstrip("/")), 1
            if kind == "cgroup2" and not controllers:
                place = Path(folder, path.lstrip("/"))
                # A group with processes may not pass controllers to its children; its parent may.
                place = place if place == Path(folder) else place.parent
                with contextlib.suppress(OSError):
                    if "memory" in (place / "cgroup.controllers").read_text().split():
                        return place, 2
    raise NoCgroupError("no memory cgroup controller is mounted")


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """Makes a memory cgroup with a limit in bytes, swap included; yields its folder.

    Raises:
        NoCgroupError: None can be made here, usually for lack of rights.
    """
    try:
        parent, version = own_folder()
        folder = parent / f"shmloader-benchmark-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
    except OSError as error:
        raise NoCgroupError(f"no memory cgroup can be made: {error}") from error
    try:
        limits = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        if version == 2:
            with contextlib.suppress(OSError):
                (parent / "cgroup.subtree_control").write_text("+memory")
            limits = ["memory.max", "memory.swap.max"]
        for name, amount in zip(limits, [nbytes, 0 if version == 2 else nbytes], strict=True):
            try:
                (folder / name).write_text(str(amount))
            except OSError as error:
                if name == limits[0]:
                    raise NoCgroupError(f"the limit cannot be set: {error}") from error
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Removes a cgroup once its last process is gone."""
    end_s = time.monotonic() + REMOVAL_S
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


def join(folder: Path) -> None:
    """Moves this process into a cgroup; the processes it starts are in it too."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def was_killed(folder: Path) -> int:
    """Number of the cgroup's processes that the kernel has killed for memory."""
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError):
            fields = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(fields.get("oom_kill", 0))
    return 0


def peak_nbytes(folder: Path) -> int:
    """The most memory that the processes of the cgroup had together.

    Raises:
        NoCgroupError: This kernel does not tell.
    """
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        with contextlib.suppress(OSError):
            return int((folder / name).read_text())
    raise NoCgroupError("this kernel does not tell a cgroup's peak: give --cgroup-limit a number")
