"""accelerate under ``install()``: the loaders that it builds from others keep their options.

`accelerate.data_loader` builds a loader of torch's class from those attributes of another one that a dict
names. The loader's own options are added to the dict, and the class is replaced, in that module only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.utils.data

from shmloader.distributed import rank_and_ranks
from shmloader.errors import ResumeError, warn_once
from shmloader.frameworks.states import states_are_added, warn_of_one_rank
from shmloader.indices.epoch_prefetch import DRAW_NOTHING
from shmloader.indices.samplers import RANKS_SHARE
from shmloader.loader import DataLoader
from shmloader.loading import loading_of
from shmloader.patches import Patches
from shmloader.resume.compatibility import ADDED_BY_OTHERS
from shmloader.settings import OWN_DEFAULTS, option_in_effect

_MODULE = "accelerate.data_loader"
_ARGUMENTS = "_PYTORCH_DATALOADER_KWARGS"
_UPDATE = "_update_state_dict"
_DISPATCHER, _FETCH = "DataLoaderDispatcher", "_fetch_batches"
_ITERATION = "_iteration"
_IS_OURS = "is_shmloader"
_DRAW_NOTHING = ("BatchSamplerShard", "SkipBatchSampler")
_RANKS_SHARE = ("BatchSamplerShard", "IterableDatasetShard", "SeedableRandomSampler")


def patch_accelerate(patches: Patches) -> None:
    """Patch accelerate's module of loaders, once it is imported; warn if this version cannot be patched."""
    module = sys.modules.get(_MODULE)
    arguments: Any = getattr(module, _ARGUMENTS, None)
    if module is None or _IS_OURS in (arguments or ()):
        return
    adapter, dispatcher = (getattr(module, name, None) for name in ("DataLoaderAdapter", _DISPATCHER))
    known = isinstance(arguments, dict) and getattr(module, "DataLoader", None) is _TORCHS
    if not (known and hasattr(adapter, _UPDATE) and hasattr(dispatcher, _FETCH)):
        warn_once(
            f"shmloader.install() cannot patch this version of accelerate: {_MODULE} lacks {_ARGUMENTS}, "
            f"a DataLoader that is torch's, DataLoaderAdapter.{_UPDATE}, or {_DISPATCHER}.{_FETCH}. Its "
            "loaders load from slots, but with the options of install(), not of the loader that they replace."
        )
        return
    patches.replace(module, _ARGUMENTS, {**arguments, **OWN_DEFAULTS, _IS_OURS: False})
    patches.replace(module, "DataLoader", _build)
    for name, around in _AROUND.items():
        patches.wrap(dispatcher if name == _FETCH else adapter, name, around)
    for kind in (module.DataLoaderShard, dispatcher):
        patches.wrap(kind, "set_epoch", _set_epoch)
    for found, names in ((RANKS_SHARE, _RANKS_SHARE), (DRAW_NOTHING, _DRAW_NOTHING)):
        found.update(vars(module)[name] for name in names if name in vars(module))


_TORCHS = torch.utils.data.DataLoader


def _build(dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a loader of the class that the original had: `DataLoader`, or torch's."""
    if kwargs.pop(_IS_OURS, False):
        kwargs |= {name: option_in_effect(name, kwargs[name]) for name in OWN_DEFAULTS if name in kwargs}
        return DataLoader(dataset, *args, **kwargs)
    return _TORCHS(dataset, *args, **{name: kwargs[name] for name in kwargs.keys() - OWN_DEFAULTS.keys()})


def _init(
    init: Any, adapter: Any, dataset: Any, use_stateful_dataloader: bool = False, **kwargs: Any
) -> None:
    """``__init__`` of accelerate's loaders: ``use_stateful_dataloader`` makes ours, not torchdata's.

    accelerate asks each loader for its state, so a failure matters only if the program wants the state.
    """
    kwargs[_IS_OURS] = use_stateful_dataloader or kwargs.get(_IS_OURS, False)
    try:
        init(adapter, dataset, **kwargs)
    except ResumeError:
        if use_stateful_dataloader:
            raise
    # All ranks write and read one file: only the rank that has the place may.
    adapter.use_stateful_dataloader = use_stateful_dataloader and not _is_idle(adapter)
    if not _is_wanted(adapter):
        vars(adapter).pop("dl_state_dict", None)
        if use_stateful_dataloader:
            adapter.dl_state_dict = {}


def _is_idle(adapter: Any) -> bool:
    """Whether rank 0 reads the batches for this one (``dispatch_batches``)."""
    return hasattr(type(adapter), _FETCH) and rank_and_ranks()[0] > 0


def _set_epoch(set_epoch: Any, adapter: Any, epoch: int) -> None:
    """``set_epoch`` of accelerate's loaders, which tells the dataset in workers too."""
    if hasattr(adapter.dataset, "set_epoch"):
        told = loading_of(adapter.base_dataloader).set_dataset_epoch
        vars(adapter)["dataset"] = SimpleNamespace(set_epoch=told)
    try:
        set_epoch(adapter, epoch)
    finally:
        vars(adapter).pop("dataset", None)


def _is_wanted(adapter: Any) -> bool:
    """Whether the program has asked for states, and this rank has them."""
    return (adapter.use_stateful_dataloader or states_are_added()) and not _is_idle(adapter)


def _update(update: Any, adapter: Any) -> None:
    if _is_wanted(adapter):
        update(adapter)
        # accelerate does not save the number of the epoch.
        adapter.dl_state_dict[_ITERATION] = getattr(adapter, "iteration", 0) + adapter.end_of_dataloader


def _state_dict(state_dict: Any, adapter: Any) -> Any:
    readers = loading_of(adapter.base_dataloader).states.readers
    state = _followed(adapter) if readers.is_followed else state_dict(adapter)
    if adapter.use_stateful_dataloader and not hasattr(type(adapter), _FETCH):
        warn_of_one_rank(adapter.base_dataloader, state, "accelerate")
    return state


def _followed(adapter: Any) -> Any:
    """The state of what came out of a look-ahead of the program, around accelerate's own."""
    state = adapter.base_dataloader.state_dict()
    state["_iterator_finished"] = state["finished"]
    iteration = getattr(adapter, "iteration", 0)
    if not state["finished"]:  # accelerate may be in a later one
        told = [state[name] for name in ("sampler_epoch", "set_epoch") if state[name] is not None]
        iteration = told[0] if told else iteration
    return state | {_ITERATION: iteration}


def _load_state_dict(load: Any, adapter: Any, state: Any) -> None:
    if not _is_idle(adapter):
        load(adapter, state if state.keys() - ADDED_BY_OTHERS else {})
        adapter.iteration = state.get(_ITERATION, getattr(adapter, "iteration", 0))


def _fetch(fetch: Any, adapter: Any, iterator: Any) -> Any:
    """Read the batches that all ranks get next; the state is that before the first, not before the last."""
    adapter._update_state_dict()  # noqa: SLF001
    vars(adapter)[_UPDATE] = lambda: None
    try:
        return fetch(adapter, iterator)
    finally:
        del vars(adapter)[_UPDATE]


_AROUND: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "state_dict": _state_dict,
    "load_state_dict": _load_state_dict,
    _UPDATE: _update,
    _FETCH: _fetch,
}
"""Functions that run around methods of accelerate's loaders, by the names of the methods."""
