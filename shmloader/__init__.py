"""shmloader: a drop-in for ``torch.utils.data.DataLoader`` that copies no batch between processes.

>>> from shmloader import DataLoader

Importing it starts no thread and no process and takes no shared memory.
"""

from shmloader.collate import empty
from shmloader.errors import (
    LoaderClosed,
    LoaderError,
    SharedMemoryExhausted,
    SpillWarning,
    WorkerDied,
    WorkerStartError,
    WorkerTimeout,
)
from shmloader.loader import DataLoader
from shmloader.statistics import LoaderStatistics

__version__ = "0.1.0"

__all__ = [
    "DataLoader",
    "LoaderClosed",
    "LoaderError",
    "LoaderStatistics",
    "SharedMemoryExhausted",
    "SpillWarning",
    "WorkerDied",
    "WorkerStartError",
    "WorkerTimeout",
    "__version__",
    "empty",
]
