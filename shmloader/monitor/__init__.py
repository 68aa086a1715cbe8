"""The memory of training programs: who has how much, how it grows, and why. Loading never imports this.

    from shmloader.monitor import Monitor

    with Monitor() as monitor:  # of this process and all that descend from it
        train()
    print(monitor.findings())

``python -m shmloader memory -- python train.py`` shows the same for any program. docs/memory.md explains it.
"""

from __future__ import annotations

from shmloader.monitor.monitor import Monitor, Reading
from shmloader.monitor.processes import ProcessMemory

__all__ = ["Monitor", "ProcessMemory", "Reading"]
