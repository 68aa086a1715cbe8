"""The class by which DLIO loads with this project's loader, as `data_loader_classname` names it."""

from __future__ import annotations

from dlio_benchmark.data_loader import torch_data_loader

import shmloader

torch_data_loader.DataLoader = shmloader.DataLoader


class Loader(torch_data_loader.TorchDataLoader):  # type: ignore[misc]
    """DLIO's own loader for torch, whose `DataLoader` is this project's."""
