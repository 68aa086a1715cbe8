"""Memory of processes, as the kernel counts it.

The proportional set size (PSS) divides each shared page among the processes that map it, so it may be added
up. RSS counts a shared page once in every process.
"""

from __future__ import annotations

from pathlib import Path


def read_memory(pid: int) -> dict[str, int]:
    """Read a process's memory by kind, as ``/proc/PID/smaps_rollup`` names it.

    Returns the bytes under ``Pss``, ``Rss``, ``Private_Dirty``, ``Anonymous`` and so on; empty if the process
    is gone or the kernel is older than Linux 4.14.
    """
    try:
        # Not as text: a codec is imported once, and a process that is forked meanwhile never gets it.
        lines = Path("/proc", str(pid), "smaps_rollup").read_bytes().decode().splitlines()[1:]
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}


def private_nbytes(pid: int) -> int:
    """Memory that a process alone has and cannot give back: not files, not shared memory; 0 if it is unknown.

    What a forked process has in common with its parent is not counted until it is changed.
    """
    found = read_memory(pid)
    # Pages of shared memory that no other process has touched are private too, but not anonymous.
    return min(found.get("Anonymous", 0), found.get("Private_Dirty", 0)) + found.get("SwapPss", 0)
