"""``prefetch_epochs``: the next epoch's first index batches, drawn while this epoch's last ones are in use.

Main process only. The rule: the sampler is asked for its next epoch as soon as this epoch's last task is
sent. The batches are the same as without it, as long as nothing but the loader uses the sampler's generator:
samplers that draw from torch's global one are refused, and a sampler with ``set_epoch()`` gets the epoch that
the program is expected to set. If the program sets another one, leaves the epoch early, or changes the
dataset, the early batches are discarded and made again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from shmloader import torch_private
from shmloader.errors import ResumeError, warn
from shmloader.indices.array_samplers import index_arrays
from shmloader.indices.samplers import (
    GeneratorStates,
    attribute_of,
    generator_states,
    sampler_with_epoch,
    sampler_with_state,
    with_inner,
)
from shmloader.indices.tracked_batches import copy_state, pass_over_end, state_of, track

NOTHING: Any = object()
"""Stands for a missing index batch."""

_MOST_DISCARDED = 2  # epochs in a row whose early batches were discarded; after them none is begun early
_DRAWS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def next_epoch_for(loader: Any, index_sampler: Any) -> NextEpoch | None:
    """The `NextEpoch` of an iterator; None unless ``prefetch_epochs`` asks for it.

    Warns if the loader cannot begin epochs early.
    """
    if not loader.prefetch_epochs:
        return None
    reason = _why_not(loader, index_sampler)
    if not reason:
        return NextEpoch(index_sampler, loader.generator)
    warn(f"prefetch_epochs=True has no effect for this loader: {reason}", UserWarning)
    return None


def _why_not(loader: Any, index_sampler: Any) -> str:
    if not loader.in_order:
        return "it needs in_order=True"
    if isinstance(loader.dataset, (IterableDataset, *torch_private.DATAPIPES)):
        return "an iterable-style dataset has no index batches"
    has_epoch = sampler_with_epoch(index_sampler) is not None
    for sampler in with_inner(index_sampler):
        if not has_epoch and callable(attribute_of(sampler, "set_epoch")):
            return (
                f"its {type(sampler).__name__} has set_epoch(), and no number `epoch` to foresee the next by"
            )
        if isinstance(sampler, _DRAWS) and sampler.generator is None:
            return (
                f"its {type(sampler).__name__} draws from torch's global generator, from which the program "
                "may draw as well. Pass a generator: generator=torch.Generator().manual_seed(...)"
            )
    return ""


class NextEpoch:
    """Draws early for one iterator, epoch after epoch.

    Attributes:
        before: States of the generators before the epoch that was begun early; None if none was.
    """

    def __init__(self, index_sampler: Any, generator: torch.Generator | None) -> None:
        self.before: GeneratorStates | None = None
        self._index_sampler = index_sampler
        self._generator = generator
        self._iterator: Iterator[Any] | None = None
        self._discarded = 0  # epochs in a row
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []  # as they were before drawing early
        self._own_state: Any = None  # likewise, of a sampler that has one
        self._epoch: int | None = None  # the number that the sampler was given, and ...
        self._step = 1  # ... how much larger than the one before
        self._expected: int | None = None

    def begin_epoch(self) -> None:
        """Learn how the program counts epochs; called when one begins."""
        self.before = None
        sampler = sampler_with_epoch(self._index_sampler)
        if sampler is not None:
            if self._epoch is not None:
                self._step = sampler.epoch - self._epoch
            self._epoch = sampler.epoch

    def draw(self) -> Any:
        """The next epoch's next index batch, or ``NOTHING``. This epoch's sampler must be exhausted."""
        if self._discarded >= _MOST_DISCARDED:
            return NOTHING
        if self._iterator is not None:
            return next(self._iterator, NOTHING)
        generators = [getattr(sampler, "generator", None) for sampler in with_inner(self._index_sampler)]
        self._states = [(one, one.get_state()) for one in generators if isinstance(one, torch.Generator)]
        if (stateful := sampler_with_state(self._index_sampler)) is not None:
            try:
                self._own_state = state_of(stateful)
            except ResumeError:  # then it could not be set back
                self._discarded = _MOST_DISCARDED
                return NOTHING
        sampler = sampler_with_epoch(self._index_sampler)
        if sampler is None:
            return self._begin()
        epoch = sampler.epoch
        self._expected = epoch + self._step
        sampler.set_epoch(self._expected)
        try:
            if all(torch.equal(one.get_state(), state) for one, state in self._states):
                return self._begin()
        finally:
            sampler.set_epoch(epoch)
        # It seeds a generator, from which an epoch that has begun goes on drawing.
        self._discarded = _MOST_DISCARDED
        for generator, state in self._states:
            generator.set_state(state)
        return NOTHING

    def _begin(self) -> Any:
        self.before = generator_states(self._index_sampler, self._generator)
        batches = index_arrays(self._index_sampler) or iter(self._index_sampler)
        self._iterator = track(self._index_sampler, batches)
        return next(self._iterator, NOTHING)  # with it, torch's samplers have drawn their order

    def take(self, *, discard: bool) -> Iterator[Any] | None:
        """The iterator over the next epoch's further index batches; None if none can be used."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return None
        sampler = sampler_with_epoch(self._index_sampler)
        if discard or (sampler is not None and sampler.epoch != self._expected):
            self._discarded += 1
            self._set_back()
            return None
        self._discarded = 0
        return iterator

    def _set_back(self) -> None:
        """Set the sampler back to its state before it drew for the next epoch."""
        stateful = sampler_with_state(self._index_sampler)
        if stateful is not None:
            make_state = functools.partial(copy_state, self._own_state)
            stateful.load_state_dict(make_state())
            pass_over_end(self._index_sampler, make_state)
        for generator, state in self._states:
            generator.set_state(state)
