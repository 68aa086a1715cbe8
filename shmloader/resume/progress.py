"""The progress of one epoch: how many of its batches the program has had."""

from __future__ import annotations

from typing import Any

import torch

from shmloader.sampling.replay import GeneratorStates, TrackedBatches


class Progress:
    """One epoch, from when an iterator begins it until the next one begins. Main process only.

    The iterator writes to it. The loader keeps it when the iterator dies, at a ``break`` for example.

    Args:
        base_seed: The iterator's base seed.
        iterator_epoch: Epochs of the iterator before this one; seeds of samples depend on both.
        sampler_epoch: The sampler's epoch, if it has one.
        global_before: State of torch's global generator before ``iter()``.

    Attributes:
        place: Index batches, from the epoch's beginning, that are done with: returned, left out for having
            no good sample, or raised from ``next()``. Where batches were returned out of order: a tuple of
            that number and of the positions behind it that are done with, too.
        finished: Whether ``next()`` has raised ``StopIteration``.
        before: States of the generators before the sampler drew the order; None if it has not yet.
        before_next: The same for the next epoch, if that was begun early.
        tracked: The sampler's batches, if their place cannot be told from their number.
        stream: Of an iterable-style dataset: the `StreamProgress`; `place` is then a number.
        global_digest: Digest of torch's global generator where the epoch began in an earlier program, or "".
        constant: All of a state that stays the same in this epoch, once it was asked for.
    """

    def __init__(
        self, base_seed: int, iterator_epoch: int, sampler_epoch: int | None, global_before: torch.Tensor
    ) -> None:
        self.base_seed = base_seed
        self.iterator_epoch = iterator_epoch
        self.sampler_epoch = sampler_epoch
        self.global_before = global_before
        self.place: int | tuple[int, ...] = 0
        self.finished = False
        self.before: GeneratorStates | None = None
        self.before_next: GeneratorStates | None = None
        self.tracked: TrackedBatches | None = None
        self.stream: Any = None
        self.global_digest = ""
        self.constant: dict[str, Any] | None = None

    def take(self, position: int) -> None:
        """Note that the batch at a position is done with, in whatever order."""
        done = {*self.behind, position}
        first = self.taken
        while first in done:
            done.remove(first)
            first += 1
        self.place = (first, *sorted(done)) if done else first

    def finish(self, before_next: GeneratorStates | None = None) -> None:
        """Note that the epoch is over.

        Args:
            before_next: As the attribute.
        """
        self.finished = True
        self.before_next = before_next

    @property
    def taken(self) -> int:
        """Batches that are done with, up to the first that is not."""
        return self.place[0] if isinstance(self.place, tuple) else self.place

    @property
    def behind(self) -> tuple[int, ...]:
        """Positions behind `taken` that are done with, too."""
        return self.place[1:] if isinstance(self.place, tuple) else ()
