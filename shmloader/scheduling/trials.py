"""What may be chosen with ``"auto"``, and what a choice was measured to do. Arithmetic only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

AUTO = "auto"

_BLOCKS = 5  # a trial's parts; the slowest and the fastest do not count
_SPARE = 1.1  # workers are reckoned with for so much more than the program was seen to take


class AutoCount(int):
    """The number that a loader has chosen, as its attribute.

    An argument of this type means ``"auto"``, beginning with that number: a framework that builds a loader
    from another one's attributes gets one that chooses for itself, too. ``int(...)`` of it is a plain number.
    """


class Choice(NamedTuple):
    """What is chosen.

    Attributes:
        num_workers: Workers.
        prefetch_factor: Batches in advance per worker.
    """

    num_workers: int
    prefetch_factor: int

    @property
    def tasks(self) -> int:
        """Tasks that are on their way at once."""
        return self.num_workers * self.prefetch_factor


class Bounds(NamedTuple):
    """What may be chosen now.

    Attributes:
        num_workers: Most workers.
        tasks: Most tasks on their way at once.
    """

    num_workers: int
    tasks: int


class Sample(NamedTuple):
    """What was measured from one returned batch to the next.

    Attributes:
        own_s: Seconds that the program took, and ``next()`` for it, without waiting.
        wait_s: Seconds that ``next()`` waited for a batch.
        idle_s: Seconds that workers, summed, are known to have waited for a task.
        made: Batches that workers have made.
    """

    own_s: float
    wait_s: float
    idle_s: float
    made: int


@dataclass(frozen=True)
class Trial:
    """What one choice was measured to do. Of five parts of the time the slowest and the fastest are left out.

    Attributes:
        choice: The choice.
        batches: Batches returned.
        own_s: Seconds that the program took.
        wait_s: Seconds that it waited.
        idle_s: Seconds that workers, summed, waited.
        made: Batches that were made.
        longest_s: The longest wait, or the longest that the program took for a batch.
        total_s: Seconds that all of it took, with the parts that are left out.
    """

    choice: Choice
    batches: int
    own_s: float
    wait_s: float
    idle_s: float
    made: int
    longest_s: float
    total_s: float

    @classmethod
    def of(cls, choice: Choice, samples: list[Sample]) -> Trial:
        """Sum up a trial's samples, of which there is one at least."""
        size = max(1, len(samples) // _BLOCKS)
        blocks = [samples[begin : begin + size] for begin in range(0, size * _BLOCKS, size)]
        blocks = sorted(filter(None, blocks), key=lambda block: sum(s.own_s + s.wait_s for s in block))
        kept = [sample for block in (blocks[1:-1] or blocks) for sample in block]
        return cls(
            choice,
            batches=len(kept),
            own_s=sum(sample.own_s for sample in kept),
            wait_s=sum(sample.wait_s for sample in kept),
            idle_s=sum(sample.idle_s for sample in kept),
            made=sum(sample.made for sample in kept),
            longest_s=max(max(sample.own_s, sample.wait_s) for sample in kept),
            total_s=sum(sample.own_s + sample.wait_s for sample in samples),
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds that it took."""
        return max(self.own_s + self.wait_s, 1e-9)

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.elapsed_s

    @property
    def waits(self) -> float:
        """The share of its time that the program waited."""
        return self.wait_s / self.elapsed_s

    @property
    def idles(self) -> float:
        """The share of their time that workers waited."""
        return min(1.0, self.idle_s / (self.choice.num_workers * self.elapsed_s))

    @property
    def busy_s(self) -> float:
        """Seconds that a worker takes for a batch."""
        busy_s = self.choice.num_workers * self.elapsed_s * (1.0 - self.idles)
        return max(busy_s / max(self.made, 1), 1e-9)

    @property
    def workers_needed(self) -> int:
        """Workers that make batches as fast as the program takes them."""
        own_s = max(self.own_s / self.batches, 1e-9)
        return max(1, math.ceil(min(_SPARE * self.busy_s / own_s, 1e6)))
