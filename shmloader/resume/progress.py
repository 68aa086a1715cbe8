"""The progress of one epoch: how many of its batches the program has had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shmloader.indices.samplers import GeneratorStates
from shmloader.indices.tracked_batches import TrackedBatches


@dataclass(eq=False)
class Progress:
    """One epoch, from when an iterator begins it until the next one begins. Main process only.

    The iterator tells it what happens. The loader keeps it when the iterator dies, at a ``break`` say.

    Attributes:
        base_seed: The iterator's base seed.
        iterator_epoch: Epochs of the iterator before this one; seeds of samples depend on both.
        sampler_epoch: The sampler's epoch, if it has one.
        global_before: State of torch's global generator before ``iter()``; its digest if an earlier program
            called that.
        before: States of the generators before the sampler drew the order, maybe in an earlier program; None
            if it has not yet.
        done: Index batches that are done: returned, left out for having no good sample, or raised from
            ``next()``. Out of order, a tuple of that number and of the done positions after it.
        set_epoch: The argument of the last ``loader.set_epoch()`` before it began, or None.
        in_order: Whether no batch has come out of order in an earlier program.
        stream: For an iterable-style dataset the `StreamProgress`; `done` is then a number.
        tracked: The sampler's batches, if it is not torch's.
        finished: Whether ``next()`` has raised ``StopIteration``.
        before_next: Like `before`, for the next epoch, if that was begun early.
    """

    base_seed: int
    iterator_epoch: int
    sampler_epoch: int | None
    global_before: torch.Tensor | str
    before: GeneratorStates | None
    done: int | tuple[int, ...] = 0
    set_epoch: int | None = None
    in_order: bool = True
    stream: Any = None
    tracked: TrackedBatches | None = None
    finished: bool = False
    before_next: GeneratorStates | None = None
    _kept: int | tuple[int, ...] = 0  # what `take_back` goes back to

    def take(self, position: int) -> None:
        """Note that the batch at a position is done; the order does not matter."""
        self.finished = False  # it was True if a sample raised StopIteration
        if self.done == position:  # so none is done after it
            self.done = position + 1
            return
        if isinstance(self.done, tuple) and self.done[0] == position and self.done[1] > position + 1:
            self.done = (position + 1, *self.done[1:])  # many may follow that are left out
            return
        done = {*self.behind, position}
        first = self.taken
        while first in done:
            done.remove(first)
            first += 1
        self.done = (first, *sorted(done)) if done else first

    def end(self, before_next: GeneratorStates | None = None) -> None:
        """Note that ``next()`` raises ``StopIteration``."""
        self.before_next, self.finished = before_next, True

    def begin_order(self, before: GeneratorStates) -> None:
        """Note the states of the generators before the sampler draws its order, with the first batch."""
        self.before = before

    def track(self, batches: TrackedBatches) -> None:
        """Keep the batches of a sampler that is not torch's."""
        self.tracked = batches

    def keep(self) -> None:
        """Let an interrupt come back to here: a call of ``next()`` begins, or has left out a batch."""
        self._kept = self.done

    def take_back(self) -> None:
        """Go back to before the batch of a call that was interrupted, which the program has not had."""
        self.done = self._kept

    @property
    def taken(self) -> int:
        """The number of batches that are done, up to the first that is not."""
        return self.done[0] if isinstance(self.done, tuple) else self.done

    @property
    def behind(self) -> tuple[int, ...]:
        """Positions after `taken` that are also done."""
        return self.done[1:] if isinstance(self.done, tuple) else ()
