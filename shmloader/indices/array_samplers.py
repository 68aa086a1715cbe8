"""Index batches of torch's commonest samplers as arrays: the same numbers, without a Python int for each.

A permutation as a list takes 36 bytes per sample of the dataset in the main process, and each index some ten
nanoseconds on its way through two generators. As an array it takes 8 bytes, and a batch is a slice of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from shmloader.indices.packed_indices import LEAST_PACKED, IntArray, PackedInts
from shmloader.indices.samplers import draw_seed
from shmloader.torch_features import Feature, disable, is_missing


def index_arrays(index_sampler: Any, skip: int = 0) -> Iterator[PackedInts] | None:
    """Iterate over a sampler's index batches, as ``iter(index_sampler)`` does, with arrays in them.

    The numbers, the generators and the calls that draw from them are the same. Call it in place of ``iter``,
    whose side effects, for these samplers, come with the first index batch. Skipping many batches at the
    beginning takes no longer than skipping few.

    Returns:
        None if this is not exactly torch's `BatchSampler` over one of its samplers in `_CHUNKS` (a
        `RandomSampler` without replacement), if its batches are small and none is to be skipped, or if the
        program or torch has changed these classes (`check_against_torch`). None also for skipping batches of
        a `WeightedRandomSampler`.
    """
    if type(index_sampler) is not BatchSampler or type(index_sampler.batch_size) is not int:
        return None
    inner = index_sampler.sampler
    replaces = type(inner) is RandomSampler and getattr(inner, "replacement", True)
    known = type(inner) in _CHUNKS and not replaces
    if skip and type(inner) is WeightedRandomSampler:
        return None  # it may draw from the global generator, which is as it was in the state only now
    if not known or (index_sampler.batch_size < LEAST_PACKED and not skip):
        return None
    if not all(is_by_torch(kind.__iter__, kind) for kind in (BatchSampler, type(inner))):
        return None
    check_against_torch(type(inner))
    return None if is_missing(Feature.ARRAY_SAMPLING) else _batches(index_sampler, skip)


@functools.cache
def check_against_torch(kind: type) -> None:
    """Disable arrays in this process unless they match torch's iteration over small samplers of a class.

    The index batches must agree, and after each of them the states of the generators. It takes up to 1 ms,
    once for each class, and leaves the global generator as it was.
    """
    state = torch.get_rng_state()
    generator = torch.Generator()
    begin = generator.get_state()

    def trace(iterate: Callable[[Any], Iterator[Any]], sampler: BatchSampler) -> list[Any]:
        torch.set_rng_state(state)
        generator.set_state(begin)
        steps: list[Any] = []
        batches = iterate(sampler)
        while not steps or steps[-1][0] is not None:
            batch = next(batches, None)
            indices = batch.tolist() if isinstance(batch, PackedInts) else batch
            states = [one.numpy().tobytes() for one in (torch.get_rng_state(), generator.get_state())]
            steps.append((indices, states))
        return steps

    data: Any = range(7)
    arguments: list[dict[str, Any]] = [{}]
    if kind is RandomSampler:
        arguments += [{"num_samples": 17}, {"generator": generator}]
    elif kind is WeightedRandomSampler:
        data = [0.1, 2.0, 0.0, 1.0]
        arguments = [{"num_samples": 8}, {"num_samples": 3, "replacement": False, "generator": generator}]
    elif kind is DistributedSampler:
        arguments = [
            {"num_replicas": replicas, "rank": 1, "shuffle": shuffle, "drop_last": drop, "seed": 3}
            for replicas, shuffle, drop in itertools.product((2, 3, 20), (False, True), (False, True))
        ]
    try:
        with torch.device("cpu"):  # whatever the program's default device is
            for keywords, drop_last in itertools.product(arguments, (False, True)):
                batches = BatchSampler(kind(data, **keywords), 3, drop_last)
                if trace(iter, batches) != trace(_batches, batches):
                    disable(
                        Feature.ARRAY_SAMPLING, f"its {kind.__name__} or BatchSampler draws in another way"
                    )
    except Exception as error:  # noqa: BLE001 - samplers of an unknown torch
        disable(Feature.ARRAY_SAMPLING, f"its samplers cannot be compared with ours: {error!r}")
    finally:
        torch.set_rng_state(state)


def is_by_torch(method: Any, kind: type) -> bool:
    """Whether a method of one of torch's classes is torch's own.

    A function that a program puts in its place has other globals, also under ``functools.wraps``.
    """
    return getattr(method, "__globals__", {}).get("__name__") == kind.__module__


def _batches(sampler: BatchSampler, skip: int = 0) -> Iterator[PackedInts]:
    """Iterate as ``BatchSampler.__iter__`` does: the inner sampler is asked no sooner than needed."""
    inner: Any = sampler.sampler
    chunks = _CHUNKS[type(inner)](inner, sampler.batch_size)
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


def _ranges(sampler: SequentialSampler, nbatch: int) -> Iterator[IntArray]:
    length = len(sampler.data_source)
    step = nbatch * max(1, 4096 // nbatch)
    for begin in range(0, length, step):
        yield np.arange(begin, min(begin + step, length), dtype=np.int64)


def _permutations(sampler: RandomSampler, _: int) -> Iterator[IntArray]:
    """Draw as ``RandomSampler.__iter__``, which may draw one permutation more than it needs at the end."""
    length = len(sampler.data_source)
    generator: torch.Generator = sampler.generator or torch.Generator().manual_seed(draw_seed())
    for _ in range(sampler.num_samples // length):
        yield torch.randperm(length, generator=generator).numpy()
    yield torch.randperm(length, generator=generator)[: sampler.num_samples % length].numpy()


def _weighted(sampler: WeightedRandomSampler, _: int) -> Iterator[IntArray]:
    drawn = torch.multinomial(
        sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
    )
    yield drawn.cpu().numpy()


def _share(sampler: DistributedSampler[Any], _: int) -> Iterator[IntArray]:
    """Draw as ``DistributedSampler.__iter__``: one rank's places in an order that is repeated to be even."""
    length, total, step = len(sampler.dataset), sampler.total_size, sampler.num_replicas  # type: ignore[arg-type]
    even = total <= length if sampler.drop_last else total >= length
    if not even or len(range(sampler.rank, total, step)) != sampler.num_samples:
        yield np.array(list(sampler))  # torch's own raises its error
        return
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        order = torch.randperm(length, generator=generator).numpy()
    else:
        order = np.arange(length, dtype=np.int64)
    share = order[sampler.rank : min(length, total) : step]
    repeated = range(sampler.rank, total, step)[len(share) :]
    if repeated:
        share = np.concatenate([share, order[np.array(repeated) % length]])
    share = np.ascontiguousarray(share)
    del order  # which is the whole dataset's
    yield share


_CHUNKS: dict[type, Callable[[Any, int], Iterator[IntArray]]] = {
    SequentialSampler: _ranges,
    RandomSampler: _permutations,
    WeightedRandomSampler: _weighted,
    DistributedSampler: _share,
}
"""Classes of torch's, with functions that give what their iterators give, in arrays."""
