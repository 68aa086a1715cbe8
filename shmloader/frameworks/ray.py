"""Ray Train under ``install()``: ``prepare_data_loader`` keeps the loader's class and options.

Ray builds a loader of torch's class from eleven arguments, and a wrapper around it that reads one batch
ahead. The class is replaced in Ray's modules only, and states follow what comes out of the wrapper.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

import torch.utils.data

from shmloader.errors import warn_once
from shmloader.loader import DataLoader
from shmloader.loading import loading_of
from shmloader.patches import Patches
from shmloader.resume.readers import Reading
from shmloader.settings import OWN_DEFAULTS, Settings

_WRAPPERS = "ray.train.torch.train_loop_utils"
_MODULES = (_WRAPPERS, "ray.train.v2.torch.train_loop_utils")
_WRAPPER, _INSIDE, _PREPARE = "_WrappedDataLoader", "_dataloader", "prepare_data_loader"
_READING = "_shmloader_reading"
_TORCHS = torch.utils.data.DataLoader
_LOST = ("in_order", "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory_device")
"""Options of torch's loader that Ray does not pass on."""
_OF_INSIDE = ("state_dict", "load_state_dict", "follow", "set_epoch", "statistics", "close")

_original: ContextVar[Any] = ContextVar("_original", default=None)
"""The loader that Ray prepares now."""


def patch_ray(patches: Patches) -> None:
    """Patch Ray Train's modules, once they are imported; warn if this version cannot be patched."""
    found = [sys.modules[name] for name in _MODULES if name in sys.modules]
    if not found or getattr(found[0], "DataLoader", None) is _build:
        return
    wrapper: Any = getattr(sys.modules.get(_WRAPPERS), _WRAPPER, None)
    known = all(hasattr(one, _PREPARE) and getattr(one, "DataLoader", None) is _TORCHS for one in found)
    if not (known and hasattr(wrapper, "_prefetch_next_batch")):
        warn_once(
            f"shmloader.install() cannot patch this version of Ray: {' or '.join(_MODULES)} lacks "
            f"{_PREPARE}, a DataLoader that is torch's, or {_WRAPPER} that reads one batch ahead. Loaders "
            "load from slots, without the options of the loader that they replace, and states are one batch "
            "ahead."
        )
        return
    for module in (*found, sys.modules["ray.train.torch"]):
        patches.wrap(module, _PREPARE, _prepare)
    for module in found:
        patches.replace(module, "DataLoader", _build)
    patches.wrap(wrapper, "__iter__", _iter)
    patches.wrap(wrapper, "__next__", _next)
    for name in _OF_INSIDE:
        patches.replace(wrapper, name, _of_inside(name))


def _of_inside(name: str) -> property:
    """A method of the loader inside Ray's wrapper, as the wrapper's own."""
    return property(lambda wrapper: getattr(vars(wrapper)[_INSIDE], name))


def _prepare(prepare: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
    before = _original.set(data_loader)
    try:
        return prepare(data_loader, *args, **kwargs)
    finally:
        _original.reset(before)


def _build(dataset: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a loader with the class and the options of the one that Ray prepares; torch's as Ray does."""
    original = _original.get()
    if not isinstance(original, DataLoader):
        return _TORCHS(dataset, *args, **kwargs)
    if original.batch_size is None and original.batch_sampler is not None:
        raise ValueError(
            f"Ray leaves out the batch_sampler ({type(original.batch_sampler).__qualname__}) of a loader "
            "that it divides among ranks. Let the batch sampler divide its batches itself, and call "
            "prepare_data_loader(loader, add_dist_sampler=False)"
        )
    options = {name: getattr(original, name) for name in OWN_DEFAULTS}
    options |= {name: getattr(original, name) for name in _LOST}
    return DataLoader(dataset, *args, device=Settings.of(original).device, **(options | kwargs))


def _iter(iterate: Any, wrapper: Any) -> Any:
    reading = Reading(loading_of(vars(wrapper)[_INSIDE]).states.readers, wrapper, lambda: None)
    vars(wrapper)[_READING] = reading
    result = iterate(wrapper)
    reading.find_epoch()
    return result


def _next(following: Any, wrapper: Any) -> Any:
    reading: Reading | None = vars(wrapper).get(_READING)  # None if it has begun before install()
    return following(wrapper) if reading is None else reading.next(lambda: following(wrapper))
