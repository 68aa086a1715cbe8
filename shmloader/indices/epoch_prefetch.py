"""``prefetch_epochs``: the next epoch's first index batches, drawn while this epoch's last ones are in use.

Main process only. The batches are the same as without it if the order depends on nothing but a generator that
the loader alone uses, or on the epoch that ``set_epoch()`` sets: other samplers are refused. If the program
sets another epoch than expected, leaves the epoch early, or changes the dataset, the early batches are
discarded and made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from shmloader.errors import warn
from shmloader.indices import samplers
from shmloader.indices.array_samplers import index_arrays
from shmloader.indices.tracked_batches import track
from shmloader.settings import Settings

NOTHING: Any = object()
"""Stands for a missing index batch."""

_MOST_DISCARDED = 2  # epochs in a row whose early batches were discarded; after them none is begun early
DRAW_NOTHING: set[type] = {BatchSampler, SequentialSampler, list, tuple, range}
"""Samplers whose order is always the same, or that of their inner ones. The integrations add frameworks'."""


def next_epoch_for(settings: Settings) -> NextEpoch | None:
    """The `NextEpoch` of an iterator; None, with a warning, if it cannot begin epochs early."""
    reason = _why_not(settings)
    if not reason:
        return NextEpoch(settings.index_sampler, settings.generator)
    warn(f"prefetch_epochs=True has no effect for this loader: {reason}", UserWarning)
    return None


def _why_not(settings: Settings) -> str:
    if not settings.in_order:
        return "it needs in_order=True"
    if settings.is_iterable:
        return "an iterable-style dataset has no index batches"
    has_epoch = samplers.sampler_with_epoch(settings.index_sampler) is not None
    for sampler in samplers.with_inner(settings.index_sampler):
        name, kind = f"its {type(sampler).__name__}", type(sampler)
        has_generator = isinstance(samplers.attribute_of(sampler, "generator"), torch.Generator)
        if samplers.has_state(sampler):
            return f"{name} has a state_dict(), which may not be set back. Give it set_epoch() instead"
        if has_epoch and has_generator:
            return f"{name} has a generator, which set_epoch() may seed. Make one from the epoch in __iter__"
        if not has_epoch and callable(samplers.attribute_of(sampler, "set_epoch")):
            return f"{name} has set_epoch(), and no number `epoch` to foresee the next by"
        if not (has_epoch or has_generator or kind in DRAW_NOTHING):
            return (
                f"{name} draws from torch's global generator, from which the program may draw as well, or "
                "counts its epochs itself. Pass a generator, generator=torch.Generator().manual_seed(...), "
                "or give it set_epoch() and the number as `epoch`"
            )
    return ""


class NextEpoch:
    """Draws early for one iterator, epoch after epoch."""

    def __init__(self, index_sampler: Any, generator: torch.Generator | None) -> None:
        self.before: samplers.GeneratorStates | None = None  # an epoch that was begun early
        self._index_sampler, self._generator = index_sampler, generator
        self._sampler = samplers.sampler_with_epoch(index_sampler)
        self._iterator: Iterator[Any] | None = None
        self._discarded = 0  # epochs in a row
        self._failed = False  # whether the sampler has raised when it drew early in this epoch
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []  # before drawing early
        # The sampler's epoch, how much larger it is than the one before, and the one that was drawn early.
        self._epoch: int | None = None
        self._step, self._expected = 1, -1

    def begin_epoch(self) -> None:
        """Learn how the program counts epochs; called when one begins."""
        self.before, self._failed = None, False
        if self._sampler is not None:
            if self._epoch is not None:
                self._step = self._sampler.epoch - self._epoch
            self._epoch = self._sampler.epoch

    def draw(self) -> Any:
        """The next epoch's next index batch, or ``NOTHING``. This epoch's sampler must be exhausted."""
        if self._discarded >= _MOST_DISCARDED or self._failed:
            return NOTHING
        try:
            return self._begin() if self._iterator is None else next(self._iterator, NOTHING)
        except Exception:  # noqa: BLE001 - the sampler's own, which it raises again when that epoch begins
            self._failed = True
            self._set_back()
            return NOTHING

    def _begin(self) -> Any:
        if self._sampler is None:
            return self._first()
        epoch = self._sampler.epoch
        self._expected = epoch + self._step
        try:
            self._sampler.set_epoch(self._expected)
            return self._first()
        finally:
            self._sampler.set_epoch(epoch)

    def _first(self) -> Any:
        nested = samplers.with_inner(self._index_sampler)
        found = [samplers.attribute_of(sampler, "generator") for sampler in nested]
        self._states = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
        self.before = samplers.generator_states(self._index_sampler, self._generator)
        if samplers.generator_of(self._index_sampler) is torch.default_generator:
            # The order does not depend on it, and the program draws from it until the epoch begins.
            self.before = self.before._replace(sampler=None)
        batches = index_arrays(self._index_sampler) or iter(self._index_sampler)
        self._iterator = track(self._index_sampler, batches)
        return next(self._iterator, NOTHING)  # with it, torch's samplers have drawn their order

    def take(self, *, discard: bool) -> Iterator[Any] | None:
        """The iterator over the next epoch's further index batches; None if none can be used."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return None
        if discard or (self._sampler is not None and self._sampler.epoch != self._expected):
            self._discarded += 1
            self._set_back()
            return None
        self._discarded = 0
        return iterator

    def _set_back(self) -> None:
        """Forget what was drawn early: the generators are as before."""
        self._iterator = self.before = None
        for generator, state in self._states:
            generator.set_state(state)
