"""Lightning under ``install()``: datasets hear of epochs, and a last batch's checkpoint begins the next one.

Lightning leaves an epoch after the last batch that it wants, without asking the loader for one more. Only it
knows which batch that is. So a state that is saved then is made that of the next epoch's beginning.

Of a loader without a length it reads one batch ahead. A state is then that before this batch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.utils.data

from shmloader.errors import ResumeError, warn_once
from shmloader.frameworks.states import warn_of_one_rank
from shmloader.loader import DataLoader
from shmloader.loading import loading_of
from shmloader.patches import Patches
from shmloader.torch_private import GET_ITERATOR

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LOOPS = {f"{package}.loops.fit_loop" for package in _PACKAGES}
_OTHERS = ("loops.evaluation_loop", "trainer.connectors.data_connector")  # that tell samplers, too
_TELLERS = _LOOPS | {f"{package}.{name}" for package in _PACKAGES for name in _OTHERS}
_TELLERS |= {"lightning.fabric.wrappers", "lightning_fabric.wrappers"}
_SAVE, _LOAD = "on_save_checkpoint", "_load_combined_loader_states"
_PROTOCOLS = {"lightning.fabric.utilities.types", "lightning_fabric.utilities.types"}
_SET_EPOCH = "_set_sampler_epoch"


def patch_lightning(patches: Patches) -> None:
    """Patch Lightning's training loop, once it is imported; warn if this version of it cannot be patched."""
    for name in _LOOPS & sys.modules.keys():
        loop: Any = getattr(sys.modules[name], "_FitLoop", None)
        if hasattr(loop, _SAVE) and hasattr(loop, _LOAD):
            patches.wrap(loop, _SAVE, _save)
            patches.wrap(loop, _LOAD, _load)
        else:
            warn_once(
                f"shmloader.install() cannot patch this version of Lightning: {name}._FitLoop lacks {_SAVE} "
                f"or {_LOAD}. Training resumed from an epoch's last batch loses an epoch."
            )
    for name in _TELLERS & sys.modules.keys():  # not all modules: it takes a millisecond to look at them
        if hasattr(module := sys.modules[name], _SET_EPOCH):
            patches.wrap(module, _SET_EPOCH, _tell)


def forget_states() -> None:
    """Make Lightning look anew which loaders have states: its protocol remembers that of each class."""
    for name in _PROTOCOLS & sys.modules.keys():
        protocol: Any = getattr(sys.modules[name], "_Stateful", None)
        if hasattr(protocol, "_abc_caches_clear"):
            protocol._abc_caches_clear()  # noqa: SLF001


def _tell(tell: Any, loader: Any, epoch: int) -> None:
    tell(loader, epoch)
    torchs = getattr(torch.utils.data.DataLoader, GET_ITERATOR)
    if isinstance(loader, DataLoader) or getattr(type(loader), GET_ITERATOR, None) is torchs:
        loading_of(loader).set_dataset_epoch(epoch)


def _save(save: Any, loop: Any) -> Any:
    saved = save(loop)
    states = saved.get("combined_loader")  # None before the loop has its loaders
    loaders = loop._combined_loader.flattened if states else []  # noqa: SLF001
    saving = [one for one in loaders if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
    for place, (loader, state) in enumerate(zip(saving, states or (), strict=True)):
        if _is_ours(state) and isinstance(loader, torch.utils.data.DataLoader):
            loading, ahead = loading_of(loader), len(getattr(loop._data_fetcher, "batches", ()))  # noqa: SLF001
            if loop.epoch_loop.batch_progress.is_last_batch:
                states[place] = loading.state_after_epoch(loop.epoch_progress.current.started)
            elif state["finished"] and loop.epoch_loop.batch_progress.current.ready:
                # In a CombinedLoader of mode "max_size": others go on, and nothing more of it comes.
                states[place] = loading.state_dict(loading.states.readers.returned)
            elif ahead:  # it reads loaders without a length ahead
                states[place] = loading.state_dict(max(loading.states.readers.returned - ahead, 0))
            warn_of_one_rank(loader, states[place], "Lightning")
    return saved


def _load(load: Any, loop: Any) -> None:
    """Load the states of a checkpoint; refuse one of an epoch's last batch that `_save` has not seen."""
    states = loop._combined_loader_states_to_load if loop.restarting else []  # noqa: SLF001
    goes_on = any(state["batches"] and not state["finished"] for state in states if _is_ours(state))
    if goes_on and loop.epoch_loop.batch_progress.is_last_batch:
        raise ResumeError(
            "the checkpoint is of an epoch's last batch, and was written without install(): resume from "
            "another step, or delete ['loops']['fit_loop']['state_dict']['combined_loader'] from it to begin "
            "an epoch"
        )
    load(loop)


def _is_ours(state: Any) -> bool:
    return "sampler_settings" in state
