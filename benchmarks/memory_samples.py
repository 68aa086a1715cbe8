"""Memory of a tree of processes over time."""

from __future__ import annotations

import subprocess
import time
from typing import NamedTuple

from shmloader.monitor.processes import ProcessTree


class MemorySample(NamedTuple):
    """The summed PSS of a tree of processes at one moment, in s on the clock of ``time.monotonic``."""

    time_s: float
    pss_nbytes: int


def sample_until_exit(process: subprocess.Popen[bytes], interval_s: float) -> list[MemorySample]:
    """Samples the tree of a child process at a steady pace until that ends; empty without PSS."""
    samples: list[MemorySample] = []
    tree = ProcessTree([process.pid])
    while process.poll() is None:
        started_s = time.monotonic()
        pss_nbytes = sum(one.pss_nbytes for one in tree.read())
        if pss_nbytes:
            samples.append(MemorySample(started_s, pss_nbytes))
        try:
            process.wait(max(0.0, started_s + interval_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue
    return samples
