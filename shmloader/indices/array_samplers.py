"""Index batches of the commonest samplers as arrays: the same numbers, without a Python int for each.

A permutation as a list takes 36 bytes per sample of the dataset in the main process, and each index some ten
nanoseconds on its way through two generators. As an array it takes 8 bytes, and a batch is a slice of it.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

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

from shmloader.errors import warn_once
from shmloader.indices.block_sampler import BlockSampler
from shmloader.indices.packed_indices import LEAST_PACKED, IntArray, PackedInts, Run, int_array
from shmloader.indices.samplers import draw_seed
from shmloader.indices.sharded_sampler import ShardedSampler
from shmloader.torch_private import unavailable

Order = np.ndarray[Any, np.dtype[np.int32 | np.int64]]
"""Numbers of all samples, in their order."""


def index_arrays(index_sampler: Any, skip: int = 0) -> Iterator[PackedInts] | None:
    """Iterate over a sampler's index batches, as ``iter(index_sampler)`` does, with arrays in them.

    The numbers, the generators and the calls that draw from them are the same. Call it in place of ``iter``,
    whose side effects, for these samplers, come with the first index batch. Skipping many batches at the
    beginning takes no longer than skipping few.

    Returns:
        None if this is not exactly torch's `BatchSampler` over one of the samplers of `_chunks_of`, if its
        batches are small and none is to be skipped, or if the program or torch has changed these classes.
        None also for skipping batches of samplers that draw from the global generator itself, which is as it
        was in the state only now, or that are not torch's.
    """
    if type(index_sampler) is not BatchSampler or type(index_sampler.batch_size) is not int:
        return None
    inner: Any = index_sampler.sampler
    kind: type = type(inner)
    if _chunks_of(kind) is None or (index_sampler.batch_size < LEAST_PACKED and not skip):
        return None
    if skip and kind not in (SequentialSampler, RandomSampler, DistributedSampler):
        return None
    if isinstance(inner, RandomSampler) and getattr(inner, "replacement", True):
        return None
    if kind is SubsetRandomSampler and not _is_of_ints(inner.indices):
        return None
    own = [(base.__dict__["__iter__"], base) for base in kind.__mro__ if "__iter__" in base.__dict__]
    if not all(is_by_torch(*each) for each in [(BatchSampler.__iter__, BatchSampler), *own]):
        return None
    if kind in _OWN or (why := why_unlike_torchs(kind)) is None:
        return _batches(index_sampler, skip)
    text = unavailable("drawing index batches as arrays", why)
    warn_once(f"{text} Index batches are the same, but take 36 bytes for each sample of the dataset.")
    return None


def index_runs(index_sampler: Any) -> Iterator[Run] | None:
    """Iterate over index batches as `index_arrays` does, where each is a run; else None."""
    if index_arrays(index_sampler) is None or type(index_sampler.sampler) is not SequentialSampler:
        return None
    return _runs(index_sampler)


def _is_of_ints(indices: Any) -> bool:
    kind = type(indices)
    return kind is range or (kind in (list, tuple) and set(map(type, indices)) == {int})


@functools.cache
def why_unlike_torchs(kind: type) -> str | None:
    """The reason why arrays do not match torch's iteration over small samplers of a class; or None."""
    before, generator = torch.get_rng_state(), torch.Generator()
    begin = generator.get_state()

    def trace(iterate: Callable[[Any], Iterator[Any]], sampler: BatchSampler) -> list[Any]:
        torch.set_rng_state(before)
        generator.set_state(begin)
        steps: list[Any] = []
        batches = iterate(sampler)
        while not steps or steps[-1][0] is not None:
            batch = next(batches, None)
            states = [one.numpy().tobytes() for one in (torch.get_rng_state(), generator.get_state())]
            indices = None if batch is None else list(batch)
            steps.append((indices, states, getattr(sampler.sampler, "epoch", None)))
        return steps

    try:
        with torch.device("cpu"):  # whatever the program's default device is
            for (data, given), drop_last in itertools.product(_arguments(kind, generator), (False, True)):
                ours, torchs = (BatchSampler(kind(data, **given), 3, drop_last) for _ in range(2))
                if trace(iter, torchs) != trace(_batches, ours):
                    return f"its {kind.__name__} or BatchSampler draws in another way"
    except Exception as error:  # noqa: BLE001 - samplers of an unknown torch
        return f"its samplers cannot be compared with ours: {error!r}"
    finally:
        torch.set_rng_state(before)
    return None


def _arguments(kind: type, generator: torch.Generator) -> list[tuple[Any, dict[str, Any]]]:
    """Arguments of small samplers of a class, made to compare the two ways."""
    data, own = range(7), {"generator": generator}
    if kind is SequentialSampler:
        return [(data, {})]
    if kind is RandomSampler:
        return [(data, {}), (data, {"num_samples": 17}), (data, own)]
    if kind is SubsetRandomSampler:
        return [([4, 9, 2, 6, 1], given) for given in ({}, own)]
    if kind is WeightedRandomSampler:
        weights = [0.1, 2.0, 0.0, 1.0]
        return [(weights, {"num_samples": 8}), (weights, {"num_samples": 3, "replacement": False, **own})]
    if issubclass(kind, RandomSampler):  # accelerate's
        return [(data, {"data_seed": 5}), (data, {"num_samples": 17, **own})]
    return [
        (data, {"num_replicas": replicas, "rank": 1, "shuffle": shuffle, "drop_last": drop, "seed": 3})
        for replicas, shuffle, drop in itertools.product((2, 3, 20), (False, True), (False, True))
    ]


def is_by_torch(method: Any, kind: type) -> bool:
    """Whether a method of one of torch's classes is torch's own, by its globals, which ``wraps`` keeps."""
    return getattr(method, "__globals__", {}).get("__name__") == kind.__module__


def _batches(sampler: BatchSampler, skip: int = 0) -> Iterator[PackedInts]:
    """Iterate as ``BatchSampler.__iter__`` does: the inner sampler is asked no sooner than needed."""
    inner: Any = sampler.sampler
    chunks = _chunks_of(type(inner))(inner, sampler.batch_size)  # type: ignore[misc]  # it was asked before
    chunk, begin = np.empty(0, np.int64), skip * sampler.batch_size  # which may be far behind the chunk
    view = chunk.data
    drop_last, batch_size = sampler.drop_last, sampler.batch_size
    while True:
        if not drop_last:
            batch_size = sampler.batch_size  # which torch's reads for each batch here, and once above
        while begin + batch_size > len(chunk) and (following := next(chunks, None)) is not None:
            if begin < len(chunk):
                chunk, begin = np.concatenate([chunk[begin:], following]), 0
            else:
                chunk, begin = following, begin - len(chunk)
            view = chunk.data
        batch = view[begin : begin + batch_size]
        if not len(batch) or (len(batch) < batch_size and drop_last):
            return
        yield batch
        begin += batch_size


def _runs(sampler: BatchSampler) -> Iterator[Run]:
    """Iterate as `_batches` does over a `SequentialSampler`, without arrays."""
    inner: Any = sampler.sampler
    begin, length = 0, len(inner.data_source)
    drop_last, batch_size = sampler.drop_last, sampler.batch_size
    while True:
        if not drop_last:
            batch_size = sampler.batch_size
        end = min(begin + batch_size, length)
        if begin >= end or (drop_last and end - begin < batch_size):
            return
        yield Run(begin, end)
        begin = end


def _ranges(sampler: SequentialSampler, nbatch: int) -> Iterator[IntArray]:
    length = len(sampler.data_source)
    step = nbatch * max(1, 4096 // nbatch)
    for begin in range(0, length, step):
        yield np.arange(begin, min(begin + step, length), dtype=np.int64)


def _permutation(length: int, generator: torch.Generator) -> Order:
    """A permutation as ``torch.randperm`` draws it; as int32, in half the memory, where that suffices.

    The generator is another device's if the program's default device is.
    """
    is_short = length <= 1 << 31 and generator.device.type == "cpu"  # there the numbers are the same
    dtype = torch.int32 if is_short else torch.int64
    return torch.randperm(length, generator=generator, dtype=dtype).cpu().numpy()


def _permutations(sampler: RandomSampler, nbatch: int) -> Iterator[IntArray]:
    """Draw as ``RandomSampler.__iter__``, which may draw one permutation more than it needs at the end."""
    length = len(sampler.data_source)
    generator: torch.Generator = sampler.generator or torch.Generator().manual_seed(draw_seed())
    for _ in range(sampler.num_samples // length):
        yield from _pieces(_permutation(length, generator), nbatch)
    yield from _pieces(_permutation(length, generator)[: sampler.num_samples % length], nbatch)


def _pieces(order: Order, nbatch: int) -> Iterator[IntArray]:
    step = nbatch * max(1, 65_536 // nbatch)
    for begin in range(0, len(order), step):
        yield order[begin : begin + step].astype(np.int64)


def _weighted(sampler: WeightedRandomSampler, _: int) -> Iterator[IntArray]:
    drawn = torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
    )
    yield drawn.cpu().numpy()


def _of_subset(sampler: SubsetRandomSampler, nbatch: int) -> Iterator[IntArray]:
    """Draw as ``SubsetRandomSampler.__iter__``, which looks each index up when its batch is made."""
    indices = sampler.indices
    places = torch.randperm(len(indices), generator=sampler.generator).cpu().numpy()
    for begin in range(0, len(places), nbatch):
        some = places[begin : begin + nbatch].tolist()
        found = int_array([indices[place] for place in some])
        if found is None:
            raise TypeError("the indices of a SubsetRandomSampler were ints, and were changed meanwhile")
        yield found


def _seeded(sampler: Any, nbatch: int) -> Iterator[IntArray]:
    """Draw as accelerate's ``SeedableRandomSampler.__iter__``."""
    if sampler.generator is None:
        sampler.generator = torch.Generator(torch.get_default_device())
    sampler.generator.manual_seed(sampler.epoch + sampler.initial_seed)
    yield from _permutations(sampler, nbatch)
    sampler.set_epoch(sampler.epoch + 1)


def _unrepeated(sampler: Any, nbatch: int) -> Iterator[IntArray]:
    """Draw as Lightning's ``UnrepeatedDistributedSampler.__iter__``, which does without the seed."""
    return _share(sampler, nbatch, sampler.epoch)


def _share(sampler: DistributedSampler[Any], _: int, seed: int | None = None) -> Iterator[IntArray]:
    """Draw as ``DistributedSampler.__iter__``: one rank's places in an order that is repeated to be even."""
    length, total, step = len(sampler.dataset), sampler.total_size, sampler.num_replicas  # type: ignore[arg-type]
    even = total <= length if sampler.drop_last else total >= length
    if not even or len(range(sampler.rank, total, step)) != sampler.num_samples:
        yield np.array(list(sampler))  # torch's own raises its error
        return
    if sampler.shuffle:
        generator = torch.Generator().manual_seed(sampler.seed + sampler.epoch if seed is None else seed)
        order = _permutation(length, generator)
    else:
        order = np.arange(length, dtype=np.int64)
    share = order[sampler.rank : min(length, total) : step].astype(np.int64)
    repeated = range(sampler.rank, total, step)[len(share) :]
    if repeated:
        share = np.concatenate([share, order[np.array(repeated) % length]])
    del order  # which is the whole dataset's
    yield share


_CHUNKS: dict[tuple[str, str], Callable[[Any, int], Iterator[IntArray]]] = {
    (SequentialSampler.__module__, "SequentialSampler"): _ranges,
    (RandomSampler.__module__, "RandomSampler"): _permutations,
    (SubsetRandomSampler.__module__, "SubsetRandomSampler"): _of_subset,
    (WeightedRandomSampler.__module__, "WeightedRandomSampler"): _weighted,
    (DistributedSampler.__module__, "DistributedSampler"): _share,
    ("accelerate.data_loader", "SeedableRandomSampler"): _seeded,
    ("lightning.pytorch.overrides.distributed", "UnrepeatedDistributedSampler"): _unrepeated,
    ("pytorch_lightning.overrides.distributed", "UnrepeatedDistributedSampler"): _unrepeated,
}
"""Classes by module and name, with functions that give what their iterators give, in arrays."""

_OWN = (ShardedSampler, BlockSampler)  # whose iterators give these arrays' numbers


def _chunks_of(kind: type) -> Callable[[Any, int], Iterator[IntArray]] | None:
    if kind in _OWN:
        return lambda sampler, nbatch: _pieces(sampler.begin_epoch(), nbatch)
    place = kind.__module__, kind.__name__
    is_it = place in _CHUNKS and getattr(sys.modules.get(place[0]), place[1], None) is kind
    return _CHUNKS[place] if is_it else None
