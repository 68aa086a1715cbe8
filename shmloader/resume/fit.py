"""Whether a state fits a loader: the keys that tell what wrote it, and the error where they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from shmloader.errors import ResumeError
from shmloader.sampling.replay import index_sampler_of, is_torchs, sampler_by_count, with_inner

VERSION = 1
"""Of the state's format."""

ADDED_BY_OTHERS = {"_iterator_finished"}
"""Keys that frameworks add to a state (accelerate); they are ignored."""

_SETTINGS = (
    "seed",
    "initial_seed",
    "shuffle",
    "replacement",
    "drop_last",
    "num_replicas",
    "rank",
)
_OF_THE_RUN = {"batch_size", "sampler's num_replicas", "sampler's rank", "sampler's samples"}
"""Keys that may differ where the sampler counts samples of all ranks."""
_OF_THE_PLACE = {"dataset_len", "batch_size", "drop_last", "sampler's samples"}
"""Keys that matter in mid-epoch only."""
_KINDS = {False: "a map-style", True: "an iterable-style"}


def described(loader: Any) -> dict[str, Any]:
    """The keys of a state that tell which loader wrote it."""
    samplers = with_inner(index_sampler_of(loader))
    batch_size = loader.batch_size
    if batch_size is None and isinstance(loader.batch_sampler, BatchSampler):
        batch_size = getattr(loader.batch_sampler, "batch_size", None)  # accelerate's subclasses have none
    return {
        "version": VERSION,
        "kind": "iterable" if isinstance(loader.dataset, IterableDataset) else "map",
        "dataset_len": _len(loader.dataset),
        "batch_size": batch_size,
        "drop_last": bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last)),
        "sampler": " of ".join(type(sampler).__name__ for sampler in samplers),
        "sampler_settings": json.dumps(_settings(samplers)),
    }


def _settings(samplers: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sampler in samplers:
        if type(sampler) is BatchSampler:
            continue
        attributes = getattr(sampler, "__dict__", {})
        for name in _SETTINGS:
            if type(value := attributes.get(name)) in (int, bool, str):
                found.setdefault(name, value)
        if is_torchs(sampler):
            found["samples"] = len(sampler)
    return found


def _len(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _with_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(state["sampler_settings"])
    flat = {name: value for name, value in state.items() if name != "sampler_settings"}
    return flat | {f"sampler's {name}": value for name, value in settings.items()}


def check_fit(state: Mapping[str, Any], loader: Any, keys: AbstractSet[str]) -> None:
    """Check that a state is one, and fits a loader.

    Args:
        state: What `DataLoader.load_state_dict` was given.
        loader: The loader.
        keys: The keys of a state.

    Raises:
        ResumeError: With the differences, and what may differ.
    """
    if state.get("version", VERSION) != VERSION:
        raise ResumeError(
            f"the state has format {state['version']!r}, and this version of shmloader reads {VERSION} only"
        )
    missing, unknown = keys - state.keys(), state.keys() - keys - ADDED_BY_OTHERS
    if missing or unknown:
        raise ResumeError(
            f"this is no state of a shmloader.DataLoader with {_KINDS['stream' in keys]} dataset: it lacks "
            f"{sorted(missing)}, and has {sorted(map(str, unknown))}. Pass what state_dict() returned."
        )
    index_sampler = index_sampler_of(loader)
    may_differ = set(_OF_THE_RUN) if sampler_by_count(index_sampler) is not None else set()
    if "stream" in keys:
        may_differ |= {"batch_size"}
    if state["finished"] or state["base_seed"] is None:
        may_differ |= _OF_THE_PLACE
    here, then = _with_settings(described(loader)), _with_settings(state)
    differences = [
        f"{name} is {then.get(name)!r} in the state and {here.get(name)!r} in this loader"
        for name in dict.fromkeys([*here, *(name for name in then if name.startswith("sampler's "))])
        if then.get(name) != here.get(name) and name not in may_differ
    ]
    if differences:
        raise ResumeError(
            f"the state does not fit this loader: {'; '.join(differences)}. Only these may differ: "
            "num_workers, prefetch_factor, dispatch, in_order, worker_type, the start method, how workers "
            "are kept and restarted, memory and pinning."
        )
