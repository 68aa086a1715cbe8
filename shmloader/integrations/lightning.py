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
_FABRIC = "utilities.data", "wrappers"
_TRAINER = "loops.fit_loop", "loops.evaluation_loop", "trainer.connectors.data_connector"
_MODULES = [
    f"{package}.{module}"
    for package, modules in {
        "lightning.fabric": _FABRIC,
        "lightning_fabric": _FABRIC,
        "lightning.pytorch": _TRAINER,
        "pytorch_lightning": _TRAINER,
    }.items()
    for module in modules
]


def patch_lightning(patches: Patches) -> None:
    """Patch those of Lightning's modules that have been imported since the last call."""
    for module in map(sys.modules.get, _MODULES):
        lightnings = getattr(module, _NAME, None)
        if lightnings is not None and not hasattr(lightnings, "__wrapped__"):
            patches.replace(module, _NAME, _telling_datasets(lightnings))


def _telling_datasets(lightnings: Any) -> Any:
    @functools.wraps(lightnings)
    def _set_sampler_epoch(loader: Any, epoch: int) -> None:
        lightnings(loader, epoch)
        torchs = getattr(torch.utils.data.DataLoader, GET_ITERATOR)
        if isinstance(loader, DataLoader) or getattr(type(loader), GET_ITERATOR, None) is torchs:
            loading_of(loader).set_dataset_epoch(loader, epoch)

    return _set_sampler_epoch
