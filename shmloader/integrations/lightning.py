"""Lightning under ``install()``: what it tells samplers at the beginning of an epoch, datasets hear too."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.utils.data

from shmloader.integrations.patches import Patches
from shmloader.loader import DataLoader
from shmloader.slot_loading import loading_of
from shmloader.torch_private import GET_ITERATOR

_NAME = "_set_sampler_epoch"


def patch_lightning(patches: Patches) -> None:
    """Patch those of Lightning's modules that have been imported since the last call."""
    for name, module in list(sys.modules.items()):
        is_lightnings = name.startswith(("lightning", "pytorch_lightning"))
        lightnings = getattr(module, "__dict__", {}).get(_NAME) if is_lightnings else None
        if lightnings is not None and lightnings.__globals__ is not globals():
            patches.replace(module, _NAME, _telling_datasets(lightnings))


def _telling_datasets(lightnings: Any) -> Any:
    @functools.wraps(lightnings)
    def _set_sampler_epoch(loader: Any, epoch: int) -> None:
        lightnings(loader, epoch)
        torchs = getattr(torch.utils.data.DataLoader, GET_ITERATOR)
        if isinstance(loader, DataLoader) or getattr(type(loader), GET_ITERATOR, None) is torchs:
            loading_of(loader).set_dataset_epoch(loader, epoch)

    return _set_sampler_epoch
