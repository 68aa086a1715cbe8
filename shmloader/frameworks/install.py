"""``install()``: all loaders of torch's class load through slots, whoever made them. Main process only.

The class itself stays, so that ``isinstance`` still works. Its method that makes an iterator is replaced; all
subclasses inherit that, including those that were imported before.
"""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch.utils.data

from shmloader.errors import warn, warn_once
from shmloader.framework_rebuilds import PreparedFlag
from shmloader.frameworks.accelerate import patch_accelerate
from shmloader.frameworks.lightning import forget_states, patch_lightning
from shmloader.frameworks.ray import patch_ray
from shmloader.frameworks.states import state_dict, states_are_added
from shmloader.loader import DataLoader
from shmloader.loading import loading_of
from shmloader.memory import why_unavailable
from shmloader.patches import Patches
from shmloader.settings import OWN_DEFAULTS, check_arguments, dispatch_of, threads_of
from shmloader.store_hooks import hooks
from shmloader.torch_private import GET_ITERATOR, WHY_NOT_INSTALLED, never_compiled, unavailable

_TORCHS = torch.utils.data.DataLoader


def install(*, stateful: bool = False, **options: Any) -> contextlib.ExitStack:
    """Let every ``torch.utils.data.DataLoader`` of this process load through slots.

    It holds for the program's own loaders, for those that frameworks make and for all subclasses, also if
    they were imported or made before. Batches are the same. Each such loader gets ``statistics()`` and
    ``close()``. `shmloader.set_epoch`, and the calls of accelerate and Lightning when an epoch begins, reach
    their persistent workers. Existing iterators continue unchanged.

    Two kinds of loader stay as they are: those whose iterator is not torch's (torchdata's), and, with one
    warning, those whose workers are threads that pose as processes (MONAI's ``use_thread_workers``).

    Call it at the top of the program, or as ``with shmloader.install():``. A second call replaces the
    options.

    Args:
        stateful: Whether each such loader gets ``state_dict()`` and ``load_state_dict()`` too. Frameworks
            save the state of every loader that has them, and such a checkpoint is read under
            ``install(stateful=True)`` only.
        **options: Defaults for `DataLoader`'s own options: ``memory_budget_nbytes``, ``worker_restarts``,
            ``worker_max_nbytes``, ``on_error``, ``dispatch``, ``seed_per_sample``, ``prefetch_epochs``,
            ``worker_type``, ``snapshot_every_n_steps``, ``place_results``, ``share_dataset`` (when the loader
            first starts workers). A `DataLoader` keeps the ones that it was made with. A loader that does not
            support one of them (``worker_restarts`` with an iterable-style dataset) loads without it, with
            one warning.

    Returns:
        A context manager that restores the former state at its end; it need not be used.

    Raises:
        TypeError: For an option that does not exist or is of a wrong type.
        ValueError: For a wrong value, for two options that exclude each other, and for ``shard``, which
            belongs to one loader.
    """
    _check_defaults(options)
    global _options  # noqa: PLW0603 - there is one torch
    before = None if _options is None else {"stateful": states_are_added(), **_options}
    restore = contextlib.ExitStack()
    restore.callback(uninstall if before is None else functools.partial(install, **before))
    if WHY_NOT_INSTALLED:
        text = unavailable("shmloader.install()", WHY_NOT_INSTALLED)
        warn_once(f"{text} Loaders of torch's class load torch's way; shmloader.DataLoader is not affected.")
        return restore
    if before is None:
        _patch()
    _options = options
    _states.undo()
    forget_states()
    if stateful:
        _states.replace(_TORCHS, "load_state_dict", DataLoader.load_state_dict)
        _states.replace(_TORCHS, "state_dict", state_dict)
        _states.replace(_TORCHS, "follow", DataLoader.follow)
    _warned.clear()
    patch_accelerate(_patches)
    _patch_imported()
    return restore


_OF_ONE_LOADER = ("shard", "shared_by")  # options that change which batches a loader gives


def _check_defaults(options: dict[str, Any]) -> None:
    unknown = options.keys() - OWN_DEFAULTS.keys()
    if unknown:
        known = ", ".join(name for name in OWN_DEFAULTS if name not in _OF_ONE_LOADER)
        raise TypeError(f"install() has no option {', '.join(sorted(unknown))}: it has {known}")
    for name in _OF_ONE_LOADER:
        if options.get(name) is not None:
            raise ValueError(
                f"install({name}={options[name]!r}) is not possible: batches would be others than torch's. "
                f"Make the loader with shmloader.DataLoader({name}=...)"
            )
    _check(options, torch.utils.data.Dataset(), 1, True, None)


def _patch_imported() -> None:
    """Patch frameworks that may have been imported since; accelerate reads an attribute that tells."""
    patch_lightning(_patches)
    patch_ray(_patches)


def uninstall() -> None:
    """Undo `install`: loaders of torch's class load torch's way from their next iterator on.

    Existing iterators continue, and persistent workers stay with their loader. Without an `install` before,
    it does nothing.
    """
    global _options  # noqa: PLW0603
    _options = None
    _states.undo()
    forget_states()
    _patches.undo()


_options: dict[str, Any] | None = None
_warned: set[str] = set()
_patches, _states = Patches(), Patches()


def _patch() -> None:
    torchs_iter, torchs_get_iterator = _TORCHS.__iter__, getattr(_TORCHS, GET_ITERATOR)
    torchs_check = _TORCHS.check_worker_number_rationality

    @never_compiled
    def __iter__(loader: Any) -> Any:  # noqa: N807
        if _options is not None:
            _patch_imported()
            if not isinstance(loader, DataLoader):
                return loading_of(loader).iterate(functools.partial(torchs_iter, loader))
        return torchs_iter(loader)

    @never_compiled
    def get_iterator(loader: Any) -> Any:
        iterator = None
        if _options is not None and not isinstance(loader, DataLoader) and not _has_threads(loader):
            _warn_of_options(loader)
            _share_dataset(loader)
            iterator = loading_of(loader).make_iterator()
        return torchs_get_iterator(loader) if iterator is None else iterator

    def check_worker_number_rationality(loader: Any) -> None:
        _patch_imported()  # when a loader is made
        torchs_check(loader)

    for name in OWN_DEFAULTS:
        _patches.replace(_TORCHS, name, _Default(name))
    _patches.replace(_TORCHS, torchs_check.__name__, check_worker_number_rationality)
    _patches.replace(_TORCHS, "__iter__", __iter__)
    _patches.replace(_TORCHS, GET_ITERATOR, get_iterator)
    for name in ("statistics", "profile", "close"):
        _patches.replace(_TORCHS, name, vars(DataLoader)[name])
    flag = PreparedFlag(lambda _: patch_accelerate(_patches))  # which may have been imported meanwhile
    for kind in (_TORCHS, DataLoader):
        _patches.replace(kind, "_is_accelerate_prepared", flag)


class _Default:
    """An option as an attribute of loaders of torch's class; those of `DataLoader` are its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        """The value as installed, or the default for a loader that does not support it."""
        default = OWN_DEFAULTS[self._name]
        if loader is None:
            return default
        value = (_options or {}).get(self._name)
        if self._name == "dispatch":
            value = dispatch_of(value, loader.num_workers)
        return default if value is None or _why_not(self._name, value, loader) else value


def _why_not(name: str, value: Any, loader: Any) -> str | None:
    """The reason why a loader cannot have the value of an option; None if it can."""
    if value == OWN_DEFAULTS[name]:
        return None
    count, persistent, context = loader.num_workers, loader.persistent_workers, loader.multiprocessing_context
    try:
        _check({name: value}, loader.dataset, count, persistent, context)
    except ValueError as error:
        return str(error)
    return None


def _check(options: dict[str, Any], dataset: Any, num_workers: int, persistent: bool, context: Any) -> None:
    given = SimpleNamespace(**{**OWN_DEFAULTS, **options})
    given.dispatch = dispatch_of(given.dispatch, 1)
    check_arguments(given, dataset, num_workers, persistent, context)


def _warn_of_options(loader: Any) -> None:
    """Warn once for each option that it has no effect on a loader that does not support it."""
    for name, value in (_options or {}).items():
        reason = None if name in _warned or not loader.num_workers else _why_not(name, value, loader)
        if reason is not None:
            _warned.add(name)
            dataset = type(loader.dataset).__qualname__
            warn(f"install({name}={value!r}) has no effect on a loader of {dataset}: {reason}.")


def _share_dataset(loader: Any) -> None:
    """Share the dataset of a loader in place, before its first workers start."""
    asked = loader.share_dataset and loader.num_workers and why_unavailable() is None
    if asked and loading_of(loader).begin_to_share():
        vars(loader)["dataset"] = hooks.share_dataset(loader.dataset)  # torch refuses to have it set


def _has_threads(loader: Any) -> bool:
    """Whether the workers of a loader are threads that pose as processes; the first of its class warns."""
    kind = threads_of(loader.multiprocessing_context)
    if kind is not None:
        warn_once(
            f"shmloader.install() leaves {type(loader).__qualname__} to torch: its workers are threads that "
            f"pose as processes ({kind.__qualname__}), which cannot write to slots."
        )
    return kind is not None
