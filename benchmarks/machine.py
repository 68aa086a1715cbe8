"""The machine: its description, and the processor time that a measurement and all others take of it."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import platform
from pathlib import Path
from typing import Any

import psutil

VERSIONS = "torch numpy pyarrow psutil shmloader torchdata grain spdl_core SeqTools datasets pillow".split()
"""Packages whose versions are reported: the measured ones, and the measuring ones."""


def cpu_seconds() -> float:
    """Adds up the processor time that this process and all below it have used, in seconds."""
    me = psutil.Process()
    total = 0.0
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


class CpuMeter:
    """Processor time since it was made: of this measurement, and of everything else."""

    def __init__(self) -> None:
        self._own_s = cpu_seconds()
        self._busy_s = _busy_seconds()

    def read(self) -> tuple[float, float]:
        """Gives the processor time used since, in seconds: by the measurement, and by others.

        Others include the host, if it took a core away from this virtual machine.
        """
        own_s = cpu_seconds() - self._own_s
        return own_s, max(0.0, _busy_seconds() - self._busy_s - own_s)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def open_descriptors() -> int:
    """Counts this process's descriptors, without the one that the counting needs."""
    return len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - called per batch


def describe() -> dict[str, Any]:
    """Describes the machine and the versions, without anything that identifies the machine."""
    frequency = psutil.cpu_freq()
    return {
        "cpu_model": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "cpu_mhz": round(frequency.current) if frequency else None,
        "memory_nbytes": psutil.virtual_memory().total,
        "load_1min": os.getloadavg()[0],
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "start_method": multiprocessing.get_context().get_start_method(),
        "transparent_hugepages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shmem_hugepages": _first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _first_line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a checkout


def describe_in_words(described: dict[str, Any]) -> str:
    """Describes the machine in a few lines that are Markdown too."""
    cores = f"{described['usable_cores']} of {described['cores']} cores"
    memory = f"{described['memory_nbytes'] / 2**30:.1f} GiB of memory"
    system = f"{described['system']} {described['release']} ({described['architecture']})"
    versions = ", ".join(f"{name} {number}" for name, number in described["versions"].items() if number)
    return (
        f"{described['cpu_model']}, {cores}, {memory}, {system}, Python {described['python']}\n"
        f"{versions}\n"
        f"load before the run {described['load_1min']:.2f}; others' share of the cores is in the tables\n"
    )
