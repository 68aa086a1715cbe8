"""Memory of processes, as the kernel counts it.

The proportional set size (PSS) divides each shared page among the processes that map it, so it may be added
up. RSS counts a shared page once in every process.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import psutil

_ATTEMPTS = 3


def read_memory(pid: int) -> dict[str, int]:
    """Read a process's memory by kind, as ``/proc/PID/smaps_rollup`` names it.

    Returns:
        Bytes under ``Pss``, ``Rss``, ``Private_Dirty``, ``Anonymous`` and so on; empty if the process is gone
        or the kernel is older than Linux 4.14.
    """
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


class CopiedMemory:
    """The memory of its parent that a forked process copies, without its own and without shared memory.

    A process that gives inherited memory back, as when it collects its parent's garbage, and also allocates
    may seem to have copied as many bytes more.

    Raises:
        psutil.Error, OSError: In every method, if the process is gone.
    """

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc", str(pid))
        # It may have allocated by now: it began with no more than its parent has.
        memories = (psutil.Process(pid).memory_info(), psutil.Process().memory_info())
        self._anonymous_nbytes: int = min(memory.rss - memory.shared for memory in memories)

    def most_nbytes(self) -> int:
        """An upper bound, by its page faults; costs nothing."""
        stat = (self._folder / "stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[7]) * mmap.PAGESIZE

    def nbytes(self) -> int:
        """Bytes of pages copied, by either side, and of those that only it still has; 25 ms for each GB."""
        smaps = (self._folder / "smaps").read_text(errors="replace")
        private, anonymous = (
            [int(kb) * 1024 for kb in re.findall(rf"^{name}: +(\d+) kB", smaps, re.MULTILINE)]
            for name in ("Private_Dirty", "Anonymous")
        )
        allocated = max(0, sum(anonymous) - self._anonymous_nbytes)
        return min(self.most_nbytes(), sum(map(min, private, anonymous))) - allocated


def tree_pss_nbytes(root_pid: int) -> int:
    """The PSS of a process and all its descendants; 0 if nothing can be read.

    Under ``forkserver`` the workers are grandchildren.
    """
    known: list[int] = []
    # A process that ends between two readings takes with it what the others have already split with
    # it, and the sum is too low. So look again, but not for ever: a zombie stays unreadable.
    for _ in range(_ATTEMPTS):
        try:
            descendants = psutil.Process(root_pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return 0
        readings = [read_memory(pid).get("Pss") for pid in (root_pid, *(child.pid for child in descendants))]
        known = [reading for reading in readings if reading is not None]
        if len(known) == len(readings):
            break
    return sum(known)
