"""Reads the memory of trees of processes, and the shared memory that they map."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from shmloader.memory.process_memory import read_memory

_SHARED = re.compile(
    rb"^(\w+)-(\w+) \S+ (\w+) (\S+) (\d+) +((?:/memfd:|/dev/shm/|/SYSV|/dev/zero).*?)(?: \(deleted\))?$",
    re.MULTILINE,
)
_OWNERS = {
    "/memfd:shmloader-slots": "slots",
    "/memfd:shmloader-store": "stores",
    "/memfd:shmloader-": "shmloader, while workers start",
    "/dev/shm/torch_": "torch's tensors",
    "/dev/shm/psm_": "multiprocessing.shared_memory",
    "/dev/shm/nccl-": "NCCL",
    "/dev/shm/": "others in /dev/shm",
    "/memfd:": "other memory files",
    "": "shared and anonymous",
}
"""Owners of shared memory by how the names of its files begin."""

_UNMAPPED = "in /dev/shm, mapped by none of these"
_ROLES = {
    "multiprocessing.resource_tracker": "resource tracker",
    "multiprocessing.forkserver": "fork server",
    "multiprocessing.spawn": "spawned process",
}


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of one process at one moment, in bytes.

    Attributes:
        pid: Its process id.
        parent: That of its parent.
        depth: Its generation in the tree: 0 for a root.
        name: Its role or command, for people.
        private_nbytes: Pages that only it has and has written to, and its part of what is swapped out.
        shared_nbytes: The other pages that it maps: shared with others, or read from files.
        pss_nbytes: Its proportional part: each page is divided among all who map it. It may be added up.
    """

    pid: int
    parent: int
    depth: int
    name: str
    private_nbytes: int
    shared_nbytes: int
    pss_nbytes: int


class ProcessTree:
    """Processes and all that descend from them, also when the processes in between have ended.

    Raises `psutil.NoSuchProcess` if there is none of these.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]
        self._known: dict[int, psutil.Process] = {root.pid: root for root in self._roots}
        self._names: dict[int, str] = {}

    def read(self) -> list[ProcessMemory]:
        """The memory of all that live, parents before children. Without those that may not be read."""
        self._find()
        parents: dict[int, int] = {}
        for pid, process in self._known.items():
            with contextlib.suppress(psutil.Error):
                parents[pid] = process.ppid()
        children = defaultdict(list)
        for pid, parent in parents.items():
            children[parent if parent in parents else 0].append(pid)
        found: list[ProcessMemory] = []
        todo = [(pid, 0) for pid in reversed(children[0])]
        while todo:
            pid, depth = todo.pop()
            todo += [(child, depth + 1) for child in sorted(children[pid], reverse=True)]
            if memory := read_memory(pid):
                swapped = memory.get("SwapPss", 0)
                private = memory["Private_Dirty"] + swapped
                shared = memory["Rss"] - memory["Private_Dirty"]
                pss = memory["Pss"] + swapped
                found.append(ProcessMemory(pid, parents[pid], depth, self._name(pid), private, shared, pss))
        return found

    def _find(self) -> None:
        """Add new descendants, and forget those that have ended."""
        alive = {pid: process for pid, process in self._known.items() if process.is_running()}
        reached: set[int] = set()
        for pid, process in list(alive.items()):  # the roots are first; the rest may be orphans
            if pid not in reached:
                with contextlib.suppress(psutil.Error):
                    for child in process.children(recursive=True):
                        reached.add(child.pid)
                        alive.setdefault(child.pid, child)
        self._known = alive
        self._names = {pid: name for pid, name in self._names.items() if pid in alive}  # numbers come again

    def _name(self, pid: int) -> str:
        if pid not in self._names:
            name = str(pid)
            with contextlib.suppress(psutil.Error):
                process = self._known[pid]
                name = _describe(process.cmdline()) or process.name()
                rank = process.environ().get("RANK", process.environ().get("LOCAL_RANK"))
                name = name if rank is None else f"rank {rank}: {name}"
            self._names[pid] = name
        return self._names[pid]


def _describe(words: list[str]) -> str:
    line = " ".join(words)
    role = next((role for module, role in _ROLES.items() if module in line), None)
    if role is not None or not words:
        return role or ""
    first = next((word for word in words[1:] if word == "-c" or not word.startswith("-")), "")
    return f"{Path(words[0]).name} {Path(first).name}".strip()[:40]


def shared_nbytes(pids: Sequence[int]) -> dict[str, int]:
    """Bytes of shared memory by owner: each part of a file once, whoever maps it."""
    names: dict[tuple[bytes, int], str] = {}
    parts: defaultdict[tuple[bytes, int], set[tuple[int, int]]] = defaultdict(set)
    for pid in pids:
        maps = b""
        with contextlib.suppress(OSError):
            maps = Path("/proc", str(pid), "maps").read_bytes()
        for begin, end, offset, device, inode, name in _SHARED.findall(maps):
            key, start = (device, int(inode)), int(offset, 16)
            names[key] = name.decode(errors="replace")
            parts[key].add((start, start + int(end, 16) - int(begin, 16)))
    sums: defaultdict[str, int] = defaultdict(int)
    for key, name in names.items():
        owner = next(owner for prefix, owner in _OWNERS.items() if name.startswith(prefix))
        sums[owner] += _covered_nbytes(parts[key])
    inodes = {inode for _, inode in names}
    folder = f"/proc/{next(iter(pids), 'self')}/root/dev/shm"  # a container has its own
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # it was removed just now
                continue
            if status.st_ino not in inodes and status.st_uid == os.getuid():
                sums[_UNMAPPED] += status.st_blocks * 512
    return {owner: nbytes for owner, nbytes in sums.items() if nbytes}


def _covered_nbytes(parts: Iterable[tuple[int, int]]) -> int:
    """Bytes that are in at least one of some parts of a file, each given by its begin and end."""
    covered = reached = 0
    for begin, end in sorted(parts):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
