"""accelerate under ``install()``: the loaders that it builds from others keep their options.

`accelerate.data_loader` builds a loader of torch's class from those attributes of another one that a dict in
that module names. The loader's own options are added to the dict, and the class is replaced, in that module
only.
"""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import torch.utils.data

from shmloader.errors import warn
from shmloader.integrations.patches import Patches
from shmloader.integrations.states import states_unwanted
from shmloader.loader import DataLoader
from shmloader.slot_loading import loading_of
from shmloader.torch_fallback import OWN_DEFAULTS

_MODULE = "accelerate.data_loader"
_ARGUMENTS = "_PYTORCH_DATALOADER_KWARGS"
_UPDATE = "_update_state_dict"
_IS_OURS = "is_shmloader"


class Accelerate:
    """Patches accelerate, if it has been imported."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._done = False

    def patch(self) -> None:
        """Patch accelerate's module of loaders, once; warn if this version of it cannot be patched."""
        module = sys.modules.get(_MODULE)
        if self._done or module is None:
            return
        self._done = True
        arguments: Any = getattr(module, _ARGUMENTS, None)
        adapter: Any = getattr(module, "DataLoaderAdapter", None)
        torchs = getattr(module, "DataLoader", None) is _TORCHS
        if not (torchs and isinstance(arguments, dict) and hasattr(adapter, _UPDATE)):
            warn(
                f"shmloader.install() cannot patch this version of accelerate: {_MODULE} lacks a dict "
                f"{_ARGUMENTS}, a DataLoader that is torch's, or DataLoaderAdapter.{_UPDATE}. Its loaders "
                "load from slots, but with the options of install(), not of the loader that they replace."
            )
            return
        self._patches.replace(module, _ARGUMENTS, {**arguments, **OWN_DEFAULTS, _IS_OURS: False})
        self._patches.replace(module, "DataLoader", _build)
        self._patches.replace(adapter, "__init__", _init_of(adapter))
        self._patches.replace(adapter, _UPDATE, _update_of(adapter))
        for kind in (module.DataLoaderShard, module.DataLoaderDispatcher):
            self._patches.replace(kind, "set_epoch", _set_epoch_of(kind))


_TORCHS = torch.utils.data.DataLoader


def _build(dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a loader of the class that the original had: `DataLoader`, or torch's."""
    if kwargs.pop(_IS_OURS, False):
        return DataLoader(dataset, *args, **kwargs)
    return _TORCHS(dataset, *args, **{name: kwargs[name] for name in kwargs.keys() - OWN_DEFAULTS.keys()})


def _init_of(adapter_class: Any) -> Any:
    """``__init__`` of accelerate's loaders: ``use_stateful_dataloader`` makes ours, not torchdata's.

    accelerate asks each loader for its state, so a failure matters only if the program wants the state.
    """
    init = adapter_class.__init__

    @functools.wraps(init)
    def __init__(adapter: Any, dataset: Any, use_stateful_dataloader: bool = False, **kwargs: Any) -> None:  # noqa: N807
        kwargs[_IS_OURS] = use_stateful_dataloader or kwargs.get(_IS_OURS, False)
        with states_unwanted(not use_stateful_dataloader):
            init(adapter, dataset, **kwargs)
        adapter.use_stateful_dataloader = use_stateful_dataloader

    return __init__


def _set_epoch_of(kind: Any) -> Any:
    """``set_epoch`` of accelerate's loaders: what they tell the dataset reaches workers too."""
    accelerates = kind.set_epoch

    @functools.wraps(accelerates)
    def set_epoch(adapter: Any, epoch: int) -> None:
        accelerates(_Telling(adapter), epoch)

    return set_epoch


class _Telling:
    """One of accelerate's loaders, whose dataset is told of an epoch through the loader inside."""

    def __init__(self, adapter: Any) -> None:
        vars(self)["adapter"] = adapter

    def __getattr__(self, name: str) -> Any:
        value, loader = getattr(self.adapter, name), self.adapter.base_dataloader
        if name != "dataset" or not hasattr(value, "set_epoch"):
            return value
        return SimpleNamespace(set_epoch=functools.partial(loading_of(loader).set_dataset_epoch, loader))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.adapter, name, value)


def _update_of(adapter_class: Any) -> Any:
    update = getattr(adapter_class, _UPDATE)

    @functools.wraps(update)
    def _update_state_dict(adapter: Any) -> None:
        with states_unwanted(not adapter.use_stateful_dataloader):
            update(adapter)

    return _update_state_dict
