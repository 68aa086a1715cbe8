"""The next epoch's index batches, drawn while the last batches of this one are consumed. Main process only.

Whoever looks must not see that they were drawn early (``prefetch_epochs``): the generators that the sampler
draws from are put back after every index batch, and what was drawn is taken only if the next epoch's own
draws would have been the same. That can be told of torch's samplers; others are not asked early.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shmloader import torch_private
from shmloader.diagnostics.callers import level_of_the_program
from shmloader.sampling.array_samplers import index_arrays
from shmloader.sampling.generator_states import GeneratorStates

NOTHING = object()
"""There is no index batch to be had early."""

_MOST_IN_VAIN = 2  # epochs in a row whose early index batches were not taken; then no more are drawn


def prefetch_for(loader: Any, index_sampler: Any, *, in_turns: bool) -> EpochPrefetch | None:
    """What draws early for an iterator; None where ``prefetch_epochs`` is not asked for, or cannot be had.

    Warns where it is asked for and cannot be had: where it cannot be told that index batches drawn early are
    the right ones, or by which worker each is to be made.

    Args:
        loader: The loader.
        index_sampler: What it draws index batches from.
        in_turns: Whether its workers take turns, and batches come in order.
    """
    if not loader.prefetch_epochs:
        return None
    if not in_turns:
        reason = "it needs in_order=True and dispatch='static', so not num_workers='auto' either"
    elif isinstance(loader.dataset, (IterableDataset, *torch_private.DATAPIPES)):
        reason = "an iterable-style dataset has no index batches that could be drawn early"
    else:
        try:
            describe(index_sampler)
        except UnknownSampler as unknown:
            reason = f"what its next epoch depends on is known of torch's own samplers only, and {unknown}"
        else:
            return EpochPrefetch(index_sampler, loader.num_workers)
    warnings.warn(
        f"prefetch_epochs=True has no effect for this loader: {reason}", stacklevel=level_of_the_program()
    )
    return None


class UnknownSampler(Exception):
    """Of this sampler cannot be told what its next epoch depends on."""


class EpochPrefetch:
    """Draws early for one iterator, epoch after epoch.

    Args:
        index_sampler: What the loader draws index batches from.
        num_workers: How many workers take turns.

    Attributes:
        sent: Tasks of the next epoch that were sent.
        turns: Whose turn it is to have one.
    """

    def __init__(self, index_sampler: Any, num_workers: int) -> None:
        self._index_sampler = index_sampler
        self._num_workers = num_workers
        self._next: _Draws | None = None
        self._in_a_row = 0
        self._epochs = _EpochNumbers(index_sampler)
        self.sent = 0
        self.turns: Iterator[int] = itertools.cycle(range(num_workers))

    def begin_epoch(self) -> None:
        """An epoch begins; to be called before it is asked for its first index batch."""
        self._next = None
        self.sent = 0
        self.turns = itertools.cycle(range(self._num_workers))
        self._epochs.note()

    def draw(self) -> Any:
        """The next epoch's next index batch, or ``NOTHING``. This epoch's sampler is exhausted."""
        try:
            if self._next is None:
                if self._in_a_row >= _MOST_IN_VAIN:
                    return NOTHING
                self._next = _Draws(self._index_sampler, self._epochs)
            return self._next.draw()
        except UnknownSampler:
            return NOTHING

    def take(self) -> Iterator[Any] | None:
        """Begin the next epoch with what was drawn early, if it would have drawn the same.

        The generators are then as if it had been drawn now.

        Returns:
            The sampler's iterator, which has given ``sent`` index batches; None if they are to be made anew.
        """
        if self._next is None or self.sent == 0:
            return None
        iterator = None
        with contextlib.suppress(UnknownSampler):
            iterator = self._next.take()
        if iterator is None:
            self._in_a_row += 1
        else:
            self._in_a_row = 0
        return iterator


class _EpochNumbers:
    """What ``set_epoch`` is expected to be called with next: as much more as the last time, or one."""

    def __init__(self, index_sampler: Any) -> None:
        inner = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
        self.sampler: Any = inner if type(inner) is DistributedSampler else None
        self._last: int | None = None
        self._step = 1

    def note(self) -> None:
        """Learn from the number that an epoch begins with."""
        if self.sampler is not None:
            if self._last is not None:
                self._step = self.sampler.epoch - self._last
            self._last = self.sampler.epoch

    @property
    def expected(self) -> int | None:
        """The next epoch's number, where there is a sampler that has one."""
        return None if self._last is None else self._last + self._step


class _Draws:
    """The early draws of one epoch."""

    def __init__(self, index_sampler: Any, epochs: _EpochNumbers) -> None:
        self._index_sampler = index_sampler
        self._distributed = epochs.sampler
        self._epoch = epochs.expected
        self._generators = _generators_of(index_sampler)
        self._before = self._drawn = GeneratorStates(self._generators)
        self._facts = describe(index_sampler, self._epoch)
        self._iterator: Iterator[Any] | None = None
        self._spoiled = False

    def draw(self) -> Any:
        # Once the program has drawn from the same generator, or seeded it, the epoch would draw others.
        if self._spoiled or not self._before.are_those_of_torch_now():
            self._spoiled = True
            return NOTHING
        distributed, epoch = self._distributed, 0
        if distributed is not None:
            epoch, distributed.epoch = distributed.epoch, self._epoch
        try:
            self._drawn.put_back()
            if self._iterator is None:
                self._iterator = index_arrays(self._index_sampler) or iter(self._index_sampler)
            return next(self._iterator, NOTHING)
        except Exception:  # noqa: BLE001 - the epoch itself will raise it
            self._spoiled = True
            return NOTHING
        finally:
            if distributed is not None:
                distributed.epoch = epoch
            self._drawn = GeneratorStates(self._generators)
            self._before.put_back()

    def take(self) -> Iterator[Any] | None:
        if self._spoiled or not self._before.are_those_of_torch_now():
            return None
        if describe(self._index_sampler) != self._facts:
            return None
        self._drawn.put_back()
        return self._iterator


def _generators_of(sampler: Any) -> list[torch.Generator]:
    """The generators that one of torch's samplers draws from."""
    if type(sampler) is BatchSampler:
        return _generators_of(sampler.sampler)
    if type(sampler) not in {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}:
        return []
    return [torch.default_generator if sampler.generator is None else sampler.generator]


def describe(sampler: Any, epoch: int | None = None) -> tuple[Any, ...]:
    """All that the index batches of one of torch's samplers depend on, besides what generators draw.

    Args:
        sampler: The sampler.
        epoch: What ``set_epoch`` is taken to have been called with, or None for what it was.

    Raises:
        UnknownSampler: If it is not exactly one of torch's, or its data cannot be compared.
    """
    kind = type(sampler)
    try:
        if kind is BatchSampler:
            return kind, id(sampler), sampler.batch_size, sampler.drop_last, describe(sampler.sampler, epoch)
        if kind in (list, tuple, range):
            return kind, pickle.dumps(sampler, 5)
        if kind in _READ:
            return kind, id(sampler), id(getattr(sampler, "generator", None)), *_READ[kind](sampler)
        if kind is DistributedSampler:
            facts = {name: value for name, value in vars(sampler).items() if name != "dataset"}
            facts["epoch"] = facts["epoch"] if epoch is None else epoch
            return kind, id(sampler), len(sampler.dataset), sorted(facts.items())
    except UnknownSampler:
        raise
    except Exception as reason:
        raise UnknownSampler(f"a sampler cannot be compared: {reason}") from reason
    raise UnknownSampler(f"{kind.__qualname__} is not one of torch's samplers")


# What of each kind its index batches depend on. Data that can be changed in place is copied.
_READ: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    SequentialSampler: lambda sampler: (len(sampler.data_source),),
    RandomSampler: lambda sampler: (len(sampler.data_source), sampler.num_samples, sampler.replacement),
    SubsetRandomSampler: lambda sampler: (pickle.dumps(sampler.indices, 5),),
    WeightedRandomSampler: lambda sampler: (
        sampler.weights.tolist(),
        sampler.num_samples,
        sampler.replacement,
    ),
}
