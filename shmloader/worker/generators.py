"""The random generators of one worker, for datasets that do not draw from the global ones.

A worker process has the global generators to itself. Worker threads share them with the whole program, so
a dataset that is to run in threads draws from ``torch.utils.data.get_worker_info().rng``, and may do so in
worker processes too: it draws the same numbers there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from shmloader.worker.seeding import numpy_seed, worker_seed


@dataclass(frozen=True, slots=True)
class WorkerGenerators:
    """``get_worker_info().rng``: generators that nobody else draws from, under the names that torch has.

    Attributes:
        random_generator: Draws what ``random`` draws in a worker process of torch.
        torch_generator: For ``generator=``: with it, torch's functions draw what they draw without it in a
            worker process of torch.
        numpy_generator: Seeded with the words that torch seeds ``numpy.random`` with in a worker process; a
            new style ``Generator``, which draws other numbers from them.
    """

    random_generator: random.Random
    torch_generator: torch.Generator
    numpy_generator: np.random.Generator


def worker_generators(base_seed: int, worker_id: int) -> WorkerGenerators:
    """The generators of a worker, as they are when it starts. No global generator is touched.

    Args:
        base_seed: The iterator's base seed.
        worker_id: 0 to ``num_workers - 1``.
    """
    seed = worker_seed(base_seed, worker_id)
    torch_generator = torch.Generator()
    torch_generator.manual_seed(seed)
    return WorkerGenerators(
        random.Random(seed), torch_generator, np.random.default_rng(numpy_seed(base_seed, worker_id))
    )
