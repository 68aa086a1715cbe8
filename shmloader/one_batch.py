"""One batch by its number, made again in the main process: ``loader.batch()``. Loading never imports it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, Dataset, DistributedSampler, SequentialSampler

from shmloader.errors import NoGoodSample, ResumeError
from shmloader.failures.bad_samples import LEFT_OUT, Report
from shmloader.failures.exceptions import drop_notes
from shmloader.indices.array_samplers import index_arrays
from shmloader.indices.mixture_sampler import MixtureSampler
from shmloader.indices.samplers import sampler_of_indices, sharded_sampler
from shmloader.indices.sharded_sampler import WHOLE_EPOCH
from shmloader.settings import THREAD, Settings
from shmloader.worker.dataset_setup import set_up
from shmloader.worker.epoch_settings import owners_in
from shmloader.worker.fetcher import FetchRules
from shmloader.worker.map_fetchers import before_each_sample, make_fetcher
from shmloader.worker.random_state import Generators, SampleSeeds, other_global_states, worker_seeds

Seeds = tuple[int, int]
"""An iterator's base seed, and the number of its epochs before one."""


class Begin(NamedTuple):
    """The beginning of the epoch in progress, or of that of a loaded state."""

    epoch: int | None  # the sampler's, if it has one
    state: Mapping[str, Any] | None  # of a sampler that divides a global order; None for the first batch
    is_loaded: bool  # whether the loader has not continued from the state yet


def batch_of(
    settings: Settings, epoch: int, number: int, seeds: Seeds | None, told: int | None, begin: Begin
) -> Any:
    """A loader's batch of a number in an epoch: see `DataLoader.batch`.

    ``seeds`` are the epoch's, or None if they are not known; ``told`` is the epoch that the dataset was told
    last, or None.
    """
    if settings.is_iterable:
        raise ResumeError(
            "an iterable-style dataset has no batches by number: its samples come in one stream"
        )
    if number < 0:
        raise IndexError(f"epoch {epoch} has no batch {number:,}: numbers begin with 0")
    if settings.seeds_samples and seeds is None:
        raise ResumeError(
            f"samples are seeded from the base seed of their epoch, and this loader does not know that of "
            f"epoch {epoch}: call set_epoch() before each epoch, or load a state of epoch {epoch} first, or "
            "pass seed_per_sample=False"
        )
    index_batch = _index_batch(settings.index_sampler, epoch, number, begin)
    rules = FetchRules.of(settings, None)
    with _told(settings, epoch, told), other_global_states(), set_up(settings.dataset):
        dataset, seeding = settings.dataset, None
        if settings.seeds_samples and seeds is not None:
            seeding = SampleSeeds(Generators(worker_seeds(seeds[0], 0)), seeds[0], in_thread=False)
            dataset = before_each_sample(dataset, rules, seeding.seed_next)
            seeding.begin(seeds[1], number)
        began_ns = time.perf_counter_ns()
        try:
            batch = make_fetcher(dataset, rules).fetch(index_batch)
        except BaseException as error:
            drop_notes(error, began_ns)
            raise
    if isinstance(batch, Report):
        batch = batch.batch
    if batch is LEFT_OUT:
        raise NoGoodSample(f"batch {number:,} of epoch {epoch} was left out: none of its samples is good")
    return batch


def _index_batch(index_sampler: Any, epoch: int, number: int, begin: Begin) -> Any:
    """The index batch of a number in an epoch, drawn from a copy of the sampler."""
    inner: Any = copy.copy(sampler_of_indices(index_sampler))
    sampler = _batched(index_sampler, inner)
    batches: Iterator[Any]
    if (sharded := sharded_sampler(sampler)) is not None:
        batch_size = getattr(sampler, "batch_size", 1)
        begun = begin.state if begin.state and begin.epoch == epoch else WHOLE_EPOCH
        if isinstance(sharded, MixtureSampler):
            if begin.is_loaded and begin.epoch is not None and begin.state is not None:
                sharded.set_epoch(begin.epoch)  # the one that the state is of
                sharded.load_state_dict(begin.state)  # with the changes of the weights
            batches = iter(_batched(index_sampler, sharded.at(epoch, number, batch_size, begun)))
        else:
            sharded.set_epoch(epoch)
            sharded.load_state_dict(sharded.state_after(number, batch_size, begun))
            batches = iter(sampler)
    elif type(inner) in (SequentialSampler, DistributedSampler):
        if type(inner) is DistributedSampler:
            inner.set_epoch(epoch)
        batches = index_arrays(sampler, number) or itertools.islice(iter(sampler), number, None)
    else:
        raise ResumeError(
            f"the order of a {type(inner).__name__} does not follow from a seed and an epoch: pass "
            "shuffle=False, or a ShardedSampler, DistributedSampler, TokenBatchSampler or MixtureSampler"
        )
    with contextlib.suppress(StopIteration):
        return next(batches)
    raise IndexError(f"epoch {epoch} has no batch {number:,} on this rank")


def _batched(index_sampler: Any, inner: Any) -> Any:
    """Another sampler of indices, in batches if the index sampler is torch's `BatchSampler`."""
    if type(index_sampler) is not BatchSampler:
        return inner
    return BatchSampler(inner, index_sampler.batch_size, index_sampler.drop_last)


@contextlib.contextmanager
def _told(settings: Settings, epoch: int, told: int | None) -> Iterator[None]:
    """Tell the dataset of an epoch meanwhile, if the program tells it of epochs."""
    owners = [] if told is None or told == epoch else owners_in(settings.dataset)
    if owners and settings.num_workers and settings.worker_type == THREAD:
        for one in (settings.dataset, *owners):
            if not isinstance(one, Dataset) or hasattr(one, "__copy__"):
                raise ResumeError(
                    f"the worker threads share {type(one).__qualname__}, which was told of epoch {told}, and "
                    f"would read epoch {epoch} too: let it be a torch Dataset without __copy__, or make the "
                    "batch in a loader with num_workers=0"
                )
    try:
        for owner in owners:
            owner.set_epoch(epoch)
        yield
    finally:
        for owner in owners:
            owner.set_epoch(told)
