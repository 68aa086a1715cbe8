"""The progress of one epoch: how many of its batches the program has had."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shmloader.errors import ResumeError
from shmloader.indices.samplers import GeneratorStates
from shmloader.indices.tracked_batches import HISTORY, TrackedBatches

Done = tuple[int, ...]
"""Index batches that are done: how many, up to the first that is not; and the positions done after that."""


class Follower:
    """The place of a reader behind a look-ahead in one epoch."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin an epoch, in this thread."""
        self.thread = threading.current_thread()
        self.waits = False  # it has asked the look-ahead for the next batch
        self.count = 0  # batches that came out of the look-ahead
        self.ended = False  # no more will come

    @property
    def is_elsewhere(self) -> bool:
        """Whether it reads, or has read, in another thread that is alive."""
        return self.thread is not threading.current_thread() and self.thread.is_alive()

    def end(self) -> None:
        """Note that no more will come."""
        self.ended = True


@dataclass(eq=False)
class Progress:
    """One epoch, from when an iterator begins it until the next one begins. Main process only.

    The iterator tells it what happens. The loader keeps it when the iterator dies, at a ``break`` say.
    `Follower` objects tell how much of what was returned is used, if something reads ahead.
    """

    base_seed: int  # the iterator's
    iterator_epoch: int  # epochs of the iterator before this one; seeds of samples depend on both
    sampler_epoch: int | None  # if the sampler has one
    # State of torch's global generator before ``iter()``; its digest if an earlier program called that.
    global_before: torch.Tensor | str
    # States of the generators before the sampler drew the order, maybe in an earlier program; None before.
    before: GeneratorStates | None
    # Index batches that are done: returned, left out for having no good sample, or raised from ``next()``.
    done: Done = (0,)
    set_epoch: int | None = None  # the argument of the last ``loader.set_epoch()`` before it began
    in_order: bool = True  # no batch has come out of order in an earlier program
    stream: Any = None  # for an iterable-style dataset the `StreamProgress`
    tracked: TrackedBatches | None = None  # the sampler's batches, if it is not torch's
    finished: bool = False  # ``next()`` has raised ``StopIteration``
    before_next: GeneratorStates | None = None  # like `before`, for the next epoch, if that has begun
    by_arrival: bool = False  # batches are returned as they arrive
    # The state that a `ShardedSampler` began with.
    sampler_begin: Mapping[str, int] = field(default_factory=dict)
    follows_left: bool = False  # the epoch before was left, with its sampler in the middle
    followers: list[Follower] = field(default_factory=list)  # they read this epoch behind a look-ahead
    _without: list[int] = field(default_factory=list)  # positions done for which no batch was returned
    _latest: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY))  # done, if by arrival

    def __post_init__(self) -> None:
        self._begun = self.done

    def take(self, position: int, *, returned: bool = True) -> None:
        """Note that the batch at a position is done; the order does not matter."""
        self.finished = False  # it was True if a sample raised StopIteration
        if not returned:
            self._without.append(position)
        if self.by_arrival:
            self._latest.append(position)
        done = self.done
        if done == (position,):  # as with nearly every batch
            self.done = (position + 1,)
        elif done[0] == position and done[1] > position + 1:
            self.done = (position + 1, *done[1:])  # many may follow that are left out
        else:
            self.done = _joined(done[0], sorted({*done[1:], position}))

    def end(self, before_next: GeneratorStates | None = None) -> None:
        """Note that ``next()`` raises ``StopIteration``."""
        self.before_next, self.finished = before_next, True

    def note_next(self, before: GeneratorStates | None) -> None:
        """Note the states of the generators before the next epoch, which begins now."""
        self.before_next = self.before_next or before

    def follow_on(self, before: Progress) -> None:
        """Note the epoch before."""
        self.follows_left = before.tracked is not None and before.tracked.is_left

    def begin_order(self, before: GeneratorStates, sampler_epoch: int | None) -> None:
        """Note generators and epoch of the sampler, which draws its order now, with the first batch."""
        self.before, self.sampler_epoch = before, sampler_epoch

    def note_set_epoch(self, epoch: int) -> None:
        """Note a call of ``loader.set_epoch()`` after ``iter()``: it counts until the order is drawn."""
        if self.before is None:
            self.set_epoch = epoch

    def take_back(self, done: Done) -> None:
        """Go back to what was done before the batch of an interrupted call, which the program has not had."""
        self.done = done
        for positions in (self._without, self._latest):
            while positions and positions[-1] >= self.taken and positions[-1] not in self.behind:
                positions.pop()

    @property
    def taken(self) -> int:
        """The number of batches that are done, up to the first that is not."""
        return self.done[0]

    @property
    def behind(self) -> tuple[int, ...]:
        """Positions after `taken` that are also done."""
        return self.done[1:]

    # --- what of it is used

    @property
    def returned(self) -> int:
        """The number of batches that ``next()`` has returned since ``iter()``."""
        done, begun = self.done, self._begun
        return done[0] + len(done) - begun[0] - len(begun) - len(self._without)

    @property
    def used(self) -> int:
        """The batches, of those that were returned, that all followers have; all without a follower."""
        return min((follower.count for follower in self.followers), default=self.returned)

    @property
    def oldest(self) -> int:
        """A number of batches below which a follower is no more; those that come by arrival may be."""
        return min(self.taken, self._begun[0] + self.used) if self.followers else self.taken

    @property
    def is_over(self) -> bool:
        """Whether the program knows that the epoch is over."""
        return self.finished and all(follower.ended for follower in self.followers)

    def done_after(self, count: int | None) -> Done:
        """`done` when ``next()`` had returned so many since ``iter()``; `ResumeError` if it is unknown.

        None: all, or those that followers have.
        """
        if count is None:
            if not self.followers:
                return self.done
            count = self.used
        returned, begun = self.returned, self._begun
        if not 0 <= count <= returned:
            raise ResumeError(
                f"there is no state after {count:,} batches: iter() has returned {returned:,} in this epoch. "
                "Batches are counted from iter() on, also in a resumed epoch, and those that on_error leaves "
                "out are not"
            )
        if not count:
            return begun
        if self.by_arrival:
            return self._without_latest(returned - count)
        position, *early = begun
        position += count - 1
        for without in sorted([*early, *self._without]):
            position += without <= position
        return _joined(position + 1, early)

    def _without_latest(self, count: int) -> Done:
        """The batches done before the latest ones that were returned."""
        undone: set[int] = set()
        for position in reversed(self._latest):
            is_batch = position not in self._without
            if not count and is_batch:
                break
            undone.add(position)
            count -= is_batch
        if count:
            raise ResumeError(
                f"there is no state from so far back, {count:,} batches before the last {HISTORY:,}: with "
                "in_order=False only those are kept"
            )
        first = min({*undone, self.taken})  # the first that has not come may be before them
        return _joined(first, sorted({*range(first, self.taken), *self.behind} - undone))


def _joined(first: int, others: list[int]) -> Done:
    """All positions before the first one, and others after it, sorted, as `Progress.done` has them."""
    rest = [position for position in others if position >= first]
    following = 0  # of them come right after the first
    while following < len(rest) and rest[following] == first + following:
        following += 1
    return (first + following, *rest[following:])
