"""Samplers of a loader: their inner samplers, their states, and the generators that they draw from."""

from __future__ import annotations

from contextvars import ContextVar
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shmloader.indices.block_sampler import BlockSampler
from shmloader.indices.compact_states import generator_at
from shmloader.indices.mixture_sampler import MixtureSampler
from shmloader.indices.sharded_sampler import ShardedSampler
from shmloader.indices.token_batches import TokenBatchSampler
from shmloader.settings import Settings

_WITHOUT_DRAWS = (SequentialSampler, DistributedSampler, ShardedSampler, BlockSampler)
_TORCHS = (*_WITHOUT_DRAWS, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_MOST_NESTED = 8

GENERATOR_IS_LOADED = ContextVar("GENERATOR_IS_LOADED", default=False)
"""Whether a state of the program's own has set torch's global generator, since this was reset."""

RANKS_SHARE: set[type] = {DistributedSampler}
"""Samplers and datasets that divide an order that all ranks have; `frameworks` adds those of frameworks."""


def attribute_of(one: Any, name: str) -> Any:
    """An attribute that torch's loader does not read; None if it is missing, or reading it raises."""
    try:
        return getattr(one, name, None)
    except Exception:  # noqa: BLE001 - of the program's own property or __getattr__
        return None


def length_of(one: Any) -> int | None:
    """The length of a loader or a dataset; None if it has none, or does not know it yet."""
    try:
        return len(one)
    except Exception:  # noqa: BLE001 - of the program's own __len__
        return None


def with_inner(index_sampler: Any) -> list[Any]:
    """A sampler of index batches, and the inner samplers from which it takes batches or indices."""
    found: list[Any] = []
    while index_sampler is not None and len(found) < _MOST_NESTED:
        found.append(index_sampler)
        inner = attribute_of(index_sampler, "batch_sampler")
        index_sampler = attribute_of(index_sampler, "sampler") if inner is None else inner
    return found


def sampler_of_indices(index_sampler: Any) -> Any:
    """The sampler that torch's `BatchSampler` takes indices from; any other sampler itself."""
    return index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler


def sampler_with_epoch(index_sampler: Any) -> Any:
    """The sampler with ``set_epoch()`` and the epoch as its attribute, or None."""
    for sampler in with_inner(index_sampler):
        epoch = attribute_of(sampler, "epoch")
        if callable(attribute_of(sampler, "set_epoch")) and isinstance(epoch, Integral):
            return sampler
    return None


def epoch_of(index_sampler: Any) -> int | None:
    """The epoch of the sampler with ``set_epoch()``, a plain int also if it was set to NumPy's; or None."""
    sampler = sampler_with_epoch(index_sampler)
    return None if sampler is None else int(sampler.epoch)


def sharded_sampler(index_sampler: Any) -> ShardedSampler | TokenBatchSampler | MixtureSampler | None:
    """The sampler that divides a global order, if a number of batches tells its place in that; or None."""
    inner = sampler_of_indices(index_sampler)
    for kind in (ShardedSampler, TokenBatchSampler, MixtureSampler):
        if isinstance(inner, kind) and type(inner).__iter__ is kind.__iter__:
            return inner
    return None


def mixture_sampler(index_sampler: Any) -> MixtureSampler | None:
    """The sampler whose weights, which the program may change, are also in states between epochs; or None."""
    sharded = sharded_sampler(index_sampler)
    return sharded if isinstance(sharded, MixtureSampler) else None


def has_state(one: Any) -> bool:
    """Whether a sampler or dataset has ``state_dict()`` and ``load_state_dict()``."""
    return all(callable(attribute_of(one, name)) for name in ("state_dict", "load_state_dict"))


def has_place(dataset: Any) -> bool:
    """Whether a dataset or its iterator has a state, and not the weights of a module, which are no place."""
    return has_state(dataset) and getattr(type(dataset), "state_dict", None) is not Module.state_dict


def sampler_with_state(index_sampler: Any) -> Any:
    """The sampler with a ``state_dict()`` of its own, which is read batch by batch; or None."""
    if is_torchs(index_sampler):  # they have none; checked first because it is needed in every epoch
        return None
    return next(filter(has_state, with_inner(index_sampler)), None)


def load_own_state(one: Any, state: Any) -> None:
    """Call the ``load_state_dict()`` of a sampler or stream; notes if it sets the global generator."""
    before = torch.get_rng_state()
    one.load_state_dict(state)
    if not torch.equal(before, torch.get_rng_state()):
        GENERATOR_IS_LOADED.set(True)


def is_torchs(index_sampler: Any) -> bool:
    """Whether a sampler is one of torch's or a `ShardedSampler`, or torch's `BatchSampler` over one."""
    return type(sampler_of_indices(index_sampler)) in _TORCHS


def ranks_share(settings: Settings) -> bool:
    """Whether a loader gives each rank its part of an order that is the same on all ranks."""
    return any(type(one) in RANKS_SHARE for one in (settings.dataset, *with_inner(settings.index_sampler)))


def repeats_its_order(index_sampler: Any) -> bool:
    """Whether an order can be drawn again for certain: all its samplers are torch's, or divide torch's."""
    kinds = {*RANKS_SHARE, *_TORCHS, BatchSampler}
    return all(type(sampler) in kinds for sampler in with_inner(index_sampler))


def draws_one_seed(index_sampler: Any) -> bool:
    """Whether a sampler draws one seed from torch's global generator, and nothing else."""
    inner = sampler_of_indices(index_sampler)
    return type(inner) is RandomSampler and inner.generator is None


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as torch's samplers and iterators do; from torch's global generator without another."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def generator_of(index_sampler: Any) -> torch.Generator | None:
    """The generator that a sampler draws its order from; None if it draws from none, or has its own state."""
    inner = sampler_of_indices(index_sampler)
    if type(inner) in (*_WITHOUT_DRAWS, MixtureSampler) or sampler_with_state(index_sampler) is not None:
        return None
    for sampler in with_inner(inner):
        if isinstance(generator := attribute_of(sampler, "generator"), torch.Generator):
            return generator
    return torch.default_generator


class GeneratorStates(NamedTuple):
    """States of the generators before a sampler draws an order; compact if an earlier program drew it."""

    sampler: torch.Tensor | str | None  # of the generator that the sampler draws from, if any
    loader: torch.Tensor | str | None  # of the loader's generator, if that is another one


def generator_states(index_sampler: Any, generator: torch.Generator | None) -> GeneratorStates:
    """The present states of a sampler's and a loader's generators."""
    drawn_from = generator_of(index_sampler)
    other = None if generator is drawn_from else generator
    return GeneratorStates(*(None if one is None else one.get_state() for one in (drawn_from, other)))


def states_if_drawn(
    index_sampler: Any, generator: torch.Generator | None, before: GeneratorStates
) -> GeneratorStates | None:
    """States for a sampler whose ``__iter__`` has drawn the order; None if it draws with the first batch.

    Called after torch's iterator has begun to iterate over the sampler and drawn a base seed.
    """
    drawn_from, of_seed = generator_of(index_sampler), generator or torch.default_generator
    if drawn_from is None or not isinstance(before.sampler, torch.Tensor):
        return None
    if drawn_from.device.type != "cpu":  # it cannot be drawn from again; torch's samplers draw with the batch
        return None
    undrawn = generator_at(before.sampler)
    if drawn_from is of_seed:
        draw_seed(undrawn)
    if torch.equal(undrawn.get_state(), drawn_from.get_state()):
        return None
    return GeneratorStates(before.sampler, None if generator is None else generator.get_state())
