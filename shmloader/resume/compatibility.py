"""Whether a state fits a loader: what describes the loader in it, its checksum, and the error."""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.data import BatchSampler

from shmloader.distributed import rank_and_ranks
from shmloader.errors import ResumeError
from shmloader.indices import samplers
from shmloader.resume.user_states import unpack_user_state
from shmloader.settings import Settings
from shmloader.wire.stream_records import STRIDE

State = dict[str, Any]
"""A state of a loader. docs/resume-exact.md explains its keys."""

VERSION = 7
"""The version of the state's format."""

ADDED_BY_OTHERS = {"_iterator_finished", "_iteration"}
"""Keys that accelerate and its integration add to a state; they are ignored."""

AT_THE_BEGINNING: State = {
    "global_generator": "",
    "batches": 0,
    "batches_behind": "",
    "finished": False,
    "sampler_checksum": None,
    "sampler_state": None,
    "sampler_batches": 0,
    "stream": "",
}
"""The keys for the progress of an epoch, with their values before its first batch."""

OF_EPOCH_BEFORE = -1
"""In place of the number of batches before a sampler's own state, if that is of the epoch before."""

ONE_RANK = (
    "it holds for the rank that wrote it only: save and load a state on each rank, or take a "
    "DistributedSampler, a ShardedSampler or, for a stream, shard='auto', whose states hold for all ranks"
)

_OF_ACCELERATE = ("num_processes", "split_batches")
_OF_TORCH = ("seed", "initial_seed", "shuffle", "replacement", "drop_last", "num_replicas", "rank")
_OF_TOKEN_BATCHES = ("max_tokens", "layout", "max_samples")
_OF_MIXTURES = ("mixture", "stopping_strategy", "epoch_size", "run_length")
_SETTINGS = (*_OF_TORCH, *_OF_ACCELERATE, *_OF_TOKEN_BATCHES, *_OF_MIXTURES)
_OF_THE_RUN = {"batch_size", "sampler's num_replicas", "sampler's rank", "sampler's samples"}
"""Keys that may differ if the sampler counts samples of all ranks."""
_OF_THE_EPOCH = {"dataset_len", "batch_size", "drop_last", "sampler's samples"}
"""Keys that matter in mid-epoch only."""


def checksum_of(state: Mapping[str, Any]) -> int:
    """A checksum over all of a state but ``batches``: see `with_batches`."""
    counted = {"checksum", "batches", *ADDED_BY_OTHERS}
    others = {name: value for name, value in state.items() if name not in counted}
    return zlib.crc32(json.dumps(others, sort_keys=True).encode())


def with_batches(checksum: int, batches: int) -> int:
    """The checksum of a whole state: only this part is needed where nothing else has changed."""
    return zlib.crc32(str(batches).encode(), checksum)


def signed(state: State) -> State:
    """A state with its checksum, which tells damage and changes by hand."""
    return state | {"checksum": with_batches(checksum_of(state), state["batches"])}


def described(settings: Settings) -> State:
    """The keys of a state that describe the loader that wrote it."""
    index_sampler = settings.index_sampler
    nested = samplers.with_inner(index_sampler)
    batch_size = settings.batch_size
    drop_last = getattr(settings.batch_sampler, "drop_last", settings.drop_last)
    if batch_size is None and isinstance(index_sampler, BatchSampler):  # as batch_sampler= or as sampler=
        batch_size = getattr(index_sampler, "batch_size", None)  # accelerate's subclasses have none
        drop_last = getattr(index_sampler, "drop_last", drop_last)
    return {
        "version": VERSION,
        "kind": "iterable-style" if settings.is_iterable else "map-style",
        "dataset_len": samplers.length_of(settings.dataset),
        "batch_size": None if batch_size is None else int(batch_size),
        "drop_last": bool(drop_last),
        "sampler": " of ".join(type(sampler).__name__ for sampler in nested),
        "sampler_settings": json.dumps(_settings(nested) | _run_of(settings)),
    }


def _settings(nested: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for sampler in reversed(nested):  # the outermost counts
        if type(sampler) is not BatchSampler:
            attributes = getattr(sampler, "__dict__", {})
            found |= {
                name: attributes[name] for name in _SETTINGS if type(attributes.get(name)) in (int, bool, str)
            }
            found |= {"samples": len(sampler)} if samplers.is_torchs(sampler) else {}
    return found


def _run_of(settings: Settings) -> dict[str, str]:
    """The rank that writes a state, as a setting; not of an order that ranks share, nor of a stream."""
    is_common = samplers.ranks_share(settings) and settings.in_order
    with contextlib.suppress(ValueError):  # variables of somebody else
        rank, ranks = rank_and_ranks()
        if ranks > 1 and not is_common and not settings.is_iterable:
            return {"run": f"rank {rank} of {ranks}"}
    return {}


def is_of_one_rank(settings: Settings, state: Mapping[str, Any]) -> bool:
    """Whether a state holds only for the rank that wrote it: other ranks have another order, or may have.

    Of samplers that are neither torch's nor have a state of their own, the checksum tells.
    """
    index_sampler = settings.index_sampler
    own = samplers.sampler_with_state(index_sampler) is not None or (
        samplers.is_torchs(index_sampler) and bool(state["sampler_generator"])
    )
    if state["stream"]:
        own = json.loads(state["stream"])["layout"] != STRIDE
    in_order = state["in_order"] or is_between_epochs(state)
    return not in_order or (own and not samplers.ranks_share(settings))


def is_between_epochs(state: Mapping[str, Any]) -> bool:
    """Whether a state was taken before the first epoch, or after one."""
    return bool(state["finished"]) or state["base_seed"] is None


def behind(state: Mapping[str, Any]) -> tuple[int, ...]:
    """The batches that were returned out of order, or are to be left out, from the first missing one on."""
    runs = [text.split("-") for text in filter(None, state["batches_behind"].split(","))]
    return tuple(position for run in runs for position in range(int(run[0]), int(run[-1]) + 1))


def listed(positions: Iterable[int]) -> str:
    """Batches as a state lists them: ``"7,10-20"``."""
    runs: list[list[int]] = []
    for position in sorted(positions):
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def check_fit(state: Mapping[str, Any], settings: Settings) -> None:
    """Raise a `ResumeError` with the differences, and what may differ, if a state does not fit a loader."""
    check_whole(state)
    index_sampler = settings.index_sampler
    if state["sampler_batches"] == OF_EPOCH_BEFORE:
        raise ResumeError(
            "the state was taken before an epoch's first batch, and the epoch before was left: the sampler "
            f"({state['sampler']}) has a state of its own, and would go on with the one that was left. Take "
            "the state before iter(), or after the first batch"
        )
    sharded = samplers.sharded_sampler(index_sampler)
    of_loader = described(settings)
    here, then = _with_settings(of_loader), _with_settings({name: state[name] for name in of_loader})
    may_differ = _may_differ(state, settings) | ({"sampler's run"} - (here.keys() & then.keys()))
    names = [name for name in here | then if then.get(name) != here.get(name) and name not in may_differ]
    differences = [
        f"{name} is {then.get(name)!r} in the state and {here.get(name)!r} in this loader" for name in names
    ]
    if sharded is not None and not _OF_THE_RUN.isdisjoint(names):
        differences.append("with in_order=False its batches are no prefix of the order that ranks share")
    if not {"sampler's run", "sampler's rank"}.isdisjoint(names):
        differences.append(ONE_RANK)
    has_state = samplers.sampler_with_state(index_sampler) is not None
    has_state |= sharded is not None and not is_between_epochs(state)
    has_state |= samplers.mixture_sampler(index_sampler) is not None
    if has_state != (state["sampler_state"] is not None) and not differences:
        has, text = "a" if has_state else "no", state["sampler_state"]
        differences = [f"sampler_state is {text!r:.50} in the state, and the sampler has {has} state_dict()"]
    if state["loader_generator"] and settings.generator is None:
        differences.append("loader_generator is there in the state, and this loader has no generator")
    if differences:
        raise ResumeError(
            f"the state does not fit this loader: {'; '.join(differences)}. Only these may differ: "
            "num_workers, prefetch_factor, dispatch, in_order, worker_type, the start method, how workers "
            "are kept and restarted, memory and pinning."
        )


def check_whole(state: Mapping[str, Any]) -> None:
    """Refuse what is no state, a state of another version, and a damaged one."""
    if not isinstance(state, Mapping):
        raise ResumeError(f"a state is a dict, not {state!r:.100}. Pass what state_dict() returned, or {{}}.")
    if (version := state.get("version", VERSION)) != VERSION:
        raise ResumeError(
            f"the state's format is of version {version!r}, and this shmloader reads {VERSION} only"
        )
    try:
        found = with_batches(checksum_of(state), state["batches"])
        written = state["checksum"]
    except (KeyError, TypeError) as error:
        raise ResumeError(
            f"this is no state of a shmloader.DataLoader ({error!r}): its keys are {list(state)!r:.500}. "
            "Pass what state_dict() returned."
        ) from error
    if found != written:
        raise ResumeError(
            f"the state is damaged, or was changed by hand: its checksum is {written!r:.50}, and that of its "
            f"contents {found}. Pass what state_dict() returned."
        )


def _may_differ(state: Mapping[str, Any], settings: Settings) -> set[str]:
    """The keys and the sampler's settings that may differ in a state and a loader."""
    names: set[str] = set()
    if state["sampler_state"]:  # a sampler sets the seeds in its own state itself
        own = unpack_user_state(state["sampler_state"])
        seeds = [name for name in ("seed", "initial_seed") if isinstance(own, Mapping) and name in own]
        names |= {f"sampler's {name}" for name in seeds}
    if not is_of_one_rank(settings, state):
        names |= {"sampler's run"}
        names |= {"sampler's rank"} if samplers.ranks_share(settings) else set()
        names |= _OF_THE_RUN if samplers.sharded_sampler(settings.index_sampler) is not None else set()
    if settings.is_iterable:
        names |= {"batch_size"}
    return names | _OF_THE_EPOCH if is_between_epochs(state) else names


def _with_settings(of_loader: State) -> State:
    """A loader's description, with a separate key for each setting of its sampler."""
    settings: State = json.loads(of_loader["sampler_settings"])
    others = {name: value for name, value in of_loader.items() if name != "sampler_settings"}
    return others | {f"sampler's {name}": value for name, value in settings.items()}
