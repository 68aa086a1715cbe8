"""An epoch's index batches once more, from where a resumed program goes on. Main process only.

Nothing is fetched. A sampler with ``state_dict()`` and ``load_state_dict()`` is set to its own state. For any
other one the generator that it draws from is set to where it was when the epoch began, and the batches that
the program has had are drawn again: of torch's commonest samplers as one slice, of others one by one. Of
samplers that are not torch's a checksum tells whether those were the same batches.
"""

from __future__ import annotations

import copy
import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shmloader.errors import ResumeError
from shmloader.sampling.array_samplers import index_arrays
from shmloader.sampling.generator_places import go_to, seed_of
from shmloader.sampling.index_batches import pack_index_batch
from shmloader.sampling.sharded_sampler import ShardedSampler

_WITHOUT_DRAWS = (SequentialSampler, DistributedSampler, ShardedSampler)
_TORCHS = (*_WITHOUT_DRAWS, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_MOST_NESTED = 8
_ADVICE = (
    "A sampler must draw the same order again: from a torch.Generator of its own, as its attribute "
    "`generator`, or from a seed and set_epoch(); or give it state_dict() and load_state_dict()."
)


def index_sampler_of(loader: Any) -> Any:
    """The sampler that a loader draws index batches from, or single indices if it joins no samples."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def with_inner(index_sampler: Any) -> list[Any]:
    """A sampler of index batches, and those below it, from which it takes batches or indices."""
    found: list[Any] = []
    while index_sampler is not None and len(found) < _MOST_NESTED:
        found.append(index_sampler)
        inner = getattr(index_sampler, "batch_sampler", None)
        index_sampler = getattr(index_sampler, "sampler", None) if inner is None else inner
    return found


def sampler_with_epoch(index_sampler: Any) -> Any:
    """The sampler with ``set_epoch()`` and the epoch as its attribute, or None."""
    for sampler in with_inner(index_sampler):
        if callable(getattr(sampler, "set_epoch", None)) and isinstance(getattr(sampler, "epoch", None), int):
            return sampler
    return None


def sampler_with_state(index_sampler: Any) -> Any:
    """The sampler that keeps its own state, if that has to be asked for batch by batch; or None."""
    if sampler_by_count(index_sampler) is not None:
        return None
    for sampler in with_inner(index_sampler):
        if all(callable(getattr(sampler, name, None)) for name in ("state_dict", "load_state_dict")):
            return sampler
    return None


def sampler_by_count(index_sampler: Any) -> Any:
    """The sampler whose state after a number of batches is known without drawing them, or None.

    It has ``state_after(batches, batch_size)``, and ``load_state_dict()`` for what that returns. Only torch's
    `BatchSampler` over it has batches of known size, in its order.
    """
    inner = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    counts = all(callable(getattr(inner, name, None)) for name in ("state_after", "load_state_dict"))
    return inner if counts else None


def is_torchs(index_sampler: Any) -> bool:
    """Whether a sampler is one of torch's (or `ShardedSampler`), or torch's `BatchSampler` over one."""
    inner = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    return type(inner) in _TORCHS


def draws_one_seed(index_sampler: Any) -> bool:
    """Whether a sampler draws one seed from torch's global generator, and nothing else."""
    inner = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    return type(inner) is RandomSampler and inner.generator is None


def generator_of(index_sampler: Any) -> torch.Generator | None:
    """The generator that a sampler draws its order from; None if it draws from none.

    It is the sampler's ``generator``, or that of the sampler below it; else torch's global one. A sampler
    with a state of its own is left to itself.
    """
    if sampler_with_state(index_sampler) is not None:
        return None
    samplers = with_inner(index_sampler)
    for sampler in samplers:
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            return generator
    if is_torchs(index_sampler) and type(samplers[-1]) in _WITHOUT_DRAWS:
        return None
    return torch.default_generator


class GeneratorStates(NamedTuple):
    """States of the generators at the moment before a sampler draws an epoch's order; None for no generator.

    Attributes:
        sampler: Of the one that the sampler draws from.
        loader: Of the loader's, where that is another one.
    """

    sampler: torch.Tensor | None
    loader: torch.Tensor | None


def generator_states(index_sampler: Any, generator: torch.Generator | None) -> GeneratorStates:
    """Read the states; takes 3 µs.

    Args:
        index_sampler: The loader's sampler of index batches.
        generator: The loader's generator.
    """
    drawn_from = generator_of(index_sampler)
    other = None if generator is drawn_from else generator
    return GeneratorStates(
        None if drawn_from is None else drawn_from.get_state(), None if other is None else other.get_state()
    )


class TrackedBatches(Iterator[Any]):
    """Index batches of a sampler that is not torch's, with what is needed to come to the same place again.

    Args:
        index_sampler: The sampler.
        iterator: Iterates over it.
        begin: Index batches before those.
        state: The sampler's own state there, if it was loaded: some samplers tell it only when iterated over.

    Attributes:
        taken: Tells how many of them the program has had; what belongs to earlier places is forgotten.
        end: The sampler's own state after its last batch; None while it may have further ones.
        draws_on: Whether the sampler has drawn from a global generator behind its first batch, where the
            program draws as well: then nothing tells what it would draw again.
        resumed: Whether it then raises instead of giving batches.
    """

    def __init__(
        self, index_sampler: Any, iterator: Iterator[Any], begin: int = 0, state: Any = None
    ) -> None:
        self.taken: Callable[[], int] = lambda: begin
        self.end: Any = None
        self.draws_on = self.resumed = False
        self._name = type(index_sampler).__name__
        self._iterator = iterator
        self._stateful = stateful = sampler_with_state(index_sampler)
        self._oldest = self._drawn = begin
        self._ahead: list[Any] = []
        self._checksum = 0
        # After each number of batches: the sampler's state, or the checksum of the batches.
        if state is None:
            state = 0 if stateful is None else _copy(stateful)
        self._after: dict[int, Any] = {begin: state}

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else self._draw()

    def _draw(self) -> Any:
        stateful, drawn = self._stateful, self._drawn
        # At few of its batches only, since it takes as long as a small sampler does.
        looks = stateful is None and drawn and not drawn & (drawn - 1)
        states = _global_states() if looks else None
        try:
            index_batch = next(self._iterator)
        except StopIteration:
            if self.end is None and stateful is not None:
                self.end = _copy(stateful)
            raise
        if states is not None and states != (now := _global_states()):
            # A program that draws from NumPy and random may never resume: it is told when it does.
            self.draws_on = self.draws_on or self.resumed or states[0] != now[0]
            if self.resumed:
                self.check()
        self._drawn += 1
        if stateful is None:
            self._after[self._drawn] = self._checksum = _add(self._checksum, index_batch)
        else:
            self._after[self._drawn] = _copy(stateful)
        while self._oldest < min(self.taken(), self._drawn):
            self._after.pop(self._oldest, None)
            self._oldest += 1
        return index_batch

    def check(self) -> None:
        """Refuse a sampler that `draws_on`.

        Raises:
            ResumeError: With the way round.
        """
        if self.draws_on:
            raise ResumeError(
                f"the sampler ({self._name}) draws from a global generator (torch's, NumPy's, random's) "
                "batch by batch, among what the program draws, so it cannot come to this place again. "
                f"{_ADVICE}"
            )

    def after(self, taken: int) -> Any:
        """The sampler's state, or the checksum, as it was when that many batches had been drawn."""
        return self._after[taken]

    def ends_after(self, taken: int) -> bool:
        """Whether a sampler with a state of its own has no batch behind that many. May draw one ahead.

        Its state there does not tell: with the last, shorter batch it may have begun anew.
        """
        if taken == self._drawn > 0 and self.end is None:
            self._ahead += itertools.islice(iter(self._draw, None), 1)
        return self.end is not None and taken == self._drawn


def _global_states() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state()  # noqa: NPY002 - the program's
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), *rest


def _copy(stateful: Any) -> Any:
    return copy.deepcopy(stateful.state_dict())


def _add(checksum: int, index_batch: Any) -> int:
    try:
        payload = pack_index_batch(index_batch)
    except Exception:  # noqa: BLE001 - without workers, indices may be anything
        payload = repr(index_batch).encode()
    return zlib.crc32(payload, checksum)


def track(index_sampler: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """The same iterator, or `TrackedBatches` of it where a number of batches does not tell its place."""
    if isinstance(iterator, TrackedBatches) or is_torchs(index_sampler):
        return iterator
    if sampler_by_count(index_sampler) is not None:
        return iterator
    return TrackedBatches(index_sampler, iterator)


class Place(NamedTuple):
    """A place in an epoch's order.

    Attributes:
        taken: Index batches before it.
        generator: The place of the sampler's generator when the epoch began; "" leaves it as it is.
        checksum: Of the index batches before it, or None.
        sampler_state: The sampler's own state there, or None.
    """

    taken: int
    generator: str
    checksum: int | None
    sampler_state: Any


def go_on_from(index_sampler: Any, place: Place) -> tuple[Iterator[Any], TrackedBatches | None]:
    """Iterate over an epoch's index batches from a place on.

    Returns:
        The iterator, and the `TrackedBatches` in it, if the sampler is not torch's.

    Raises:
        ResumeError: If the sampler does not come to the place.
    """
    source = _begin(index_sampler, place.generator)
    counting = sampler_by_count(index_sampler)
    if counting is not None:
        counting.load_state_dict(place.sampler_state)
        return iter(source), None
    stateful = sampler_with_state(index_sampler)
    if stateful is not None:
        if place.taken:
            stateful.load_state_dict(place.sampler_state)
        else:
            end_epoch(index_sampler, place.sampler_state)
        tracked = TrackedBatches(index_sampler, iter(source), place.taken, place.sampler_state)
        return tracked, tracked
    iterator: Iterator[Any] | None = index_arrays(source, place.taken)
    if iterator is None:
        iterator = track(index_sampler, iter(source))
        _draw_again(index_sampler, iterator, place)
    found = iterator if isinstance(iterator, TrackedBatches) else None
    if place.generator and not place.taken:
        # The order is drawn with the first batch: now, while the generator is where it was.
        return itertools.chain(list(itertools.islice(iterator, 1)), iterator), found
    return iterator, found


def end_epoch(index_sampler: Any, state: Any) -> None:
    """Bring a sampler with a state of its own to where an epoch has ended, so that the next one can begin.

    Some samplers have begun anew there. Others give nothing once, and begin anew then.

    Args:
        index_sampler: The sampler.
        state: Its state after its last batch.
    """
    stateful = sampler_with_state(index_sampler)
    stateful.load_state_dict(state)
    if list(itertools.islice(iter(index_sampler), 1)):
        stateful.load_state_dict(state)


def _begin(index_sampler: Any, generator_place: str) -> Any:
    """The sampler, with its generator set to a place; where that is a seed, a copy that begins with it."""
    if not generator_place:
        return index_sampler
    seed = seed_of(generator_place)
    if seed is None:
        generator = generator_of(index_sampler)
        if generator is not None:
            set_generator(generator, generator_place)
        return index_sampler
    seeded = copy.copy(index_sampler)
    inner = seeded
    if type(index_sampler) is BatchSampler:
        inner = seeded.sampler = copy.copy(index_sampler.sampler)
    inner.generator = torch.Generator().manual_seed(seed)
    return seeded


def set_generator(generator: torch.Generator, place: str) -> None:
    """Set a generator to a place.

    Raises:
        ResumeError: If the text is no place.
    """
    try:
        go_to(place, generator)
    except ValueError as error:
        raise ResumeError(f"this state cannot be resumed from: {error}") from error


def _draw_again(index_sampler: Any, iterator: Iterator[Any], place: Place) -> None:
    """Draw the batches before a place, and compare their checksum.

    Raises:
        ResumeError: If there are too few of them, or others.
    """
    if isinstance(iterator, TrackedBatches):
        iterator.taken, iterator.resumed = lambda: place.taken, True
    drawn = sum(1 for _ in itertools.islice(iterator, place.taken))
    name = type(index_sampler).__name__
    if drawn < place.taken:
        raise ResumeError(
            f"the state was taken after {place.taken:,} batches, and the sampler ({name}) ended after "
            f"{drawn:,} now. {_ADVICE}"
        )
    if place.checksum is not None and isinstance(iterator, TrackedBatches):
        checksum = iterator.after(drawn)
        if checksum != place.checksum:
            raise ResumeError(
                f"the sampler ({name}) gave other batches than those {drawn:,} that the program has had, "
                f"when it was asked again (checksum {checksum}, in the state {place.checksum}). {_ADVICE}"
            )
