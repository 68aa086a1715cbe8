"""The rest of an epoch's index batches, for a resumed program. Main process only.

Nothing is fetched. A sampler with ``state_dict()`` and ``load_state_dict()`` is set to its own state after
the last batch that the program has had, or before it, if it may have been the epoch's last: the batch is then
drawn again. For any other sampler, its generator is set back to the beginning of the epoch, and the batches
that the program has had are drawn again: in one slice for torch's commonest samplers, one by one for others,
with a checksum that tells whether they are the same.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from shmloader.errors import ResumeError
from shmloader.indices import samplers
from shmloader.indices.array_samplers import index_arrays
from shmloader.indices.compact_states import set_to
from shmloader.indices.tracked_batches import ADVICE, TrackedBatches, pass_over_end, track
from shmloader.resume.compatibility import State
from shmloader.resume.user_states import unpack_user_state


def batches_from(
    index_sampler: Any, loaded: State, generator: torch.Generator | None, *, threads: bool
) -> Iterator[Any]:
    """Iterate over an epoch's index batches, from the place of a state in mid-epoch.

    The generator is the loader's, as it was when the epoch began. A sampler that comes elsewhere is an error.
    ``threads`` says whether workers are threads.
    """
    if samplers.sampler_with_state(index_sampler) is not None:
        return batches_by_own_state(index_sampler, loaded, generator)
    source = _with_generator(index_sampler, loaded)
    if (sharded := samplers.sharded_sampler(index_sampler)) is not None:
        sharded.load_state_dict(unpack_user_state(loaded["sampler_state"]))
        return index_arrays(source) or iter(source)
    taken: int = loaded["batches"]
    iterator = index_arrays(source, taken)
    if iterator is None:
        iterator = track(index_sampler, iter(source), resumed=True, threads=threads)
        _draw_again(index_sampler, iterator, 0, loaded)
    return iterator


def batches_by_own_state(
    index_sampler: Any, loaded: State, generator: torch.Generator | None, *, unchanged: bool = True
) -> TrackedBatches:
    """Iterate over the index batches, in this epoch or the next, of a sampler that has a state of its own.

    In an ``unchanged`` loader the batches of an epoch that is over must be the same ones.
    """
    generator = generator or torch.Generator()  # the sampler may draw from it, too
    at_begin = generator.get_state()
    make_state = functools.partial(unpack_user_state, loaded["sampler_state"])
    begin = loaded["sampler_batches"]
    samplers.load_own_state(samplers.sampler_with_state(index_sampler), make_state())
    if not begin:
        # It may be the state of the last epoch's end. The sampler need not know of a base seed that was drawn
        # from the same generator since.
        pass_over_end(index_sampler, make_state)
        generator.set_state(at_begin)
    batches = TrackedBatches(index_sampler, iter(index_sampler), begin, make_state())
    if unchanged:
        _draw_again(index_sampler, batches, begin, loaded)
    if not loaded["finished"]:
        return batches
    for _ in batches:  # none; or some, if the loader is another
        pass
    generator.set_state(at_begin)
    return TrackedBatches(index_sampler, iter(index_sampler))


def _with_generator(index_sampler: Any, loaded: State) -> Any:
    """The sampler with its generator set back; for one that draws a seed, a copy that begins with it."""
    if not loaded["sampler_generator"]:
        return index_sampler
    if not samplers.draws_one_seed(index_sampler):
        set_generator(samplers.generator_of(index_sampler), loaded, "sampler_generator")
        return index_sampler
    seeded = copy.copy(index_sampler)
    if type(index_sampler) is BatchSampler:
        seeded.sampler = copy.copy(index_sampler.sampler)
    generator = samplers.sampler_of_indices(seeded).generator = torch.Generator()
    set_generator(generator, loaded, "sampler_generator")
    return seeded


def set_generator(generator: torch.Generator | None, loaded: State, name: str) -> None:
    """Set a generator to the compact state under a key of a state; either may be missing."""
    if generator is not None and loaded[name]:
        set_to(loaded[name], generator)


def _draw_again(index_sampler: Any, iterator: Iterator[Any], begin: int, loaded: State) -> None:
    """Draw batches that the program has had, from ``begin`` on; `ResumeError` if they are not the same."""
    taken, checksum, found = loaded["batches"], loaded["sampler_checksum"], None
    if isinstance(iterator, TrackedBatches):
        iterator.follow(lambda: taken)
    drawn = begin + sum(1 for _ in itertools.islice(iterator, taken - begin))
    if drawn < taken:
        raise ResumeError(
            f"the state was taken after {taken:,} batches, and the sampler ({_name(index_sampler)}) ended "
            f"after {drawn:,} now. {ADVICE}"
        )
    if isinstance(iterator, TrackedBatches):
        found = iterator.checksum(taken)
    if None not in (checksum, found) and checksum != found:
        raise ResumeError(
            f"the sampler ({_name(index_sampler)}) now gives other batches than the {taken:,} that the "
            f"program has had (checksum {found}, in the state {checksum}). {ADVICE} If the state is that of "
            "another rank, save and load it on each."
        )


def _name(index_sampler: Any) -> str:
    return type(samplers.sampler_of_indices(index_sampler)).__name__
