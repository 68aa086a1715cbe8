"""Memory of a tree of processes, as the kernel's proportional set size (PSS).

PSS divides each shared page among the processes that map it, so the figures of a main process and
its workers may be added up. RSS may not: it counts a shared page once in every process.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_ATTEMPTS = 3


@dataclass(frozen=True)
class MemorySample:
    """The memory of a tree of processes at one moment.

    Attributes:
        time_s: When it was read, on the clock of ``time.monotonic``.
        pss_nbytes: PSS, summed over the processes.
        processes: How many processes were counted.
    """

    time_s: float
    pss_nbytes: int
    processes: int


def read_memory(pid: int) -> dict[str, int]:
    """Read a process's memory by kind, as ``/proc/PID/smaps_rollup`` names it.

    Returns:
        Bytes under ``Pss``, ``Rss``, ``Private_Dirty``, ``Anonymous`` and so on; empty where the process is
        gone or the kernel does not tell (Linux 4.14 and later does).
    """
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def sample_memory(root_pid: int) -> MemorySample | None:
    """Sum the PSS of a process and its descendants; None when nothing could be read.

    Descendants and not children: under ``forkserver`` the workers are grandchildren.
    """
    known: list[int] = []
    # A process that ends between two readings takes with it what the others have already split with
    # it, and the sum is too low. So look again, but not for ever: a zombie stays unreadable.
    for _ in range(_ATTEMPTS):
        time_s = time.monotonic()
        try:
            descendants = psutil.Process(root_pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        readings = [read_memory(pid).get("Pss") for pid in (root_pid, *(child.pid for child in descendants))]
        known = [reading for reading in readings if reading is not None]
        if len(known) == len(readings):
            break
    return MemorySample(time_s, sum(known), len(known)) if known else None


def sample_until_exit(process: subprocess.Popen[bytes], interval_s: float) -> list[MemorySample]:
    """Sample a process's tree at a steady pace until the process ends.

    Args:
        process: The root of the tree, a child of this process.
        interval_s: Time from one sample to the next.

    Returns:
        The samples in order of time; empty where PSS is not available.
    """
    samples: list[MemorySample] = []
    while process.poll() is None:
        started_s = time.monotonic()
        sample = sample_memory(process.pid)
        if sample is not None:
            samples.append(sample)
        remaining_s = max(0.0, started_s + interval_s - time.monotonic())
        try:
            process.wait(timeout=remaining_s)
        except subprocess.TimeoutExpired:
            continue
    return samples
