"""Lightning under ``install()``: a checkpoint of an epoch's last batch begins the next epoch.

Lightning leaves an epoch after the last batch that it wants, without asking the loader for one more. Only it knows
which batch that is. So a state that is saved then is made that of the next epoch's beginning.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch.utils.data

from shmloader.errors import ResumeError, warn_once
from shmloader.integrations.patches import Patches
from shmloader.integrations.states import states_are_added, warn_of_one_rank
from shmloader.slot_loading import loading_of

_MODULES = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
_SAVE, _LOAD, _STATES = (
    "on_save_checkpoint",
    "_load_combined_loader_states",
    "_combined_loader_states_to_load",
)
_WITHOUT = (
    "Or delete ['loops']['fit_loop']['state_dict']['combined_loader'] from the checkpoint: the loader then begins an "
    "epoch, as torch's does."
)


class Lightning:
    """Patches Lightning's training loop, if it has been imported."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._done: set[str] = set()

    def patch(self) -> None:
        """Patch the loop of each package of Lightning, once; warn if this version of it cannot be patched."""
        for name in _MODULES:
            module = sys.modules.get(name)
            if module is None or name in self._done:
                continue
            self._done.add(name)
            loop: Any = getattr(module, "_FitLoop", None)
            if not (hasattr(loop, _SAVE) and hasattr(loop, _LOAD)):
                warn_once(
                    f"shmloader.install() cannot patch this version of Lightning: {name}._FitLoop lacks {_SAVE} or "
                    f"{_LOAD}. If training is resumed from an epoch's last batch, the next epoch has no batches."
                )
                continue
            self._patches.replace(loop, _SAVE, _save_of(loop))
            self._patches.replace(loop, _LOAD, _load_of(loop))


def _save_of(loop_class: Any) -> Any:
    save = getattr(loop_class, _SAVE)

    @functools.wraps(save)
    def on_save_checkpoint(loop: Any) -> Any:
        saved = save(loop)
        states, progress = saved.get("combined_loader", []), loop.epoch_loop.batch_progress
        for place, (loader, state) in enumerate(zip(_with_states(loop), states, strict=True)):
            if _is_ours(state) and isinstance(loader, torch.utils.data.DataLoader):
                if progress.is_last_batch:
                    epoch = loop.epoch_progress.current.started
                    states[place] = loading_of(loader).states.state_after_epoch(loader, epoch)
                warn_of_one_rank(loader, states[place], "Lightning")
        return saved

    return on_save_checkpoint


def _load_of(loop_class: Any) -> Any:
    load = getattr(loop_class, _LOAD)

    @functools.wraps(load)
    def _load_combined_loader_states(loop: Any) -> None:
        states = [state for state in getattr(loop, _STATES, []) if _is_ours(state)] if loop.restarting else []
        if states and not states_are_added() and len(_with_states(loop)) < len(getattr(loop, _STATES)):
            raise ResumeError(
                "the checkpoint has states of loaders of torch's class: it was written under "
                "install(stateful=True), or by a shmloader 0.1.0 whose install() always added states. Call "
                f"shmloader.install(stateful=True). {_WITHOUT}"
            )
        if loop.epoch_loop.batch_progress.is_last_batch and any(
            state["batches"] and not state["finished"] for state in states
        ):
            raise ResumeError(
                "the checkpoint is of an epoch's last batch, and the loader's state in it is not that of the epoch's "
                "end: it was written without install(), or by a shmloader 0.1.0 that did not know of last batches. "
                f"Resume from a checkpoint of another step. {_WITHOUT}"
            )
        load(loop)

    return _load_combined_loader_states


def _with_states(loop: Any) -> list[Any]:
    """The loaders whose states Lightning saves."""
    methods = ("state_dict", "load_state_dict")
    return [one for one in loop._combined_loader.flattened if all(hasattr(one, name) for name in methods)]  # noqa: SLF001


def _is_ours(state: Any) -> bool:
    return "sampler_settings" in state
