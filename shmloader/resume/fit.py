"""The keys of a state, whether a state fits a loader, and the error where it does not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from shmloader.errors import ResumeError
from shmloader.sampling.samplers import (
    index_sampler_of,
    is_torchs,
    sampler_with_state,
    sharded_sampler,
    with_inner,
)

State = dict[str, Any]

VERSION = 2
"""Of the state's format."""

ADDED_BY_OTHERS = {"_iterator_finished"}
"""Keys that frameworks add to a state (accelerate); they are ignored."""

_TEXTS = (
    "kind sampler sampler_settings sampler_generator loader_generator global_generator batches_behind stream"
)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_TEXTS.split(), (str,)),
    **dict.fromkeys("drop_last persistent_workers finished sampler_ended".split(), (bool,)),
    **dict.fromkeys("version iterator_epoch batches".split(), (int,)),
    **dict.fromkeys("dataset_len batch_size base_seed sampler_checksum".split(), (int, type(None))),
    **dict.fromkeys("set_epoch sampler_epoch".split(), (int, type(None))),
    "sampler_state": (str, type(None)),
}
"""The keys of a state, with the types of their values. Numbers are not below 0, but for epochs of others."""

_MOST = 1 << 63
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
_OF_THE_EPOCH = {"dataset_len", "batch_size", "drop_last", "sampler's samples"}
"""Keys that matter in mid-epoch only."""


def described(loader: Any) -> State:
    """The keys of a state that tell which loader wrote it."""
    samplers = with_inner(index_sampler_of(loader))
    batch_size = loader.batch_size
    if batch_size is None and isinstance(loader.batch_sampler, BatchSampler):
        batch_size = getattr(loader.batch_sampler, "batch_size", None)  # accelerate's subclasses have none
    return {
        "version": VERSION,
        "kind": "iterable-style" if isinstance(loader.dataset, IterableDataset) else "map-style",
        "dataset_len": _len(loader.dataset),
        "batch_size": None if batch_size is None else int(batch_size),
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


def is_between_epochs(state: Mapping[str, Any]) -> bool:
    """Whether a state was taken before the first epoch, or after one."""
    return bool(state["finished"]) or state["base_seed"] is None


@contextlib.contextmanager
def named_in_errors(state: Mapping[str, Any], name: str) -> Iterator[None]:
    """Raise what the value of a key has led to as a `ResumeError` that names the key."""
    try:
        yield
    except ResumeError:
        raise
    except Exception as error:
        raise ResumeError(
            f"the state is damaged, or was changed by hand: {name!r} is {state[name]!r:.100} "
            f"({type(error).__name__}: {error!s:.300})"
        ) from error


def behind(state: Mapping[str, Any]) -> tuple[int, ...]:
    """The batches that were returned out of order, behind the first one that is missing."""
    with named_in_errors(state, "batches_behind"):
        positions = tuple(map(int, filter(None, state["batches_behind"].split(","))))
        if positions and min(positions) <= state["batches"]:
            raise ValueError(f"they are not behind batch {state['batches']:,}")
        return positions


def check_fit(state: Mapping[str, Any], loader: Any) -> None:
    """Check that a state is one, and fits a loader.

    Args:
        state: What `DataLoader.load_state_dict` was given.
        loader: The loader.

    Raises:
        ResumeError: With what is wrong, or with the differences, and what may differ.
    """
    _check_keys(state)
    behind(state)
    index_sampler = index_sampler_of(loader)
    sharded, between_epochs = sharded_sampler(index_sampler), is_between_epochs(state)
    may_differ = set(_OF_THE_RUN) if sharded is not None else set()
    if isinstance(loader.dataset, IterableDataset):
        may_differ |= {"batch_size"}
    if between_epochs:
        may_differ |= _OF_THE_EPOCH
    here, then = _with_settings(described(loader)), _with_settings(state)
    differences = [
        f"{name} is {then.get(name)!r} in the state and {here.get(name)!r} in this loader"
        for name in dict.fromkeys([*here, *(name for name in then if name.startswith("sampler's "))])
        if then.get(name) != here.get(name) and name not in may_differ
    ]
    has_state = sampler_with_state(index_sampler) is not None or not (sharded is None or between_epochs)
    if has_state != (state["sampler_state"] is not None) and not differences:
        has, text = "a" if has_state else "no", state["sampler_state"]
        differences = [f"sampler_state is {text!r:.50} in the state, and the sampler has {has} state_dict()"]
    if state["loader_generator"] and loader.generator is None:
        differences.append("loader_generator is there in the state, and this loader has no generator")
    if differences:
        raise ResumeError(
            f"the state does not fit this loader: {'; '.join(differences)}. Only these may differ: "
            "num_workers, prefetch_factor, dispatch, in_order, worker_type, the start method, how workers "
            "are kept and restarted, memory and pinning."
        )


def _check_keys(state: Mapping[str, Any]) -> None:
    if state.get("version", VERSION) != VERSION:
        raise ResumeError(
            f"the state's format is of version {state['version']!r}, and this shmloader reads {VERSION} only"
        )
    missing, unknown = _TYPES.keys() - state.keys(), state.keys() - _TYPES.keys() - ADDED_BY_OTHERS
    if missing or unknown:
        raise ResumeError(
            f"this is no state of a shmloader.DataLoader: it lacks {sorted(missing)}, and has "
            f"{sorted(map(str, unknown))}. Pass what state_dict() returned."
        )
    for name, types in _TYPES.items():
        with named_in_errors(state, name):
            value = state[name]
            if type(value) not in types:
                raise TypeError(f"it is no {' or '.join(sorted(one.__name__ for one in types))}")
            lowest = -_MOST if name.endswith("_epoch") else 0
            if type(value) is int and not lowest <= value < _MOST:
                raise ValueError("it is out of range")
    with named_in_errors(state, "base_seed"):
        if state["base_seed"] is None and (state["batches"] or state["finished"]):
            raise ValueError("there is one when an epoch has begun")


def _with_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    with named_in_errors(state, "sampler_settings"):
        settings: dict[str, Any] = json.loads(state["sampler_settings"])
        flat = {name: value for name, value in state.items() if name != "sampler_settings"}
        return flat | {f"sampler's {name}": value for name, value in settings.items()}
