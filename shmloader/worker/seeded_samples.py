"""Samples that draw the same random numbers whichever worker fetches them (``dispatch="dynamic"``).

Runs in the worker. Before each sample the generators that a dataset's code draws from are seeded for it;
where a batch is not fetched sample by sample, once for the batch. In a worker process these are the global
ones of torch (on the CPU), NumPy and ``random``, which takes 11 µs, and those of ``get_worker_info().rng``. A
worker thread shares the global ones with the program and leaves them alone.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch

from shmloader.sources import why_per_sample
from shmloader.worker.seeding import sample_seeds


class SampleGenerators:
    """``get_worker_info().rng`` while samples are seeded: generators of the sample at hand.

    They are made when they are asked for, so a dataset is to ask for them in each sample.
    """

    def __init__(self) -> None:
        self._seeds = 0, 0, 0

    def seed(self, seeds: tuple[int, int, int]) -> None:
        """Begin a sample, with the seeds that `sample_seeds` gives."""
        vars(self).clear()  # what was made for the last one
        self._seeds = seeds

    @functools.cached_property
    def torch_generator(self) -> torch.Generator:
        """For ``generator=``: draws what torch's global one draws for this sample in a worker process."""
        return torch.Generator().manual_seed(self._seeds[0])

    @functools.cached_property
    def random_generator(self) -> random.Random:
        """Draws what ``random`` draws for this sample in a worker process."""
        return random.Random(self._seeds[1])

    @functools.cached_property
    def numpy_generator(self) -> np.random.Generator:
        """A new style ``Generator``, which draws other numbers than ``numpy.random`` does."""
        return np.random.default_rng(self._seeds[2])


class SampleSeeds:
    """Seeds this worker's generators for one sample after the other.

    Args:
        base_seed: The iterator's base seed.
        epoch: Epochs of the iterator before the present one.
        in_thread: Whether the global generators belong to the program.

    Attributes:
        epoch: As above; to be set when another epoch begins.
        generators: For ``get_worker_info().rng``.
    """

    def __init__(self, base_seed: int, epoch: int, *, in_thread: bool) -> None:
        self.epoch = epoch
        self.generators = SampleGenerators()
        self._base_seed = base_seed
        self._in_thread = in_thread
        self._seq = self._position = 0

    def begin(self, seq: int) -> None:
        """Begin a batch, and seed for what draws in it outside of a sample.

        Args:
            seq: Number of the batch in the epoch.
        """
        self._seq, self._position = seq, 0
        self.seed_next()

    def seed_next(self) -> None:
        """Seed for the next sample of the batch."""
        seeds = sample_seeds(self._base_seed, self.epoch, self._seq, self._position)
        self._position += 1
        self.generators.seed(seeds)
        if not self._in_thread:
            # Not torch.manual_seed, which takes 0.4 ms: it asks every backend and notes the stack for CUDA.
            torch.default_generator.manual_seed(seeds[0])
            random.seed(seeds[1])
            np.random.seed(seeds[2])  # noqa: NPY002 - what datasets draw from

    def wrap(self, dataset: Any, collate_fn: Any, *, auto_collation: bool) -> Any:
        """A map-style dataset that is seeded before each sample; itself where `begin` is enough.

        Args:
            dataset: The dataset.
            collate_fn: What joins its samples.
            auto_collation: Whether it is asked for lists of indices; else each batch is one sample.
        """
        whole = not auto_collation or getattr(dataset, "__getitems__", None)
        if whole or why_per_sample(dataset, collate_fn) is None:
            return dataset
        return _Seeded(dataset, self)


class _Seeded:
    """Fetches like the dataset, after seeding."""

    def __init__(self, dataset: Any, seeds: SampleSeeds) -> None:
        self._dataset = dataset
        self._seed_next = seeds.seed_next

    def __getitem__(self, index: Any) -> Any:
        self._seed_next()
        return self._dataset[index]
