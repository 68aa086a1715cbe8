"""shmloader: a drop-in for ``torch.utils.data.DataLoader`` whose workers collate into shared memory.

>>> from shmloader import DataLoader

Importing it starts no thread and no process and takes no shared memory. ``python -m shmloader --help`` says
where the pages are that docstrings name, such as docs/gpu.md.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from shmloader.errors import (
    ArchiveError,
    BadSampleWarning,
    LoaderClosed,
    LoaderError,
    NoGoodSample,
    NotReady,
    NotSharedWarning,
    PeerDied,
    QueueClosed,
    ResumeError,
    ServerDied,
    SharedMemoryExhausted,
    ShareTimeout,
    SlotCorrupted,
    SpillWarning,
    WorkerDied,
    WorkerStartError,
    WorkerTimeout,
)
from shmloader.frameworks import install, uninstall
from shmloader.frameworks.states import set_epoch
from shmloader.indices.block_sampler import BlockSampler
from shmloader.indices.mixture import Mixture
from shmloader.indices.mixture_sampler import MixtureSampler
from shmloader.indices.sharded_sampler import ShardedSampler
from shmloader.indices.token_batches import TokenBatchSampler
from shmloader.loader import DataLoader
from shmloader.loading import imported_when_used
from shmloader.resume.skipping import skip_batches
from shmloader.sources import why_per_sample
from shmloader.statistics import AutotuneReport, BadSample, LoaderStatistics
from shmloader.store import open_store, share, unshare
from shmloader.store.host import share_on_host
from shmloader.tar import TarDataset
from shmloader.worker.collate import collate_packed, empty

if TYPE_CHECKING:
    from shmloader.channel.own_process import OwnProcess
    from shmloader.channel.queue import Queue, wait
    from shmloader.serving import attach, serve
    from shmloader.tar.stream import TarStream

_IMPORTED_WHEN_USED = {
    "OwnProcess": "channel.own_process",
    "Queue": "channel.queue",
    "TarStream": "tar.stream",
    "attach": "serving",
    "serve": "serving",
    "wait": "channel.queue",
}


def _host_loading(loader: Any) -> Any:
    return importlib.import_module(f"{__name__}.serving.ranks").host_loading(loader)


# The loader may not import `serving`, which imports it: it looks here for what it needs of it.
imported_when_used["host"] = _host_loading


if not TYPE_CHECKING:  # to which any misspelt name would be known

    def __getattr__(name: str) -> Any:
        if name not in _IMPORTED_WHEN_USED:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_IMPORTED_WHEN_USED[name]}")
        value = globals()[name] = getattr(module, name)
        return value


if os.environ.get("SHMLOADER_PROFILE"):
    from shmloader.loading import profile_each as _profile_each
    from shmloader.profiling.program import begin as _begin

    _begin(_profile_each)

__version__ = "0.1.0"

open = open_store  # noqa: A001 - used as shmloader.open; assigned, since type checkers count that as exported

__all__ = [
    "ArchiveError",
    "AutotuneReport",
    "BadSample",
    "BadSampleWarning",
    "BlockSampler",
    "DataLoader",
    "LoaderClosed",
    "LoaderError",
    "LoaderStatistics",
    "Mixture",
    "MixtureSampler",
    "NoGoodSample",
    "NotReady",
    "NotSharedWarning",
    "OwnProcess",
    "PeerDied",
    "Queue",
    "QueueClosed",
    "ResumeError",
    "ServerDied",
    "ShardedSampler",
    "ShareTimeout",
    "SharedMemoryExhausted",
    "SlotCorrupted",
    "SpillWarning",
    "TarDataset",
    "TarStream",
    "TokenBatchSampler",
    "WorkerDied",
    "WorkerStartError",
    "WorkerTimeout",
    "__version__",
    "attach",
    "collate_packed",
    "empty",
    "install",
    "serve",
    "set_epoch",
    "share",
    "share_on_host",
    "skip_batches",
    "uninstall",
    "unshare",
    "wait",
    "why_per_sample",
]

_MODULES = {"frameworks", "monitor", "store", "tar"}  # those with public names of their own


def __dir__() -> list[str]:
    return sorted([*__all__, "open", *(_MODULES & globals().keys())])
